"""A table for each party, joined by an id column."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pbmvfl.data import VerticalDataset, load_table
from pbmvfl.data.schema_template import schema_template
from pbmvfl.data.tables import check_table
from pbmvfl.deploy.alignment.tables import read_party_table
from pbmvfl.errors import DataError

#: Person i is i years old, has been i + 100 times in the shop, and churned if i is odd.
BANK, SHOP = range(30), range(10, 50)


def write(path: Path, people: Any, *, column: str, plus: int, label: bool = False, kind: str = "word") -> Path:
    """A file whose rows are in an order of its own."""
    rows = list(people)
    random.Random(plus).shuffle(rows)
    cells: dict[str, Any] = {
        "person": [f"P{i}" if kind == "word" else i for i in rows],
        column: [i + plus for i in rows],
    }
    if label:
        cells["churn"] = ["yes" if i % 2 else "no" for i in rows]
    if path.suffix == ".parquet":
        pq.write_table(pa.table(cells), path)
    else:
        lines = [",".join(cells), *(",".join(map(str, row)) for row in zip(*cells.values(), strict=True))]
        path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return {
        "bank": write(tmp_path / "bank.csv", BANK, column="age", plus=0),
        "shop": write(tmp_path / "shop.parquet", SHOP, column="visits", plus=100, label=True),
    }


def load(files: dict[str, Any], **changes: Any) -> VerticalDataset:
    return load_table(files, **({"label": "churn", "id": "person"} | changes))


def people_of(data: VerticalDataset) -> dict[str, tuple[float, float, str]]:
    """What the data set says of everybody, by id."""
    parts = [
        np.concatenate([train, test])[:, 0] for train, test in zip(data.train_features, data.test_features, strict=True)
    ]
    labels = [data.class_names[label] for label in (*data.train_labels, *data.test_labels)]
    return dict(zip((*data.train_ids, *data.test_ids), zip(*parts, labels, strict=True), strict=True))


def test_rows_are_those_whose_id_every_file_has_and_stay_together(files: dict[str, Path]) -> None:
    data = load(files)
    assert data.party_names == ("bank", "shop")
    assert people_of(data) == {f"P{i}": (i, i + 100, "yes" if i % 2 else "no") for i in range(10, 30)}
    assert data.name == "bank+shop"
    assert data.notes[-2:] == (
        "bank.csv: 10 of 30 rows are left out because another table does not have the id.",
        "shop.parquet: 20 of 40 rows are left out because another table does not have the id.",
    )


def test_the_order_and_the_split_follow_the_ids_and_not_the_files(files: dict[str, Path], tmp_path: Path) -> None:
    before = load(files, seed=3)
    again = write(tmp_path / "again.csv", reversed(BANK), column="age", plus=0)
    after = load({**files, "bank": again}, seed=3)
    assert before.train_ids == after.train_ids
    np.testing.assert_array_equal(before.train_features[0], after.train_features[0])
    assert load(files, seed=4).train_ids != before.train_ids


def test_labels_may_have_a_file_of_their_own(files: dict[str, Path], tmp_path: Path) -> None:
    shop = write(tmp_path / "visits.csv", SHOP, column="visits", plus=100)
    labels = write(tmp_path / "labels.csv", range(5, 25), column="nothing", plus=0, label=True)
    data = load({**files, "shop": shop}, label_data=labels)
    assert people_of(data) == {f"P{i}": (i, i + 100, "yes" if i % 2 else "no") for i in range(10, 25)}


def test_a_label_is_never_a_feature_of_any_party(files: dict[str, Path], tmp_path: Path) -> None:
    labels = write(tmp_path / "labels.csv", SHOP, column="nothing", plus=0, label=True)
    data = load(files, label_data=labels)  # shop.parquet has the label as well
    assert data.columns is not None
    assert [part.names for part in data.columns] == [("age",), ("visits",)]


def test_columns_choose_among_those_of_a_file_and_may_have_one_name(files: dict[str, Path], tmp_path: Path) -> None:
    bank = tmp_path / "more.csv"
    bank.write_text("person,visits,age,note\n" + "".join(f"P{i},{i},{2 * i},hello\n" for i in BANK))
    data = load({**files, "bank": bank}, columns={"bank": ["visits"], "shop": ["visits"]})
    assert people_of(data)["P11"] == (11, 111, "yes")
    assert load({**files, "bank": bank}, columns="bank=age").train_features[0].shape == (16, 1)


def test_a_test_table_for_each_party_is_joined_by_itself(files: dict[str, Path], tmp_path: Path) -> None:
    test = {
        "bank": write(tmp_path / "bank2.csv", range(60, 80), column="age", plus=0),
        "shop": write(tmp_path / "shop2.csv", range(70, 90), column="visits", plus=100, label=True),
    }
    data = load(files, test=test)
    assert set(data.test_ids or ()) == {f"P{i}" for i in range(70, 80)}
    assert people_of(data)["P75"] == (75, 175, "yes")
    with pytest.raises(DataError, match="test must be given as the training data is"):
        load(files, test=tmp_path / "bank2.csv")


def test_an_id_column_of_one_table_for_all_names_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("who,age,visits,churn\n" + "".join(f"P{i:02},{i},{i},{i % 2}\n" for i in range(20)))
    data = load_table(path, label="churn", columns="bank=age;shop=visits", id="who")
    by_id = dict(zip(data.train_ids or (), data.train_features[0][:, 0].tolist(), strict=True))
    assert by_id == {name: float(name[1:]) for name in by_id}
    with pytest.raises(DataError, match="id='age' is also a column of party='bank'"):
        load_table(path, label="churn", columns="bank=age;shop=visits", id="age")


def test_a_fault_names_the_row_by_its_number_in_its_own_file(files: dict[str, Path]) -> None:
    lines = files["bank"].read_text().splitlines()
    row = next(number for number, line in enumerate(lines[1:]) if line.startswith("P17,"))
    lines[1 + row] = "P17,old"
    outside = next(number for number, line in enumerate(lines[1:]) if line.startswith("P3,"))
    lines[1 + outside] = "P3,young"  # nobody asks for this person
    files["bank"].write_text("\n".join(lines) + "\n")
    schema = {"columns": {"age": {"range": [0, 120]}, "visits": {"range": [0, 200]}}}
    with pytest.raises(DataError, match=rf"^bank.csv: column='age': row={row} \(counted from 0\) is not a number"):
        load(files, schema=schema)


def bad(files: dict[str, Path], **changes: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(files, **changes)
    assert "P1" not in str(caught.value)
    return str(caught.value)


def test_ids_that_cannot_tell_rows_apart_are_counted_and_not_shown(files: dict[str, Path]) -> None:
    files["bank"].write_text(files["bank"].read_text() + "P11,3\nP11,4\nP12,5\n")
    assert "bank.csv: id='person': 3 rows have an id that an earlier row has" in bad(files)


def test_rows_without_an_id_are_named_by_file_and_row(files: dict[str, Path]) -> None:
    files["bank"].write_text(files["bank"].read_text() + ",3\n")
    assert "bank.csv: id='person': row=30 (counted from 0) has no id" in bad(files)


def test_ids_of_different_types_are_refused_and_a_csv_has_either(files: dict[str, Path], tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.parquet", SHOP, column="visits", plus=100, label=True, kind="whole")
    words = write(tmp_path / "words.parquet", BANK, column="age", plus=0)
    assert "words in words.parquet and whole numbers in whole.parquet" in bad({"bank": words, "shop": whole})
    text = write(tmp_path / "text.csv", BANK, column="age", plus=0, kind="whole")
    assert load({"bank": text, "shop": whole}).num_samples == 16
    half = tmp_path / "half.parquet"
    pq.write_table(pa.table({"person": [0.5, 1.5], "age": [1, 2]}), half)
    assert "half.parquet: id='person' has type double; permitted are words and whole numbers" in bad(
        {**files, "bank": half}
    )


def test_files_without_a_common_id_are_refused_with_their_counts(files: dict[str, Path], tmp_path: Path) -> None:
    other = write(tmp_path / "other.csv", range(100, 105), column="age", plus=0)
    words = bad({**files, "bank": other})
    assert "no id is in all of other.csv (5 rows), shop.parquet (40 rows)" in words


def test_every_fault_of_every_file_is_named_at_once(files: dict[str, Path], tmp_path: Path) -> None:
    words = bad(files, id="persn", columns="bank=agee;shop=visits", label="chrn")
    assert "label='chrn' is in none of bank.csv, shop.parquet (did you mean 'churn'?)" in words
    assert (
        "column='persn' is not in bank.csv (did you mean 'person'?), nor is column='agee' (did you mean 'age'?)"
        in words
    )
    assert "column='persn' is not in shop.parquet" in words
    assert "columns name party='bnk', which has no table (did you mean 'bank'?)" in bad(files, columns="bnk=age")
    twice = write(tmp_path / "twice.csv", BANK, column="age", plus=0, label=True)
    assert "label='churn' is in twice.csv and shop.parquet; leave it in one" in bad({**files, "bank": twice})
    only = tmp_path / "only.csv"
    only.write_text("person\nP1\nP2\n")
    assert "only.csv has no column beside id and label" in bad({**files, "bank": only})
    only.write_text("person,churn\nP1,yes\nP2,no\n")
    assert "if it has the labels alone, give it as --label-data FILE" in bad({"shop": files["bank"], "only": only})
    assert "gone.csv' does not exist" in bad({**files, "bank": tmp_path / "gone.csv"})


def test_what_cannot_be_joined_is_said_before_anything_is_read(files: dict[str, Path]) -> None:
    assert "id is needed with a table for each party" in bad(files, id=None)
    assert "at least 2 parties" in bad({"bank": files["bank"]})
    with pytest.raises(DataError, match="columns are needed with one table for all"):
        load_table(files["bank"], label="churn")
    with pytest.raises(DataError, match="label_data goes with a table for each party"):
        load_table(files["bank"], label="churn", columns="a=age;b=visits", label_data=files["shop"])


# --- the index of a pandas frame ---


def frame(index: Any) -> pd.DataFrame:
    """A shop's frame with an index that is stored in the file."""
    people = [f"P{i}" for i in range(30)]
    cells = {"person": people, "visits": range(30), "churn": ["yes", "no"] * 15}
    made = pd.DataFrame(cells)
    return (
        made.set_index("person")
        if index == "person"
        else made.set_index(pd.Index([7 * i % 31 for i in range(30)], name=index))
    )


@pytest.mark.parametrize("index", [None, "number"])
@pytest.mark.parametrize("in_memory", [False, True])
def test_the_index_of_a_pandas_frame_is_no_feature_unless_it_is_named(
    files: dict[str, Path], tmp_path: Path, index: str | None, in_memory: bool
) -> None:
    path, stored = tmp_path / "shop.parquet", index or "__index_level_0__"
    frame(index).to_parquet(path)
    assert stored in pq.read_schema(path).names  # else there is nothing to leave out
    shop = pa.Table.from_pandas(frame(index)) if in_memory else path
    given = {**files, "shop": shop}
    data = load(given)
    assert data.columns is not None
    assert [part.names for part in data.columns] == [("age",), ("visits",)]
    assert sum(f"column={stored!r} is the index of a pandas frame" in note for note in data.notes) == 1
    made = schema_template(shop, label="churn", id="person")
    assert set(made.entries) == {"visits"}
    assert stored in " ".join(made.notes)
    checked = check_table(shop, schema=None, label="churn", id="person")
    assert checked.columns[0].names == ("visits",)
    assert stored in " ".join(checked.notes)
    named = load(given, columns={"bank": ["age"], "shop": ["visits", stored]})
    assert named.columns is not None
    assert named.columns[1].names == ("visits", stored)
    assert not any("index of a pandas frame" in note for note in named.notes)
    if not in_memory:
        assert read_party_table(path, id="person", columns=None, schema=CHURN).columns.names == ("visits", "churn")


CHURN = {"columns": {"churn": {"vocabulary": ["yes", "no"]}}}


def test_the_index_of_a_pandas_frame_can_be_the_id(files: dict[str, Path], tmp_path: Path) -> None:
    frame("person").to_parquet(tmp_path / "shop.parquet")
    data = load(files)
    assert {*(data.train_ids or ()), *(data.test_ids or ())} == {f"P{i}" for i in BANK}
    assert not any("index of a pandas frame" in note for note in data.notes)
