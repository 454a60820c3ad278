"""Fetching: checked, atomic, once. The network is a server on this machine or a fake; the real one is never used."""

from __future__ import annotations

import hashlib
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest

from pbmvfl.data import data_root, datasets, load_dataset, sources
from pbmvfl.errors import DataError

CONTENT = b"some public bytes" * 1000


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PBMVFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address under which this machine serves it."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietHandler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def archive(served: tuple[Path, str]) -> sources.Archive:
    folder, address = served
    (folder / "file.bin").write_bytes(CONTENT)
    md5 = hashlib.md5(CONTENT).hexdigest()
    return sources.Archive(dataset="set", file_name="file.bin", url=f"{address}/file.bin", size=len(CONTENT), md5=md5)


@pytest.mark.parametrize("progress", [False, True])
def test_a_file_is_fetched_into_the_cache(archive: sources.Archive, cache: Path, progress: bool) -> None:
    path = sources.fetch(archive, progress=progress)
    assert path == cache / "set" / "file.bin"
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]


def test_a_cached_file_is_not_fetched_again(archive: sources.Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sources.fetch(archive, progress=False)
    monkeypatch.setattr(sources, "open_url", lambda _url: pytest.fail("the network was used"))
    assert sources.fetch(archive, progress=False) == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"md5": "0" * 32}, "has md5=.* where 000"),
        ({"size": len(CONTENT) + 1}, f"gave {len(CONTENT)} bytes where"),
        ({"size": len(CONTENT) - 1}, f"gave more than {len(CONTENT) - 1} bytes"),
    ],
)
def test_a_file_that_is_not_the_expected_one_is_not_kept(
    archive: sources.Archive, cache: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        sources.fetch(replace(archive, **changes), progress=False)
    assert list((cache / "set").iterdir()) == []


def test_a_missing_file_says_what_to_put_where(archive: sources.Archive, cache: Path) -> None:
    gone = replace(archive, url=archive.url + ".gone")
    with pytest.raises(DataError) as caught:
        sources.fetch(gone, progress=False)
    for part in (gone.url, "set/file.bin", "PBMVFL_DATA", str(cache), "404"):
        assert part in str(caught.value)
    assert list((cache / "set").iterdir()) == []


def test_an_interrupted_write_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "file"

    def interrupted() -> None:
        with sources.written_at_once(target) as part:
            part.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_npz_is_refused_and_a_pickle_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(b"no zip file")
    with pytest.raises(DataError, match="damaged"):
        sources.read_arrays(path, "x")
    np.savez(path, x=np.array([{}], dtype=object))
    with pytest.raises(DataError, match=r"allow_pickle"):
        sources.read_arrays(path, "x")
    sources.save_arrays(path, x=np.arange(3))
    assert sources.read_arrays(path, "x")[0].tolist() == [0, 1, 2]
    with pytest.raises(DataError, match="not the expected file"):
        sources.read_arrays(path, "y")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PBMVFL_CACHE", str(tmp_path / "mine"))
    assert sources.cache_root() == tmp_path / "mine"
    monkeypatch.delenv("PBMVFL_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert sources.cache_root() == tmp_path / "xdg" / "pbmvfl"


def test_a_cache_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PBMVFL_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="set PBMVFL_CACHE"):
        sources.cache_folder("digits")


# OpenML. The fake answers at the level of the web, so that scikit-learn's own reading of the answers is tested too.


class _Answer(io.BytesIO):
    def info(self) -> dict[str, str]:
        return {}


def fake_openml(monkeypatch: pytest.MonkeyPatch, matrix: np.ndarray, orders: list[tuple[int, ...]]) -> list[str]:
    """Serve an int matrix, its last column the target, as nominal columns with the given orders of categories."""
    names = [f"column_{i}" for i in range(matrix.shape[1] - 1)] + ["Result"]
    header = "".join(f"@ATTRIBUTE {n} {{{','.join(map(str, o))}}}\n" for n, o in zip(names, orders, strict=True))
    rows = "\n".join(",".join(map(str, row)) for row in matrix.tolist())
    arff = f"@RELATION test\n{header}@DATA\n{rows}\n".encode()
    features = [
        {
            "index": str(i),
            "name": name,
            "data_type": "nominal",
            "number_of_missing_values": "0",
            "is_target": str(name == "Result").lower(),
            "is_ignore": "false",
            "is_row_identifier": "false",
        }
        for i, name in enumerate(names)
    ]
    description = {
        "id": "4534",
        "name": "test",
        "version": "1",
        "status": "active",
        "format": "ARFF",
        "description": "",
        "url": "https://www.openml.org/data/v1/download/1/test.arff",
        "md5_checksum": hashlib.md5(arff).hexdigest(),
    }
    asked: list[str] = []

    def urlopen(request: Any, *_args: Any, **_kwargs: Any) -> _Answer:
        url = request.full_url
        asked.append(url)
        if url.endswith(".arff"):
            return _Answer(arff)
        if "/features/" in url:
            return _Answer(json.dumps({"data_features": {"feature": features}}).encode())
        if "/qualities/" in url:
            quality = [{"name": "NumberOfInstances", "value": str(len(matrix))}]
            return _Answer(json.dumps({"data_qualities": {"quality": quality}}).encode())
        return _Answer(json.dumps({"data_set_description": description}).encode())

    monkeypatch.setattr("sklearn.datasets._openml.urlopen", urlopen)
    return asked


def small_phishing(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A table of the phishing set's form with 10 rows, which the loader is made to expect."""
    matrix = (np.arange(10 * 31).reshape(10, 31) * 7 % 11 % 3 - 1).astype(np.int8)
    matrix[:, 30] = [1, -1] * 5
    monkeypatch.setattr(datasets, "_PHISHING_ROWS", 10)
    monkeypatch.setattr(datasets, "_PHISHING_TRAIN", 8)
    monkeypatch.setattr(datasets, "_PHISHING_SHA256", hashlib.sha256(matrix.tobytes()).hexdigest())
    monkeypatch.setattr(datasets, "data_root", lambda: None)
    return matrix


def orders() -> list[tuple[int, ...]]:
    return [((1, 0, -1), (-1, 0, 1), (0, -1, 1))[i % 3] for i in range(30)] + [(-1, 1)]


def test_nominal_columns_become_the_numbers_they_spell(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = small_phishing(monkeypatch)
    asked = fake_openml(monkeypatch, matrix, orders())
    data = load_dataset("phishing", num_parties=2, progress=False)
    np.testing.assert_array_equal(np.concatenate(data.train_features, axis=1), (matrix[:8, :30] + 1) / 2)
    np.testing.assert_array_equal(data.test_labels, [1, 0])
    assert sum(url.endswith(".arff") for url in asked) == 1
    again = load_dataset("phishing", num_parties=2, progress=False)  # from our own copy now
    assert sum(url.endswith(".arff") for url in asked) == 1
    np.testing.assert_array_equal(again.train_features[1], data.train_features[1])


def test_a_table_that_is_not_the_known_one_is_refused_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    matrix = small_phishing(monkeypatch)
    fake_openml(monkeypatch, matrix[::-1], orders())
    with pytest.raises(DataError, match="not the known phishing table"):
        load_dataset("phishing", progress=False)
    assert list((cache / "phishing").iterdir()) == []


def test_no_network_and_no_copy_says_what_to_put_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_args: Any, **_kwargs: Any) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr(datasets, "data_root", lambda: None)
    monkeypatch.setattr("sklearn.datasets.fetch_openml", no_network)
    monkeypatch.setattr(sources, "open_url", no_network)
    for name, file in {
        "phishing": "phishing/phishing.parquet",
        "activity": "activity/har_train.parquet",
        "cifar10": "cifar10/cifar-10-binary.tar.gz",
        "modelnet10": "modelnet10/ModelNet10.zip",
        "imagenet100": "imagenet100/train/<class>",
    }.items():
        with pytest.raises(DataError) as caught:
            load_dataset(name, progress=False)
        for part in (name, file, "PBMVFL_DATA", "http"):
            assert part in str(caught.value)


def activity_rows(order: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
    counts = datasets.ACTIVITY_COUNTS
    labels = np.concatenate([np.repeat(np.arange(1, 7), counts[split]) for split in ("train", "test")])[order]
    features = np.zeros((len(labels), 561))
    features[:, 0] = np.arange(len(labels))
    features[:, 560] = 7
    return features, labels


def test_the_activity_split_is_told_by_its_class_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "data_root", lambda: None)
    monkeypatch.setattr(sources, "fetch_openml_table", lambda *_args, **_kwargs: activity_rows())
    data = load_dataset("activity", progress=False)
    assert (data.num_samples, data.num_test_samples) == (7352, 2947)
    assert data.test_features[0][0, 0] == 7352
    assert [part.shape[1] for part in data.train_features] == [112] * 5
    assert max(part.max() for part in data.train_features[1:]) == 0  # the last of the 561 columns is left out
    monkeypatch.setattr(sources, "fetch_openml_table", lambda *_args, **_kwargs: pytest.fail("fetched again"))
    assert load_dataset("activity", progress=False).test_labels.tolist() == data.test_labels.tolist()


@pytest.mark.parametrize("order", [slice(None, None, -1), slice(None, -1)], ids=["reversed", "incomplete"])
def test_activity_rows_in_another_order_are_refused(monkeypatch: pytest.MonkeyPatch, cache: Path, order: slice) -> None:
    monkeypatch.setattr(datasets, "data_root", lambda: None)
    monkeypatch.setattr(sources, "fetch_openml_table", lambda *_args, **_kwargs: activity_rows(order))
    with pytest.raises(DataError, match="the split cannot be told"):
        load_dataset("activity", progress=False)
    assert list((cache / "activity").iterdir()) == []


def test_the_real_phishing_table_passes_through_openml_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    local = data_root()
    if local is None or not (local / "phishing" / "phishing.parquet").is_file():
        pytest.skip("no local copy of phishing (PBMVFL_DATA)")
    matrix = datasets._read_parquet(local / "phishing" / "phishing.parquet", 31)
    expected = load_dataset("phishing", progress=False)
    monkeypatch.setattr(datasets, "data_root", lambda: None)
    fake_openml(monkeypatch, matrix, [*orders()[:30], (1, -1)])
    fetched = load_dataset("phishing", progress=False)
    for one, other in zip(expected.train_features, fetched.train_features, strict=True):
        np.testing.assert_array_equal(one, other)
