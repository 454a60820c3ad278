"""Killed, and continued: the same schedule, new keys, every release counted, damage noticed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pbmvfl._files import write_atomically
from pbmvfl.federation.checkpoints import Checkpoints
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit, epsilon_at
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import rdp_curve
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.protocol.session import Meter
from support.command_line import run_command
from support.federation_runs import change_index, counted_uses, files_of, newest_states, weights
from support.ledger_books import kill_after

EMBEDDING = 6
ROUNDS_PER_EPOCH = 4  # 32 training rows in batches of 8
PARTIES = 2


def write_table(folder: Path) -> None:
    random = np.random.default_rng(8)
    lines = ["a,b,c,y,person"]
    for row, label in enumerate(random.integers(0, 2, 40)):
        lines.append(",".join(f"{2 * label + value:.5f}" for value in random.normal(size=3)) + f",{label},{row}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")


def command(*options: object, epochs: int = 6) -> list[str]:
    usual = ("--data", "table.csv", "--label", "y", "--columns", "one=a,b;two=c", "--id", "person")
    sizes = ("--num-epochs", epochs, "--batch-size", 8, "--embedding-dim", 2, "--num-trials", 3, "--optimizer", "sgd")
    return [str(word) for word in ("train", *usual, "--encoder", "linear", *sizes, "--json", *options)]


@pytest.fixture
def cli(monkeypatch, run_main, tmp_path) -> Callable[..., tuple[int, str, str]]:
    """The command in this process: exit code, stdout, and stderr without line breaks."""
    write_table(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        code, out, err = run_main(*arguments)
        return code, out, "".join(err.split())

    return run


def killed_at(embedding: int, arguments: list[str], folder: Path) -> None:
    """The command in a process that gets kill -9 from outside when its n-th embedding crosses the wire."""

    def train(pipe: int) -> None:
        record, left = Meter.record, embedding

        def count(self: Meter, direction: str, party: int, data: bytes, *, setup: bool) -> None:
            nonlocal left
            record(self, direction, party, data, setup=setup)
            left -= data[5] == EMBEDDING
            if not left:
                os.write(pipe, bytes(4))
                signal.pause()  # until it is killed

        Meter.record = count  # type: ignore[method-assign]
        run_command(*arguments, cwd=folder)

    assert kill_after(1, train) == 1


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
    return weights(run / "checkpoints")


def index_of(run: Path, role: str = "server") -> dict[str, Any]:
    index: dict[str, Any] = json.loads((run / "checkpoints" / role / "checkpoints.json").read_text())
    return index


def epochs_of(run: Path) -> list[dict[str, Any]]:
    """The epochs in the file beside the server's checkpoints, by its lines and not by its reader."""
    lines = (run / "checkpoints/server/history.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "before"} for line in lines]


def spans(result: dict[str, Any]) -> list[tuple[int, int]]:
    return [(session["first_round"], session["charged_until"]) for session in result["sessions"]]


def uses(result: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """What a result says, checked against every row of every round that was charged."""
    said = {
        kind: (each["releases"], each["updates"], each["total_releases"]) for kind, each in result["row_uses"].items()
    }
    assert said == counted_uses(Plan.from_dict(result["plan"]), spans(result))
    return said


def assert_same_states(first: dict, second: dict) -> None:
    assert set(first) == set(second) == {"server", "party-0", "party-1"}
    for role, state in first.items():
        assert state.keys() == second[role].keys()
        for name, value in state.items():
            assert torch.equal(value, second[role][name]), (role, name)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- kill -9 ---


@pytest.mark.usefixtures("rendered_curves")
@pytest.mark.slow
def test_a_run_killed_from_outside_is_continued_to_the_same_schedule_with_new_keys(cli, tmp_path):
    run = tmp_path / "run"
    killed_at(3 * PARTIES * ROUNDS_PER_EPOCH + 3, command("--out", "run"), tmp_path)
    assert not (run / "result.json").exists()
    plan = Plan.from_json((run / "plan.json").read_text())
    kept = index_of(run)
    assert [state["completed_rounds"] for state in kept["states"]] == [2 * ROUNDS_PER_EPOCH, 3 * ROUNDS_PER_EPOCH]
    before = epochs_of(run)

    code, out, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert [line["epoch"] for line in result["history"]] == [1, 2, 3, 4, 5, 6]
    assert result["history"][:3] == before
    assert result["plan_hash"] == plan.hash.hex() == kept["plan_hash"]
    assert result["plan"] == plan.to_dict()
    assert index_of(run)["run_id"] == kept["run_id"]
    first, second = result["sessions"]
    assert first["session"] != second["session"]
    # Killed in the fourth epoch, which was charged as a whole before its first message.
    assert spans(result) == [(0, 4 * ROUNDS_PER_EPOCH), (3 * ROUNDS_PER_EPOCH, len(plan.schedule))]
    assert uses(result) == {"joint": (7, 7, 7 * 32)}
    assert any("resumed" in note for note in result["notes"])
    assert (run / "result.json").read_text() == out
    assert (run / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("embedding", "resumes_at", "charged_until"),
    [
        (3, 0, 2),  # in the first epoch: nothing was saved, and its rows are released again
        (2 * PARTIES * ROUNDS_PER_EPOCH + 1, 2 * ROUNDS_PER_EPOCH, 9),  # the third epoch's first message
        (3 * PARTIES * ROUNDS_PER_EPOCH, 2 * ROUNDS_PER_EPOCH, 12),  # the third epoch's last message
    ],
)
def test_rounds_that_ran_twice_are_counted_twice(embedding, resumes_at, charged_until, cli, monkeypatch):
    interrupted_at(embedding, monkeypatch, cli, command("--out", "run"))
    code, out, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert spans(result) == [(0, charged_until), (resumes_at, 24)]
    assert uses(result) == {"joint": (7, 7, 6 * 32 + 8 * (charged_until - resumes_at))}
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
    # 20 embeddings are epochs 1, 2 and half of 3; ten more from epoch 3 on are it and a round of 4; then 4, 5, 6
    assert spans(result) == [(0, 10), (8, 13), (12, 24)]
    ((most, _, total),) = uses(result).values()
    assert most in (7, 8)  # 8 if a row of the round of epoch 4 was in that half of epoch 3 too
    assert total == (24 + 2 + 1) * 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--momentum", 0.9, "--gradient-codec", "int8"),
        ("--optimizer", "adam", "--evaluation", "released", "--gradient-codec", "bfloat16"),
    ],
    ids=["sgd with momentum", "adam"],
)
def test_without_noise_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(options, cli, tmp_path):
    exact = ("--mechanism", "none", *options)
    killed_at(21, command(*exact, "--out", "killed"), tmp_path)
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
    code, out, _ = cli("train", "--resume", "run", "-v")
    assert code == 0
    assert "continues at round 8 of" in out
    cells = [line.split() for line in out.splitlines() if line.split()[:2] == ["cell", "paper"]]
    assert len(cells) == 2
    assert cells[0] == cells[1]
    fresh = cli(*(word if word != "run" else "other" for word in arguments), "-v")[1]
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
        "party-0": {"model.network.0.weight", "model.network.0.bias", "run.public_start"},
        "party-1": {"model.network.0.weight", "model.network.0.bias", "run.public_start"},
    }
    for role in names:
        index = index_of(interrupted, role)
        assert set(index) == {"format", "plan", "plan_hash", "run_id", "states", "sha256"}
        assert [state["completed_rounds"] for state in index["states"]] == [4, 8]
        for state in index["states"]:
            assert set(state) == {"completed_rounds", "file", "sha256", "notes"}
            assert set(state["notes"]) == ({"seconds", "traffic", "history"} if role == "server" else set())
        folder = interrupted / "checkpoints" / role
        assert {path.name for path in folder.iterdir()} == files_of(folder)
    sessions = json.loads((interrupted / "sessions.json").read_text())
    known = {"session", "first_round", "charged_until", "noise_is_seeded", "plan_hash", "public_start", "sha256"}
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
    assert not list((tmp_path / "run").rglob("checkpoints.json"))
    code, out, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    assert spans(json.loads(out)) == [(0, 1), (0, 24)]
    assert uses(json.loads(out)) == {"joint": (7, 7, 6 * 32 + 8)}


def test_a_run_with_a_ledger_is_not_continued_around_it(cli, monkeypatch, tmp_path):
    interrupted_at(21, monkeypatch, cli, command("--ledger", "books", "--out", "run"))
    code, _, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    charged = Ledger(tmp_path / "books/one.sqlite", must_exist=True).sessions("table")
    assert len(charged) == 2


@pytest.mark.parametrize("missing", ["all of them", "one of them"])
def test_a_run_whose_ledgers_are_gone_is_refused_and_says_where_they_were(missing, cli, monkeypatch, tmp_path):
    interrupted_at(21, monkeypatch, cli, command("--ledger", "books", "--out", "run"))
    path = tmp_path / ("books" if missing == "all of them" else "books/two.sqlite")
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
    one = plan.replace(num_epochs=1).training_run()
    divergence = uses * rdp_curve(one, Unit.CELL, Accounting.PAPER, orders=(4.0,))[0]
    choice = {"unit": "cell", "accounting": "paper", "delta": 1e-5, "order": 4.0}
    Ledger(folder / "books/one.sqlite").close()
    book = Ledger(folder / "books/two.sqlite")
    book.set_limit("table", Limit.choose(epsilon=epsilon_at(divergence, 1e-5, 4.0), **choice))
    book.close()


@pytest.fixture
def stopped(cli, tmp_path) -> Plan:
    """A run of six epochs that a limit of two and a half uses a row ended after two."""
    assert cli(*command("--out", "probe"))[0] == 0
    plan = Plan.from_json((tmp_path / "probe/plan.json").read_text())
    set_limit(tmp_path, plan, 2.5)
    code, out, err = cli(*command("--ledger", "books", "--out", "run", "--exact-metrics", "--until-limit"))
    assert code == 3, err
    assert [line["epoch"] for line in json.loads(out)["history"]] == [1, 2]
    return plan


def test_a_run_that_a_limit_ended_goes_on_when_the_limit_is_raised(stopped, cli, tmp_path):
    set_limit(tmp_path, stopped, 10)
    code, out, err = cli("train", "--resume", "run", "--exact-metrics", "--verbose")
    assert code == 0, err
    assert "ended by a party's ledger; training continues from there" in " ".join(out.split())
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["stopped"] == ""
    assert [line["epoch"] for line in result["history"]] == [1, 2, 3, 4, 5, 6]
    # the refused round may have left party 0, so its rows were used once more
    assert spans(result) == [(0, 9), (8, 24)]
    assert uses(result) == {"joint": (7, 7, 6 * 32 + 8)}
    charged = [
        [(entry.first_round, entry.charged_until) for entry in Ledger(book, must_exist=True).sessions("table")]
        for book in (tmp_path / "books/one.sqlite", tmp_path / "books/two.sqlite")
    ]
    assert charged == [[(0, 9), (8, 24)], [(0, 8), (8, 24)]]
    again = cli("train", "--resume", "run", "--json", "--exact-metrics")
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
        code, out, err = cli(*command("--ledger", "books", "--out", "run", "--exact-metrics"))
    assert code == 3, err
    assert [line["epoch"] for line in json.loads(out)["history"]] == [1, 1.5]
    set_limit(tmp_path, plan, 10)
    code, out, err = cli("train", "--resume", "run", "--json", "--exact-metrics")
    assert code == 0, err
    result = json.loads(out)
    assert [line["epoch"] for line in result["history"]] == [1, 1.5, 2, 3, 4, 5, 6]
    assert spans(result) == [(0, 7), (6, 24)]
    assert uses(result) == {"joint": (7, 7, 6 * 32 + 8)}


def test_a_run_that_is_refused_again_loses_nothing_even_if_it_is_killed_then(stopped, cli, monkeypatch, tmp_path):
    """Its second checkpoint is of the same round as its first."""
    kept = states(tmp_path / "run")
    writes = []

    def killed(path: Path, data: str | bytes, *, mode: int) -> None:
        if path.suffix == ".safetensors":
            writes.append(path)
            if len(writes) == 2:
                raise KeyboardInterrupt
        write_atomically(path, data, mode=mode)

    with monkeypatch.context() as patch:
        patch.setattr("pbmvfl.federation.checkpoints.write_atomically", killed)
        assert cli("train", "--resume", "run", "--json", "--exact-metrics", "--until-limit")[0] == 130
    assert len(writes) == 2
    assert_same_states(states(tmp_path / "run"), kept)
    set_limit(tmp_path, stopped, 20)
    code, out, err = cli("train", "--resume", "run", "--json", "--exact-metrics")
    assert code == 0, err
    assert [line["epoch"] for line in json.loads(out)["history"]] == [1, 2, 3, 4, 5, 6]
    assert len(states(tmp_path / "run")) == 3
    for role in states(tmp_path / "run"):
        left = {path.name for path in (tmp_path / "run/checkpoints" / role).glob("round-*")}
        assert left == {state["file"] for state in index_of(tmp_path / "run", role)["states"]}
        assert len(left) == 2


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
    """Of columns; a label's epsilon holds at delta 0."""
    return {row["delta"] for row in json.loads(text)["privacy"] if row["unit"] != "label"}


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


def without(*names: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        values = json.loads(path.read_text())
        path.write_text(json.dumps({name: value for name, value in values.items() if name not in names}))

    change.__name__ = f"without {' '.join(names)}"
    return change


def a_list(path: Path) -> None:
    path.write_text("[]")


#: Changes of an index that has the right sum afterwards.


def index_without(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        change_index(path.parent, lambda index: index.pop(name))

    change.__name__ = f"rewritten without {name}"
    return change


def of_another_protocol(path: Path) -> None:
    """As another version of the program would have left it: the same plan under another hash."""
    change_index(path.parent, lambda index: index.update(plan_hash="00" * 32))


def without_history(path: Path) -> None:
    change_index(path.parent, lambda index: index["states"][-1]["notes"].pop("history"))


def without_its_sum(path: Path) -> None:
    change_index(path.parent, lambda index: index["states"][-1].pop("sha256"))


def after_the_last_round(path: Path) -> None:
    change_index(path.parent, lambda index: index["states"][-1].update(completed_rounds=25))


INDEX, SESSIONS = "checkpoints/server/checkpoints.json", "sessions.json"
OF_PARTY = "checkpoints/party-1/checkpoints.json"
SERVER, PARTY = "server", "party-1"  # their newest weights
DAMAGE = [
    (INDEX, cut_short),
    (INDEX, emptied),
    (SERVER, cut_short),
    (SERVER, emptied),
    (SERVER, garbage),
    (SERVER, removed),
    (PARTY, cut_short),
    (PARTY, garbage),
    (PARTY, removed),
    ("plan.json", cut_short),
    ("data.json", cut_short),
    ("data.json", removed),
    (INDEX, garbage),
    (INDEX, a_list),
    (INDEX, index_without("plan_hash")),
    (INDEX, index_without("states")),
    (INDEX, without("sha256")),
    (INDEX, without_history),
    ("checkpoints/server/history.jsonl", cut_short),
    ("checkpoints/server/history.jsonl", emptied),
    ("checkpoints/server/history.jsonl", garbage),
    ("checkpoints/server/history.jsonl", removed),
    (INDEX, of_another_protocol),
    (OF_PARTY, garbage),
    (OF_PARTY, index_without("run_id")),
    (OF_PARTY, without_its_sum),
    (OF_PARTY, after_the_last_round),
    (OF_PARTY, of_another_protocol),
    (SESSIONS, cut_short),
    (SESSIONS, garbage),
    ("plan.json", garbage),
    ("data.json", garbage),
    ("data.json", a_list),
    ("data.json", without("dataset")),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_run_is_refused_and_left_as_it_is(name, damage, interrupted, cli):
    """A damaged index is refused if there is none before it."""
    path = newest_states(interrupted / "checkpoints").get(name, interrupted / name)
    damage(path)
    if path.name == "checkpoints.json":
        (path.parent / "checkpoints.previous.json").unlink()
    before = tree(interrupted)
    code, out, words = cli("train", "--resume", "run", "--json")
    assert code == 2
    assert out == ""
    assert words.startswith("error:")
    named = path.parent if damage is without_history else path  # notes are known by their folder
    assert str(named.relative_to(interrupted)) in words or name == "plan.json"
    assert tree(interrupted) == before


@pytest.mark.parametrize("name", [INDEX, OF_PARTY])
@pytest.mark.parametrize("damage", [cut_short, emptied, garbage, removed], ids=lambda damage: damage.__name__)
def test_a_run_with_a_damaged_index_is_resumed_from_the_checkpoint_before(name, damage, interrupted, cli):
    before = epochs_of(interrupted)
    damage(interrupted / name)
    code, out, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert [line["epoch"] for line in result["history"]] == [1, 2, 3, 4, 5, 6]
    assert result["history"][0] == before[0]
    # 21 embeddings of two parties: the eleventh round was under way, and the second epoch runs again
    assert spans(result) == [(0, 11), (ROUNDS_PER_EPOCH, 24)]
    assert uses(result) == {"joint": (8, 8, (11 + 20) * 8)}


def test_a_run_of_version_0_1_is_refused_by_name_and_left_as_it_is(interrupted, cli):
    """All roles' weights lay in one folder there, beside a checkpoint.json."""
    shutil.rmtree(interrupted / "checkpoints")
    (interrupted / "checkpoints").mkdir()
    (interrupted / "checkpoints/checkpoint.json").write_text('{"completed_rounds": 8, "weights": "round-0000008"}')
    before = tree(interrupted)
    code, out, words = cli("train", "--resume", "run", "--json")
    assert (code, out) == (2, "")
    assert "run/checkpointswaswrittenbyversion0.1" in words
    assert tree(interrupted) == before


@pytest.mark.parametrize("role", ["server", "party-1"])
def test_a_checkpoint_of_another_network_is_refused_and_left_as_it_is(role, interrupted, cli):
    plan = Plan.from_json((interrupted / "plan.json").read_text())
    kept = Checkpoints(folder=interrupted / "checkpoints" / role, plan=plan)
    assert kept.run_id is not None
    kept.notes.update(kept.notes_of(kept.run_id, 8))
    kept.save(kept.run_id, 8, {name: torch.zeros(7, 7) for name in kept.load(kept.run_id, 8)})
    before = tree(interrupted)
    code, out, words = cli("train", "--resume", "run", "--json")
    assert (code, out) == (2, "")
    assert "doesnotfitthenetwork" in words
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
    plan = Plan.from_json((tmp_path / "run/plan.json").read_text())
    kept = Checkpoints(folder=tmp_path / "run/checkpoints/party-1", plan=plan)
    assert kept.run_id is not None
    state = kept.load(kept.run_id, 8)
    without_moments = {name: value for name, value in state.items() if not name.startswith("moment.")}
    assert len(without_moments) < len(state)
    kept.save(kept.run_id, 8, without_moments)
    code, _, words = cli("train", "--resume", "run", "--json")
    assert code == 2
    assert "doesnotfitthenetwork:moment." in words


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
    assert "table.csvhad" in words  # another size of the file is enough: nobody looks at values
    assert tree(interrupted) == before
