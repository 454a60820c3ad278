"""A disk that is full: the file is named, nothing half-written is left, and all that was released is counted."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbmvfl._files import write_atomically
from pbmvfl.errors import CheckpointError, LedgerError, WriteError
from pbmvfl.ledger.database import Database
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.ledger_folder import look_ahead
from pbmvfl.ledger.session_opening import Opening, SessionRows
from pbmvfl.plan.plan import Plan
from pbmvfl.protocol.session import Meter
from pbmvfl.wire.refusals import Refusal, RefusalCode
from support.ledger_books import small_plan

EMBEDDING = 6
EPOCHS, PER_EPOCH = 2, 4  # 32 training rows in batches of 8
OPTIONS = ("--label", "y", "--columns", "one=a,b;two=c", "--encoder", "linear", "--num-epochs", EPOCHS)
SIZES = ("--batch-size", 8, "--embedding-dim", 2, "--num-trials", 3)
COMMAND = ("train", "--data", "table.csv", *OPTIONS, *SIZES, "--ledger", "books")

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch, run_main, tmp_path) -> Cli:
    random = np.random.default_rng(8)
    lines = ["a,b,c,y"]
    for label in random.integers(0, 2, 40):
        lines.append(",".join(f"{2 * label + value:.5f}" for value in random.normal(size=3)) + f",{label}")
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return run_main


@pytest.fixture
def sent(monkeypatch) -> Counter[tuple[int, int]]:
    """How often each (party, round) crossed the wire, read from the bytes."""
    seen: Counter[tuple[int, int]] = Counter()
    record = Meter.record

    def count(self: Meter, direction: str, party: int, data: bytes, *, setup: bool) -> None:
        record(self, direction, party, data, setup=setup)
        if direction == "up" and data[5] == EMBEDDING:
            seen[party, struct.unpack_from("<I", data, 32)[0]] += 1

    monkeypatch.setattr(Meter, "record", count)
    return seen


def full_from(patch: pytest.MonkeyPatch, part: str, number: int) -> list[str]:
    """From the `number`-th file with `part` in its path on, nothing can be forced to disk any more."""
    sync, found, failed = os.fsync, [], []

    def no_space(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        found.extend([path] if part in path and os.path.isfile(path) else [])
        if len(found) >= number:
            failed.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as the system says it: without a name
        sync(descriptor)

    patch.setattr(os, "fsync", no_space)
    return failed


def assert_all_is_counted(folder: Path, sent: Counter[tuple[int, int]]) -> dict[str, Any]:
    """The result and every ledger know of each release, and of no more than an epoch that was not one."""
    result: dict[str, Any] = json.loads((folder / "run/result.json").read_text())
    schedule = Plan.from_dict(result["plan"]).schedule
    assert [line["epoch"] for line in result["history"]] == [*range(1, EPOCHS + 1)]
    for party, name in enumerate(("one", "two")):
        charged: Counter[int] = Counter()
        for session in Ledger(folder / f"books/{name}.sqlite", must_exist=True).sessions("table"):
            charged.update(range(session.first_round, session.charged_until))
        logged: Counter[int] = Counter()
        for session in result["sessions"]:
            logged.update(range(session["first_round"], session["charged_until"]))
        rows: Counter[int] = Counter()
        for number in range(len(schedule)):
            assert sent[party, number] <= charged[number]
            assert sent[party, number] <= logged[number] <= sent[party, number] + 1
            rows.update({int(row): sent[party, number] for row in schedule[number].rows})
        assert max(rows.values()) <= result["row_uses"]["joint"]["releases"]
        assert sum(rows.values()) <= result["row_uses"]["joint"]["total_releases"]
    return result


#: (part of a path, which of the writes of such files finds the disk full, epochs that are kept)
WRITES = [
    ("run/sessions.json", 1, 0),
    ("run/sessions.json", 2, 1),
    ("run/sessions.json", 3, 2),
    ("party-0/round-", 1, 0),
    ("party-0/checkpoints.json", 1, 0),
    ("party-1/round-", 2, 1),
    ("party-1/checkpoints.json", 2, 1),
    ("server/round-", 1, 0),
    ("server/checkpoints.json", 2, 1),
    ("server/history.jsonl", 1, 0),
    ("server/history.jsonl", 2, 1),
    ("model/one/weights", 1, 2),
    ("model/server/part.json", 1, 2),
    ("run/history.csv", 1, 2),
    ("run/result.json", 1, 2),
]


@pytest.mark.parametrize(("part", "number", "kept"), WRITES)
def test_a_run_on_a_full_disk_names_the_file_and_goes_on_where_it_was(
    part, number, kept, cli, sent, monkeypatch, tmp_path
):
    with monkeypatch.context() as patch:
        failed = full_from(patch, part, number)
        code, out, err = cli(*COMMAND, "--out", "run")
    assert code == 2
    assert part in failed[0]
    words = " ".join(err.split())
    assert re.sub(r"\.[0-9a-f]{16}\.tmp$", "", failed[0]).removeprefix(f"{tmp_path}/") in words
    assert "cannot be written: No space left on device; make room on that disk" in words
    assert "Traceback" not in err
    assert "continue with: pbmvfl train --resume run" in out
    assert not list(tmp_path.rglob("*.tmp"))
    assert not (tmp_path / "run/result.json").exists()
    code, out, err = cli("train", "--resume", "run")
    assert code == 0, err
    result = assert_all_is_counted(tmp_path, sent)
    again = result["sessions"][-1]["first_round"]
    assert again == kept * PER_EPOCH
    assert max(sent.values()) == (1 if kept == EPOCHS or part.startswith("run/") else 2)
    assert cli("train", "--resume", "run", "--json")[0] == 0


@pytest.mark.parametrize("name", ["plan.json", "data.json"])
def test_a_run_that_cannot_even_begin_leaves_no_folder(name, cli, sent, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        full_from(patch, f"run/{name}", 1)
        code, _, err = cli(*COMMAND, "--out", "run")
    assert code == 2
    assert f"run/{name} cannot be written: No space left" in err
    assert not (tmp_path / "run").exists()
    assert not sent
    assert cli(*COMMAND, "--out", "run")[0] == 0


def test_a_picture_that_cannot_be_drawn_loses_nothing(cli, sent, monkeypatch, tmp_path):
    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("pbmvfl.cli.train_view.draw_curves", no_space)
        code, out, err = cli(*COMMAND, "--out", "run", "--json")
    assert (code, out) == (2, "")
    assert "run/curves.png cannot be written: No space left on device" in err
    assert "continue with: pbmvfl train --resume run" in err  # JSON alone goes to stdout
    assert cli("train", "--resume", "run", "--json")[0] == 0
    assert_all_is_counted(tmp_path, sent)
    assert max(sent.values()) == 1


@pytest.mark.parametrize("charge", [1, 5, 8, 11])
def test_a_ledger_that_cannot_be_written_ends_the_run_before_bytes_leave(charge, cli, sent, monkeypatch, tmp_path):
    run, seen = Database.run, []

    def full(self: Database, statement: str, values: Any = ()) -> Any:
        seen.extend([statement] if statement.startswith("UPDATE charged") else [])
        if len(seen) >= charge:
            raise LedgerError(f"ledger={str(self.path)!r} cannot be read or written: database or disk is full")
        return run(self, statement, values)

    with monkeypatch.context() as patch:
        patch.setattr("pbmvfl.federation.party_setup.ROUNDS_AHEAD", 1)
        patch.setattr(Database, "run", full)
        code, _, err = cli(*COMMAND, "--out", "run")
    assert code == 2
    assert "disk is full" in err
    left = Counter(sent)
    assert sum(left.values()) < charge  # one charge a party and round
    code, _, err = cli("train", "--resume", "run")
    assert code == 0, err
    assert_all_is_counted(tmp_path, sent)


@pytest.mark.usefixtures("rendered_curves")
@pytest.mark.slow
def test_a_run_in_a_process_whose_files_may_not_grow_is_continued(cli, sent, tmp_path):
    """The real system's refusal: 30 kB are enough for all but the picture, and compiled code that is kept for later."""
    program = "from pbmvfl.cli import main; main()"
    command = [str(word) for word in COMMAND[:-2]]

    def no_large_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    done = subprocess.run(
        [sys.executable, "-c", program, *command, "--out", "run", "--json"],
        cwd=tmp_path,
        preexec_fn=no_large_files,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "run/curves.png cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    code, out, err = cli("train", "--resume", "run", "--json")
    assert code == 0, err
    assert json.loads(out)["row_uses"]["joint"]["releases"] == EPOCHS
    assert not sent  # everything was trained already
    assert (tmp_path / "run/curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("mode", [None, 0o600])
def test_a_file_that_cannot_be_replaced_is_as_it_was(mode, monkeypatch, tmp_path):
    path = tmp_path / "book.json"
    write_atomically(path, "before", mode=mode)
    with monkeypatch.context() as patch:
        full_from(patch, "book.json", 1)
        with pytest.raises(WriteError, match=r"book\.json cannot be written: No space left on device; make room"):
            write_atomically(path, "after", mode=mode)
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["book.json"]
    with pytest.raises(OSError, match="missing/book"):  # as every error of the system
        write_atomically(tmp_path / "missing/book", "after")


def test_a_party_that_cannot_write_tells_the_server_what_to_wait_for_and_no_name_of_a_file():
    refusal = Refusal.of(WriteError("/home/bank/run/round-1 cannot be written: No space left on device"))
    assert refusal.code is RefusalCode.FAULT
    assert "make room" in refusal.words
    assert not {"home", "bank", "run", "round-1", "device"} & set(refusal.words.replace("/", " ").split())


def test_a_party_whose_checkpoint_is_damaged_says_so_without_its_name():
    refusal = Refusal.of(CheckpointError("/home/bank/run/round-1 is damaged"))
    assert refusal.code is RefusalCode.FAULT
    assert "checkpoint" in refusal.words
    assert not {"home", "bank", "run", "round-1"} & set(refusal.words.replace("/", " ").split())


def test_a_book_that_a_full_disk_left_empty_is_begun_by_the_next_run(tmp_path):
    """The disk is full while the book is made: a real limit, in a process of its own."""
    make = (
        "import resource, signal; from pbmvfl.ledger.ledger import Ledger;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); Ledger('one.sqlite', owner='one')"
    )
    ended = subprocess.run([sys.executable, "-c", make], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "LedgerError" in ended.stderr
    book = tmp_path / "one.sqlite"
    assert book.is_file()
    opening = Opening(dataset="people", plan=small_plan(), rows=SessionRows(test_ids=["a"]))
    assert look_ahead(book, party="one", opening=opening).limits == ()  # nothing is refused because of it
    with contextlib.closing(Ledger(book, owner="one")) as begun:
        assert begun.datasets() == []
    with pytest.raises(LedgerError, match="test_ids has 1 rows"):  # now it is a ledger, and refuses such a session
        look_ahead(book, party="one", opening=opening)
