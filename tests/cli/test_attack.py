"""`pbmvfl attack`: results, pictures and the report of a run under a limit, refusals, and the exit code of an alarm."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.mechanisms.label_response import LabelResponse


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small table of categories."""
    place = tmp_path_factory.mktemp("attacked")
    random = np.random.default_rng(3)
    values = random.integers(0, 3, size=(160, 4))
    lines = ["who,a,b,c,d,churn"]
    lines += [f"p{i},{','.join(map(str, row))},{'yes' if row.sum() > 4 else 'no'}" for i, row in enumerate(values)]
    (place / "people.csv").write_text("\n".join(lines) + "\n")
    return place


TRAIN = (
    "--data",
    "people.csv",
    "--label",
    "churn",
    "--columns",
    "bank=a,b;shop=c,d",
    "--id",
    "who",
    "--ledger",
    "books",
)
NUMBERS = ("--num-epochs", 2, "--batch-size", 20, "--num-trials", 8, "--beta", 0.2, "--embedding-dim", 4)


def ledger_rows(place: Path) -> dict[str, str]:
    """Everything in the ledgers, by their files."""
    found = {}
    for path in sorted((place / "books").glob("*.sqlite")):
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            found[path.name] = hashlib.sha256("\n".join(database.iterdump()).encode()).hexdigest()
    return found


def test_a_run_under_a_limit_is_attacked_reported_and_charged_nothing(trained, run_main, monkeypatch):
    monkeypatch.chdir(trained)
    assert run_main("train", *TRAIN, *NUMBERS, "--out", "joint")[0] == 0
    limit = Limit.choose(unit="cell", accounting="strict", epsilon=1e-3, delta=1e-5)
    for path in sorted((trained / "books").glob("*.sqlite")):
        with contextlib.closing(Ledger(path)) as book:
            book.set_limit("people", limit)
    before = ledger_rows(trained)
    assert len(before) == 2
    code, out, err = run_main("attack", "joint", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found == json.loads((trained / "joint" / "attack.json").read_text())
    assert (trained / "joint" / "attack-bars.png").stat().st_size > 1000
    for name in ("attack.json", "attack-bars.png"):  # what was got of the rows is for their owner
        assert (trained / "joint" / name).stat().st_mode & 0o077 == 0
    assert {score["attacker"] for score in found["scores"]} >= {"server", "curious party", "network observer, no masks"}
    for score in found["scores"]:
        assert score["gain"]["low"] <= score["value"] - score["baseline"] <= score["gain"]["high"]
    assert ledger_rows(trained) == before

    assert run_main("report", "joint")[0] == 0
    page = (trained / "joint" / "report.html").read_text()
    assert "Attacks on this run" in page
    assert "which of two values of a cell" in page
    assert "<img" not in page
    (trained / "joint" / "attack.json").write_text('{"scores": [{"attack": 3}]}')
    code, _, err = run_main("report", "joint")
    assert code == 2
    assert "attack.json" in err

    # A planted fault: the label holder uses true labels where the plan says that they are drawn.
    monkeypatch.setattr(LabelResponse, "draw", lambda _, labels, __: labels)
    code, out, _ = run_main("attack", "joint", "--json", "--out", "faulty")
    assert code == 5
    alarmed = [score for score in json.loads(out)["scores"] if score["is_alarm"]]
    assert alarmed
    assert all(", label epsilon" in score["attack"] for score in alarmed)
    assert all(score["value"] > score["surely_above"] > score["bound"] for score in alarmed)


def test_what_cannot_be_attacked_is_refused_with_the_way_out(trained, run_main, monkeypatch):
    monkeypatch.chdir(trained)
    without_predictions = ("train", *TRAIN[:-2], "--num-epochs", 2, "--epsilon", 8, "--out", "silent")
    assert run_main(*without_predictions)[0] == 0
    for arguments, words in (
        (("attack",), "SOURCE is missing"),
        (("attack", "nothing-there"), "neither a run folder nor a dataset"),
        (("attack", "digits", "--out", "people.csv"), "is a file"),
        (("attack", "silent"), "train with --prediction-epsilon"),
    ):
        code, _, err = run_main(*arguments)
        assert code == 2
        assert words in err
