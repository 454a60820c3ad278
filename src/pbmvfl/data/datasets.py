"""Named data sets: found locally if there is a copy, fetched from their public source if not, checked either way.

Look-up order: the folder given as `root`, the folder of PBMVFL_DATA (or ../shared/data beside the checkout), the
cache folder, the public source. Every preparation here is fixed in advance; nothing is learned from the values.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl._text import did_you_mean
from pbmvfl.crypto.public_streams import SPLIT_STREAM, public_permutation
from pbmvfl.data import images, sources, voxels
from pbmvfl.data.vertical import (
    Layout,
    VerticalDataset,
    numbered_parties,
    require_four_parties,
    require_party_count,
    split_whole,
)
from pbmvfl.errors import DataError

_PHISHING_ROWS, _PHISHING_TRAIN, _PHISHING_COLUMNS = 11_055, 8_844, 30
_PHISHING_SHA256 = "ea433e32d8e2e43f2879a7093cb3a5bd5d225d5b4612e5543c39df028150792d"

_ACTIVITY_COLUMNS, _ACTIVITY_USED = 561, 560
_ACTIVITY_CLASSES = ("walking", "walking_upstairs", "walking_downstairs", "sitting", "standing", "laying")
ACTIVITY_COUNTS = {"train": (1226, 1073, 986, 1286, 1374, 1407), "test": (496, 471, 420, 491, 532, 537)}
ACTIVITY_SHA256 = {
    "train": "05c0b0d01eec9531b05eb931a989c87a7ea908f4c04e91316f465d08550a4580",
    "test": "006a94bb93df77cb331d30f63940419167081235ed5eb40809bba7c84e512e1d",
}

#: Digests of the packed grids (bits), which are an eighth of the unpacked ones and as telling.
_MODELNET10_SHA256 = {
    "train": "11a7181ab56c24194ee5951561d3d5f6386905025a4558625b56ec7eb2e57bc0",
    "test": "f0f036ad2af15ec92fb12c10390f1d30bf2c5e10d3a551a95843946ee6d52ce5",
}

_DIGITS_SEED = 0


@dataclass(frozen=True)
class _Request:
    """Arguments of a loader: folders to search, number of parties, and whether to show progress."""

    folders: tuple[Path, ...]
    explicit: Path | None
    num_parties: int
    progress: bool

    def find(self, *relative_paths: str) -> Path | None:
        """Return the first of the paths in the first folder that has any, or None."""
        candidates = (folder / path for folder in self.folders for path in relative_paths)
        return next((path for path in candidates if path.exists()), None)


def data_root() -> Path | None:
    """Return the folder of local copies: PBMVFL_DATA, else ../shared/data beside the current folder or its checkout.

    Returns:
        The folder, or None if there is none.

    Raises:
        DataError: If PBMVFL_DATA is set and is not a folder.
    """
    if chosen := os.environ.get("PBMVFL_DATA"):
        folder = Path(chosen).expanduser()
        if not folder.is_dir():
            raise DataError(f"PBMVFL_DATA={chosen} is not a folder; correct it or unset it")
        return folder
    here = Path.cwd()
    checkout = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
    candidates = (folder.parent / "shared" / "data" for folder in (here, checkout))
    return next((folder for folder in candidates if folder.is_dir()), None)


def load_dataset(
    name: str,
    *,
    num_parties: int | None = None,
    root: str | Path | None = None,
    progress: bool = True,
) -> VerticalDataset:
    """Load a named data set, split over the parties.

    Args:
        name: One of `DATASETS`.
        num_parties: Number of parties; by default the set's usual number.
        root: Folder of local copies, laid out as `docs/how-to/own-table.md` says; searched before all others.
        progress: Show progress of downloads and preparation on standard error.

    Returns:
        The data set, from a local copy, from the cache, or fetched.

    Raises:
        DataError: If the name or the number of parties is not permitted, or there is no copy and none can be fetched.
    """
    if name not in _LOADERS:
        raise DataError(
            f"name={name!r} is not a known data set; known are {', '.join(DATASETS)}.{did_you_mean(name, DATASETS)} "
            "For a table of your own use --data FILE on the command line, or load_table in Python"
        )
    load, default_parties = _LOADERS[name]
    wanted = default_parties if num_parties is None else num_parties
    require_party_count(wanted)
    folders = [sources.cache_root()]
    if (local := data_root()) is not None:
        folders.insert(0, local)
    explicit = None if root is None else Path(root).expanduser()
    if explicit is not None:
        if not explicit.is_dir():
            raise DataError(f"root={str(root)!r} is not a folder; give the folder that has {name}/ in it")
        folders.insert(0, explicit)
    return load(_Request(tuple(folders), explicit, wanted, progress))


def _cut(
    name: str,
    *,
    layout: Layout,
    parts: Iterable[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]],
    class_names: tuple[str, ...],
    num_parties: int,
    encoder: str,
    notes: tuple[str, ...] = (),
    column_values: int | None = None,
) -> VerticalDataset:
    """Split whole training and test arrays over `num_parties` parties."""
    (train, train_labels), (test, test_labels) = parts
    return VerticalDataset(
        name=name,
        party_names=numbered_parties(num_parties),
        train_features=split_whole(train, layout=layout, num_parties=num_parties),
        test_features=split_whole(test, layout=layout, num_parties=num_parties),
        train_labels=train_labels,
        test_labels=test_labels,
        class_names=class_names,
        default_encoder=encoder,
        layout=layout,
        notes=notes,
        column_values=column_values,
    )


def _sha256(array: npt.NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def _read_parquet(path: Path, num_columns: int) -> npt.NDArray[Any]:
    """Read the first `num_columns` columns as one matrix of the columns' own type."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, use_threads=False)
        if table.num_columns < num_columns:
            raise DataError(f"{path} has {table.num_columns} columns where {num_columns} are expected; copy it again")
        return np.stack([column.to_numpy() for column in table.columns[:num_columns]], axis=1)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read ({error}); delete it or copy it again") from error


def _load_digits(request: _Request) -> VerticalDataset:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    features = (bunch.data / 16).astype(np.float32)  # 16 is the format's largest pixel value, not the data's
    labels = bunch.target.astype(np.int64)
    order = public_permutation(len(labels), seed=_DIGITS_SEED, stream=SPLIT_STREAM)
    num_train = len(labels) * 4 // 5
    parts = ((features[rows], labels[rows]) for rows in (order[:num_train], order[num_train:]))
    classes = tuple(str(digit) for digit in range(10))
    return _cut(
        "digits", layout="digits", parts=parts, class_names=classes, num_parties=request.num_parties, encoder="mlp"
    )


def _load_phishing(request: _Request) -> VerticalDataset:
    path = request.find("phishing/phishing.parquet", "phishing/phishing.npz")
    if path is None:
        folder = sources.cache_folder("phishing")
        features, target = sources.fetch_openml_table("phishing", data_id=4534, files="phishing/phishing.parquet")
        matrix = np.column_stack([features, target]).astype(np.int8)
        _check_phishing(matrix, "https://www.openml.org/d/4534")
        sources.save_arrays(folder / "phishing.npz", matrix=matrix)
    else:
        columns = _PHISHING_COLUMNS + 1
        is_parquet = path.suffix == ".parquet"
        matrix = _read_parquet(path, columns) if is_parquet else sources.read_arrays(path, "matrix")[0]
        _check_phishing(matrix, path)
    scaled = ((matrix[:, :_PHISHING_COLUMNS].astype(np.float32) + 1) / 2).astype(np.float32)
    labels = (matrix[:, _PHISHING_COLUMNS] == 1).astype(np.int64)
    parts = ((scaled[rows], labels[rows]) for rows in (slice(None, _PHISHING_TRAIN), slice(_PHISHING_TRAIN, None)))
    return _cut(
        "phishing",
        layout="columns",
        parts=parts,
        class_names=("phishing", "legitimate"),
        num_parties=request.num_parties,
        encoder="mlp",
        column_values=3,  # -1, 0 and 1, as its description says
    )


def _check_phishing(matrix: npt.NDArray[Any], source: object) -> None:
    expected = (_PHISHING_ROWS, _PHISHING_COLUMNS + 1)
    if matrix.shape != expected or matrix.dtype != np.int8 or _sha256(matrix) != _PHISHING_SHA256:
        raise DataError(
            f"{source}: {matrix.dtype}{matrix.shape} is not the known phishing table (int8{expected}, "
            f"sha256 {_PHISHING_SHA256[:12]}...); rows or columns differ or are in another order. Replace the copy"
        )


def _load_activity(request: _Request) -> VerticalDataset:
    path = request.find("activity/har_train.parquet", "activity/har.npz")
    notes: tuple[str, ...] = ()
    if path is None:
        data = _fetch_activity()
    elif path.suffix == ".npz":
        x_train, y_train, x_test, y_test = sources.read_arrays(path, "x_train", "y_train", "x_test", "y_test")
        data = {"train": (x_train, y_train), "test": (x_test, y_test)}
        _check_activity(data, path)
    else:
        data = {}
        for split in ("train", "test"):
            matrix = _read_parquet(path.with_name(f"har_{split}.parquet"), _ACTIVITY_COLUMNS + 2)
            # subject and activity are int8 and become float32 here with the rest; both are exact.
            data[split] = (matrix[:, :_ACTIVITY_COLUMNS].copy(), matrix[:, -1].astype(np.int64) - 1)
        _check_activity(data, path.parent)
        for split, (features, _) in data.items():
            if _sha256(features) != ACTIVITY_SHA256[split]:
                raise DataError(f"{path.parent}: the {split} features differ from the known ones; copy them again")
        notes = (
            "488 of the 561 features are recomputed from raw signals; the official rows that are public agree to 3e-5.",
        )
    parts = ((data[split][0][:, :_ACTIVITY_USED], data[split][1]) for split in ("train", "test"))
    return _cut(
        "activity",
        layout="columns",
        parts=parts,
        class_names=_ACTIVITY_CLASSES,
        num_parties=request.num_parties,
        encoder="mlp",
        notes=notes,
    )


def _fetch_activity() -> dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Fetch both splits from OpenML, which has them in one table without a boundary; class counts verify the split."""
    folder = sources.cache_folder("activity")
    files = "activity/har_train.parquet and activity/har_test.parquet"
    features, target = sources.fetch_openml_table("activity", data_id=1478, files=files)
    matrix, labels = features.astype(np.float32), target - 1
    num_train = sum(ACTIVITY_COUNTS["train"])
    data = {
        "train": (matrix[:num_train], labels[:num_train]),
        "test": (matrix[num_train:], labels[num_train:]),
    }
    _check_activity(data, "https://www.openml.org/d/1478")
    arrays = {f"{kind}_{split}": data[split][i] for split in data for i, kind in enumerate("xy")}
    sources.save_arrays(folder / "har.npz", **arrays)
    return data


def _check_activity(data: dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]], source: object) -> None:
    for split, (features, labels) in data.items():
        counts = tuple(np.bincount(labels, minlength=6).tolist()) if len(labels) and labels.min() >= 0 else ()
        expected = ACTIVITY_COUNTS[split]
        if features.shape != (sum(expected), _ACTIVITY_COLUMNS) or counts != expected:
            raise DataError(
                f"{source}: {split} has shape={features.shape} and rows per class {counts}; the official split has "
                f"{(sum(expected), _ACTIVITY_COLUMNS)} and {expected}. The rows are incomplete or in another order, "
                "so the split cannot be told: use a copy of the official one (docs/how-to/own-table.md)"
            )


def _load_cifar10(request: _Request) -> VerticalDataset:
    require_four_parties(request.num_parties)
    path = request.find("cifar10/labels.npz", f"cifar10/{sources.CIFAR10.file_name}")
    if path is not None and path.name == "labels.npz":
        pictures = images.read_cifar10_sheets(path.parent)
    else:
        path = path or sources.fetch(sources.CIFAR10, progress=request.progress)
        pictures = images.read_cifar10_archive(path)
    return _pictures("cifar10", pictures, images.CIFAR10_CLASSES)


def _load_imagenet100(request: _Request) -> VerticalDataset:
    require_four_parties(request.num_parties)
    path = request.find("imagenet100/train")
    if request.explicit is not None and (request.explicit / "train").is_dir():
        path = request.explicit / "train"  # `root` may also name the tree itself
    if path is None:
        raise DataError(
            "dataset='imagenet100' has no copy on this machine, and it needs a registration, so it is not fetched. Put "
            "imagenet100/train/<class>/<picture> and imagenet100/val/<class>/<picture> into a folder and name it in "
            "PBMVFL_DATA or root; get the pictures from https://www.image-net.org"
        )
    pictures, class_names = images.read_image_folder(path.parent, progress=request.progress)
    return _pictures("imagenet100", pictures, class_names)


def _pictures(name: str, pictures: images.Pictures, class_names: tuple[str, ...]) -> VerticalDataset:
    train, train_labels, test, test_labels = pictures
    return VerticalDataset(
        name=name,
        party_names=numbered_parties(len(train)),
        train_features=train,
        test_features=test,
        train_labels=train_labels,
        test_labels=test_labels,
        class_names=class_names,
        default_encoder="resnet18",
        layout="quadrants",
    )


def _load_modelnet10(request: _Request) -> VerticalDataset:
    folder = sources.cache_folder("modelnet10")
    checked, own, archive = "modelnet10_voxels30.npz", "from_meshes30.npz", sources.MODELNET10.file_name
    path = request.find(*(f"modelnet10/{name}" for name in (checked, own, archive)))
    notes: tuple[str, ...] = ("The grids were made from the meshes here and differ from the published ones.",)
    names = ("bits_train", "y_train", "bits_test", "y_test")
    if path is None or path.name == archive:
        path = path or sources.fetch(sources.MODELNET10, progress=request.progress)
        # Prepared grids of an earlier call serve an archive that lies in another folder, too.
        if not (folder / own).is_file():
            sources.save_arrays(folder / own, **voxels.grids_from_meshes(path, progress=request.progress))
        path = folder / own
    x_train, y_train, x_test, y_test = sources.read_arrays(path, *names)
    bits, labels = {"train": x_train, "test": x_test}, {"train": y_train, "test": y_test}
    for split, counts in voxels.MODELNET10_COUNTS.items():
        if tuple(np.bincount(labels[split], minlength=len(counts)).tolist()) != counts:
            raise DataError(f"{path}: the {split} rows per class are not ModelNet10's {counts}; replace the copy")
        if path.name == checked and _sha256(bits[split]) != _MODELNET10_SHA256[split]:
            raise DataError(f"{path}: the {split} grids differ from the known ones; copy the file again")
    views = voxels.load_views(bits, folder=folder, progress=request.progress)
    return _cut(
        "modelnet10",
        layout="views",
        parts=((views[split], labels[split].astype(np.int64)) for split in ("train", "test")),
        class_names=voxels.MODELNET10_CLASSES,
        num_parties=request.num_parties,
        encoder="multiview-conv",
        notes=notes if path.name == own else (),
    )


_LOADERS: dict[str, tuple[Callable[[_Request], VerticalDataset], int]] = {
    "digits": (_load_digits, 4),
    "phishing": (_load_phishing, 5),
    "activity": (_load_activity, 5),
    "cifar10": (_load_cifar10, 4),
    "modelnet10": (_load_modelnet10, 6),
    "imagenet100": (_load_imagenet100, 4),
}

DATASETS: tuple[str, ...] = tuple(_LOADERS)
