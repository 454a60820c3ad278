"""The owner's words on the command line: allow, accept, --exact-metrics; and what `ledger show` says."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbmvfl.errors import LedgerError
from pbmvfl.federation.federation import Federation
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.spending import spending
from support.ledger_books import NAME, charge_all, opening, paper_limit, small_plan

Main = Callable[..., tuple[int, str, str]]
COLUMNS = "bank=income,debt;shop=visits,basket"


@pytest.fixture
def main(run_main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Main:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return run_main


def write_table(path: Path) -> None:
    random = np.random.default_rng(3)
    lines = ["person,income,debt,visits,basket,churn"]
    for number, row in enumerate(random.normal(size=(60, 4)).round(3)):
        lines.append(",".join(map(str, (number, *row))) + ("," + ("yes" if row.sum() > 0 else "no")))
    path.write_text("\n".join(lines) + "\n")


TRAIN = ("train", "--data", "people.csv", "--label", "churn", "--columns", COLUMNS, "--id", "person", "--num-epochs", 1)


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
    assert "its owner accepted the ledger" in main("ledger", "show", path)[1]


def test_data_under_another_name_is_allowed_by_its_owner(main, tmp_path):
    path = tmp_path / "a.sqlite"
    plan = small_plan()
    values = np.zeros((plan.num_samples, 2), dtype=np.float32)
    charge_all(Ledger(path), plan, rounds=1, train_values=values)
    with pytest.raises(LedgerError, match=re.escape(f"pbmvfl ledger allow {path} --dataset folk")):
        Ledger(path).open_session(opening(dataset="folk", plan=plan, run="2", session="s", train_values=values))
    assert "folk is about other people; noted" in main("ledger", "allow", path, "--dataset", "folk")[1]
    Ledger(path).open_session(opening(dataset="folk", plan=plan, run="2", session="s", train_values=values)).close()
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


# --- before the first round ---

LIMIT = ("--dataset", "people", "--epsilon")
SIZES = ("--num-parties", 2, "--num-samples", 48, "--num-classes", 2, "--num-test-samples", 12, "--columns", 2)


def strict_train(out: str, *options: object, data: str = "people.csv") -> tuple[object, ...]:
    table = ("--data", data, "--label", "churn", "--columns", COLUMNS, "--id", "person", "--plan", "plan.json")
    return ("train", *table, "--ledger", "books", "--exact-metrics", "--out", out, *options)


@pytest.fixture
def planned(main: Main, tmp_path: Path) -> Main:
    """A table, and a plan for epsilon 4 of it."""
    write_table(tmp_path / "people.csv")
    assert main("plan", "--epsilon", 4, *SIZES, "--num-epochs", 5, "--out", "plan.json")[0] == 0
    return main


def folder(path: Path) -> list[str]:
    return sorted(str(each.relative_to(path)) for each in path.rglob("*") if not each.name.startswith("state"))


def test_limits_of_all_parties_are_set_before_the_first_run_in_one_command(main, tmp_path):
    code, out, _ = main("ledger", "limit", "books", "--parties", "bank, shop", *LIMIT, 8)
    assert code == 0
    assert out.count("cell, strict, server: epsilon 8 at delta 1e-05, counted as Gaussian noise; spent 0") == 2
    for party in ("bank", "shop"):
        book = Ledger(tmp_path / f"books/{party}.sqlite", read_only=True)
        assert (book.owner, len(book.limits("people"))) == (party, 1)
    assert main("ledger", "limit", "numbered", "--parties", 3, *LIMIT, 8)[0] == 0
    assert sorted(path.name for path in (tmp_path / "numbered").glob("*.sqlite")) == [
        f"party-{index}.sqlite" for index in range(3)
    ]
    out = main("ledger", "limit", "books", *LIMIT, 9)[1]  # of all that are there
    assert out.count("epsilon 9") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("new",),
            "is not there yet; name a ledger, or the folder of some; to make the ledgers of its parties: --parties",
        ),
        (("books", "--parties", "bank,,shop"), "permitted: different names"),
        (("books", "--parties", "bank,bank"), "permitted: different names"),
        (("books/bank.sqlite", "--parties", "bank"), "is one party's ledger"),
        (("people.csv", "--parties", "bank"), "is one party's ledger"),
        (("people.csv/x", "--parties", "bank"), "cannot be made one"),
        (("books", "--counting", "loose"), "permitted: gaussian, renyi"),
    ],
)
def test_a_limit_that_cannot_be_set_makes_nothing(arguments, words, main, tmp_path):
    write_table(tmp_path / "people.csv")
    assert main("ledger", "limit", "books", "--parties", "bank,shop", *LIMIT, 8)[0] == 0
    before = folder(tmp_path)
    code, _, err = main("ledger", "limit", *arguments, *LIMIT, 8)
    assert code == 2
    assert words in " ".join(err.split())
    assert folder(tmp_path) == before


def test_a_run_is_told_what_it_will_cost_and_refused_if_a_limit_would_end_it(planned, tmp_path):
    assert planned("ledger", "limit", "books", "--parties", "bank,shop", *LIMIT, 5)[0] == 0
    code, out, _ = planned(*strict_train("one", "--verbose"))
    assert code == 0
    said = "ledger of every party: nothing of 'people'; cell, strict: epsilon 0 of 5 is spent, 4.00 after this run"
    assert said in out
    before = folder(tmp_path)
    code, out, err = planned(*strict_train("two"))
    assert code == 2
    assert "1 run of 'people'; cell, strict: epsilon 4.00 of 5 is spent" in out
    assert "the limit would end it at round" in out
    assert "Nothing was sent or written" in " ".join(err.split())
    assert folder(tmp_path) == before
    code, out, _ = planned(*strict_train("two", "--until-limit", "--json"))
    assert code == 3
    assert json.loads(out)["stopped"]


def test_a_plan_within_ledgers_is_trained_by_the_command_that_it_prints(planned, tmp_path):
    assert planned("ledger", "limit", "books", "--parties", "bank,shop", "--dataset", "folk", "--epsilon", 3)[0] == 0
    table = ("--data", "people.csv", "--label", "churn", "--columns", COLUMNS, "--id", "person")
    code, out, _ = planned(
        "plan", *table, "--epsilon", 9, "--ledger", "books", "--dataset", "folk", "--out", "new.json"
    )
    assert code == 0
    command = shlex.split(out.splitlines()[-1].partition("train it with: pbmvfl ")[2])
    code, _, err = planned(*command, "--out", "run")
    assert code == 0, err
    with contextlib.closing(Ledger(tmp_path / "books/bank.sqlite", read_only=True)) as book:
        (held,) = book.limits("folk")
        assert 2.9 < spending(book, "folk", held).epsilon <= 3


def test_parties_whose_books_differ_are_told_apart(planned):
    assert planned("ledger", "limit", "books", "--parties", "bank,shop", *LIMIT, 5)[0] == 0
    assert planned("ledger", "limit", "books/shop.sqlite", *LIMIT, 3)[0] == 0
    code, out, err = planned(*strict_train("one"))
    assert code == 2
    assert "ledger of bank: nothing of 'people'" in out
    assert "ledger of shop: nothing of 'people'" in out
    assert "the limit of party='shop' would end this run" in " ".join(err.split())


@pytest.mark.parametrize("counting", ["gaussian", "renyi"])
def test_a_plan_within_what_is_left_runs_to_its_end_and_leaves_next_to_nothing(counting, planned, tmp_path):
    limit = (*LIMIT, 9, "--counting", counting)
    assert planned("ledger", "limit", "books", "--parties", "bank,shop", *limit)[0] == 0
    assert planned(*strict_train("one"))[0] == 0
    within = ("plan", "--epsilon", 12, *SIZES, "--num-epochs", 5, "--ledger", "books")
    code, out, _ = planned(*within, "--out", "rest.json")
    assert code == 0
    assert "of 9 for 'people' (cell, strict), and will have" in " ".join(out.split())
    assert "train it with: pbmvfl train DATASET --plan rest.json --ledger books" in " ".join(out.split())
    (tmp_path / "plan.json").unlink()
    (tmp_path / "rest.json").rename(tmp_path / "plan.json")
    code, _, err = planned(*strict_train("two", "--json"))
    assert code == 0, err
    with contextlib.closing(Ledger(tmp_path / "books/bank.sqlite", read_only=True)) as book:
        (held,) = book.limits("people")
        assert 8.9 < spending(book, "people", held).epsilon <= 9
    assert planned("ledger", "limit", "books", *LIMIT, 8)[0] == 0
    code, _, err = planned(*within)
    assert code == 2
    assert "raise a limit" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "has no limits; set one"),
        (("--dataset", "folk"), "has no limits, and dataset='folk' is asked for; set one"),
    ],
)
def test_a_plan_within_books_without_limits_is_refused(options, words, main, tmp_path):
    Ledger(tmp_path / "books/bank.sqlite", owner="bank").close()
    code, _, err = main("plan", "--epsilon", 4, *SIZES, "--ledger", "books", *options)
    assert code == 2
    assert words in " ".join(err.split())


def test_a_second_session_on_a_ledger_leaves_nothing_behind(planned, tmp_path):
    path = tmp_path / "books/shop.sqlite"
    session = Ledger(path, owner="shop").open_session(
        opening(dataset="people", plan=small_plan(), run="r", session="s")
    )
    before = folder(tmp_path)
    code, _, err = planned(*strict_train("run"))
    assert code == 2
    assert "being charged by another session" in err
    assert folder(tmp_path) == before
    session.close()


def test_a_session_that_comes_in_between_leaves_nothing_behind_either(planned, monkeypatch, tmp_path):
    """The books are free when the run looks at them, and one of them is not when it begins."""
    path = tmp_path / "books/shop.sqlite"
    opened = []
    fit = Federation.fit

    def late(*arguments: Any, **named: Any) -> Any:
        opened.append(
            Ledger(path, owner="shop").open_session(opening(dataset="x", plan=small_plan(), run="r", session="s"))
        )
        return fit(*arguments, **named)

    monkeypatch.setattr(Federation, "fit", late)
    assert planned(*strict_train("run"))[0] == 2
    assert not (tmp_path / "run").exists()
    opened[0].close()


def test_a_renamed_copy_is_refused_before_there_is_a_folder(planned, tmp_path):
    assert planned(*strict_train("one"))[0] == 0
    lines = (tmp_path / "people.csv").read_text().splitlines()
    (tmp_path / "folk.csv").write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    code, _, err = planned(*strict_train("two", data="folk.csv"))
    assert code == 2
    words = " ".join(err.split())
    assert "of the rows of dataset='people'" in words or "the values of dataset='people'" in words
    assert not (tmp_path / "two").exists()
    assert planned("ledger", "allow", "books", "--dataset", "folk")[0] == 0
    assert planned(*strict_train("two", data="folk.csv"))[0] == 0


def test_sessions_are_shown_in_words(main, tmp_path):
    path = tmp_path / "a.sqlite"
    plan = small_plan(evaluation="released", num_epochs=1)
    charge_all(Ledger(path, owner="bank"), plan, run="1")
    charge_all(Ledger(path, owner="bank"), plan, run="2", rounds=1)
    Ledger(path, owner="bank").open_session(opening(dataset=NAME, plan=plan, run="3", session="s")).close()
    _, out, _ = main("ledger", "show", path)
    assert "a.sqlite, the ledger of bank" in out
    assert "people: 3 runs, 3 sessions, 35 row releases" in out
    assert "rounds 0 to 6: trained 1 epoch on 23 rows, 7 rows predicted, PBM b=2" in out
    assert "round 0: trained 0.2174 epochs on 23 rows, PBM b=2" in out
    assert "nothing charged" in out


def test_training_with_a_limit_and_no_word_about_exact_metrics_looks_at_none(main, tmp_path):
    """A budget is planned so that it can be trained under the owners' limits; numbers by hand are left as they are."""
    write_table(tmp_path / "people.csv")
    limit = ("ledger", "limit", "books", "--parties", "one,two", "--dataset", "people", "--epsilon", 8)
    assert main(*limit)[0] == 0
    command = ("train", "--data", "people.csv", "--label", "churn", "--columns", "one=income,debt;two=visits")
    command += ("--id", "person", "--ledger", "books")
    code, out, err = main(*command, "--out", "run", "--verbose")
    assert code == 0, err
    assert "no limit counts exact metrics: none are looked at" in " ".join(out.split())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["metrics"] == {}
    assert result["plan"]["evaluation"] == "none"
    assert "the plan measures nothing" in " ".join(out.split())


# --- the label holder's ledger ---


def test_the_label_holder_s_ledger_is_limited_forecast_shown_and_drawn_anew_by_name(main, tmp_path):
    write_table(tmp_path / "people.csv")
    train = (*TRAIN, "--verbose", "--ledger", "books", "--label-epsilon", 2, "--evaluation", "none")
    limit = ("ledger", "limit", "books", "--dataset", "people", "--epsilon")
    code, out, _ = main(*limit, 5, "--unit", "label")
    assert (code, "books/label-holder.sqlite: people: label, strict, all parties: epsilon 5" in out) == (0, True)
    code, out, _ = main(*train, "--out", "one")
    assert code == 0
    assert "ledger of every party: nothing of 'people', and no limit" in out
    assert "ledger of label-holder: nothing of 'people'; label, strict: epsilon 0 of 5 is spent, 2.00 after this" in out
    code, out, _ = main(*train, "--out", "two")
    assert (
        code,
        "label-holder: 1 draw of labels of 'people'; label, strict: epsilon 2.00 of 5 is spent, 2.00" in out,
    ) == (
        0,
        True,
    )
    code, out, _ = main("ledger", "show", "books")
    assert "round 0: labels of 48 rows, randomised response k=2, epsilon=2 a label" in out
    assert [line.split() for line in out.splitlines() if line.split()[:1] == ["label"]] == [
        ["label", "strict", "all", "parties", "5", "2.00", "2.00", "1e-05"]
    ]
    spent = json.loads(main("privacy", "two", "--json")[1])["ledgers"]
    assert [set(each) for each in spent] == [
        {"ledger", "cell", "record"},
        {"ledger", "label"},
        {"ledger", "cell", "record"},
    ]
    # A limit of cells is the parties' alone, and takes nothing from what is left for labels.
    assert "label-holder" not in main(*limit, 1e9, "--accounting", "paper")[1]
    shutil.rmtree(tmp_path / "books" / "labels")
    code, _, err = main(*train, "--out", "three")
    assert (code, "--redraw-labels" in err, (tmp_path / "three").exists()) == (2, True, False)
    assert main(*train, "--out", "three", "--redraw-labels")[0] == 0
    code, _, err = main(*train[:-4], "--label-epsilon", 1.5, "--evaluation", "none", "--until-limit", "--out", "four")
    assert (code, "from epsilon 4.00 to 5.50" in err, (tmp_path / "four").exists()) == (2, True, False)


def test_a_limit_of_labels_is_for_one_ledger(main, tmp_path):
    limit = ("ledger", "limit", "books", "--dataset", "people", "--unit", "label", "--epsilon", 5)
    assert "leave out --parties bank,shop" in main(*limit, "--parties", "bank,shop")[2]
    assert not (tmp_path / "books").exists()
    assert main(*limit)[0] == 0
    assert [path.name for path in (tmp_path / "books").glob("*.sqlite")] == ["label-holder.sqlite"]
    assert main(*limit[:-2], "--remove")[0] == 0
    charge_all(Ledger(tmp_path / "bank.sqlite"), small_plan(), rounds=1)
    said = main("ledger", "limit", "bank.sqlite", "--dataset", NAME, "--unit", "label", "--epsilon", 5)[1]
    assert "it counts drawn labels alone, and this ledger has none" in said
