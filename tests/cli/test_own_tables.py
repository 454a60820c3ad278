"""`pbmvfl schema`, and own tables on the command line: a file for each party, ids, resuming."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbmvfl.data import load_table
from pbmvfl.data.schema_template import schema_template
from pbmvfl.errors import DataError, RunFolderError
from pbmvfl.federation.run_folder import RunFolder, RunSource, TableSource
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.plan.plan import Plan

QUICK = ("--encoder", "linear", "--num-epochs", 1, "--batch-size", 10, "--embedding-dim", 2, "--num-trials", 4)
FILES = ("--data", "bank=bank.csv", "--data", "shop=shop.csv", "--id", "person", "--label", "churn")

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, run_main: Any, tmp_path: Path) -> Cli:
    """The command in this process, beside two files with 40 rows in common."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(2)
    bank = ["person,income,job,home"]
    bank += [f"P{i},{random.normal():.3f},{'cook' if i % 3 else '?'},{i % 4 == 0}" for i in range(50)]
    shop = ["person,visits,city,churn"]
    shop += [f"P{i},{i % 7},{'Bonn' if i % 2 else 'Köln'},{'yes' if i % 2 else 'no'}" for i in range(49, 9, -1)]
    Path("bank.csv").write_text("\n".join(bank) + "\n")
    Path("shop.csv").write_text("\n".join(shop) + "\n")
    schema = {
        "income": {"range": [-3, 3]},
        "job": {"vocabulary": ["cook"], "missing": True},
        "visits": {"range": [0, 7]},
        "city": {"vocabulary": ["Bonn", "Köln"]},
    }
    Path("schema.json").write_text(json.dumps({"columns": schema}))

    def run(*arguments: object) -> tuple[int, str, str]:
        return run_main(*arguments)

    return run


# --- a template ---


def test_a_template_has_names_and_types_and_no_value(cli: Cli) -> None:
    code, out, err = cli("schema", "bank=bank.csv", "shop=shop.csv", "--label", "churn", "--id", "person")
    assert code == 0
    assert json.loads(out) == {
        "columns": {
            "income": {"range": [None, None]},
            "job": {"vocabulary": []},
            "home": {"vocabulary": [False, True]},
            "visits": {"range": [None, None]},
            "city": {"vocabulary": []},
        }
    }
    assert out.count("\n") == 7  # a line per column, to be filled in by hand
    assert "To fill in: range of income, vocabulary of job, range of visits, vocabulary of city." in err
    for value in ("cook", "Bonn", "Köln", "P1"):
        assert value not in out + err


def test_values_are_in_it_only_where_the_owner_says_that_they_are_public(cli: Cli) -> None:
    command = ("schema", "bank=bank.csv", "shop=shop.csv", "--label", "churn", "--id", "person")
    code, out, err = cli(*command, "--public-values", "city, job,visits")
    assert code == 0
    columns = json.loads(out)["columns"]
    assert columns["city"] == {"vocabulary": ["Bonn", "Köln"]}
    assert "Köln" in out  # readable, not escaped
    assert columns["job"] == {"vocabulary": ["cook"], "missing": True}
    assert columns["visits"] == {"range": [0, 6]}
    assert columns["income"] == {"range": [None, None]}
    assert "Public from now on, because you said so: job, visits, city (their values are in the schema)." in err
    code, out, err = cli(*command, "--public-values", "citty,age")
    assert (code, out) == (2, "")
    assert "column='citty', which is not among the columns (did you mean 'city'?)" in err
    assert "column='age'" in err


def test_a_template_names_slips_and_dates_and_asks_for_numbers(cli: Cli) -> None:
    lines = ["amount,opened,years,note"]
    lines += [f"{i if i != 7 else '1.000.000'},2024-03-{1 + i % 9:02},{'<1' if i % 3 else i},?" for i in range(20)]
    Path("loans.csv").write_text("\n".join(lines) + "\n")
    code, out, err = cli("schema", "loans.csv", "--public-values", "amount")
    assert code == 0
    assert json.loads(out)["columns"] == {
        "amount": {"range": [0.0, 19.0]},
        "opened": {"vocabulary": []},
        "years": {"vocabulary": []},
        "note": {"range": [None, None]},
    }
    assert "column='amount' is mostly numbers, but row=7 (counted from 0) is not; mend that." in err
    assert "column='opened' holds dates; make numbers of them before loading" in err
    assert "1.000.000" not in out + err


def test_a_template_goes_to_a_file_that_must_not_exist_and_to_json(cli: Cli) -> None:
    code, out, _ = cli("schema", "bank.csv", "--id", "person", "--out", "new.json")
    assert code == 0
    assert out.startswith("new.json has a line for each of 3 columns.\n")
    assert set(json.loads(Path("new.json").read_text())["columns"]) == {"income", "job", "home"}
    before = Path("schema.json").read_bytes()
    code, _, err = cli("schema", "bank.csv", "--out", "schema.json")
    assert code == 2
    assert "exists already and was not touched" in err
    assert Path("schema.json").read_bytes() == before
    code, out, err = cli("schema", "bank.csv", "--columns", "a=income;b=job", "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said["fill_in"] == ["range of income", "vocabulary of job"]
    assert said["published"] == []
    assert set(said["schema"]["columns"]) == {"income", "job"}


def test_a_template_needs_the_label_and_the_id_that_are_named(cli: Cli) -> None:
    code, out, err = cli("schema", "shop.csv", "--label", "chrun", "--id", "persn")
    assert (code, out) == (2, "")
    assert "label='chrun' is not in shop.csv (did you mean 'churn'?); correct the name, or leave the label out" in err
    assert "column='persn' is not in shop.csv (did you mean 'person'?)" in err
    code, out, err = cli("schema", "bank=bank.csv", "shop=shop.csv", "--label", "left", "--id", "person")
    assert (code, out) == (2, "")
    assert "label='left' is not in bank.csv or shop.csv; correct the name" in err
    assert cli("schema", "bank=bank.csv", "shop=shop.csv", "--label", "churn", "--id", "person")[0] == 0


def test_a_template_is_not_made_of_a_header_without_commas(cli: Cli) -> None:
    Path("semi.csv").write_text(Path("bank.csv").read_text().replace(",", ";"))
    Path("tabs.csv").write_text(Path("bank.csv").read_text().replace(",", "\t"))
    for file, mark in (("semi.csv", ";"), ("tabs.csv", "\t")):
        code, out, err = cli("schema", file, "--out", "new.json")
        assert (code, out) == (2, "")
        assert f"{file} has 1 column" in err
        assert f"Columns must be separated by commas, not by {mark!r}; save the file with commas" in err
    assert not Path("new.json").exists()


@pytest.mark.usefixtures("cli")
def test_a_template_that_is_not_filled_in_is_refused_with_all_holes() -> None:
    made = schema_template({"bank": "bank.csv", "shop": "shop.csv"}, label="churn", id="person")
    assert len(made.holes) == 4
    with pytest.raises(DataError) as caught:
        load_table({"bank": "bank.csv", "shop": "shop.csv"}, label="churn", id="person", schema=made.schema)
    found = "\n".join(caught.value.faults)
    for name in ("income", "job", "visits", "city"):
        assert f"schema of column={name!r}" in found
    assert "bank.csv: column='job': rows=12, 15, 18, 21, 24 and 8 more (counted from 0) have no value" in found


def test_a_template_needs_no_torch_and_no_numba(cli: Cli, run_process: Any, tmp_path: Path) -> None:
    del cli  # it wrote the files
    program = "import sys\nfrom pbmvfl.cli import main\ntry:\n    main()\nfinally:\n"
    program += "    print([name for name in ('torch', 'numba', 'sklearn') if name in sys.modules], file=sys.stderr)\n"
    done = run_process("schema", "bank.csv", "--json", program=program, cwd=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


# --- a check ---


def test_a_check_says_fine_or_all_faults_and_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    command = (
        "schema",
        "bank=bank.csv",
        "shop=shop.csv",
        "--id",
        "person",
        "--label",
        "churn",
        "--check",
        "schema.json",
    )
    before = sorted(path.name for path in tmp_path.iterdir())
    code, out, _ = cli(*command)
    assert code == 0
    assert out.splitlines()[:3] == [
        "fine: 40 rows",
        "bank: 3 columns become 5 numbers",
        "shop: 2 columns become 3 numbers",
    ]
    schema = json.loads(Path("schema.json").read_text())
    schema["columns"]["city"]["vocabulary"] = ["Bonn"]
    schema["columns"]["visits"]["range"] = [7, 0]
    Path("schema.json").write_text(json.dumps(schema))
    code, out, err = cli(*command)
    assert (code, out) == (2, "")
    assert err.startswith("error: 2 faults were found:\n  1. schema of column='visits': range=[7, 0]")
    code, out, err = cli(*command, "--json")
    assert (code, err) == (2, "")
    said = json.loads(out)
    assert said["fine"] is False
    assert len(said["faults"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert cli(*command, "--out", "x.json")[0] == 2


# --- training ---


def test_a_file_for_each_party_trains_resumes_and_is_known_to_ledgers_by_id(cli: Cli, tmp_path: Path) -> None:
    command = ("train", *FILES, "--schema", "schema.json", *QUICK)
    code, out, err = cli(*command, "--out", "run", "--ledger", "books", "--dataset-name", "customers", "--json")
    assert code == 0, err
    assert Plan.from_dict(json.loads(out)["plan"]).num_samples == 32
    source = RunFolder.existing(tmp_path / "run").read_source().rows
    assert isinstance(source, TableSource)
    assert source.data == {"bank": str(tmp_path / "bank.csv"), "shop": str(tmp_path / "shop.csv")}
    assert set(source.load().train_ids or ()) < {f"P{i}" for i in range(10, 50)}
    assert Ledger(tmp_path / "books" / "bank.sqlite", read_only=True).datasets() == ["customers"]
    (tmp_path / "run/result.json").unlink()  # as if it had not ended
    assert cli(*command, "--resume", "run")[0] == 0
    (tmp_path / "run/result.json").unlink()
    code, _, err = cli("train", *FILES[:2], "--data", "shop=bank.csv", *FILES[4:], "--resume", "run")
    assert code == 2
    assert "is a run with data=" in err
    os.utime("shop.csv", ns=(1, 1))
    code, out, _ = cli("train", "--resume", "run", "--verbose")
    assert code == 0
    assert "shop.csvwaswrittentosincetherunbegan" in "".join(out.split())
    Path("shop.csv").write_text(Path("shop.csv").read_text() + "P99,1,Bonn,no\n")
    (tmp_path / "run/result.json").unlink(missing_ok=True)
    code, _, err = cli("train", "--resume", "run")
    assert code == 2
    assert "run on other values" in " ".join(err.split())


def test_ledgers_are_found_by_the_files_names(cli: Cli, tmp_path: Path) -> None:
    assert cli("train", *FILES, "--schema", "schema.json", *QUICK, "--out", "run", "--ledger", "books")[0] == 0
    code, out, _ = cli("privacy", "run")
    assert code == 0
    assert "all runs of 'bank+shop' in it together" in " ".join(out.split())
    assert Ledger(tmp_path / "books" / "shop.sqlite", read_only=True).datasets() == ["bank+shop"]


def test_labels_have_a_file_of_their_own_and_no_rows_are_for_testing(cli: Cli, tmp_path: Path) -> None:
    lines = [line.split(",") for line in Path("shop.csv").read_text().splitlines()]
    Path("labels.csv").write_text("\n".join(f"{line[0]},{line[3]}" for line in lines) + "\n")
    Path("shop.csv").write_text("\n".join(",".join(line[:3]) for line in lines) + "\n")
    options = ("--label-data", "labels.csv", "--test-fraction", 0, "--schema", "schema.json")
    code, out, err = cli("train", *FILES, *options, *QUICK, "--out", "run", "--json")
    assert code == 0, err
    assert "train_accuracy" in json.loads(out)["metrics"]
    assert "test_accuracy" not in json.loads(out)["metrics"]
    assert RunFolder.existing(tmp_path / "run").read_source().rows.load().num_samples == 40


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--data", "bank.csv", "--data", "shop.csv", "--label", "churn"), "'bank.csv' is not of the form PARTY=FILE"),
        (("--data", "a=bank.csv", "--data", "a=shop.csv", "--label", "churn"), "names party='a' twice"),
        (("--data", "a=bank.csv", "--data", "b=shop.csv", "--label", "churn"), "--data needs --id"),
        (("--data", "a=bank.csv", "--id", "person", "--label", "churn"), "at least 2 parties"),
        (("--data", "bank.csv", "--label", "churn"), "--data needs --columns"),
        (("digits", "--id", "person"), "--id goes with --data TABLE"),
        (("digits", "--label-data", "bank.csv"), "--label-data goes with --data TABLE"),
    ],
)
def test_files_that_do_not_go_together_are_refused(cli: Cli, tmp_path: Path, options: Any, words: str) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    code, _, err = cli("train", *options, *QUICK)
    assert code == 2
    assert words in " ".join(err.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_column_out_of_scale_is_named_and_no_run_folder_is_left(cli: Cli, tmp_path: Path) -> None:
    schema = json.loads(Path("schema.json").read_text())
    del schema["columns"]["income"]
    Path("schema.json").write_text(json.dumps(schema))
    bank = Path("bank.csv").read_text().splitlines()
    bank[40] = "P39,5.2e10,cook,True"
    Path("bank.csv").write_text("\n".join(bank) + "\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    for command in ((), ("--out", "run")):
        code, _, err = cli("train", *FILES, "--schema", "schema.json", *command)
        assert code == 2
        assert "bank.csv: column='income': row=39 (counted from 0) is infinite or beyond 1e+09" in err
        assert 'give the column a range in the schema, "income": {"range": [low, high]}' in err
        assert "5.2e" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_file_whose_name_has_an_equals_sign_is_a_file(cli: Cli) -> None:
    Path("a=b.csv").write_text("age,visits,churn\n" + "".join(f"{i},{i},{i % 2}\n" for i in range(40)))
    options = ("--label", "churn", "--columns", "bank=age;shop=visits")
    assert cli("train", "--data", "a=b.csv", *options, *QUICK, "--out", "run")[0] == 0


# --- what a run folder keeps ---

OLD = {
    "dataset": None,
    "data": "/there/people.csv",
    "label": "churn",
    "columns": "bank=a;shop=b",
    "schema": None,
    "test_data": None,
    "test_fraction": 0.2,
    "dataset_name": None,
    "seed": 0,
    "num_parties": None,
    "files": {"data": [12, 34]},
    "ledger": None,
    "delta": 1e-5,
}


def test_folders_from_before_are_read() -> None:
    source = RunSource.from_dict(OLD, Path("data.json"))
    assert isinstance(source.rows, TableSource)
    assert (source.rows.id, source.rows.label_data, source.rows.name) == (None, None, "people")
    assert source.rows.files == {"data": (12, 34)}
    assert RunSource.from_dict(json.loads(json.dumps(source.to_dict())), Path("data.json")) == source


@pytest.mark.parametrize(
    "damage", [{"data": ["x"]}, {"data": {"bank": 7}}, {"test_data": {"bank": None}}, {"id": 3}, {"columns": 7}]
)
def test_a_damaged_source_is_refused_by_the_folder(damage: dict[str, Any]) -> None:
    with pytest.raises(RunFolderError, match=r"data.json is damaged"):
        RunSource.from_dict(OLD | damage, Path("data.json"))
