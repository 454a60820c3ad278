"""A table of one's own: who holds which column, what the public schema does, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.data import VerticalDataset, load_table, parse_columns
from pbmvfl.data.column_rules import PartyColumns
from pbmvfl.data.faults import Faults
from pbmvfl.data.labels import number_classes
from pbmvfl.data.schema import read_schema
from pbmvfl.data.schema_template import schema_template
from pbmvfl.data.tables import check_table
from pbmvfl.errors import DataError

ROWS = 20
SCHEMA = {"columns": {"job": {"vocabulary": ["cook", "nurse"]}, "age": {"range": [0, 120]}}}
COLUMNS = {"bank": ["age", "job"], "hospital": ["bmi"]}


def values(**changes: Any) -> dict[str, Any]:
    table: dict[str, Any] = {
        "age": [float(6 * i) for i in range(ROWS)],
        "job": ["cook", "nurse"] * (ROWS // 2),
        "bmi": [20.0 + i for i in range(ROWS)],
        "sick": ["yes", "no", "no", "yes"] * (ROWS // 4),
    }
    return table | changes


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_table(name: str = "people.parquet", **changes: Any) -> Path:
        path = tmp_path / name
        table = pa.table(values(**changes))
        if path.suffix == ".csv":
            import pyarrow.csv

            pyarrow.csv.write_csv(table, path)
        else:
            pq.write_table(table, path)
        return path

    return write_table


def load(path: Path, **changes: Any) -> VerticalDataset:
    arguments: dict[str, Any] = {"label": "sick", "columns": COLUMNS, "schema": SCHEMA}
    return load_table(path, **(arguments | changes))


def replaced(column: str, row: int, value: Any) -> dict[str, Any]:
    cells = list(values()[column])
    cells[row] = value
    return {column: cells}


@pytest.mark.parametrize("name", ["people.parquet", "people.csv"])
def test_a_table_is_cut_as_its_owners_say(write: Any, name: str) -> None:
    data = load(write(name))
    assert data.name == "people"
    assert data.party_names == ("bank", "hospital")
    assert [part.shape for part in data.train_features] == [(16, 3), (16, 1)]
    assert (data.num_samples, data.num_test_samples, data.class_names) == (16, 4, ("no", "yes"))
    assert data.default_encoder == "mlp"
    # Rows stay together: bmi = 20 + i tells the row, and the others follow from it.
    rows = (np.concatenate([data.train_features[1], data.test_features[1]])[:, 0] - 20).astype(int)
    bank = np.concatenate([data.train_features[0], data.test_features[0]])
    assert sorted(rows.tolist()) == list(range(ROWS))
    np.testing.assert_allclose(bank[:, 0], rows * 6 / 60 - 1, atol=1e-6)
    np.testing.assert_array_equal(bank[:, 2], rows % 2)
    labels = np.concatenate([data.train_labels, data.test_labels])
    np.testing.assert_array_equal(labels, np.isin(rows % 4, [0, 3]))


def test_the_split_follows_the_public_seed(write: Any) -> None:
    path = write()
    rows = [load(path, seed=seed).test_features[1].tolist() for seed in (1, 1, 2)]
    assert rows[0] == rows[1] != rows[2]


def numbers_by_id(data: VerticalDataset) -> dict[str, int]:
    """Which row of the file stands behind each id: bmi = 20 + i tells it."""
    rows = (np.concatenate([data.train_features[1], data.test_features[1]])[:, 0] - 20).astype(int)
    return dict(zip((*data.train_ids, *data.test_ids), rows.tolist(), strict=True))


@pytest.mark.parametrize("name", ["people.parquet", "people.csv"])
def test_a_row_has_the_same_id_whatever_the_split(write: Any, name: str) -> None:
    path = write(name)
    loads = [load(path), load(path, seed=1), load(path, seed=1, test_fraction=0.5)]
    loads.append(load(path, test=write("later.parquet", bmi=[99.0] * ROWS)))
    for data in loads[:3]:
        assert numbers_by_id(data) == {str(row): row for row in range(ROWS)}
    assert loads[3].train_ids == tuple(str(row) for row in range(ROWS))
    assert len({data.train_ids for data in loads}) == 4


def test_rows_of_a_test_file_are_others_than_those_of_the_training_file(write: Any) -> None:
    path = write()
    data = load(path, test=write("later.parquet"))
    assert data.test_ids == tuple(f"later:{row}" for row in range(ROWS))
    assert not {*data.train_ids} & {*data.test_ids}
    assert load(path, test=path).test_ids == load(path, test=path).train_ids  # the same people, so the same ids


def test_a_test_file_is_used_instead_of_a_split(write: Any) -> None:
    data = load(write(), test=write("later.parquet", age=[200.0] * ROWS))
    assert (data.num_samples, data.num_test_samples) == (ROWS, ROWS)
    assert set(data.test_features[0][:, 0].tolist()) == {1.0}  # clipped to the range's end, not to the values seen


def test_the_columns_can_be_one_text(write: Any) -> None:
    assert parse_columns(" bank = age, job ; hospital=bmi; ") == {"bank": ("age", "job"), "hospital": ("bmi",)}
    assert load(write(), columns="bank=age,job;hospital=bmi").party_names == ("bank", "hospital")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('bank="income, net",age;shop=visits', {"bank": ("income, net", "age"), "shop": ("visits",)}),
        ('bank = age , "a;b=c" ; shop="d"', {"bank": ("age", "a;b=c"), "shop": ("d",)}),
        ('bank="say ""hi""";shop=b', {"bank": ('say "hi"',), "shop": ("b",)}),
        ('bank=5" pipe,b;shop=6" pipe', {"bank": ('5" pipe', "b"), "shop": ('6" pipe',)}),
        ("bank=age,\n  job;\nshop=b", {"bank": ("age", "job"), "shop": ("b",)}),
    ],
)
def test_a_name_with_a_comma_stands_in_quotes(text: str, names: dict[str, tuple[str, ...]]) -> None:
    assert parse_columns(text) == names


@settings(max_examples=100, deadline=None)
@given(
    parties=st.lists(
        st.lists(st.text("ab,;=\"' |", min_size=1, max_size=6).map(str.strip).filter(bool), min_size=1, max_size=3),
        min_size=2,
        max_size=3,
    ).filter(lambda found: len({name for names in found for name in names}) == sum(map(len, found)))
)
def test_every_name_can_be_given_in_quotes(parties: list[list[str]]) -> None:
    def quoted(name: str) -> str:
        return '"' + name.replace('"', '""') + '"'

    text = ";".join(f"p{i}={','.join(map(quoted, names))}" for i, names in enumerate(parties))
    assert parse_columns(text) == {f"p{i}": tuple(names) for i, names in enumerate(parties)}


def test_a_column_with_a_comma_in_its_name_is_loaded_and_the_error_says_how(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text('"income, net",bmi,sick\n' + "".join(f"{i},{20 + i},{i % 2}\n" for i in range(ROWS)))
    with pytest.raises(DataError, match=r"""column='income' is not in .*, as in bank="income, net"$"""):
        load(path, columns="bank=income, net;shop=bmi", schema=None)
    data = load(path, columns='bank="income, net";shop=bmi', schema=None)
    assert data.columns is not None
    assert data.columns[0].names == ("income, net",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bank=age", "at least 2"),
        ("", "at least 2"),
        ("bank;hospital=bmi", "not of the form"),
        ("=age;hospital=bmi", "not of the form"),
        ("bank=age;bank=job", "party='bank' occurs twice"),
        ("bank=;hospital=bmi", "party='bank' has no columns"),
        ("bank=age,age;hospital=bmi", r"column='age' is named twice \(party='bank'\)"),
        ("bank=age;hospital=bmi,age", "column='age' is named twice .*'bank' and party='hospital'"),
    ],
)
def test_a_wrong_assignment_is_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_columns(text)


def test_a_column_named_twice_is_refused(write: Any) -> None:
    with pytest.raises(DataError, match="column='age' is named twice"):
        load(write(), columns={"bank": ["age"], "hospital": ["bmi", "age"]})


def test_a_bare_word_in_place_of_a_list_of_columns_is_refused(write: Any) -> None:
    with pytest.raises(DataError, match="is not a list of names"):
        load(write(), columns={"bank": "age", "hospital": ["bmi"]})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load(tmp_path / "nothing.csv")


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ends in '.xlsx'; permitted are .parquet and .csv"):
        load(tmp_path / "people.xlsx")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "people.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match="cannot be read as a table"):
        load(path)


def test_a_missing_column_is_refused_with_the_nearest_spelling(write: Any) -> None:
    with pytest.raises(DataError, match=r"column='agee' is not in people.parquet .did you mean 'age'"):
        load(write(), columns={"bank": ["agee"], "hospital": ["bmi"]})


def test_a_missing_label_column_is_refused_with_the_nearest_spelling(write: Any) -> None:
    with pytest.raises(DataError, match=r"column='sik' .*did you mean 'sick'"):
        load(write(), label="sik")


@pytest.mark.parametrize("name", ["people.parquet", "people.csv"])
def test_a_row_without_label_is_refused(write: Any, name: str) -> None:
    with pytest.raises(DataError, match=r"label='sick': row=5 .* has no label"):
        load(write(name, **replaced("sick", 5, None)))


def test_the_label_cannot_be_a_feature(write: Any) -> None:
    with pytest.raises(DataError, match="label='sick' is also a column of party='hospital'"):
        load(write(), columns={"bank": ["age"], "hospital": ["bmi", "sick"]})


@pytest.mark.parametrize("name", ["people.parquet", "people.csv"])
@pytest.mark.parametrize(("column", "value"), [("age", None), ("bmi", None), ("job", None), ("bmi", float("nan"))])
def test_a_missing_value_is_refused_with_its_place(write: Any, name: str, column: str, value: Any) -> None:
    with pytest.raises(DataError, match=f"column='{column}': row=7 .* has no value"):
        load(write(name, **replaced(column, 7, value)))


@pytest.mark.parametrize(
    ("column", "value", "remedy"),
    [
        ("bmi", float("inf"), "infinite or beyond 1e+09; give the column a range in the schema"),
        ("bmi", -1.001e9, 'infinite or beyond 1e+09; give the column a range in the schema, "bmi": {"range"'),
        ("bmi", 1e39, "infinite or beyond 1e+09; give the column a range in the schema"),
        ("age", float("-inf"), "infinite; correct it"),
    ],
)
def test_a_value_beyond_the_bound_is_refused_with_its_place(write: Any, column: str, value: float, remedy: str) -> None:
    with pytest.raises(DataError, match=f"people.parquet: column='{column}': row=3 .* is {re.escape(remedy)}"):
        load(write(**replaced(column, 3, value)))


@pytest.mark.parametrize(("column", "value"), [("bmi", 1e9), ("bmi", -1e9), ("age", 1e39)])
def test_a_value_at_the_bound_or_with_a_range_is_permitted(write: Any, column: str, value: float) -> None:
    data = load(write(**replaced(column, 3, value)))
    assert data.num_samples + data.num_test_samples == ROWS


@pytest.mark.parametrize("fraction", [1, 1.5, -0.2, float("nan"), True])
def test_a_test_fraction_below_zero_or_of_everything_is_refused(write: Any, fraction: float) -> None:
    with pytest.raises(DataError, match="test_fraction="):
        load(write(), test_fraction=fraction)


def test_words_without_a_vocabulary_are_refused_with_the_reason_and_the_remedy(write: Any) -> None:
    with pytest.raises(DataError, match=r'is a release about private values.*\{"columns": \{"job": \{"vocabulary"'):
        load(write(), schema=None)


def test_the_reason_for_vocabularies_is_given_once(write: Any) -> None:
    with pytest.raises(DataError) as caught:
        load(write(bmi=["thin", "thick"] * (ROWS // 2)), schema=None)
    assert str(caught.value).count("is a release about private values") == 1
    assert "column='bmi' holds words and needs a vocabulary as well" in str(caught.value)


@pytest.mark.parametrize("name", ["people.parquet", "people.csv"])
def test_dates_are_refused_as_what_they_are(write: Any, name: str) -> None:
    for dates in (["2024-12-31", "1999-01-01 10:00"], ["31.12.2024", "1.1.99"], ["12/31/2024", "1/1/1999"]):
        with pytest.raises(DataError, match=r"column='bmi' holds dates; make numbers of them before loading, such as"):
            load(write(name, bmi=dates * (ROWS // 2)))
    if name == "people.parquet":
        days = pa.array([1, 2] * (ROWS // 2), pa.int32()).cast(pa.date32())
        with pytest.raises(DataError, match=r"has type date32.*If these are dates, make numbers of them"):
            load(write(name, bmi=days))


def test_a_word_outside_the_vocabulary_is_refused_with_its_rows_and_never_shown(write: Any) -> None:
    with pytest.raises(DataError, match=r"column='job': rows=4, 5, 6, 7, 8 and 11 more .* not in the voc") as caught:
        load(write(job=["cook"] * 4 + ["pilot"] + ["sailor"] * 15))
    assert "sailor" not in str(caught.value)
    assert "pilot" not in str(caught.value)


def test_other_words_get_a_place_of_their_own(write: Any) -> None:
    schema = {"columns": {"job": {"vocabulary": ["cook", "nurse"], "other": True}, "age": {"range": [0, 120]}}}
    data = load(write(**replaced("job", 4, "pilot")), schema=schema)
    jobs = np.concatenate([data.train_features[0], data.test_features[0]])[:, 1:]
    assert jobs.shape == (ROWS, 3)
    assert jobs.sum(axis=0).tolist() == [9, 10, 1]


def test_numbers_without_a_range_are_used_as_they_are_and_noted(write: Any) -> None:
    data = load(write())
    assert data.train_features[1].max() > 1
    assert len(data.notes) == 1
    assert "hospital" in data.notes[0]
    assert "1 column has no range" in data.notes[0]
    assert "bmi" in data.notes[0]
    ranged = {"columns": SCHEMA["columns"] | {"bmi": {"range": [10, 60]}}}
    assert load(write(), schema=ranged).notes == ()


def test_scaling_looks_at_the_range_and_never_at_other_rows(write: Any) -> None:
    before = load(write(), test=write("test.parquet"))
    after = load(write(**replaced("age", 0, 119.0)), test=write("test.parquet"))
    np.testing.assert_array_equal(before.train_features[0][1:], after.train_features[0][1:])
    assert before.train_features[0][0, 0] == -1
    assert after.train_features[0][0, 0] == pytest.approx(119 / 60 - 1)


def test_true_and_false_need_no_vocabulary_because_their_type_is_one(write: Any) -> None:
    data = load(write(bmi=[True, False] * (ROWS // 2)))
    assert data.train_features[1].shape == (16, 2)
    assert data.notes == ()


def test_dictionary_columns_and_integer_codes_are_words_too(write: Any) -> None:
    job = pa.array(values()["job"]).dictionary_encode()
    schema = {"columns": SCHEMA["columns"] | {"bmi": {"vocabulary": [1, 2, 3]}}}
    data = load(write(job=job, bmi=pa.array([1, 3] * (ROWS // 2), pa.int8())), schema=schema)
    assert [part.shape[1] for part in data.train_features] == [3, 3]
    assert data.train_features[1].sum(axis=0)[1] == 0


def test_a_csv_column_that_looks_like_numbers_stays_words_when_its_vocabulary_says_so(write: Any) -> None:
    schema = {"columns": SCHEMA["columns"] | {"bmi": {"vocabulary": ["01", "02"]}}}
    data = load(write("codes.csv", bmi=["01", "02"] * (ROWS // 2)), schema=schema)
    assert data.train_features[1].shape == (16, 2)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"colums": {}}, "unknown key 'colums' .did you mean 'columns'"),
        ({"columns": {"age": {"rnge": [0, 1]}}}, "column='age' has the unknown key 'rnge' .did you mean 'range'"),
        ({"columns": {"age": {}}}, "either a vocabulary or a range"),
        ({"columns": {"age": {"range": [0, 1], "vocabulary": ["a"]}}}, "either a vocabulary or a range"),
        ({"columns": {"age": {"range": [1, 1]}}}, "low less than high"),
        ({"columns": {"age": {"range": [0, float("inf")]}}}, "must be finite"),
        ({"columns": {"age": {"range": [0]}}}, "must be two numbers"),
        ({"columns": {"age": {"range": [0, 1], "other": True}}}, "other belongs to a vocabulary"),
        ({"columns": {"job": {"vocabulary": []}}}, "must be a list of words"),
        ({"columns": {"job": {"vocabulary": ["a", 1]}}}, "must be a list of words"),
        ({"columns": {"job": {"vocabulary": ["a", "a"]}}}, "has a word twice"),
        ({"columns": {"job": {"vocabulary": ["a"], "other": "yes"}}}, "other='yes'"),
        ({"columns": {"job": {"vocabulary": [1, 2]}}}, "its vocabulary is of int values"),
        ({"columns": {"jop": {"vocabulary": ["a"]}}}, "column='jop', which is not in .*did you mean 'job'"),
        ({"columns": ["age"]}, "must be of the form"),
    ],
)
def test_a_schema_that_says_something_else_is_refused(write: Any, schema: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(write(), schema=schema)


def test_a_schema_with_columns_of_other_tables_says_that_it_is_shared(write: Any) -> None:
    columns = SCHEMA["columns"] | {"visits": {"range": [0, 9]}, "town": {"vocabulary": ["a", "b"]}}
    with pytest.raises(DataError) as caught:
        load(write(), schema={"columns": columns})
    assert len(caught.value.faults) == 1
    message = str(caught.value)
    assert "describes column='visits', which is not in people.parquet, nor is column='town'; correct the" in message
    said = re.search(r'say so in it: ({"shared": true), "columns": {\.\.\.}}$', message)
    assert said is not None
    # What the error says is a way out, and the columns that are there mean the same.
    shared = json.loads(said[1] + "}") | {"columns": columns}
    found, alone = load(write(), schema=shared), load(write())
    assert found.columns == alone.columns
    np.testing.assert_array_equal(found.train_features[0], alone.train_features[0])
    with pytest.raises(DataError, match="schema of column='town': the vocabulary is still empty"):
        load(write(), schema=shared | {"columns": columns | {"town": {"vocabulary": []}}})
    with pytest.raises(DataError, match="shared='yes'; permitted are true and false"):
        load(write(), schema=SCHEMA | {"shared": "yes"})


def test_a_schema_file_is_read_and_a_repeated_key_in_it_refused(write: Any, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    assert load(write(), schema=path).num_parties == 2
    path.write_text('{"columns": {"age": {"range": [0, 1]}, "age": {"range": [0, 9]}}}')
    with pytest.raises(DataError, match="'age' twice"):
        load(write(), schema=path)
    path.write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        load(write(), schema=path)
    with pytest.raises(DataError, match="cannot be read"):
        load(write(), schema=tmp_path / "none.json")


def test_the_owners_name_for_the_rows_is_the_data_sets(write: Any) -> None:
    data = load(write(), name="patients 2024")
    assert data.name == "patients 2024"
    assert data.train_ids == load(write()).train_ids
    assert load(write(), name=None).name == "people"


@pytest.mark.parametrize("name", ["", " ", "people ", "\tpeople", "a/b", "..\\b", 7])
def test_a_name_that_is_empty_or_could_be_mistaken_is_refused(write: Any, name: Any) -> None:
    with pytest.raises(DataError, match=r"name=.* is not permitted; give a text without / and"):
        load(write(), name=name)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
@pytest.mark.parametrize("place", ["header", "used", "unused"])
def test_a_csv_in_another_encoding_is_refused_with_the_remedy(tmp_path: Path, encoding: str, place: str) -> None:
    header = "größe" if place == "header" else "job"
    lines = [f"age,bmi,sick,{header},note"]
    lines += [f"{i},{20 + i},{i % 2},{'Köchin' if place == 'used' else 'cook'},Müller" for i in range(ROWS)]
    path = tmp_path / "people.csv"
    path.write_text("\n".join(lines), encoding=encoding)
    with pytest.raises(DataError, match=r"people.csv' is not UTF-8; save it as UTF-8"):
        load(path)


def test_a_csv_in_utf_8_may_have_a_byte_order_mark_and_any_letters(tmp_path: Path) -> None:
    lines = ["größe,bmi,sick", *(f"{i},{20 + i},{'süß' if i % 2 else 'no'}" for i in range(ROWS))]
    path = tmp_path / "people.csv"
    path.write_text("\n".join(lines), encoding="utf-8-sig")
    data = load(path, columns="bank=größe;hospital=bmi", schema=None)
    assert data.class_names == ("no", "süß")


def test_blanks_around_the_names_of_a_csv_are_no_part_of_them(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("age , job, bmi, sick\n" + "".join(f"{i},cook, {20 + i},{i % 2}\n" for i in range(ROWS)))
    assert load(path).train_features[1].shape == (16, 1)


@pytest.mark.parametrize(
    ("separator", "shown"),
    [(";", "not by ';'"), ("\t", r"not by '\\t'"), ("|", r"not by '\|'")],
    ids=["semi", "tab", "bar"],
)
@pytest.mark.parametrize("decimal", [".", ","])
def test_another_separator_is_named_with_the_header_that_was_found(
    tmp_path: Path, separator: str, shown: str, decimal: str
) -> None:
    path = tmp_path / "people.csv"
    rows = [["age", "job", "bmi", "sick"], *([f"{i}{decimal}5", "cook", "20", "no"] for i in range(ROWS))]
    path.write_text("\n".join(separator.join(row) for row in rows))
    found = re.escape(repr(separator.join(rows[0])))
    message = rf"people.csv has 1 column: {found}. Columns must be separated by commas, {shown}; save the file with"
    for use in (load, schema_template, lambda file: check_table(file, schema=None)):
        with pytest.raises(DataError, match=message):
            use(path)


def test_a_separator_in_some_names_is_part_of_them(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("age;years,job|title,bmi,sick\n" + "".join(f"{i},{i},{20 + i},{i % 2}\n" for i in range(ROWS)))
    assert list(schema_template(path).entries) == ["age;years", "job|title", "bmi", "sick"]


def test_a_missing_column_is_refused_with_the_columns_there_are(write: Any) -> None:
    with pytest.raises(DataError, match=r"column='height' .*it has 4 columns: 'age', 'job', 'bmi', 'sick'$"):
        load(write("people.csv"), columns={"bank": ["age"], "hospital": ["height"]})


@pytest.mark.parametrize("name", ["people.parquet", "people.csv"])
def test_a_table_without_rows_is_refused_as_such(write: Any, name: str) -> None:
    nothing = {column: [] for column in values()}
    with pytest.raises(DataError, match="has column names but no rows; at least one row is needed"):
        load(write(name, **nothing))


def test_an_empty_file_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text("\n")
    with pytest.raises(DataError, match=r"people.csv' is empty; give a line of column names"):
        load(tmp_path / "people.csv")


@pytest.mark.parametrize("name", ["people.parquet", "people.csv"])
def test_a_label_that_is_a_real_number_is_refused_with_the_number_of_classes(write: Any, name: str) -> None:
    income = [1000.0, 1000.0, 2345.5, *(3000.25 + i for i in range(ROWS - 3))]
    with pytest.raises(DataError, match=r"label='sick': row=2 .* has 2345.5, which is not a whole .* 19 different"):
        load(write(name, sick=income))
    with pytest.raises(DataError, match="has inf, which is not a whole"):
        load(write(name, sick=[0.0] * (ROWS - 1) + [float("inf")]))


def test_whole_numbers_of_a_real_type_are_classes(write: Any) -> None:
    assert load(write(sick=[0.0, 1.0] * (ROWS // 2))).num_classes == 2


@pytest.mark.parametrize(("num_classes", "refused"), [(ROWS // 2, False), (ROWS // 2 + 1, True), (ROWS, True)])
def test_more_classes_than_half_the_rows_are_refused(write: Any, num_classes: int, refused: bool) -> None:
    path = write(sick=[f"id-{i % num_classes}" for i in range(ROWS)])
    if not refused:
        assert load(path).num_classes == num_classes
        return
    with pytest.raises(
        DataError, match=rf"label='sick' has {num_classes} classes in 20 rows; permitted are at most 10 "
    ):
        load(path)
    # rows of a test file count, too
    assert load(path, test=path).num_classes == num_classes


def numbered(labels: list[int], name: str) -> tuple[str, ...]:
    faults = Faults()
    classes, _ = number_classes([labels], name, faults)
    faults.raise_any()
    return classes


@pytest.mark.parametrize(("rows", "most"), [(4, 2), (99, 49), (100, 25), (1000, 250), (3999, 999), (5000, 1000)])
def test_of_a_hundred_rows_or_more_a_quarter_may_be_classes_and_of_fewer_half(rows: int, most: int) -> None:
    assert len(numbered([row % most for row in range(rows)], "kind")) == most
    with pytest.raises(DataError, match=f"permitted are at most {most:,} .*numpy.digitize.*regressor"):
        numbered([row % (most + 1) for row in range(rows)], "kind")


def test_more_than_a_thousand_classes_are_refused() -> None:
    raw = list(range(1001)) * 5
    with pytest.raises(DataError, match=r"has 1,001 classes in 5,005 rows; permitted are at most 1,000 .*few classes"):
        numbered(raw, "income")
    assert len(numbered([value % 1000 for value in raw], "kind")) == 1000


@pytest.mark.parametrize(("column", "reason"), [("age", "its schema has a range"), ("bmi", "18 of 20 values are num")])
def test_a_word_among_numbers_is_refused_with_its_place(write: Any, column: str, reason: str) -> None:
    cells = [str(cell) for cell in values()[column]]
    cells[6], cells[9] = "abc", "secret"
    for name in ("people.parquet", "people.csv"):
        with pytest.raises(DataError, match=rf"column='{column}': rows=6, 9 .* not numbers, but .*{reason}") as caught:
            load(write(name, **{column: cells}))
        assert "secret" not in str(caught.value)
        assert "abc" not in str(caught.value)


def test_words_in_a_column_with_a_range_are_refused_with_the_first_rows(write: Any) -> None:
    with pytest.raises(DataError, match=r"column='age': rows=0, 1, .* are not numbers, but its schema has a range"):
        load(write(age=["old", "young"] * (ROWS // 2)))


def test_numbers_stored_as_words_are_refused_as_such(write: Any) -> None:
    for column in ("age", "bmi"):
        with pytest.raises(DataError, match=f"column='{column}' has numbers that are stored as words; store the"):
            load(write(**{column: [str(i) for i in range(ROWS)]}))


def test_a_column_of_which_half_are_numbers_holds_words(write: Any) -> None:
    with pytest.raises(DataError, match="column='bmi' holds words and needs a vocabulary"):
        load(write(bmi=["7", "1_000"] * (ROWS // 2)))


def encode(entries: dict[str, Any], cells: dict[str, Any]) -> Any:
    faults = Faults()
    rules = read_schema({"columns": entries}, faults).rules
    faults.raise_any()
    return PartyColumns(party="a", rules=tuple(rules.values())).encode(pa.table(cells), "cells")


@settings(deadline=None)  # a busy machine is no failure
@given(words=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=30), other=st.booleans())
def test_one_hot_can_be_read_back(words: list[str], other: bool) -> None:
    vocabulary = list("fedcba")
    encoded = encode({"w": {"vocabulary": vocabulary, "other": other}}, {"w": words})
    assert encoded.shape == (len(words), 6 + other)
    np.testing.assert_array_equal(encoded.sum(axis=1), 1)
    assert [vocabulary[slot] for slot in encoded.argmax(axis=1)] == words


@settings(deadline=None)  # a busy machine is no failure
@given(
    low=st.floats(-1e6, 1e6),
    width=st.floats(1e-3, 1e6),
    cells=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20),
)
def test_scaled_numbers_stay_in_the_unit_interval_and_in_order(low: float, width: float, cells: list[float]) -> None:
    schema = {"x": {"range": [low, low + width]}}
    scaled = encode(schema, {"x": cells})[:, 0]
    assert scaled.dtype == np.float32
    assert np.abs(scaled).max() <= 1
    assert (np.diff(scaled[np.argsort(cells)]) >= 0).all()
    edges = encode(schema, {"x": [low, low + width]})[:, 0]
    np.testing.assert_array_equal(edges, [-1, 1])
