"""Pictures in quadrants: both forms of CIFAR-10 say the same, and a folder of pictures is cut where it should be."""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pbmvfl.data import data_root, images, load_dataset, sources
from pbmvfl.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PBMVFL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def whole(quadrants: tuple[np.ndarray, ...]) -> np.ndarray:
    """Four quadrants put together again, written apart from the code that cuts them."""
    top, bottom = np.concatenate(quadrants[:2], axis=3), np.concatenate(quadrants[2:], axis=3)
    return np.concatenate([top, bottom], axis=2)


def small_batches(monkeypatch: pytest.MonkeyPatch, rows: int = 3) -> dict[str, bytes]:
    """Batches of the official form with a few records each, which the reader is made to expect."""
    names = {split: list(batches) for split, batches in images.CIFAR10_BATCHES.items()}
    contents = {}
    for number, name in enumerate([*names["train"], *names["test"]]):
        records = (np.arange(rows * 3073).reshape(rows, 3073) * (number + 3) % 251).astype(np.uint8)
        records[:, 0] = [(number + row) % 10 for row in range(rows)]
        contents[name] = records.tobytes()
    expected = {s: {n: hashlib.sha1(contents[n]).hexdigest() for n in names[s]} for s in names}
    monkeypatch.setattr(images, "CIFAR10_BATCHES", expected)
    return contents


def tar(contents: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_the_official_archive_is_fetched_and_read_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = small_batches(monkeypatch)
    packed = tar(dict(reversed(contents.items())))  # the archive's order is not the batches' order
    archive = replace(sources.CIFAR10, size=len(packed), md5=hashlib.md5(packed).hexdigest())
    monkeypatch.setattr(sources, "CIFAR10", archive)
    monkeypatch.setattr(sources, "open_url", lambda _url: io.BytesIO(packed))
    monkeypatch.setattr("pbmvfl.data.datasets.data_root", lambda: None)
    data = load_dataset("cifar10", progress=False)
    assert (data.num_samples, data.num_test_samples, data.default_encoder) == (15, 3, "resnet18")
    assert {part.shape[1:] for part in data.train_features} == {(3, 16, 16)}
    train = np.frombuffer(b"".join(list(contents.values())[:5]), np.uint8).reshape(15, 3073)
    np.testing.assert_array_equal(whole(data.train_features).reshape(15, -1), train[:, 1:])
    np.testing.assert_array_equal(data.train_labels, train[:, 0])


def test_a_batch_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    contents = small_batches(monkeypatch)
    changed = bytearray(contents["data_batch_3.bin"])
    changed[77] ^= 1
    path = tmp_path / "a.tar.gz"
    path.write_bytes(tar(contents | {"data_batch_3.bin": bytes(changed)}))
    with pytest.raises(DataError, match=r"data_batch_3.bin is missing or differs"):
        images.read_cifar10_archive(path)
    path.write_bytes(tar({name: c for name, c in contents.items() if name != "test_batch.bin"}))
    with pytest.raises(DataError, match=r"test_batch.bin is missing or differs"):
        images.read_cifar10_archive(path)
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match="damaged"):
        images.read_cifar10_archive(path)


@pytest.mark.slow
def test_the_local_sheets_are_the_official_batches_byte_for_byte() -> None:
    root = data_root()
    if root is None or not (root / "cifar10" / "labels.npz").is_file():
        pytest.skip("no local copy of cifar10 (PBMVFL_DATA)")
    data = load_dataset("cifar10", progress=False)
    assert (data.num_parties, data.num_samples, data.num_test_samples) == (4, 50_000, 10_000)
    for split, features, labels in (
        ("train", data.train_features, data.train_labels),
        ("test", data.test_features, data.test_labels),
    ):
        for number, sha1 in enumerate(images.CIFAR10_BATCHES[split].values()):
            rows = slice(number * 10_000, (number + 1) * 10_000)
            pixels = whole(tuple(part[rows] for part in features)).reshape(10_000, -1)
            records = np.concatenate([labels[rows, None].astype(np.uint8), pixels], axis=1)
            assert hashlib.sha1(records.tobytes()).hexdigest() == sha1


def test_an_incomplete_copy_of_the_sheets_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar10"
    folder.mkdir()
    np.savez(folder / "labels.npz", y_train=np.zeros(50_000, np.uint8), y_test=np.zeros(10_000, np.uint8))
    with pytest.raises(DataError, match="0 train pictures and 50000 labels"):
        load_dataset("cifar10", root=tmp_path)
    (folder / "train_00.webp").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"train_00.webp cannot be read"):
        load_dataset("cifar10", root=tmp_path)
    Image.new("RGB", (8, 8)).save(folder / "train_00.webp", lossless=True)
    with pytest.raises(DataError, match="1600 pixels wide"):
        load_dataset("cifar10", root=tmp_path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two classes; each picture has four colours, one to a quadrant, and is wider than high or the other way round."""
    folder = tmp_path / "pictures" / "imagenet100"
    for split, count in (("train", 3), ("val", 1)):
        for label, (width, height) in (("cat", (80, 40)), ("ant", (40, 96))):
            (folder / split / label).mkdir(parents=True)
            for number in range(count):
                pixels = np.zeros((height, width, 3), np.uint8)
                pixels[: height // 2, width // 2 :, 0] = 255
                pixels[height // 2 :, : width // 2, 1] = 255
                pixels[height // 2 :, width // 2 :] = 255
                Image.fromarray(pixels).save(folder / split / label / f"{number}.png")
    (folder / "train" / "ant" / "notes.txt").write_text("not a picture")
    return folder


def corners(part: np.ndarray) -> list[list[int]]:
    """The colour of the pixel in the outer third of each quadrant, well away from the blurred borders."""
    return part[:, :, 2, 2].tolist()


def test_a_folder_of_pictures_becomes_quadrants(tree: Path) -> None:
    ((train, train_labels, test, test_labels), names) = images.read_image_folder(tree, image_size=16, progress=False)
    assert names == ("ant", "cat")
    assert (train_labels.tolist(), test_labels.tolist()) == ([0, 0, 0, 1, 1, 1], [0, 1])
    assert {part.shape for part in train} == {(6, 3, 8, 8)}
    for part, colour in zip(train, ([0, 0, 0], [255, 0, 0], [0, 255, 0], [255, 255, 255]), strict=True):
        assert corners(part) == [colour] * 6
    assert len(test[0]) == 2


def test_a_named_tree_is_loaded_at_224_pixels_from_either_root(tree: Path) -> None:
    for root in (tree.parent, tree):
        data = load_dataset("imagenet100", root=root, progress=False)
        assert {part.shape for part in data.train_features} == {(6, 3, 112, 112)}
        assert data.default_encoder == "resnet18"


def test_prepared_pictures_are_used_again_until_one_changes(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images.read_image_folder(tree, image_size=16, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(images, "_read_square", lambda *_args: pytest.fail("decoded again"))
        images.read_image_folder(tree, image_size=16, progress=False)
    Image.new("RGB", (50, 50), (9, 9, 9)).save(tree / "val" / "cat" / "0.png")
    ((_, _, test, _), _) = images.read_image_folder(tree, image_size=16, progress=False)
    assert corners(test[0])[1] == [9, 9, 9]


def test_a_broken_picture_is_named_and_nothing_half_prepared_is_left(tree: Path, cache: Path) -> None:
    (tree / "train" / "cat" / "1.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"cat.1\.png cannot be read"):
        images.read_image_folder(tree, image_size=16, progress=False)
    assert list((cache / "imagenet100").iterdir()) == []


def test_a_tree_without_its_parts_is_refused(tree: Path) -> None:
    (tree / "val" / "dog").mkdir()
    with pytest.raises(DataError, match="dog has no pictures"):
        images.read_image_folder(tree, image_size=16)
    Image.new("RGB", (20, 20)).save(tree / "val" / "dog" / "0.png")
    with pytest.raises(DataError, match="dog is a class without training pictures"):
        images.read_image_folder(tree, image_size=16)
    (tree / "val").rename(tree / "elsewhere")
    with pytest.raises(DataError, match="val has no class folders"):
        images.read_image_folder(tree, image_size=16)


@pytest.mark.parametrize("size", [0, 15, -2, 16.0, True])
def test_a_picture_size_that_cannot_be_halved_is_refused(tree: Path, size: Any) -> None:
    with pytest.raises(DataError, match="image_size="):
        images.read_image_folder(tree, image_size=size)
