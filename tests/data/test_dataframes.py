"""Frames in memory: pandas, pyarrow, and whatever speaks Arrow's stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from pbmvfl.data import VerticalDataset, load_table
from pbmvfl.errors import DataError

SCHEMA = {
    "columns": {
        "age": {"range": [0, 20], "missing": True},
        "job": {"vocabulary": ["cook", "nurse"], "missing": True},
        "code": {"vocabulary": [1, 2], "missing": True},
    }
}
COLUMNS = "bank=age,job,code;shop=visits,member"
WIDTHS = [(2 + 3 + 3), (1 + 2)]


def cells(**changes: Any) -> dict[str, Any]:
    return {
        "age": [float(i) if i % 5 else None for i in range(20)],
        "job": ["cook", "nurse", None, "cook"] * 5,
        "code": [1, 2, None, 2] * 5,
        "visits": list(range(20)),
        "member": [True, False] * 10,
        "churn": ["yes", "no"] * 10,
    } | changes


class Stream:
    """A frame of another library: all that is known of it is Arrow's stream."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def pandas_frame(**changes: Any) -> pd.DataFrame:
    return pd.DataFrame(cells(**changes))


KINDS = {
    "pandas": lambda: pandas_frame(),
    "pandas with an index of words": lambda: pandas_frame().set_axis([f"row {i}" for i in range(20)]),
    "pandas with categories": lambda: pandas_frame(job=pd.Categorical(cells()["job"])),
    "pandas with whole numbers that may be missing": lambda: pandas_frame(
        code=pd.array(cells()["code"], dtype="Int64")
    ),
    "pandas with objects": lambda: pandas_frame().astype(object),
    "pandas with small types": lambda: pandas_frame(
        visits=np.arange(20, dtype=np.uint8), age=np.array(cells()["age"], dtype=np.float32)
    ),
    "pyarrow": lambda: pa.table(cells()),
    "pyarrow batch": lambda: pa.RecordBatch.from_pydict(cells()),
    "pyarrow with a dictionary": lambda: pa.table(cells(job=pa.array(cells()["job"]).dictionary_encode())),
    "pyarrow with views of text, as polars has": lambda: pa.table(
        cells(
            job=pa.DictionaryArray.from_arrays(
                pa.array([0, 1, None, 0] * 5, pa.uint32()), pa.array(["cook", "nurse"], pa.string_view())
            ),
            churn=pa.array(cells()["churn"], pa.string_view()),
        )
    ),
    "a reader that can be read once": lambda: pa.table(cells()).to_reader(),
    "a stream": lambda: Stream(pa.table(cells())),
}


def everything(data: VerticalDataset) -> list[Any]:
    return [
        *(part.tolist() for part in data.train_features),
        data.train_labels.tolist(),
        data.class_names,
        data.train_ids,
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_frame_gives_the_same_rows(kind: str) -> None:
    data = load_table(KINDS[kind](), label="churn", columns=COLUMNS, schema=SCHEMA)
    assert data.name == "frame"
    assert [part.shape[1] for part in data.train_features] == WIDTHS
    assert everything(data) == everything(load_table(pa.table(cells()), label="churn", columns=COLUMNS, schema=SCHEMA))


def test_a_frame_and_the_file_that_it_was_read_from_give_the_same_rows(tmp_path: Any) -> None:
    pandas_frame().to_csv(tmp_path / "people.csv", index=False)
    from_file = load_table(tmp_path / "people.csv", label="churn", columns=COLUMNS, schema=SCHEMA)
    from_frame = load_table(pd.read_csv(tmp_path / "people.csv"), label="churn", columns=COLUMNS, schema=SCHEMA)
    assert everything(from_file) == everything(from_frame)


def test_numbers_and_words_in_one_column_are_text() -> None:
    """As pandas leaves a column with marks that it read by pieces."""
    mixed = pandas_frame(age=[float(i) if i % 5 else "?" for i in range(20)])
    data = load_table(mixed, label="churn", columns=COLUMNS, schema=SCHEMA)
    assert everything(data) == everything(load_table(pandas_frame(), label="churn", columns=COLUMNS, schema=SCHEMA))


@pytest.mark.parametrize("column", [[{"a": 1}] * 20, [object()] * 20, [b"x", "y"] * 10])
def test_a_column_of_objects_is_refused_by_name(column: list[Any]) -> None:
    with pytest.raises(DataError, match=r"column='visits'"):
        load_table(pandas_frame(visits=column), label="churn", columns=COLUMNS, schema=SCHEMA)


def test_a_frame_may_have_a_name_and_a_test_frame() -> None:
    data = load_table(
        pandas_frame(), label="churn", columns=COLUMNS, schema=SCHEMA, test=pandas_frame(), name="patients"
    )
    assert (data.name, data.num_samples, data.num_test_samples) == ("patients", 20, 20)
    assert (data.test_ids or ("",))[0] == "frame:0"


def test_without_test_rows_all_are_for_training() -> None:
    data = load_table(pandas_frame(), label="churn", columns=COLUMNS, schema=SCHEMA, test_fraction=0)
    assert (data.num_samples, data.num_test_samples) == (20, 0)
    assert [part.shape for part in data.test_features] == [(0, width) for width in WIDTHS]
    assert data.test_ids == ()
    assert sorted(map(int, data.train_ids or ())) == list(range(20))


@pytest.mark.parametrize(
    "source", [pd.Series([1, 2], name="age"), pa.chunked_array([[1, 2]]), pa.array([1]), iter([]), b"people.csv", 3.5]
)
def test_what_is_no_table_is_refused_with_what_is(source: Any) -> None:
    with pytest.raises(DataError, match=r"cannot be read; give the path of a .parquet or .csv file, a DataFrame"):
        load_table(source, label="churn", columns=COLUMNS)


def test_true_and_false_with_a_range_are_refused_with_the_way_out() -> None:
    schema = {"columns": SCHEMA["columns"] | {"member": {"range": [0, 1]}}}
    with pytest.raises(DataError, match="holds true and false where numbers are meant; true and false need no entry"):
        load_table(pandas_frame(), label="churn", columns=COLUMNS, schema=schema)


@pytest.mark.parametrize("names", [{"label": None}, {"label": 3}, {"id": 7}])
def test_a_label_and_an_id_are_names(names: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="must be names of columns"):
        load_table(pandas_frame(), **({"label": "churn", "columns": COLUMNS} | names))


# --- a frame per party ---


def frames(**more: Any) -> dict[str, Any]:
    whole = cells()
    return {
        "bank": pd.DataFrame({name: whole[name] for name in ("age", "job", "code")} | more),
        "shop": pa.table({name: whole[name] for name in ("visits", "member")} | more),
    }


@pytest.mark.parametrize("kind", [list, np.array, pd.Series, pd.Categorical, pa.array])
def test_frames_in_the_same_order_with_labels_beside_them(kind: Any) -> None:
    data = VerticalDataset.from_frames(frames(), labels=kind(cells()["churn"]), schema=SCHEMA)
    whole = load_table(pa.table(cells()), label="churn", columns=COLUMNS, schema=SCHEMA)

    def by_id(found: VerticalDataset) -> dict[str, Any]:
        rows = [*(part.tolist() for part in found.train_features), found.train_labels.tolist()]
        tests = [*(part.tolist() for part in found.test_features), found.test_labels.tolist()]
        every = [[*some, *more] for some, more in zip(rows, tests, strict=True)]
        return dict(zip((*found.train_ids, *found.test_ids), zip(*every, strict=True), strict=True))

    assert by_id(data) == by_id(whole)


def test_labels_and_ids_may_be_columns() -> None:
    who = [f"P{i:02}" for i in range(20)]
    given = frames(who=who)
    given["shop"] = given["shop"].append_column("churn", [cells()["churn"]]).slice(5)
    data = VerticalDataset.from_frames(given, labels="churn", ids="who", schema=SCHEMA, test_fraction=0, name="people")
    assert sorted(data.train_ids or ()) == who[5:]
    assert data.name == "people"
    beside = VerticalDataset.from_frames(frames(), labels=cells()["churn"], ids=who, schema=SCHEMA, test_fraction=0)
    assert sorted(beside.train_ids or ()) == who


def test_what_does_not_fit_together_is_refused() -> None:
    short = {**frames(), "bank": frames()["bank"].head(7)}
    with pytest.raises(DataError, match=r"different numbers of rows: bank has 7, shop has 20; give ids"):
        VerticalDataset.from_frames(short, labels=cells()["churn"])
    with pytest.raises(DataError, match="labels= has 3 values for 20 rows"):
        VerticalDataset.from_frames(frames(), labels=["yes", "no", "no"])
    with pytest.raises(DataError, match="labels beside them belong to no row"):
        VerticalDataset.from_frames(frames(who=list(range(20))), labels=cells()["churn"], ids="who")
    with pytest.raises(DataError, match="at least 2 parties"):
        VerticalDataset.from_frames({"bank": frames()["bank"]}, labels=cells()["churn"])
    with pytest.raises(DataError, match="frame of bank: id='ids=': 19 rows have an id that an earlier row has"):
        VerticalDataset.from_frames(frames(), labels=cells()["churn"], ids=["same"] * 20, schema=SCHEMA)
    with pytest.raises(DataError, match="must be a list, an array or a series"):
        VerticalDataset.from_frames(frames(), labels=[{"a": 1}, "b"] * 10)
