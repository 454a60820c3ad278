"""The owner's words on the command line: allow, accept, --exact-metrics; and what `ledger show` says."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ledger_books import NAME, charge_all, paper_limit, small_plan
from pbmvfl.errors import LedgerError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit

Main = Callable[..., tuple[int, str, str]]
COLUMNS = "bank=income,debt;shop=visits,basket"


@pytest.fixture
def main(run_main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Main:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return run_main


def write_table(path: Path) -> None:
    random = np.random.default_rng(3)
    lines = ["income,debt,visits,basket,churn"]
    for row in random.normal(size=(60, 4)).round(3):
        lines.append(",".join(map(str, row)) + ("," + ("yes" if row.sum() > 0 else "no")))
    path.write_text("\n".join(lines) + "\n")


TRAIN = ("train", "--data", "people.csv", "--label", "churn", "--columns", COLUMNS, "--num-epochs", 1)


def test_training_with_a_limit_and_exact_metrics_is_refused_before_there_is_a_folder(main, tmp_path):
    write_table(tmp_path / "people.csv")
    limit = ("--dataset", "people", "--unit", "cell", "--accounting", "paper", "--epsilon", 1000)
    assert main("ledger", "limit", "books/party-0.sqlite", *limit)[0] == 0
    assert main("ledger", "limit", "books/party-1.sqlite", *limit)[0] == 0
    code, _, err = main(*TRAIN, "--ledger", "books", "--out", "run")
    assert code == 2
    words = " ".join(err.split())
    assert "evaluation=released" in words
    assert "--exact-metrics" in words
    assert not (tmp_path / "run").exists()
    assert main(*TRAIN, "--ledger", "books", "--out", "run", "--exact-metrics")[0] == 0
    code, out, _ = main("ledger", "show", "books")
    assert code == 0
    assert out.count("exact metrics of its rows were permitted") == 2


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_a_run_folder_and_all_that_is_in_it_is_its_owner_s_alone(umask, main, tmp_path):
    write_table(tmp_path / "people.csv")
    before = os.umask(umask)
    try:
        assert main(*TRAIN, "--ledger", "books", "--out", "run")[0] == 0
    finally:
        os.umask(before)
    found = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert {"curves.png", "data.json", "plan.json", "sessions.json"} <= {file.name for file in found}
    for file in found:
        assert stat.S_IMODE(file.stat().st_mode) == (0o700 if file.is_dir() else 0o600), file
    assert "fingerprint" not in json.loads((tmp_path / "run/data.json").read_text())


def test_an_older_copy_is_shown_refused_and_accepted(main, tmp_path):
    path = tmp_path / "a.sqlite"
    charge_all(Ledger(path), small_plan(), run="1", rounds=1)
    shutil.copy(path, tmp_path / "copy")
    charge_all(Ledger(path), small_plan(), run="2", rounds=1)
    shutil.copy(tmp_path / "copy", path)
    assert "note: it is an older copy" in main("ledger", "show", path)[1]
    limit = ("--dataset", NAME, "--unit", "cell", "--accounting", "paper", "--epsilon", 9)
    code, _, err = main("ledger", "limit", path, *limit)
    assert code == 2
    assert "pbmvfl ledger accept" in " ".join(err.split())
    assert "accepted, although it is an older copy" in main("ledger", "accept", path)[1]
    assert "nothing to accept" in main("ledger", "accept", path)[1]
    assert main("ledger", "limit", path, *limit)[0] == 0
    assert "its owner accepted the book" in main("ledger", "show", path)[1]


def test_data_under_another_name_is_allowed_by_its_owner(main, tmp_path):
    path = tmp_path / "a.sqlite"
    plan = small_plan()
    values = np.zeros((plan.num_samples, 2), dtype=np.float32)
    charge_all(Ledger(path), plan, rounds=1, train_values=values)
    with pytest.raises(LedgerError, match=re.escape(f"pbmvfl ledger allow {path} --dataset folk")):
        Ledger(path).open_session(dataset="folk", plan=plan, run="2", session="s", train_values=values)
    assert "folk is about other people; noted" in main("ledger", "allow", path, "--dataset", "folk")[1]
    Ledger(path).open_session(dataset="folk", plan=plan, run="2", session="s", train_values=values).close()
    assert main("ledger", "allow", tmp_path / "none.sqlite", "--dataset", "folk")[0] == 2


@pytest.mark.parametrize("order", [1.569692, 2.0, 33.0])
def test_as_one_plan_is_never_shown_above_what_was_spent(order, main, tmp_path):
    """The first of these orders is the best one here, and not among those that are looked at for one plan."""
    path = tmp_path / "a.sqlite"
    limit: Limit = paper_limit(1e6, order=order)
    Ledger(path).set_limit(NAME, limit)
    charge_all(Ledger(path), small_plan(beta=0.25, num_trials=16))
    _, out, _ = main("ledger", "show", path)
    (row,) = [line.split() for line in out.splitlines() if line.split()[:3] == ["cell", "paper", "server"]]
    spent, as_one_plan = map(float, row[4:6])
    assert as_one_plan <= spent
