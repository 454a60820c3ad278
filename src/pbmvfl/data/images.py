"""Pictures cut into four quadrants, one per party: CIFAR-10, and any folder with one subfolder per class.

Shapes: N pictures, 3 channels; a quadrant is (N, 3, H/2, W/2) uint8. Quadrants are filled while decoding, so that
the whole pictures never exist beside them in memory.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.data import sources
from pbmvfl.data.vertical import picture_quadrants
from pbmvfl.errors import DataError

Pixels = npt.NDArray[np.uint8]
Quadrants = tuple[Pixels, ...]
Labels = npt.NDArray[np.int64]
#: Training quadrants, training labels, test quadrants, test labels.
Pictures = tuple[Quadrants, Labels, Quadrants, Labels]

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_ROWS = {"train": 50_000, "test": 10_000}

#: SHA-1 of the official binary batches.
CIFAR10_BATCHES = {
    "train": {
        "data_batch_1.bin": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
        "data_batch_2.bin": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
        "data_batch_3.bin": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
        "data_batch_4.bin": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
        "data_batch_5.bin": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    },
    "test": {"test_batch.bin": "67eb016db431130d61cd03c7ad570b013799c88c"},
}

_SIDE = 32
_HALF = _SIDE // 2
_PER_EDGE = 50  # a sheet is a 50 x 50 mosaic
_RECORD = 1 + 3 * _SIDE * _SIDE  # label byte, then red, green and blue planes

_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}
#: Part of the name of prepared folders: raise it when preparation changes, and old ones are not found any more.
_PREPARATION = 1


def read_cifar10_sheets(folder: Path) -> Pictures:
    """Read CIFAR-10 from lossless WebP mosaics `train_*.webp`, `test_*.webp` and `labels.npz` (y_train, y_test)."""
    y_train, y_test = sources.read_arrays(folder / "labels.npz", "y_train", "y_test")
    train, test = _read_sheets(folder, "train"), _read_sheets(folder, "test")
    for split, quadrants, labels in (("train", train, y_train), ("test", test, y_test)):
        if not len(quadrants[0]) == len(labels) == CIFAR10_ROWS[split]:
            raise DataError(
                f"{folder}: {len(quadrants[0])} {split} pictures and {len(labels)} labels; CIFAR-10 has "
                f"{CIFAR10_ROWS[split]} of each, so the copy is incomplete"
            )
    return train, y_train.astype(np.int64), test, y_test.astype(np.int64)


def _read_sheets(folder: Path, split: str) -> Quadrants:
    from PIL import Image, UnidentifiedImageError

    paths = sorted(folder.glob(f"{split}_*.webp"))
    per_sheet = _PER_EDGE * _PER_EDGE
    quadrants = tuple(np.empty((len(paths) * per_sheet, 3, _HALF, _HALF), dtype=np.uint8) for _ in range(4))
    for number, path in enumerate(paths):
        try:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
        except (OSError, UnidentifiedImageError) as error:
            raise DataError(f"{path} cannot be read as a picture ({error}); copy it again") from error
        if pixels.shape != (_PER_EDGE * _SIDE, _PER_EDGE * _SIDE, 3):
            raise DataError(f"{path} has shape={pixels.shape}; a sheet is {_PER_EDGE * _SIDE} pixels wide and high")
        # (mosaic row, top/bottom, y, mosaic column, left/right, x, channel)
        tiles = pixels.reshape(_PER_EDGE, 2, _HALF, _PER_EDGE, 2, _HALF, 3)
        rows = slice(number * per_sheet, (number + 1) * per_sheet)
        for index, quadrant in enumerate(quadrants):
            part = tiles[:, index // 2, :, :, index % 2]  # (mosaic row, y, mosaic column, x, channel)
            quadrant[rows] = part.transpose(0, 2, 4, 1, 3).reshape(per_sheet, 3, _HALF, _HALF)
    return quadrants


def read_cifar10_archive(path: Path) -> Pictures:
    """Read CIFAR-10 from the official archive of binary batches, without unpacking it to disk."""
    records: dict[str, list[Pixels]] = {split: [] for split in CIFAR10_BATCHES}
    try:
        with tarfile.open(path, "r:gz") as archive:
            wanted = {name: split for split, batches in CIFAR10_BATCHES.items() for name in batches}
            found = {}
            for member in archive:  # in the archive's own order: a gzip stream cannot be read backwards cheaply
                name = member.name.rpartition("/")[2]
                if name in wanted and member.isfile() and (file := archive.extractfile(member)) is not None:
                    found[name] = file.read()
    except (OSError, tarfile.TarError, EOFError) as error:
        raise DataError(f"{path} is damaged ({error}); delete it and load again") from error
    for split, batches in CIFAR10_BATCHES.items():
        for name, sha1 in batches.items():
            content = found.get(name, b"")
            if hashlib.sha1(content, usedforsecurity=False).hexdigest() != sha1:
                raise DataError(f"{path}: {name} is missing or differs from the official one; delete it and load again")
            records[split].append(np.frombuffer(content, dtype=np.uint8).reshape(-1, _RECORD))
    return *_from_records(records["train"]), *_from_records(records["test"])


def _from_records(batches: list[Pixels]) -> tuple[Quadrants, Labels]:
    records = np.concatenate(batches)
    pictures = records[:, 1:].reshape(-1, 3, _SIDE, _SIDE)
    return picture_quadrants(pictures), records[:, 0].astype(np.int64)


def read_image_folder(
    folder: Path, *, image_size: int = 224, progress: bool = True
) -> tuple[Pictures, tuple[str, ...]]:
    """Read a tree `train/<class>/*` and `val/<class>/*` (or `test/`) as quadrants of square pictures.

    The shorter side becomes image_size * 256 / 224 pixels and the centre is cut out, as is usual. The result is kept in
    the cache and memory-mapped from there, because a hundred classes at 224 pixels are some 19 GB.

    Returns:
        The quadrants with their labels, and the class names.
    """
    if isinstance(image_size, bool) or not isinstance(image_size, int) or image_size < 2 or image_size % 2:
        raise DataError(f"image_size={image_size!r} is not permitted; give an even integer of at least 2")
    train = _list_images(folder / "train")
    test_folder = next((folder / name for name in ("val", "test") if (folder / name).is_dir()), folder / "val")
    test = _list_images(test_folder)
    class_names = tuple(sorted({label for label, _ in train}))
    for label, path in test:
        if label not in class_names:
            raise DataError(f"{path.parent} is a class without training pictures; permitted are the classes of train/")
    prepared = sources.cache_folder("imagenet100")
    parts: list[Any] = []
    for split, images in (("train", train), ("test", test)):
        target = prepared / f"{split}-{image_size}-{_fingerprint(folder, images)}"
        parts.append(_prepare(images, target, image_size=image_size, progress=progress))
        parts.append(np.array([class_names.index(label) for label, _ in images], dtype=np.int64))
    return (parts[0], parts[1], parts[2], parts[3]), class_names


def _list_images(folder: Path) -> list[tuple[str, Path]]:
    classes = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    images = []
    for path in classes:
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in _SUFFIXES)
        if not files:
            raise DataError(f"{path} has no pictures; permitted are {', '.join(sorted(_SUFFIXES))}")
        images += [(path.name, file) for file in files]
    if not images:
        raise DataError(
            f"{folder} has no class folders; the tree must be train/<class>/<picture> and val/<class>/<picture>"
        )
    return images


def _fingerprint(folder: Path, images: Sequence[tuple[str, Path]]) -> str:
    """Digest names, sizes and times of the pictures: it changes if one is added, removed or replaced."""
    digest = hashlib.sha256(f"{_PREPARATION}\n".encode())
    for _, path in images:
        state = path.stat()
        digest.update(f"{path.relative_to(folder)}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _prepare(images: Sequence[tuple[str, Path]], target: Path, *, image_size: int, progress: bool) -> Quadrants:
    half = image_size // 2
    paths = [target.with_name(f"{target.name}-{index}.npy") for index in range(4)]
    if not all(path.is_file() for path in paths):
        shape = (len(images), 3, half, half)
        parts = [path.with_name(f".{path.name}.{uuid.uuid4().hex}.part") for path in paths]
        try:
            quadrants = [np.lib.format.open_memmap(p, mode="w+", dtype=np.uint8, shape=shape) for p in parts]
            with (
                sources.progress_bar(f"Preparing {target.name}", len(images), enabled=progress) as advance,
                ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,  # decoding releases the interpreter lock
            ):
                decoded = pool.map(lambda image: _read_square(image[1], image_size), images)
                for row, picture in enumerate(decoded):
                    for index, quadrant in enumerate(quadrants):
                        y, x = index // 2 * half, index % 2 * half
                        quadrant[row] = picture[:, y : y + half, x : x + half]
                    advance(1)
            for quadrant, part, path in zip(quadrants, parts, paths, strict=True):
                quadrant.flush()
                os.replace(part, path)
        except OSError as error:
            raise DataError(
                f"{target.parent} cannot be written ({error}); set PBMVFL_CACHE to another folder"
            ) from error
        finally:
            for part in parts:
                part.unlink(missing_ok=True)
    # Copy on write: pages come from the disk when they are used, and no code can change the file by accident.
    return tuple(np.load(path, mmap_mode="c", allow_pickle=False) for path in paths)


def _read_square(path: Path, image_size: int) -> Pixels:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            picture = image.convert("RGB")
    except (OSError, UnidentifiedImageError, SyntaxError) as error:
        raise DataError(f"{path} cannot be read as a picture ({error}); remove or replace it") from error
    scale = image_size * 256 / 224 / min(picture.size)
    width, height = (max(image_size, round(side * scale)) for side in picture.size)
    picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - image_size) // 2, (height - image_size) // 2
    square = np.asarray(picture.crop((left, top, left + image_size, top + image_size)))
    return np.ascontiguousarray(square.transpose(2, 0, 1))
