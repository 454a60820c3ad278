"""Killed, and continued: the same schedule, new keys, every release counted, damage noticed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pbmvfl.files import write_atomically
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit, epsilon_at
from pbmvfl.plan import Plan
from pbmvfl.privacy.accounting import rdp_curve
from pbmvfl.privacy.table import training_run
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.runs.checkpoints import Progress, load_progress, load_weights, save_checkpoint
from pbmvfl.runs.driver import Meter

MAIN = "from pbmvfl.cli import main; main()"
#: The command in a process that ends itself, as kill -9 does, when its n-th embedding crosses the wire.
SUICIDE = """
import os, signal, sys
from pbmvfl.runs.driver import Meter
from pbmvfl.cli import main
left = int(sys.argv.pop(1))
record = Meter.record
def count(self, direction, party, data, *, setup):
    global left
    record(self, direction, party, data, setup=setup)
    left -= data[5] == 6
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
Meter.record = count
main()
"""
EMBEDDING = 6
ROUNDS_PER_EPOCH = 4  # 32 training rows in batches of 8
PARTIES = 2


def write_table(folder: Path) -> None:
    random = np.random.default_rng(8)
    lines = ["a,b,c,y"]
    for label in random.integers(0, 2, 40):
        lines.append(",".join(f"{2 * label + value:.5f}" for value in random.normal(size=3)) + f",{label}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")


def command(*options: object, epochs: int = 6) -> list[str]:
    usual = ("--data", "table.csv", "--label", "y", "--columns", "one=a,b;two=c", "--encoder", "linear")
    sizes = ("--num-epochs", epochs, "--batch-size", 8, "--embedding-dim", 2, "--num-trials", 3, "--optimizer", "sgd")
    return [str(word) for word in ("train", *usual, *sizes, "--json", *options)]


@pytest.fixture
def cli(monkeypatch, run_main, tmp_path) -> Callable[..., tuple[int, str, str]]:
    """The command in this process: exit code, stdout, and stderr without line breaks."""
    write_table(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        code, out, err = run_main(*arguments)
        return code, out, "".join(err.split())

    return run


@pytest.fixture
def killed_at(run_process, tmp_path) -> Callable[[int, list[str]], None]:
    """The command in a process that is killed when its n-th embedding crosses the wire."""

    def run(embedding: int, arguments: list[str]) -> None:
        done = run_process(embedding, *arguments, program=SUICIDE, cwd=tmp_path)
        assert done.returncode == -signal.SIGKILL, done.stderr

    return run


def interrupted_at(embedding: int, monkeypatch, cli, arguments: list[str]) -> str:
    """Ctrl-C in this process when the n-th embedding crosses the wire: quicker than a process, and as sudden."""
    record, seen = Meter.record, []

    def count(self: Meter, direction: str, party: int, data: bytes, *, setup: bool) -> None:
        record(self, direction, party, data, setup=setup)
        seen.append(data[5] == EMBEDDING)
        if sum(seen) == embedding:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Meter, "record", count)
        code, out, _ = cli(*arguments)
    assert code == 130
    return out


def states(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.stem: load_file(path) for path in sorted(run.glob("checkpoints/round-*/*.safetensors"))}


def assert_same_states(first: dict, second: dict) -> None:
    assert set(first) == set(second) == {"server", "party-0", "party-1"}
    for role, state in first.items():
        assert state.keys() == second[role].keys()
        for name, value in state.items():
            assert torch.equal(value, second[role][name]), (role, name)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- kill -9 ---


@pytest.mark.slow
def test_a_run_killed_from_outside_is_continued_to_the_same_schedule_with_new_keys(cli, tmp_path):
    epochs = 120
    index = tmp_path / "run/checkpoints/checkpoint.json"
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *command("--out", "run", epochs=epochs)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 60
        while not index.exists() or json.loads(index.read_text())["completed_rounds"] < 3 * ROUNDS_PER_EPOCH:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < end, "no checkpoint after a minute"
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "run/result.json").exists()
    plan = Plan.from_json((tmp_path / "run/plan.json").read_text())
    kept = json.loads(index.read_text())

    code, out, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert [line["epoch"] for line in result["history"]] == list(range(1, epochs + 1))
    assert result["history"][: len(kept["history"])] == kept["history"]
    assert result["plan_hash"] == plan.hash.hex() == kept["plan_hash"]
    assert result["plan"] == plan.to_dict()
    first, second = result["sessions"]
    assert first["session"] != second["session"]
    assert first["first_round"] == 0
    assert second["first_round"] == kept["completed_rounds"] > 0
    assert first["charged_until"] >= second["first_round"]
    assert second["charged_until"] == plan.num_rounds
    uses = [-(-s["charged_until"] // ROUNDS_PER_EPOCH) - s["first_round"] // ROUNDS_PER_EPOCH for s in (first, second)]
    assert result["row_uses"]["train"] == sum(uses) >= epochs
    assert any("resumed" in note for note in result["notes"])
    assert (tmp_path / "run/result.json").read_text() == out
    assert (tmp_path / "run/curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("embedding", "resumes_at", "train_uses"),
    [
        (3, 0, 7),  # in the first epoch: nothing was saved, and its rows are released again
        (2 * PARTIES * ROUNDS_PER_EPOCH + 1, 2 * ROUNDS_PER_EPOCH, 7),  # the third epoch's first message
        (3 * PARTIES * ROUNDS_PER_EPOCH, 2 * ROUNDS_PER_EPOCH, 7),  # the third epoch's last message
    ],
)
def test_rounds_that_ran_twice_are_counted_twice(embedding, resumes_at, train_uses, cli, monkeypatch):
    interrupted_at(embedding, monkeypatch, cli, command("--out", "run"))
    code, out, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["sessions"][1]["first_round"] == resumes_at
    assert result["row_uses"] == {"train": train_uses, "test": 0}
    plan = Plan.from_dict(result["plan"])
    spent = {(row["unit"], row["accounting"]): row["epsilon"] for row in reversed(result["privacy"])}
    for unit in ("cell", "record"):
        one_more = plan.replace(num_epochs=7).privacy().epsilon(unit, "paper")
        assert spent[unit, "paper"] == one_more > plan.privacy().epsilon(unit, "paper")


def test_a_run_killed_twice_has_three_sessions_with_three_ids(cli, monkeypatch):
    interrupted_at(20, monkeypatch, cli, command("--out", "run"))
    interrupted_at(10, monkeypatch, cli, ["train", "--resume", "run", "--json"])
    code, out, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert len({session["session"] for session in result["sessions"]}) == 3
    assert [line["epoch"] for line in result["history"]] == [1, 2, 3, 4, 5, 6]
    # 20 embeddings are epochs 1, 2 and half of 3; ten more from epoch 3 on are it and a part of 4; then 4, 5, 6
    assert [session["first_round"] for session in result["sessions"]] == [0, 8, 12]
    assert result["row_uses"]["train"] == 3 + 2 + 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--momentum", 0.9, "--gradient-codec", "int8"),
        ("--optimizer", "adam", "--evaluation", "released", "--gradient-codec", "bfloat16"),
    ],
    ids=["sgd with momentum", "adam"],
)
def test_without_noise_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(options, cli, killed_at, tmp_path):
    exact = ("--mechanism", "none", *options)
    killed_at(21, command(*exact, "--out", "killed"))
    code, out, err = cli("train", "--resume", "killed", "--json")
    assert code == 0, err
    assert cli(*command(*exact, "--out", "whole"))[0] == 0
    assert_same_states(states(tmp_path / "killed"), states(tmp_path / "whole"))
    whole = json.loads((tmp_path / "whole/result.json").read_text())
    resumed = json.loads(out)
    assert resumed["metrics"] == whole["metrics"]
    for left, right in zip(resumed["history"], whole["history"], strict=True):
        left.pop("seconds"), right.pop("seconds")
        assert left == right
    assert any(name.startswith("moment.") for name in states(tmp_path / "whole")["server"])


def test_with_noise_a_resumed_run_draws_anew(cli, monkeypatch, tmp_path):
    """Two copies of one killed run go different ways: nothing random was kept."""
    interrupted_at(13, monkeypatch, cli, command("--out", "one"))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert [cli("train", "--resume", name, "--json")[0] for name in ("one", "two")] == [0, 0]
    one, two = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two"))
    assert one["sessions"][0] == two["sessions"][0]
    assert one["sessions"][1]["session"] != two["sessions"][1]["session"]
    with pytest.raises(AssertionError, match=r"server|party"):
        assert_same_states(states(tmp_path / "one"), states(tmp_path / "two"))


# --- an interrupted run, in this process ---


@pytest.fixture
def interrupted(cli, monkeypatch, tmp_path) -> Path:
    assert interrupted_at(21, monkeypatch, cli, command("--out", "run")) == ""
    return tmp_path / "run"


def test_an_interrupted_run_says_how_to_continue(cli, monkeypatch):
    arguments = [word for word in command("--out", "run") if word != "--json"]
    assert "pbmvfl train --resume run" in interrupted_at(21, monkeypatch, cli, arguments)


def test_a_resumed_run_prints_before_it_starts_what_it_will_have_cost_at_its_end(cli, monkeypatch):
    arguments = [word for word in command("--out", "run") if word != "--json"]
    interrupted_at(21, monkeypatch, cli, arguments)
    code, out, _ = cli("train", "--resume", "run")
    assert code == 0
    assert "continues at round 8 of" in out
    cells = [line.split() for line in out.splitlines() if line.split()[:2] == ["cell", "paper"]]
    assert len(cells) == 2
    assert cells[0] == cells[1]
    fresh = cli(*(word if word != "run" else "other" for word in arguments))[1]
    (planned, *_) = (line.split() for line in fresh.splitlines() if line.split()[:2] == ["cell", "paper"])
    assert planned != cells[0]


def test_an_interrupt_gives_back_what_was_charged_and_never_asked_for(cli, monkeypatch, tmp_path):
    interrupted_at(21, monkeypatch, cli, command("--out", "run", "--checkpoint-every", "2"))
    (session,) = json.loads((tmp_path / "run" / "sessions.json").read_text())
    # 21 embeddings of two parties: ten rounds are complete and the eleventh is under way
    assert session["charged_until"] == 11


def test_checkpoints_hold_weights_and_no_keys_and_no_noise(interrupted):
    names = {role: set(state) for role, state in states(interrupted).items()}
    assert names == {
        "server": {"model.weight", "model.bias"},
        "party-0": {"model.network.0.weight", "model.network.0.bias"},
        "party-1": {"model.network.0.weight", "model.network.0.bias"},
    }
    assert {path.name for path in (interrupted / "checkpoints").iterdir()} == {
        "checkpoint.json",
        "round-0000008",
    }
    index = json.loads((interrupted / "checkpoints/checkpoint.json").read_text())
    assert set(index) == {
        "plan",
        "plan_hash",
        "weights",
        "completed_rounds",
        "run_id",
        "seconds",
        "traffic",
        "history",
    }
    sessions = json.loads((interrupted / "sessions.json").read_text())
    known = {"session", "first_round", "charged_until", "noise_is_seeded", "plan_hash"}
    assert [set(session) for session in sessions] == [known]


def test_a_finished_run_prints_its_result_again_and_trains_nothing(cli, monkeypatch, tmp_path):
    code, first, _ = cli(*command("--out", "run"))
    assert code == 0
    before = {str(path): path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something crossed the wire")

    monkeypatch.setattr(Meter, "record", refuse)
    code, again, err = cli("train", "--resume", "run", "--json")
    assert (code, err) == (0, "")
    assert again == first
    assert {str(path): path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_a_run_killed_after_its_last_checkpoint_only_writes_its_result(cli, tmp_path):
    assert cli(*command("--out", "run"))[0] == 0
    whole = json.loads((tmp_path / "run/result.json").read_text())
    (tmp_path / "run/result.json").unlink()
    code, out, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["history"] == whole["history"]
    assert result["metrics"] == whole["metrics"]
    assert result["row_uses"] == whole["row_uses"]
    assert result["privacy"] == whole["privacy"]


def test_a_killed_run_that_never_reached_a_checkpoint_starts_again_and_counts_both(cli, monkeypatch, tmp_path):
    interrupted_at(1, monkeypatch, cli, command("--out", "run"))
    assert not (tmp_path / "run/checkpoints/checkpoint.json").exists()
    code, out, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    assert json.loads(out)["row_uses"]["train"] == 7


def test_a_run_with_a_ledger_is_not_continued_around_it(cli, monkeypatch, tmp_path):
    interrupted_at(21, monkeypatch, cli, command("--ledger", "books", "--out", "run"))
    code, _, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    charged = Ledger(tmp_path / "books/party-0.sqlite", must_exist=True).sessions("table")
    assert len(charged) == 2


@pytest.mark.parametrize("missing", ["all of them", "one of them"])
def test_a_run_whose_ledgers_are_gone_is_refused_and_says_where_they_were(missing, cli, monkeypatch, tmp_path):
    interrupted_at(21, monkeypatch, cli, command("--ledger", "books", "--out", "run"))
    path = tmp_path / ("books" if missing == "all of them" else "books/party-1.sqlite")
    path.rename(tmp_path / "elsewhere")
    before = tree(tmp_path)
    code, out, words = cli("train", "--resume", "run", "--json")
    assert (code, out) == (2, "")
    assert f"ledger='{path}'" in words
    assert "back" in words
    assert tree(tmp_path) == before
    (tmp_path / "elsewhere").rename(path)
    assert cli("train", "--resume", "run", "--json")[0] == 0


def test_a_finished_run_shows_its_result_although_its_ledgers_are_gone(cli, tmp_path):
    _, first, _ = cli(*command("--ledger", "books", "--out", "run", epochs=1))
    shutil.rmtree(tmp_path / "books")
    assert cli("train", "--resume", "run", "--json") == (0, first, "")


# --- ended by a ledger ---


def set_limit(folder: Path, plan: Plan, uses: float) -> None:
    """Party 1 permits so many uses of every row."""
    one = training_run(plan.replace(num_epochs=1))
    divergence = uses * rdp_curve(one, Unit.CELL, Accounting.PAPER, orders=(4.0,))[0]
    choice = {"unit": "cell", "accounting": "paper", "delta": 1e-5, "order": 4.0}
    book = Ledger(folder / "books/party-1.sqlite")
    book.set_limit("table", Limit.choose(epsilon=epsilon_at(divergence, 1e-5, 4.0), **choice))
    book.close()


@pytest.fixture
def stopped(cli, tmp_path) -> Plan:
    """A run of six epochs that a limit of two and a half uses a row ended after two."""
    assert cli(*command("--out", "probe"))[0] == 0
    plan = Plan.from_json((tmp_path / "probe/plan.json").read_text())
    set_limit(tmp_path, plan, 2.5)
    code, out, err = cli(*command("--ledger", "books", "--out", "run"))
    assert code == 3, err
    assert [line["epoch"] for line in json.loads(out)["history"]] == [1, 2]
    return plan


def test_a_run_that_a_limit_ended_goes_on_when_the_limit_is_raised(stopped, cli, tmp_path):
    set_limit(tmp_path, stopped, 10)
    code, out, err = cli("train", "--resume", "run")
    assert code == 0, err
    assert "ended by a party's ledger; it goes on" in " ".join(out.split())
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["stopped"] == ""
    assert [line["epoch"] for line in result["history"]] == [1, 2, 3, 4, 5, 6]
    assert [session["first_round"] for session in result["sessions"]] == [0, 2 * ROUNDS_PER_EPOCH]
    # the refused round may have left party 0, so its rows were used once more
    assert result["row_uses"] == {"train": 7, "test": 0}
    charged = [
        [(entry.first_round, entry.charged_until) for entry in Ledger(book, must_exist=True).sessions("table")]
        for book in (tmp_path / "books/party-0.sqlite", tmp_path / "books/party-1.sqlite")
    ]
    assert charged == [[(0, 9), (8, 24)], [(0, 8), (8, 24)]]
    again = cli("train", "--resume", "run", "--json")
    assert again == (0, (tmp_path / "run/result.json").read_text(), "")


def test_a_run_goes_on_from_the_middle_of_an_epoch(cli, monkeypatch, tmp_path):
    """The limit comes with the sixth round, so the seventh is refused: one and a half epochs are kept."""
    assert cli(*command("--out", "probe"))[0] == 0
    plan = Plan.from_json((tmp_path / "probe/plan.json").read_text())
    record, seen = Meter.record, []

    def strike(self: Meter, direction: str, party: int, data: bytes, *, setup: bool) -> None:
        record(self, direction, party, data, setup=setup)
        seen.append(data[5] == EMBEDDING)
        if sum(seen) == 6 * PARTIES and seen[-1]:
            set_limit(tmp_path, plan, 0.5)

    with monkeypatch.context() as patch:
        patch.setattr(Meter, "record", strike)
        code, out, err = cli(*command("--ledger", "books", "--out", "run"))
    assert code == 3, err
    assert [line["epoch"] for line in json.loads(out)["history"]] == [1, 1.5]
    set_limit(tmp_path, plan, 10)
    code, out, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert [line["epoch"] for line in result["history"]] == [1, 1.5, 2, 3, 4, 5, 6]
    assert [(session["first_round"], session["charged_until"]) for session in result["sessions"]] == [(0, 7), (6, 24)]
    assert result["row_uses"]["train"] == 7


def test_a_run_that_is_refused_again_loses_nothing_even_if_it_is_killed_then(stopped, cli, monkeypatch, tmp_path):
    """Its second checkpoint is of the same round as its first."""
    kept = states(tmp_path / "run")
    writes = []

    def killed(path: Path, data: str | bytes) -> None:
        if path.suffix == ".safetensors":
            writes.append(path)
            if len(writes) == 2:
                raise KeyboardInterrupt
        write_atomically(path, data)

    with monkeypatch.context() as patch:
        patch.setattr("pbmvfl.runs.checkpoints.write_atomically", killed)
        assert cli("train", "--resume", "run", "--json")[0] == 130
    assert len(writes) == 2
    index = json.loads((tmp_path / "run" / INDEX).read_text())
    named = tmp_path / "run/checkpoints" / index["weights"]
    assert_same_states({path.stem: load_file(path) for path in named.iterdir()}, kept)
    set_limit(tmp_path, stopped, 20)
    code, out, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    assert [line["epoch"] for line in json.loads(out)["history"]] == [1, 2, 3, 4, 5, 6]
    assert len(states(tmp_path / "run")) == 3
    assert len(list((tmp_path / "run/checkpoints").glob("round-*"))) == 1


@pytest.mark.parametrize("crash_at", range(1, 6))
def test_a_second_checkpoint_of_one_round_leaves_the_first_or_is_whole(crash_at, monkeypatch, tmp_path):
    plan = Plan.of(num_parties=2, num_samples=32, num_classes=2, batch_size=8)
    traffic = {"bytes_setup": 1, "bytes_up": 1, "bytes_down": 1, "rounds": 5}
    progress = Progress(completed_rounds=5, run_id="ab" * 8, seconds=1.0, traffic=traffic, history=[{"epoch": 1}])

    def save_all(value: float, later: Progress) -> None:
        weights = [{"weight": torch.full((2,), value + role)} for role in range(3)]
        save_checkpoint(tmp_path, plan, later, server=weights[0], parties=weights[1:])

    class Crash(Exception):
        pass

    def crashing(path: Path, data: str | bytes) -> None:
        count.append(path)
        if len(count) == crash_at:
            raise Crash
        write_atomically(path, data)

    count: list[Path] = []
    save_all(0.0, progress)
    monkeypatch.setattr("pbmvfl.runs.checkpoints.write_atomically", crashing)
    survived = crash_at > 4  # three roles and the index
    if survived:
        save_all(10.0, replace(progress, seconds=2.0))
    else:
        with pytest.raises(Crash):
            save_all(10.0, replace(progress, seconds=2.0))
    server, parties = load_weights(tmp_path, plan)
    found = [float(state["weight"][0]) for state in (server, *parties)]
    assert found == ([10.0, 11.0, 12.0] if survived else [0.0, 1.0, 2.0])
    assert load_progress(tmp_path, plan) == replace(progress, seconds=2.0 if survived else 1.0)
    monkeypatch.undo()
    save_all(20.0, progress)
    assert float(load_weights(tmp_path, plan)[0]["weight"][0]) == 20.0
    assert len(list(tmp_path.glob("round-*"))) == 1


# --- what a resumed run says of itself ---


def notes_about_traffic(result: dict) -> list[str]:
    return [note for note in result["notes"] if "bytes of up to" in note]


def test_a_resumed_run_says_how_many_rounds_bytes_it_does_not_know(cli, monkeypatch, tmp_path):
    interrupted_at(21, monkeypatch, cli, command("--out", "run"))
    code, out, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    result = json.loads(out)
    (note,) = notes_about_traffic(result)
    asked = -(-21 // PARTIES)  # the round under way counts
    assert f"up to {asked - 2 * ROUNDS_PER_EPOCH} rounds" in note  # of the third epoch
    plan = Plan.from_dict(result["plan"])
    assert result["traffic"]["bytes_up"] == plan.traffic().bytes_up  # as if nothing had been sent twice
    assert cli(*command("--out", "whole"))[0] == 0
    assert not notes_about_traffic(json.loads((tmp_path / "whole/result.json").read_text()))


def test_a_resumed_run_that_sent_nothing_twice_does_not_say_so(cli, tmp_path):
    assert cli(*command("--out", "run"))[0] == 0
    (tmp_path / "run/result.json").unlink()
    code, out, _ = cli("train", "--resume", "run", "--json")
    assert code == 0
    assert len(json.loads(out)["sessions"]) == 2
    assert not notes_about_traffic(json.loads(out))


def deltas(text: str) -> set[float]:
    return {row["delta"] for row in json.loads(text)["privacy"]}


def test_a_resumed_run_keeps_the_delta_that_it_was_started_with(cli, monkeypatch, tmp_path):
    interrupted_at(21, monkeypatch, cli, command("--out", "run", "--delta", 1e-3))
    code, out, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    assert deltas(out) == {1e-3}
    assert (tmp_path / "run/result.json").read_text() == out
    assert cli("train", "--resume", "run", "--json") == (0, out, "")  # finished
    assert deltas(cli("train", "--resume", "run", "--json", "--delta", 1e-7)[1]) == {1e-7}
    assert (tmp_path / "run/result.json").read_text() == out


def test_a_run_folder_of_an_earlier_version_has_the_usual_delta(interrupted, cli):
    without("delta")(interrupted / "data.json")
    code, out, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    assert deltas(out) == {1e-5}


# --- damage ---


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00garbage" * 5)


def removed(path: Path) -> None:
    path.unlink()


def of_another_network(path: Path) -> None:
    save_file({name: torch.zeros(7, 7) for name in load_file(path)}, path)


def without(*names: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        values = json.loads(path.read_text())
        path.write_text(json.dumps({name: value for name, value in values.items() if name not in names}))

    change.__name__ = f"without {' '.join(names)}"
    return change


def a_list(path: Path) -> None:
    path.write_text("[]")


def of_another_protocol(path: Path) -> None:
    """As an older version of the program would have left it: the same plan under another hash."""
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "plan_hash": "00" * 32}))


INDEX, SESSIONS = "checkpoints/checkpoint.json", "sessions.json"
SERVER, PARTY = "checkpoints/round-0000008/server.safetensors", "checkpoints/round-0000008/party-1.safetensors"
DAMAGE = [
    (INDEX, cut_short),
    (INDEX, emptied),
    (SERVER, cut_short),
    (SERVER, emptied),
    (SERVER, garbage),
    (SERVER, removed),
    (SERVER, of_another_network),
    (PARTY, cut_short),
    (PARTY, removed),
    (PARTY, of_another_network),
    ("plan.json", cut_short),
    ("data.json", cut_short),
    ("data.json", removed),
    (INDEX, garbage),
    (INDEX, a_list),
    (INDEX, without("plan_hash")),
    (INDEX, without("weights")),
    (INDEX, without("history")),
    (INDEX, of_another_protocol),
    (SESSIONS, cut_short),
    (SESSIONS, garbage),
    ("plan.json", garbage),
    ("data.json", garbage),
    ("data.json", a_list),
    ("data.json", without("dataset")),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_run_is_refused_and_left_as_it_is(name, damage, interrupted, cli):
    damage(interrupted / name)
    before = tree(interrupted)
    code, out, words = cli("train", "--resume", "run", "--json")
    assert code == 2
    assert out == ""
    assert words.startswith("error:")
    assert tree(interrupted) == before


def test_a_checkpoint_without_its_count_of_releases_is_refused(interrupted, cli):
    removed(interrupted / SESSIONS)
    before = tree(interrupted)
    code, _, words = cli("train", "--resume", "run", "--json")
    assert code == 2
    assert "sessions.json" in words
    assert tree(interrupted) == before


@pytest.mark.parametrize("options", [("--momentum", 0.9), ("--optimizer", "adam")], ids=["sgd", "adam"])
def test_a_checkpoint_that_lacks_the_optimizer_s_moments_is_refused(options, cli, monkeypatch, tmp_path):
    interrupted_at(21, monkeypatch, cli, command(*options, "--out", "run"))
    path = tmp_path / "run" / PARTY
    save_file({name: value for name, value in load_file(path).items() if not name.startswith("moment.")}, path)
    code, _, words = cli("train", "--resume", "run", "--json")
    assert code == 2
    assert "checkpoint" in words


@pytest.mark.parametrize("damage", [cut_short, garbage, without("metrics")], ids=lambda damage: damage.__name__)
def test_a_damaged_result_is_refused_by_file_and_left_as_it_is(damage, cli, tmp_path):
    assert cli(*command("--out", "run", epochs=1))[0] == 0
    damage(tmp_path / "run/result.json")
    before = tree(tmp_path / "run")
    code, out, words = cli("train", "--resume", "run", "--json")
    assert code == 2
    assert out == ""
    assert "result.json" in words
    assert tree(tmp_path / "run") == before


def test_changed_columns_are_not_continued_in_silence(interrupted, cli, tmp_path):
    """Fewer rows than the plan has: another table under the same name."""
    lines = (tmp_path / "table.csv").read_text().splitlines()
    (tmp_path / "table.csv").write_text("\n".join(lines[:-10]) + "\n")
    before = tree(interrupted)
    code, _, words = cli("train", "--resume", "run", "--json")
    assert code == 2
    assert "num_samples=32" in words
    assert tree(interrupted) == before
