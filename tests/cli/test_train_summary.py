"""What `pbmvfl train` prints by default: few lines, with the account's own numbers, at most one a second in a pipe."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from pbmvfl import _compiled
from pbmvfl.cli import train_view
from pbmvfl.cli.train_summary import Paced, print_cost, print_few_notes
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import epsilon_bound
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import Accounting, Adversary, Unit
from support.cohorts import small_data

EXAMPLES = Path(__file__).parents[2] / "examples"
DELTA = 1e-5
DATA = small_data()


def shown(plan: Plan, *, columns: int = 80, **options: bool) -> str:
    out = io.StringIO()
    print_cost(Console(file=out, width=columns), plan.training_run(), delta=DELTA, title="cost", **options)
    return out.getvalue()


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return line.removeprefix(name).split()


@pytest.mark.slow
def test_a_run_prints_at_most_fifteen_lines_of_eighty_columns(run_main, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    clock = iter(range(1_000_000))
    monkeypatch.setattr(train_view, "Paced", lambda say: Paced(say, clock=lambda: next(clock) / 4))  # 40 epochs in 10 s
    code, out, err = run_main("train", "digits", "--out", "run")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 80
    assert lines[0] == "digits: 1,437 training and 360 test rows, 10 classes, 4 parties of 16 columns"
    assert lines[1].startswith("staged: ")
    assert sum(line.startswith("epoch ") for line in lines) == 1
    assert out.count("best attack") == 1
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert f"test accuracy {result['metrics']['test_accuracy']:.4f}" in out
    assert lines[-1] == "next: pbmvfl evaluate run, pbmvfl report run"


FILES = ("--data", "bank=bank.csv", "--data", "shop=shop.csv")
PEOPLE = ("--data", "people.csv", "--columns", "bank=age,income,debt,job,owns_home;shop=visits,basket,channel,member")
KINDS = {
    "a file for each party": (*FILES, "--epsilon", 1, "--prediction-epsilon", 8),
    "exact sums": (*PEOPLE, "--epsilon", 1),
    "ledgers": (*PEOPLE, "--prediction-epsilon", 8, "--ledger", "ledgers"),
    "ledgers with limits": (*FILES, "--prediction-epsilon", 2, "--ledger", "limited", "--dataset-name", "people"),
    "labels in clear": (*PEOPLE, "--label-epsilon", "none", "--record"),
    "pbm": (*PEOPLE, "--algorithm", "pbm", "--num-epochs", 1),
    "pbm by the paper's count": (*PEOPLE, "--accounting", "paper", "--num-epochs", 1, "--ledger", "ledgers"),
    "nothing but noise": (*PEOPLE, "--epsilon", 0.05, "--label-epsilon", 0.05),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_every_kind_print_at_most_fifteen_lines(kind, run_main, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("people.csv", "bank.csv", "shop.csv", "schema.json"):
        shutil.copy(EXAMPLES / name, tmp_path)
    table = ("--id", "customer", "--label", "left", "--schema", "schema.json")
    if "limited" in KINDS[kind]:
        run_main("ledger", "limit", "limited", "--parties", "bank,shop", "--dataset", "people", "--epsilon", 16)
    code, out, err = run_main("train", *KINDS[kind], *table, "--out", "run")
    assert (code, err) == (0, "")
    wrapped = sum(max(1, -(-len(line) // 80)) for line in out.splitlines())
    assert wrapped <= 15, out
    files = "PARTY=NEW.csv ..." if "bank=bank.csv" in KINDS[kind] else "NEW.csv"
    assert f"next: pbmvfl predict run --data {files} --id customer, pbmvfl report run" in out


ENDED = {
    "after some rounds": ((), 3),
    "before its first round": (("--prediction-epsilon", 8), 3),
    "at its predictions": (("--prediction-epsilon", 8, "--epsilon", 1), 7),
    "in joint rounds": (("--algorithm", "pbm", "--num-epochs", 1, "--label-epsilon", "none"), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDED)
def test_runs_that_a_ledger_ends_print_at_most_fifteen_lines_and_why_they_ended(kind, run_main, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("people.csv", "schema.json"):
        shutil.copy(EXAMPLES / name, tmp_path)
    options, limit = ENDED[kind]
    run_main("ledger", "limit", "limited", "--parties", "bank,shop", "--dataset", "people", "--epsilon", limit)
    table = ("--id", "customer", "--label", "left", "--schema", "schema.json", "--ledger", "limited")
    train = ("train", *PEOPLE, *table, *options, "--until-limit", "--out", "run")
    resume = ("train", "--resume", "run", "--until-limit")
    for command in (train, resume):
        code, out, err = run_main(*command)
        assert (code, err) == (train_view.STOPPED_BY_LEDGER, "")
        wrapped = sum(max(1, -(-len(line) // 80)) for line in out.splitlines())
        assert wrapped <= 15, out
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        said = " ".join(out.split())
        assert f"stopped by a ledger: {result['stopped'][:50]}" in said
        assert command is resume or kind == "in joint rounds" or result["stopped"] in said
        has_model = (tmp_path / "run" / "model").is_dir()
        use = "predict run --data NEW.csv --id customer" if has_model else "ledger show limited"
        assert out.splitlines()[-1] == f"next: pbmvfl {use}, pbmvfl report run"
        for next_command in ("report run", "ledger show limited"):
            assert run_main(*next_command.split())[0] == 0


@pytest.mark.parametrize("released", [False, True])
def test_the_table_has_the_account_s_numbers_of_training_rows_predicted_rows_and_labels(released):
    plan = Plan.for_budget(epsilon=8, delta=DELTA, data=DATA, **({"prediction_epsilon": 4} if released else {}))
    text, run = shown(plan), plan.training_run()
    assert released or row(text, "predicted rows") == ["none", "none"]
    for name, split in {"training rows": "train", **({"predicted rows": "test"} if released else {})}.items():
        expected = []
        for unit in (Unit.CELL, Unit.RECORD):
            bound = epsilon_bound(run.of_split(split), unit, Accounting.STRICT, delta=DELTA)
            expected += [format_epsilon(bound.epsilon), str(math.ceil(50 + 50 * bound.advantage_upper_bound))]
        assert row(text, name) == expected
    # Randomised response with k answers has advantage (e^eps - 1) / (e^eps + k - 1) between two labels.
    odds = math.exp(plan.label_epsilon)
    right = math.ceil(50 + 50 * (odds - 1) / (odds + plan.num_classes - 1))
    assert row(text, "training labels") == [format_epsilon(plan.label_epsilon), str(right)]
    assert "not a proof" not in text


def test_joint_rounds_show_the_paper_s_count_and_who_learns_more_than_the_server():
    plan = Plan.for_data(DATA, algorithm="pbm", label_epsilon=None, num_trials=16, beta=0.1, num_epochs=2)
    text, run = shown(plan, columns=200), plan.training_run()
    paper = epsilon_bound(run, Unit.CELL, Accounting.PAPER, delta=DELTA)
    assert row(text, "as the paper counts *")[0] == format_epsilon(paper.epsilon)
    assert "* not a proof" in text
    everyone = Adversary(server=True, colluding_parties=2)
    worse = epsilon_bound(run, Unit.CELL, Accounting.STRICT, everyone, delta=DELTA)
    assert f"attacked by {everyone}: cell epsilon {format_epsilon(worse.epsilon)}" in text
    assert row(text, "training labels")[:2] == ["in", "clear"]


def test_known_noise_hides_nothing():
    plan = Plan.for_budget(epsilon=8, delta=DELTA, data=DATA)
    assert row(shown(plan, noise_is_known=True), "training rows") == ["infinity", "100"] * 2


def test_a_pipe_gets_fewer_lines_the_longer_a_run_takes():
    now, said = 0.0, []
    paced = Paced(lambda line: said.append((now, line)), clock=lambda: now)
    for i in range(36_000):  # an hour, ten epochs a second
        now = i / 10
        paced(str(i))
    times = [time for time, _ in said]
    assert times[:3] == [4, 20, 80]
    assert min(later - earlier for earlier, later in pairwise(times)) >= 1
    assert 60 <= len(times) <= 70  # one a minute in the end
    assert not Paced(said.append, clock=lambda: now)("first")


def few_notes(notes: list[tuple[str, str]], *, room: int) -> list[str]:
    out = io.StringIO()
    used = print_few_notes(Console(file=out, width=80), notes, room=room, others="with --verbose")
    lines = out.getvalue().splitlines()
    assert used == len(lines)
    return lines


def test_notes_for_which_there_is_no_room_are_counted():
    notes = [("note", each) for each in "abcde"]
    assert few_notes(notes, room=4) == ["note: a", "note: b", "note: c", "2 more notes with --verbose"]
    assert few_notes(notes, room=5) == [f"note: {each}" for each in "abcde"]
    assert few_notes(notes, room=0) == ["5 notes with --verbose"]


def test_a_note_for_which_there_is_one_line_is_cut_and_not_counted():
    line, more = few_notes([("warning", "useless " * 40), ("note", "a"), ("note", "b")], room=2)
    assert more == "2 more notes with --verbose"
    assert line.startswith("warning: useless useless ")
    assert line.endswith("…")
    assert len(line) <= 80


def test_warm_up_is_named_while_it_lasts_and_compiling_only_while_it_happens(monkeypatch):
    bar = Progress()
    bar.add_task("training", total=3, shown="loss 1")
    (task,) = bar.tasks
    column = train_view.RoundsColumn()
    seen = []

    def compiled_loop(value: int) -> int:
        seen.append(column.render(task).plain)
        return value

    monkeypatch.setattr("numba.njit", lambda **_: lambda function: function)
    assert column.render(task).plain == "warm-up"
    loop = _compiled.compiled(compiled_loop)
    assert [loop(1), loop(2)] == [1, 2]
    assert seen == ["warm-up: compiling loops", "warm-up"]
    bar.update(task.id, completed=1)
    assert re.fullmatch(r"round 1/3  loss 1", column.render(task).plain)
