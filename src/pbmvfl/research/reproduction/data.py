"""Rows of a study: the real data set, part of it, or in a smoke run a synthetic stand-in of the same form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pbmvfl.crypto.public_streams import SPLIT_STREAM, public_permutation
from pbmvfl.data.datasets import data_root, load_dataset
from pbmvfl.data.sources import cache_root
from pbmvfl.data.vertical import Layout, VerticalDataset, numbered_parties, split_whole
from pbmvfl.errors import DataError
from pbmvfl.research.reproduction.studies import Study

NO_DATA = "not run here, no data"
#: The kept rows are public and the same for every seed of a study, as the data is.
_ROWS_SEED = 0


@dataclass(frozen=True)
class _Form:
    layout: Layout
    shape: tuple[int, ...]
    num_classes: int
    encoder: str


#: Stand-ins: columns of a table, or whole pictures before they are cut.
_FORMS = {
    "phishing": _Form("columns", (30,), 2, "mlp"),
    "activity": _Form("columns", (560,), 6, "mlp"),
    "cifar10": _Form("quadrants", (3, 32, 32), 10, "resnet18"),
    "modelnet10": _Form("views", (12, 32, 32), 10, "multiview-conv"),
    "imagenet100": _Form("quadrants", (3, 144, 144), 100, "resnet18"),
}


def has_copy(dataset: str, root: Path | None = None) -> bool:
    """Return True if the data set is on this machine, so that nothing has to be fetched."""
    folders = [folder for folder in (root, data_root(), cache_root()) if folder is not None]
    return any((folder / dataset).is_dir() and any((folder / dataset).iterdir()) for folder in folders)


def load_study_data(study: Study, num_parties: int, *, root: Path | None = None) -> tuple[VerticalDataset, bool]:
    """Load the data, split for this many parties.

    Returns:
        The data, and True if they are a stand-in.

    Raises:
        DataError: If there is no copy.
    """
    if study.quick and not has_copy(study.dataset, root):
        return _stand_in(study, num_parties), True
    if study.dataset == "imagenet100" and not has_copy("imagenet100", root):
        raise DataError(f"imagenet100: {NO_DATA}")
    data = load_dataset(study.dataset, num_parties=num_parties, root=root, progress=False)
    return _fewer_rows(data, study), False


def _fewer_rows(data: VerticalDataset, study: Study) -> VerticalDataset:
    wanted = study.num_samples
    if wanted is None or wanted >= data.num_samples:
        return data
    rows = public_permutation(data.num_samples, seed=_ROWS_SEED, stream=SPLIT_STREAM)[:wanted]
    test_rows = slice(None, wanted) if study.quick else slice(None)
    return replace(
        data,
        train_features=tuple(np.ascontiguousarray(part[rows]) for part in data.train_features),
        train_labels=data.train_labels[rows],
        test_features=tuple(np.ascontiguousarray(part[test_rows]) for part in data.test_features),
        test_labels=data.test_labels[test_rows],
    )


def _stand_in(study: Study, num_parties: int) -> VerticalDataset:
    """Make synthetic rows in which the class moves every column a little: enough to see that a study runs."""
    form = _FORMS[study.dataset]
    random = np.random.default_rng(0)
    rows = study.num_samples or 200
    labels = random.integers(0, form.num_classes, 2 * rows).astype(np.int64)
    labels[: form.num_classes] = np.arange(form.num_classes)[: 2 * rows]
    centres = random.random((form.num_classes, *form.shape), dtype=np.float32)
    noisy = centres[labels] + 0.3 * random.standard_normal((2 * rows, *form.shape), dtype=np.float32)
    whole = noisy if form.layout == "columns" else (noisy.clip(0, 1) * 255).astype(np.uint8)
    return VerticalDataset(
        name=study.dataset,
        party_names=numbered_parties(num_parties),
        train_features=split_whole(whole[:rows], layout=form.layout, num_parties=num_parties),
        test_features=split_whole(whole[rows:], layout=form.layout, num_parties=num_parties),
        train_labels=labels[:rows],
        test_labels=labels[rows:],
        class_names=tuple(str(label) for label in range(form.num_classes)),
        default_encoder=form.encoder,
        layout=form.layout,
        notes=("Made-up rows: a stand-in where no copy of the data is at hand.",),
    )
