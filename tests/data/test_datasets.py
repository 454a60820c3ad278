"""The named sets: where they are looked for, and what the local copies hold."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pbmvfl.data import DATASETS, VerticalDataset, data_root, datasets, load_dataset
from pbmvfl.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PBMVFL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def local_copy(*files: str) -> Path:
    """The folder of local copies, or a skip that says what is missing."""
    root = data_root()
    for file in files:
        if root is None or not (root / file).exists():
            pytest.skip(f"no local copy of {file} (PBMVFL_DATA)")
    assert root is not None
    return root


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        DataError, match=r"name='mnist' .* digits, phishing, activity, cifar10, modelnet10, imagenet100"
    ):
        load_dataset("mnist")
    with pytest.raises(DataError, match="use --data FILE on the command line, or load_table in Python"):
        load_dataset("mnist")
    assert DATASETS == ("digits", "phishing", "activity", "cifar10", "modelnet10", "imagenet100")


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'sklearn', 'pyarrow', 'PIL', 'rich', 'scipy'}"
    code = f"import sys, pbmvfl.data; found = {heavy} & set(sys.modules); sys.exit(', '.join(found) or 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_digits_come_with_scikit_learn() -> None:
    data = load_dataset("digits")
    assert (data.num_parties, data.num_samples, data.num_test_samples, data.num_classes) == (4, 1437, 360, 10)
    assert {part.shape for part in data.train_features} == {(1437, 16)}
    assert data.default_encoder == "mlp"
    values = np.concatenate([part.reshape(-1) for part in (*data.train_features, *data.test_features)])
    assert (values.min(), values.max()) == (0, 1)
    assert (values * 16 == np.round(values * 16)).all()


def test_every_digit_is_in_one_split_with_its_label() -> None:
    from sklearn.datasets import load_digits

    data = load_dataset("digits", num_parties=2)
    train = np.concatenate(data.train_features, axis=1)
    test = np.concatenate(data.test_features, axis=1)
    mine = sorted(
        (*row, label)
        for rows, labels in ((train, data.train_labels), (test, data.test_labels))
        for row, label in zip((rows * 16).astype(int).tolist(), labels.tolist(), strict=True)
    )
    bunch = load_digits()
    assert mine == sorted(
        (*row, label) for row, label in zip(bunch.data.astype(int).tolist(), bunch.target.tolist(), strict=True)
    )


def test_the_digits_split_is_the_same_for_everybody() -> None:
    """The first labels, written down: a change of numpy or of the shuffle would move the split silently."""
    assert load_dataset("digits").train_labels[:12].tolist() == [1, 0, 6, 9, 4, 9, 3, 5, 7, 0, 8, 4]


@pytest.mark.parametrize("count", [1, 0, "4"])
def test_a_wrong_party_count_is_refused_before_anything_is_read(count: int) -> None:
    with pytest.raises(DataError, match="num_parties="):
        load_dataset("phishing", num_parties=count)


@pytest.mark.parametrize("name", ["cifar10", "imagenet100"])
def test_pictures_for_another_count_than_four_are_refused_before_anything_is_read(name: str) -> None:
    with pytest.raises(DataError, match="only num_parties=4"):
        load_dataset(name, num_parties=3)


def test_a_root_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        load_dataset("phishing", root=tmp_path / "none")


def test_the_data_folder_is_the_environments_else_beside_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inside = tmp_path / "checkout" / "docs"
    inside.mkdir(parents=True)
    monkeypatch.delenv("PBMVFL_DATA", raising=False)
    monkeypatch.chdir(inside)
    assert data_root() is None
    (tmp_path / "shared" / "data").mkdir(parents=True)
    assert data_root() is None  # not a checkout yet: no reason to look two folders up
    (tmp_path / "checkout" / ".git").mkdir()
    assert data_root() == tmp_path / "shared" / "data"
    monkeypatch.chdir(tmp_path / "checkout")
    assert data_root() == tmp_path / "shared" / "data"
    monkeypatch.setenv("PBMVFL_DATA", str(inside))
    assert data_root() == inside
    monkeypatch.setenv("PBMVFL_DATA", str(inside / "none"))
    with pytest.raises(DataError, match=r"PBMVFL_DATA=.* is not a folder"):
        data_root()


def test_the_given_root_comes_before_the_environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("given", "environment"):
        (tmp_path / folder / "phishing").mkdir(parents=True)
        (tmp_path / folder / "phishing" / "phishing.parquet").write_bytes(b"broken")
    monkeypatch.setenv("PBMVFL_DATA", str(tmp_path / "environment"))
    with pytest.raises(DataError, match="given/phishing"):
        load_dataset("phishing", root=tmp_path / "given")
    with pytest.raises(DataError, match="environment/phishing"):
        load_dataset("phishing")


def test_phishing_is_the_known_table_in_file_order() -> None:
    local_copy("phishing/phishing.parquet")
    data = load_dataset("phishing")
    assert (data.num_parties, data.num_samples, data.num_test_samples) == (5, 8844, 2211)
    assert {part.shape[1] for part in data.train_features} == {6}
    assert set(np.unique(np.concatenate(data.train_features, axis=1))) == {0.0, 0.5, 1.0}
    assert int(data.train_labels.sum() + data.test_labels.sum()) == 6157
    assert data.class_names[1] == "legitimate"
    assert data.split_features(num_parties=10).train_features[9].shape == (8844, 3)
    assert _logistic_accuracy(data) == pytest.approx(0.921, abs=0.005)


def _logistic_accuracy(data: VerticalDataset) -> float:
    from sklearn.linear_model import LogisticRegression

    train, test = (np.concatenate(parts, axis=1) for parts in (data.train_features, data.test_features))
    model = LogisticRegression(max_iter=300).fit(train, data.train_labels)
    return float(model.score(test, data.test_labels))


def test_a_changed_phishing_value_is_noticed(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = local_copy("phishing/phishing.parquet") / "phishing" / "phishing.parquet"
    table = pq.read_table(source)
    column = table.column(0).to_numpy().copy()
    column[100] = -column[100]
    (tmp_path / "phishing").mkdir()
    pq.write_table(table.set_column(0, table.column_names[0], pa.array(column)), tmp_path / "phishing/phishing.parquet")
    with pytest.raises(DataError, match="not the known phishing table"):
        load_dataset("phishing", root=tmp_path)


def test_activity_is_the_official_split_without_the_last_column() -> None:
    local_copy("activity/har_train.parquet", "activity/har_test.parquet")
    data = load_dataset("activity")
    assert (data.num_parties, data.num_samples, data.num_test_samples) == (5, 7352, 2947)
    assert {part.shape[1] for part in data.train_features} == {112}
    assert max(float(np.abs(part).max()) for part in data.train_features) <= 1
    assert np.bincount(data.test_labels).tolist() == [496, 471, 420, 491, 532, 537]
    assert data.notes


def test_a_changed_activity_value_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    local_copy("activity/har_train.parquet")
    monkeypatch.setitem(datasets.ACTIVITY_SHA256, "test", "0" * 64)
    with pytest.raises(DataError, match="test features differ"):
        load_dataset("activity")


def test_a_modelnet_copy_with_a_changed_grid_is_noticed(tmp_path: Path) -> None:
    source = local_copy("modelnet10/modelnet10_voxels30.npz") / "modelnet10" / "modelnet10_voxels30.npz"
    with np.load(source) as file:
        arrays = {name: file[name] for name in file.files}
    (tmp_path / "modelnet10").mkdir()
    target = tmp_path / "modelnet10" / source.name
    arrays["bits_test"][5, 700] ^= 1
    np.savez(target, **arrays)
    with pytest.raises(DataError, match="test grids differ"):
        load_dataset("modelnet10", root=tmp_path, progress=False)
    arrays["y_test"] = arrays["y_test"][:-1]
    np.savez(target, **arrays)
    with pytest.raises(DataError, match="rows per class"):
        load_dataset("modelnet10", root=tmp_path, progress=False)
    shutil.rmtree(tmp_path / "modelnet10")


@pytest.mark.slow
def test_modelnet_is_rendered_once_and_then_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local_copy("modelnet10/modelnet10_voxels30.npz")
    data = load_dataset("modelnet10", progress=False)
    assert (data.num_parties, data.num_samples, data.num_test_samples) == (6, 3991, 908)
    assert {(part.shape[1:], str(part.dtype)) for part in data.train_features} == {((2, 32, 32), "uint8")}
    assert data.default_encoder == "multiview-conv"
    dark = (np.concatenate(data.train_features, axis=1).reshape(3991, -1).max(axis=1) == 0).sum()
    assert dark == 7  # the empty grids that the published copy has
    monkeypatch.setattr("pbmvfl.data.voxels.render_views", lambda *_args, **_kwargs: pytest.fail("rendered again"))
    again = load_dataset("modelnet10", num_parties=12, progress=False)
    np.testing.assert_array_equal(again.train_features[3][:, 0], data.train_features[1][:, 1])
    assert len(list((cache / "modelnet10").iterdir())) == 1
