"""Every fault of a schema and a table at once, with row and column, and no value of a column in it."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.data import load_table
from pbmvfl.data.faults import nearest
from pbmvfl.data.tables import check_table
from pbmvfl.errors import DataError

COLUMNS = {"bank": ["age", "job"], "shop": ["visits", "city"]}
SCHEMA = {
    "columns": {
        "age": {"range": [0, 120]},
        "job": {"vocabulary": ["cook", "nurse"]},
        "visits": {"range": [0, 50]},
        "city": {"vocabulary": ["Bonn", "Aachen"]},
    }
}


def table(**changes: Any) -> dict[str, list[Any]]:
    cells = {
        "age": [str(20 + i) for i in range(12)],
        "job": ["cook", "nurse"] * 6,
        "visits": [str(i) for i in range(12)],
        "city": ["Bonn", "Aachen"] * 6,
        "churn": ["yes", "no"] * 6,
    }
    return cells | changes


def write(path: Path, cells: dict[str, list[Any]]) -> Path:
    lines = [",".join(cells), *(",".join(map(str, row)) for row in zip(*cells.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


def faults_of(path: Path, **changes: Any) -> tuple[str, ...]:
    arguments: dict[str, Any] = {"label": "churn", "columns": COLUMNS, "schema": SCHEMA}
    with pytest.raises(DataError) as caught:
        load_table(path, **(arguments | changes))
    assert all(fault in str(caught.value) for fault in caught.value.faults[:20])
    return caught.value.faults


def test_one_pass_names_every_fault_of_schema_and_table(tmp_path: Path) -> None:
    cells = table(
        age=["", "?", *table()["age"][2:]],
        job=[*table()["job"][:11], "pilot"],
        visits=["many", *table()["visits"][1:]],
        churn=["", *table()["churn"][1:]],
    )
    schema = {
        "columns": SCHEMA["columns"]
        | {"city": {"vocabulary": []}, "jop": {"range": [0, 1]}, "age": {"range": [0, 120]}}
    }
    columns = {"bank": ["age", "job", "incom"], "shop": ["visits", "city"]}
    found = faults_of(write(tmp_path / "people.csv", cells), schema=schema, columns=columns)
    expected = [
        "schema of column='city': the vocabulary is still empty",
        "column='incom' is not in people.csv",
        "the schema describes column='jop', which is not in people.csv (did you mean 'job'?)",
        "people.csv: column='age': rows=0, 1 (counted from 0) have no value",
        "people.csv: column='job': row=11 (counted from 0) has a value that is not in the vocabulary",
        "people.csv: column='visits': row=0 (counted from 0) is not a number",
        "people.csv: label='churn': row=0 (counted from 0) has no label",
    ]
    assert len(found) == len(expected)
    for words in expected:
        assert sum(words in fault for fault in found) == 1, words


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("agee", ["weight", "age"], "age"),
        ("aeg", ["age"], "age"),
        ("jop", ["job", "age"], "job"),
        ("Marital Status", ["marital_status"], "marital_status"),
        ("incone", ["outcome", "income"], "income"),
        ("income", ["outcome", "inc"], None),
        ("total_rooms", ["total_bedrooms"], None),
        ("households", ["household_income", "house_age"], None),
        ("col10", ["col11", "col1", "col100"], None),
        ("visits_2023", ["visits_2024"], None),
        ("x", ["y", "age"], None),
        ("ab", ["cd", "ax"], None),
        ("churn", [], None),
        ("churn", ["county", "hour", "turn"], None),
    ],
)
def test_only_a_slip_of_a_name_is_suggested(name: str, known: list[str], meant: str | None) -> None:
    assert nearest(name, known) == ("" if meant is None else f" (did you mean {meant!r}?)")


def test_the_text_lists_the_first_twenty_faults_and_counts_the_others(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(25)]
    path = write(tmp_path / "people.csv", {**{name: ["?", "1"] * 4 for name in names}, "churn": ["yes", "no"] * 4})
    with pytest.raises(DataError, match="25 faults were found") as caught:
        load_table(path, label="churn", columns={"bank": names[:12], "shop": names[12:]})
    assert len(caught.value.faults) == 25
    assert str(caught.value).endswith("and 5 more")
    assert sum(f"column={name!r}" in str(caught.value) for name in names) == 20


def test_a_single_fault_is_said_without_a_list(tmp_path: Path) -> None:
    path = write(tmp_path / "people.csv", table(visits=["many", *table()["visits"][1:]]))
    with pytest.raises(DataError, match=r"^people.csv: column='visits': row=0") as caught:
        load_table(path, label="churn", columns=COLUMNS, schema=SCHEMA)
    assert "\n" not in str(caught.value)


def test_all_holes_of_a_template_and_all_missing_values_are_named_together(tmp_path: Path) -> None:
    path = write(tmp_path / "people.csv", table(age=["NA", *table()["age"][1:]], city=["?", *table()["city"][1:]]))
    schema = {
        "columns": {
            "age": {"range": [None, None]},
            "job": {"vocabulary": []},
            "visits": {"range": [0, None]},
            "city": {"vocabulary": []},
        }
    }
    found = "\n".join(faults_of(path, schema=schema))
    assert found.count("the range is not filled in yet") == 2
    assert found.count("the vocabulary is still empty") == 2
    assert "column='age': row=0" in found
    assert "column='city': row=0" in found


def test_a_train_and_a_test_file_are_named_apart(tmp_path: Path) -> None:
    train = write(tmp_path / "people.csv", table(age=["x", *table()["age"][1:]]))
    test = write(tmp_path / "later.csv", table(age=["1", "x", *table()["age"][2:]]))
    found = faults_of(train, test=test)
    assert [fault.partition(" (")[0] for fault in found] == [
        "people.csv: column='age': row=0",
        "later.csv: column='age': row=1",
    ]


@pytest.mark.parametrize("quoted", [False, True])
def test_a_ragged_csv_names_the_lines_and_shows_no_value(tmp_path: Path, quoted: bool) -> None:
    path = write(tmp_path / "people.csv", table())
    lines = path.read_text().splitlines()
    lines[4] += ",topsecret"
    lines[7] = "topsecret,3"
    if quoted:  # a cell over two lines makes later lines stand one further down
        lines[2] = lines[2].replace("nurse", '"nur\nse"')
    path.write_text("\n".join(lines) + "\n")
    (found,) = faults_of(path)
    lines_said = f"line {5 + quoted} has 6, line {8 + quoted} has 2"
    assert f"2 rows with another number of values than the header's 5 names: {lines_said}" in found
    assert "topsecret" not in found


def test_a_cell_over_several_lines_is_one_cell_wherever_the_file_is_cut_for_reading(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    rows = 30_000  # more than a megabyte, which is read in pieces
    path.write_text(
        "age,note,visits,churn\n" + "".join(f'{i % 90},"{"of two" * 4}\nlines",3,{i % 2}\n' for i in range(rows))
    )
    data = load_table(path, label="churn", columns="bank=age;shop=visits", test_fraction=0)
    assert data.num_samples == rows
    assert data.train_features[0].sum() == sum(i % 90 for i in range(rows))


def test_many_ragged_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("age,visits,churn\n" + "1,2,3,4\n" * 1000)
    (found,) = faults_of(path, columns="bank=age;shop=visits", schema=None)
    assert "1,000 rows with another number" in found
    assert ", and 995 more" in found


SECRET = "Zq7topsecret"
PLACES = ["age", "job", "visits", "city", "id"]


@settings(deadline=None, max_examples=40)
@given(
    spoiled=st.lists(st.tuples(st.sampled_from(PLACES), st.integers(0, 11)), min_size=1, max_size=6),
    kind=st.sampled_from(["csv", "parquet", "ragged", "frame"]),
    with_schema=st.booleans(),
)
def test_no_error_and_no_traceback_ever_shows_a_value(
    tmp_path_factory: pytest.TempPathFactory, spoiled: list[tuple[str, int]], kind: str, with_schema: bool
) -> None:
    cells = {**table(), "id": [str(i) for i in range(12)]}
    for name, row in spoiled:
        cells[name][row] = f"{SECRET}{row % 2}"
    folder = tmp_path_factory.mktemp("secret")
    source: Any = write(folder / "people.csv", cells)
    if kind == "parquet":
        source = folder / "people.parquet"
        pq.write_table(pa.table(cells), source)
    elif kind == "ragged":
        source.write_text(source.read_text() + f"{SECRET},{SECRET}\n")
    elif kind == "frame":
        import pandas as pd

        mixed = {name: [cell if SECRET in cell or name in ("job", "city", "churn") else float(cell) for cell in column]
                 for name, column in cells.items()}  # fmt: skip
        source = pd.DataFrame(mixed)
    if (
        kind != "ragged"
        and all(name == "id" for name, _ in spoiled)
        and len({row % 2 for _, row in spoiled}) == len({row for _, row in spoiled})
    ):
        return  # different ids, and nothing wrong
    with pytest.raises(DataError) as caught:
        load_table(source, label="churn", columns=COLUMNS, id="id", schema=SCHEMA if with_schema else None)
    told = traceback.TracebackException.from_exception(caught.value)
    assert SECRET not in "".join([str(caught.value), *caught.value.faults, *told.format()])


def test_labels_that_differ_by_blanks_or_capitals_only_are_named_with_both_spellings(tmp_path: Path) -> None:
    churn = ["yes", " yes", "no", "No", "yes", "maybe", "yes", "no", "no", "no", "yes", "maybe"]
    found = faults_of(write(tmp_path / "people.csv", table(churn=churn)))
    assert found == (
        "label='churn' has classes that differ by blanks only: ' yes' (1 row), 'yes' (4 rows); write them alike",
        "label='churn' has classes that differ by capital letters only: 'No' (1 row), 'no' (4 rows); write them alike",
    )


def test_a_class_that_only_test_rows_have_is_noted(tmp_path: Path) -> None:
    train = write(tmp_path / "people.csv", table())
    test = write(tmp_path / "later.csv", table(churn=["yes"] * 10 + ["maybe"] * 2))
    data = load_table(train, label="churn", columns=COLUMNS, schema=SCHEMA, test=test)
    assert data.notes == ("Class 'maybe' has 2 test rows and no training row, so it cannot be learned.",)


def test_blanks_around_words_are_named_as_the_reason(tmp_path: Path) -> None:
    (found,) = faults_of(write(tmp_path / "people.csv", table(job=[" cook", "nurse"] * 6)))
    assert "not in the vocabulary because of blanks around words (take them away)" in found


def test_a_check_without_training_says_how_wide_the_parties_are(tmp_path: Path) -> None:
    path = write(tmp_path / "people.csv", table())
    checked = check_table(path, schema=SCHEMA, columns=COLUMNS, label="churn")
    assert str(checked).splitlines() == [
        "fine: 12 rows",
        "bank: 2 columns become 3 numbers",
        "shop: 2 columns become 3 numbers",
        "classes: no, yes",
    ]
    assert str(check_table(path, schema=SCHEMA, label="churn")).splitlines()[1] == "table: 4 columns become 6 numbers"
    with pytest.raises(DataError, match="column='churn' holds words and needs a vocabulary"):
        check_table(path, schema=SCHEMA)
