"""New rows for a model: its columns, by its rules, with or without a label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pbmvfl.data import NewRows, VerticalDataset, load_rows, load_table
from pbmvfl.errors import DataError

SCHEMA = {
    "columns": {
        "age": {"range": [0, 100], "missing": True},
        "job": {"vocabulary": ["cook", "nurse"], "other": True},
        "visits": {"range": [0, 50]},
    }
}
HEADER = "age,job,visits,member,weight,churn"


@pytest.fixture
def data(tmp_path: Path) -> VerticalDataset:
    rows = [f"{i},{'cook' if i % 3 else 'pilot'},{i},{i % 2 == 0},{i}.5,{'yes' if i % 2 else 'no'}" for i in range(40)]
    path = tmp_path / "people.csv"
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return load_table(path, label="churn", columns="bank=age,job;shop=visits,member,weight", schema=SCHEMA)


def load(data: VerticalDataset, source: Any, **how: Any) -> NewRows:
    assert data.columns is not None
    return load_rows(source, columns=data.columns, class_names=data.class_names, **how)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_new_rows_become_the_numbers_that_the_same_rows_became_in_training(
    data: VerticalDataset, tmp_path: Path
) -> None:
    new = load(data, tmp_path / "people.csv", label="churn", name="people")
    assert new.labels is not None
    assert new.ids == tuple(str(row) for row in range(40))  # so that a ledger knows them again
    for features, whole in zip(data.train_features, new.features, strict=True):
        np.testing.assert_array_equal(features, whole[[int(row) for row in data.train_ids or ()]])
    np.testing.assert_array_equal(data.train_labels, new.labels[[int(row) for row in data.train_ids or ()]])


def test_a_single_row_without_label_and_in_another_order_of_columns_is_enough(
    data: VerticalDataset, tmp_path: Path
) -> None:
    path = write(tmp_path / "new.csv", "note,weight,member,visits,job,age", "hello,7,true,25,pilot,?")
    new = load(data, path)
    assert new.labels is None
    assert new.ids == ("new:0",)
    assert new.name == "new"
    assert new.party_names == ("bank", "shop")
    assert [part.tolist() for part in new.features] == [[[0, 1, 0, 0, 1]], [[0, 0, 1, 7]]]
    assert new.num_rows == 1


def test_a_frame_has_ids_too(data: VerticalDataset) -> None:
    frame = pa.table({"age": [1], "job": ["cook"], "visits": [2], "member": [False], "weight": [1.0], "who": ["P7"]})
    assert load(data, frame).ids == ("frame:0",)
    assert load(data, frame, id="who").ids == ("P7",)
    assert load(data, frame, name="patients").name == "patients"
    # All frames have the same name, so it says nothing about whose rows these are.
    assert load(data, frame, name="frame").ids == ("frame:0",)


def test_a_repr_shows_shapes_and_no_value(data: VerticalDataset, tmp_path: Path) -> None:
    shown = repr(load(data, tmp_path / "people.csv"))
    assert shown == "NewRows(name='people', bank: (40, 5), shop: (40, 4), without labels)"


def test_a_table_for_each_party_is_joined(data: VerticalDataset, tmp_path: Path) -> None:
    files = {
        "shop": write(tmp_path / "shop.csv", "who,visits,member,weight,churn", "c,1,true,1,no", "a,2,false,2,yes"),
        "bank": write(tmp_path / "bank.csv", "who,age,job", "b,1,cook", "a,100,nurse", "c,50,cook"),
    }
    new = load(data, files, id="who", label="churn")
    assert new.ids == ("a", "c")
    assert new.features[0].tolist() == [[1, 0, 0, 1, 0], [0, 0, 1, 0, 0]]
    assert new.labels is not None
    assert new.labels.tolist() == [1, 0]
    assert new.notes == ("bank.csv: 1 of 3 rows is left out because another table does not have the id.",)
    labels = write(tmp_path / "labels.csv", "who,churn", "a,no")
    assert load(data, files, id="who", label="churn", label_data=labels).ids == ("a",)


def faults(data: VerticalDataset, source: Any, **how: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(data, source, **how)
    return str(caught.value)


def test_all_missing_columns_are_named_at_once_with_what_they_may_be_called(
    data: VerticalDataset, tmp_path: Path
) -> None:
    path = write(tmp_path / "new.csv", "agee,jobb,visits,member", "1,cook,2,true")
    words = faults(data, path, label="churned", id="who")
    assert "column='age' is not in new.csv (did you mean 'agee'?)" in words
    for name in ("nor is column='job' (did you mean 'jobb'?)", "nor is column='weight'", "nor is column='churned'"):
        assert name in words
    assert "nor is column='who'; it has 4 columns: 'agee', 'jobb', 'visits', 'member'" in words


def test_cells_are_checked_by_the_model_s_rules(data: VerticalDataset, tmp_path: Path) -> None:
    path = write(tmp_path / "new.csv", HEADER, "1,cook,,true,1,no", "x,cook,2,secret,1,no", "1,cook,2,true,heavy,no")
    words = faults(data, path)
    assert "column='age': row=1 (counted from 0) is not a number" in words
    assert "column='visits': row=0 (counted from 0) has no value" in words
    assert "column='member': row=1 (counted from 0) is no true or false" in words
    assert "column='weight': row=2 (counted from 0) is not a number, but numbers are meant" in words
    assert "heavy" not in words
    assert "secret" not in words


def test_a_label_that_the_model_does_not_know_is_named_with_its_row(data: VerticalDataset, tmp_path: Path) -> None:
    path = write(tmp_path / "new.csv", HEADER, "1,cook,1,true,1,no", "1,cook,1,true,1,maybe", "1,cook,1,true,1,")
    assert "label='churn': row=2 (counted from 0) has no label" in faults(data, path, label="churn")
    write(path, HEADER, "1,cook,1,true,1,no", "1,cook,1,true,1,maybe")
    words = faults(data, path, label="churn")
    assert "row=1 (counted from 0) has a class that the model does not know ('maybe'); known: 'no', 'yes'" in words
    assert load(data, path).labels is None


def test_parties_other_than_the_model_s_are_named_at_once(data: VerticalDataset, tmp_path: Path) -> None:
    words = faults(data, {"bnk": tmp_path / "a.csv"})
    assert "party='bank' has no table (did you mean 'bnk'?)" in words
    assert "party='shop' has no table" in words
    assert "party='bnk' is not one of the model's (did you mean 'bank'?); those are bank, shop" in words
    assert "id is needed" in words


@pytest.mark.parametrize("source", [7, None, [[1, 2]], np.zeros((2, 2))])
def test_something_that_is_no_table_is_refused(data: VerticalDataset, source: Any) -> None:
    assert "cannot be read; give the path of a .parquet or .csv file, a DataFrame" in faults(data, source)


def test_numbers_of_a_label_are_the_same_classes_in_any_type() -> None:
    cells = {"a": [1.0, 2.0] * 4, "b": [1.0, 2.0] * 4}
    data = load_table(pa.table({**cells, "y": [0.0, 1.0] * 4}), label="y", columns="p=a;q=b")
    assert data.class_names == ("0", "1")
    new = load(data, pa.table({**cells, "y": [1, 0] * 4}), label="y")
    assert new.labels is not None
    assert new.labels.tolist() == [1, 0] * 4
