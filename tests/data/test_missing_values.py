"""Values that are missing: a public slot for them, and what is one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.data import PartyColumns, load_rows, load_table
from pbmvfl.data.faults import Faults
from pbmvfl.data.schema import read_schema
from pbmvfl.errors import DataError


def columns_of(entries: dict[str, Any]) -> PartyColumns:
    faults = Faults()
    schema = read_schema({"columns": entries}, faults)
    faults.raise_any()
    return PartyColumns(party="bank", rules=tuple(schema.rules.values()))


def encode(entries: dict[str, Any], cells: dict[str, Any]) -> np.ndarray:
    return columns_of(entries).encode(pa.table(cells), "cells")


def from_csv(path: Path, entry: dict[str, Any], cells: list[str]) -> np.ndarray:
    """One column of a CSV as numbers."""
    path.write_text("\n".join(["x,y", *(f"{cell},1" for cell in cells)]) + "\n")
    other = PartyColumns(party="shop", rules=columns_of({"y": {"range": [0, 1]}}).rules)
    rows = load_rows(path, columns=[columns_of({"x": entry}), other], class_names=["a", "b"])
    return rows.features[0]


def test_a_number_that_is_missing_is_zero_and_sets_its_slot() -> None:
    encoded = encode({"age": {"range": [0, 100], "missing": True}}, {"age": [0.0, None, float("nan"), 100.0, 75.0]})
    assert encoded.tolist() == [[-1, 0], [0, 1], [0, 1], [1, 0], [0.5, 0]]


def test_a_word_that_is_missing_has_no_slot_of_a_word() -> None:
    entry = {"vocabulary": ["cook", "nurse"], "other": True, "missing": True}
    encoded = encode({"job": entry}, {"job": ["nurse", None, "?", "", "NA", "pilot"]})
    nothing = [0, 0, 0, 1]
    assert encoded.tolist() == [[0, 1, 0, 0], nothing, nothing, nothing, nothing, [0, 0, 1, 0]]


def test_true_and_false_and_whole_numbers_may_be_missing_too() -> None:
    assert encode({"x": {"vocabulary": [False, True], "missing": True}}, {"x": [True, None]}).tolist() == [
        [0, 1, 0],
        [0, 0, 1],
    ]
    # A program without integers that can be missing made them real.
    assert encode({"x": {"vocabulary": [7, 8], "missing": True}}, {"x": [8.0, math.nan, 7.0]}).tolist() == [
        [0, 1, 0],
        [0, 0, 1],
        [1, 0, 0],
    ]


def test_a_column_without_any_value_is_all_slot() -> None:
    entries = {"x": {"range": [0, 1], "missing": True}, "y": {"vocabulary": ["a"], "missing": True}}
    assert encode(entries, {"x": pa.nulls(2), "y": pa.nulls(2)}).tolist() == [[0, 1, 0, 1]] * 2


@pytest.mark.parametrize("mark", ["", "?", "NA", "N/A", "NaN", "nan", "NULL", "null", " ?", '"?"'])
def test_every_usual_mark_in_a_csv_is_a_missing_value(tmp_path: Path, mark: str) -> None:
    numbers = from_csv(tmp_path / "new.csv", {"range": [0, 10], "missing": True}, ["5", mark, "10"])
    assert numbers.tolist() == [[0, 0], [0, 1], [1, 0]]
    words = from_csv(tmp_path / "new.csv", {"vocabulary": ["5", "10"], "missing": True}, ["5", mark, "10"])
    assert words.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize("cells", [["-9", "3"], [-9, 3], [-9.0, 3.0], ["-9.0", "3"]])
def test_an_owner_s_own_marks_count_beside_the_usual_ones(cells: list[Any]) -> None:
    entry = {"range": [0, 6], "missing": ["unknown", -9, "-9.0"]}
    assert encode({"x": entry}, {"x": cells}).tolist() == [[0, 1], [0, 0]]
    if isinstance(cells[0], str):
        assert encode({"x": entry}, {"x": ["unknown", "?", "6"]}).tolist() == [[0, 1], [0, 1], [1, 0]]


def test_a_mark_that_is_a_word_of_the_vocabulary_is_that_word() -> None:
    entry = {"vocabulary": ["NA", "DE"], "missing": True}  # Namibia
    assert encode({"x": entry}, {"x": ["NA", "", "DE"]}).tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    with pytest.raises(DataError, match="'DE' is in the vocabulary and in missing; it can only be one of them"):
        columns_of({"x": {"vocabulary": ["NA", "DE"], "missing": ["DE"]}})


def test_without_a_slot_a_question_mark_is_what_it_was() -> None:
    assert encode({"x": {"vocabulary": ["a", "?"]}}, {"x": ["?", "a"]}).tolist() == [[0, 1], [1, 0]]
    assert encode({"x": {"vocabulary": ["a"], "other": True}}, {"x": ["?", "a"]}).tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ({"range": [0, 120]}, '"x": {"range": [0, 120], "missing": true}'),
        ({"vocabulary": ["a"]}, '"x": {"vocabulary": [...], "missing": true}'),
        ({"vocabulary": ["a"], "other": True}, '"x": {"vocabulary": [...], "other": true, "missing": true}'),
    ],
)
def test_a_missing_value_without_a_slot_is_a_fault_with_the_schema_s_line_that_would_mend_it(
    entry: dict[str, Any], line: str
) -> None:
    cells = pa.array([None, None, "a" if "vocabulary" in entry else "1"])
    with pytest.raises(DataError, match=r"column='x': rows=0, 1 .* have no value") as caught:
        encode({"x": entry}, {"x": cells})
    assert line in str(caught.value)


@pytest.mark.parametrize("missing", ["?", 1, [], [True], [None], {"a": 1}, None])
def test_a_slot_is_asked_for_by_true_or_by_a_list_of_marks(missing: Any) -> None:
    with pytest.raises(DataError, match="permitted are true, false and a list of marks"):
        columns_of({"x": {"range": [0, 1], "missing": missing}})


# --- each row by itself ---

RULES = {
    "age": {"range": [0, 120], "missing": ["-9"]},
    "job": {"vocabulary": ["cook", "nurse"], "other": True, "missing": True},
    "code": {"vocabulary": [1, 2, 3], "missing": True},
    "home": {"vocabulary": [False, True], "missing": True},
    "kind": {"vocabulary": ["a", "b"]},
    "plain": None,
}
CELLS = {
    "age": st.sampled_from(["", "?", "-9", "NA", "0", "61.5", "+7", "1e2", "999"]),
    "job": st.sampled_from(["", "?", "cook", "nurse", "pilot", " cook"]),
    "code": st.sampled_from(["", "?", "1", "2", "3", "3.0"]),
    "home": st.sampled_from(["", "?", "true", "False"]),
    "kind": st.sampled_from(["a", "b"]),
    "plain": st.sampled_from(["0", "1.5", "-2e3", "+4"]),
}


def every_rule() -> list[PartyColumns]:
    ruled = columns_of({name: entry for name, entry in RULES.items() if entry is not None})
    plain = PartyColumns.from_dict({"party": "shop", "columns": [{"name": "plain"}]})
    return [ruled, plain]


@settings(deadline=None, max_examples=40)  # a busy machine is no failure
@given(rows=st.lists(st.fixed_dictionaries(CELLS), min_size=1, max_size=6), chosen=st.integers(0, 5))
def test_what_a_row_becomes_never_depends_on_other_rows(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]], chosen: int
) -> None:
    path = tmp_path_factory.mktemp("rows") / "new.csv"

    def encoded(some: list[dict[str, str]]) -> np.ndarray:
        path.write_text("\n".join([",".join(CELLS), *(",".join(row[name] for name in CELLS) for row in some)]) + "\n")
        found = load_rows(path, columns=every_rule(), class_names=["a", "b"])
        return np.concatenate(found.features, axis=1)

    row = chosen % len(rows)
    np.testing.assert_array_equal(encoded(rows)[row], encoded([rows[row]])[0])


def test_rules_come_back_from_what_is_kept_of_them() -> None:
    for part in every_rule():
        again = PartyColumns.from_dict(part.to_dict())
        assert again == part
        assert again.width == part.width
    assert every_rule()[0].width == 2 + 4 + 4 + 3 + 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["party", "columns", "name", "range", "vocabulary", "other", "missing"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(values=JSON)
def test_kept_columns_that_are_something_else_are_refused_and_never_guessed(values: Any) -> None:
    try:
        found = PartyColumns.from_dict(values)
    except DataError:
        return
    assert found.width >= len(found.rules) >= 1


def test_a_table_with_slots_says_how_wide_its_parties_are(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("age,visits,sick\n" + "".join(f"{'?' if i % 4 == 0 else i},{i},{i % 2}\n" for i in range(20)))
    schema = {"columns": {"age": {"range": [0, 20], "missing": True}, "visits": {"range": [0, 20]}}}
    data = load_table(path, label="sick", columns="bank=age;shop=visits", schema=schema)
    assert [part.shape[1] for part in data.train_features] == [2, 1]
    assert data.columns is not None
    assert [part.width for part in data.columns] == [2, 1]
    assert sum(part[:, 1].sum() for part in (data.train_features[0], data.test_features[0])) == 5
