"""An organisation's rows in the common order: the right numbers, mapped, and noticed when changed."""

from __future__ import annotations

import csv
import json
import os
import stat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.data import readers
from pbmvfl.deploy.alignment.aligned_rows import (
    AlignedLabels,
    AlignedRows,
    load_labels,
    materialise,
    materialise_labels,
)
from pbmvfl.deploy.alignment.row_ids import AgreedOrder, order_digest, order_proof
from pbmvfl.deploy.alignment.tables import read_label_table, read_party_table
from pbmvfl.errors import AlignmentError, DataError, WriteError
from support.alignment_runs import hmac_of_order

SCHEMA = {
    "columns": {
        "job": {"vocabulary": ["cook", "nurse"], "other": True, "missing": True},
        "age": {"range": [0, 100], "missing": True},
    }
}
JOBS = ["cook", "nurse", "pilot", ""]


def write_csv(path: Path, rows: int) -> list[dict[str, str]]:
    """A table with words, numbers, true and false, and gaps."""
    written = [
        {
            "person": f"p{row:05d}",
            "job": JOBS[row % 4],
            "age": "" if row % 7 == 0 else str(row % 120),
            "weight": f"{row / 8:.3f}",
            "member": "true" if row % 3 else "false",
        }
        for row in range(rows)
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(written[0]))
        writer.writeheader()
        writer.writerows(written)
    return written


def numbers_of(row: dict[str, str]) -> list[float]:
    """What the schema says a row becomes, written out anew."""
    job = [0.0, 0.0, 0.0, 0.0]
    job[{"cook": 0, "nurse": 1, "pilot": 2, "": 3}[row["job"]]] = 1.0
    age = [0.0, 1.0] if row["age"] == "" else [min(float(row["age"]), 100.0) / 50 - 1, 0.0]
    member = [0.0, 1.0] if row["member"] == "true" else [1.0, 0.0]
    return [*job, *age, float(row["weight"]), *member]


def agreed(table, rows, *, name="people", key=b"k" * 32) -> AgreedOrder:
    rows = np.asarray(rows, dtype=np.int64)
    digest = order_digest(key, table.ids.pieces(rows), len(rows))
    return AgreedOrder(name=name, rows=rows, key=key, digest=digest)


@pytest.fixture
def small_batches(monkeypatch):
    """Files are read in many pieces."""
    monkeypatch.setattr(readers, "_ROWS", 64)
    monkeypatch.setattr(readers, "_BYTES", 4096)


def party_rows(folder: Path, *, rows: int = 40, chosen=(7, 3, 39, 0, 12)) -> AlignedRows:
    write_csv(folder / "bank.csv", rows)
    table = read_party_table(folder / "bank.csv", id="person", schema=SCHEMA)
    return materialise(table, agreed(table, chosen), folder / "alignments" / "people")


# --- the right numbers in the right order ---


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_rows_are_the_table_s_by_its_schema_in_the_common_order(tmp_path, kind):
    written = write_csv(tmp_path / "bank.csv", 1000)
    path = tmp_path / f"bank.{kind}"
    if kind == "parquet":
        columns = {name: [row[name] or None for row in written] for name in ("person", "job")}
        columns["age"] = [float(row["age"]) if row["age"] else None for row in written]
        columns["weight"] = [float(row["weight"]) for row in written]
        columns["member"] = [row["member"] == "true" for row in written]
        pq.write_table(pa.table(columns), path)
    table = read_party_table(path, id="person", schema=SCHEMA, party="bank")
    order = np.random.default_rng(1).permutation(1000)[:700]
    aligned = materialise(table, agreed(table, order), tmp_path / "alignments" / "people")
    assert table.width == aligned.features.shape[1] == 9
    assert list(aligned.ids) == [written[row]["person"] for row in order]
    np.testing.assert_allclose(aligned.features, [numbers_of(written[row]) for row in order], rtol=1e-6, atol=1e-6)
    assert aligned.digest == hmac_of_order(b"k" * 32, list(aligned.ids))
    assert aligned.columns.names == ("job", "age", "weight", "member")


@given(rows=st.integers(1, 50), data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_order_of_any_part_of_the_rows(tmp_path_factory, rows, data):
    folder = tmp_path_factory.mktemp("any")
    values = [[row, row + 0.5] for row in range(rows)]
    columns = {"id": range(100, 100 + rows), "a": [v[0] for v in values], "b": [v[1] for v in values]}
    pq.write_table(pa.table(columns), folder / "x.parquet")
    chosen = data.draw(st.lists(st.sampled_from(range(rows)), min_size=1, unique=True))
    table = read_party_table(folder / "x.parquet", id="id")
    aligned = materialise(table, agreed(table, chosen), folder / "people")
    assert aligned.features.tolist() == [values[row] for row in chosen]
    assert list(aligned.ids) == [str(100 + row) for row in chosen]


def test_a_later_table_is_encoded_by_the_rules_of_the_first(tmp_path):
    first = party_rows(tmp_path)
    write_csv(tmp_path / "later.csv", 5)
    later = read_party_table(tmp_path / "later.csv", id="person", columns=first.columns)
    assert later.columns == first.columns


def test_chosen_columns_alone_are_read(tmp_path):
    write_csv(tmp_path / "bank.csv", 5)
    table = read_party_table(tmp_path / "bank.csv", id="person", columns=["weight"])
    assert (table.width, table.columns.names) == (1, ("weight",))


# --- mapped ---


def test_features_are_mapped_and_cannot_be_written(tmp_path):
    aligned = party_rows(tmp_path)
    assert aligned.features.dtype == np.float32
    assert not aligned.features.flags.writeable
    assert not aligned.features.flags.owndata
    address = aligned.features.ctypes.data
    maps = Path("/proc/self/maps").read_text().splitlines()
    (line,) = [each for each in maps if int(each.split("-")[0], 16) <= address < int(each.split("-")[1].split()[0], 16)]
    assert line.endswith("rows.arrow")


def test_files_are_their_owner_s_alone(tmp_path):
    old = os.umask(0)
    try:
        party_rows(tmp_path)
    finally:
        os.umask(old)
    folder = tmp_path / "alignments" / "people"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "order.json": 0o600,
        "rows.arrow": 0o600,
    }


def test_what_is_printed_shows_no_value(tmp_path):
    aligned = party_rows(tmp_path)
    assert repr(aligned) == "AlignedRows(name='people', count=5)"
    assert "p00007" not in str(aligned)


# --- proofs ---


def test_the_proof_is_that_of_the_order(tmp_path):
    aligned = party_rows(tmp_path)
    again = AlignedRows.load(tmp_path / "alignments" / "people")
    expected = order_proof(
        key=b"k" * 32, digest=hmac_of_order(b"k" * 32, list(aligned.ids)), challenge=b"c", party="bank"
    )
    assert again.proof(b"c", "bank") == aligned.proof(b"c", "bank") == expected


# --- what was changed is noticed ---


def change_byte(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_any_changed_byte_of_the_rows_is_noticed(tmp_path):
    party_rows(tmp_path)
    folder = tmp_path / "alignments" / "people"
    whole = (folder / "rows.arrow").read_bytes()
    for at in range(0, len(whole), 37):
        change_byte(folder / "rows.arrow", at)
        with pytest.raises(AlignmentError, match="was changed or is damaged"):
            AlignedRows.load(folder)
        (folder / "rows.arrow").write_bytes(whole)
    AlignedRows.load(folder)


@pytest.mark.parametrize("name", ["digest", "key", "count", "name", "width"])
def test_a_changed_order_is_noticed(tmp_path, name):
    party_rows(tmp_path)
    path = tmp_path / "alignments" / "people" / "order.json"
    said = json.loads(path.read_text())
    said[name] = said[name] + 1 if isinstance(said[name], int) else said[name][::-1]
    path.write_text(json.dumps(said))
    with pytest.raises(AlignmentError, match="damaged"):
        AlignedRows.load(path.parent, quick=True)


def test_rows_of_another_alignment_are_noticed_without_reading_them(tmp_path):
    """Of the same size and the same columns: the order's digest stands in the file."""
    write_csv(tmp_path / "bank.csv", 40)
    table = read_party_table(tmp_path / "bank.csv", id="person", schema=SCHEMA)
    for name, rows in (("one", [1, 2, 3]), ("two", [3, 2, 1])):
        materialise(table, agreed(table, rows, name=name), tmp_path / name)
    (tmp_path / "one" / "rows.arrow").write_bytes((tmp_path / "two" / "rows.arrow").read_bytes())
    with pytest.raises(AlignmentError, match="another alignment"):
        AlignedRows.load(tmp_path / "one", quick=True)


@pytest.mark.parametrize("size", [0, 10, 500])
def test_a_truncated_file_is_noticed(tmp_path, size):
    party_rows(tmp_path)
    path = tmp_path / "alignments" / "people" / "rows.arrow"
    os.truncate(path, size)
    with pytest.raises(AlignmentError, match="bytes, not"):
        AlignedRows.load(path.parent, quick=True)


def test_a_folder_without_an_alignment_says_how_to_make_one(tmp_path):
    with pytest.raises(AlignmentError, match="make one with `pbmvfl align`"):
        AlignedRows.load(tmp_path)


def test_a_table_that_changes_between_reading_and_writing_is_refused(tmp_path):
    write_csv(tmp_path / "bank.csv", 40)
    table = read_party_table(tmp_path / "bank.csv", id="person", schema=SCHEMA)
    order = agreed(table, [1, 2])
    lines = (tmp_path / "bank.csv").read_text().splitlines(keepends=True)
    for changed in ([lines[0], *lines[:0:-1]], lines[:-1], [*lines, "new,cook,1,1,true\n"]):
        (tmp_path / "bank.csv").write_text("".join(changed))
        with pytest.raises(AlignmentError, match="was changed while"):
            materialise(table, order, tmp_path / "people")
        assert not list((tmp_path / "people").iterdir())


# --- writing ---


def test_an_alignment_is_never_written_over(tmp_path):
    first = party_rows(tmp_path)
    table = read_party_table(tmp_path / "bank.csv", id="person", schema=SCHEMA)
    with pytest.raises(AlignmentError, match=r"'people' is there already.*choose another name"):
        materialise(table, agreed(table, [1]), tmp_path / "alignments" / "people")
    assert list(AlignedRows.load(tmp_path / "alignments" / "people").ids) == list(first.ids)


def test_what_a_killed_process_left_is_no_alignment_and_is_written_over(tmp_path):
    folder = tmp_path / "alignments" / "people"
    folder.mkdir(parents=True)
    (folder / "rows.arrow").write_bytes(b"half")
    (folder / "features.tmp").write_bytes(b"half")
    (folder / "outcome.json").write_text("{}")
    with pytest.raises(AlignmentError, match="has no alignment"):
        AlignedRows.load(folder)
    party_rows(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["order.json", "outcome.json", "rows.arrow"]


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "pbmvfl.deploy.alignment.aligned_rows.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})
    )
    with pytest.raises(AlignmentError, match="0 MiB free, and 64 MiB are needed; make room"):
        party_rows(tmp_path)


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pbmvfl.deploy.alignment.aligned_rows.os.posix_fallocate", full)
    with pytest.raises(WriteError, match="make room on that disk"):
        party_rows(tmp_path)
    assert not list((tmp_path / "alignments" / "people").iterdir())


# --- faults of tables ---


@pytest.mark.usefixtures("small_batches")
def test_faults_far_down_in_a_file_are_found_before_anybody_is_asked(tmp_path):
    written = write_csv(tmp_path / "bank.csv", 1000)
    text = (tmp_path / "bank.csv").read_text().replace("p00900,cook,", "p00900,cook,private-word")
    (tmp_path / "bank.csv").write_text(text)
    with pytest.raises(DataError, match=r"row=900 .*is not a number") as caught:
        read_party_table(tmp_path / "bank.csv", id="person", schema=SCHEMA)
    assert "private-word" not in str(caught.value)
    assert len(written) == 1000


def test_words_without_a_vocabulary_are_refused(tmp_path):
    write_csv(tmp_path / "bank.csv", 8)
    with pytest.raises(DataError, match="'job' holds words and needs a vocabulary"):
        read_party_table(tmp_path / "bank.csv", id="person", columns=["job"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id,a\n1,2\n1,3\n", "1 of 2 rows have an id that an earlier row has"),
        ("id,a\n1,2\n,3\n", "1 of 2 rows have no id"),
        ("id,a\n", "no rows"),
        ("id\n1\n", "no column beside the id"),
        ("key,a\n1,2\n", "column='id' is not in"),
        ("id,a\n1,2,3\n", "1 row with another number of values"),
    ],
)
def test_tables_that_cannot_be_used_say_why(tmp_path, text, words):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises((AlignmentError, DataError), match=words):
        read_party_table(tmp_path / "x.csv", id="id")


def test_a_schema_for_a_column_that_is_not_there_is_a_misspelt_one(tmp_path):
    (tmp_path / "x.csv").write_text("id,weight\n1,2\n")
    with pytest.raises(DataError, match=r"'wieght', which is not in x.csv \(did you mean 'weight'\?\)"):
        read_party_table(tmp_path / "x.csv", id="id", schema={"columns": {"wieght": {"range": [0, 1]}}})
    shared = {"shared": True, "columns": {"wieght": {"range": [0, 1]}}}
    assert read_party_table(tmp_path / "x.csv", id="id", schema=shared).columns.rules[0].range is None


# --- the label holder ---


def label_rows(folder: Path, labels: list[str], rows: list[int]) -> AlignedLabels:
    lines = [f"{number},{label}\n" for number, label in enumerate(labels)]
    (folder / "clinic.csv").write_text("person,ill\n" + "".join(lines))
    table = read_label_table(folder / "clinic.csv", id="person", label="ill")
    materialise_labels(table, agreed(table, rows), folder / "people")
    return load_labels(folder / "people")


def test_labels_stand_in_the_common_order(tmp_path):
    aligned = label_rows(tmp_path, ["yes", "no", "yes", "no"], [2, 1, 0])
    assert list(aligned.ids) == ["2", "1", "0"]
    assert [aligned.class_names[number] for number in aligned.labels] == ["yes", "no", "yes"]
    assert aligned.count == len(aligned) == 3


def test_rows_without_labels_are_there_to_be_predicted(tmp_path):
    (tmp_path / "new.csv").write_text("person\n1\n2\n")
    table = read_label_table(tmp_path / "new.csv", id="person", label=None)
    materialise_labels(table, agreed(table, [1]), tmp_path / "people")
    assert load_labels(tmp_path / "people").labels is None


def test_a_party_s_rows_are_not_taken_for_labels_nor_labels_for_rows(tmp_path):
    party_rows(tmp_path)
    with pytest.raises(AlignmentError, match="a party's rows"):
        load_labels(tmp_path / "alignments" / "people")
    label_rows(tmp_path, ["yes", "no"], [0, 1])
    with pytest.raises(AlignmentError, match="is no party's"):
        AlignedRows.load(tmp_path / "people")
