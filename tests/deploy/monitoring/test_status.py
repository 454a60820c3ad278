"""A site's status file: whole or not there, private, written a few times a second, honest about its process."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pbmvfl.deploy.job.reporting import SpentWatch, limits_spent
from pbmvfl.deploy.monitoring import status as module
from pbmvfl.deploy.monitoring.redaction import redacted_error
from pbmvfl.deploy.monitoring.status import EpsilonSpent, Role, State, Status, StatusFile, read_status
from pbmvfl.errors import DataError, EncoderError, LedgerError, PartyLost, PartyRefused
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.privacy.units import Adversary, Unit
from support.ledger_books import DELTA, NAME, charge_all, paper_limit, small_plan
from support.line_parties import until

SECRET = "alice-4711-0.73125"


def new(path: Path, **changes: object) -> StatusFile:
    return StatusFile(path, site="bank", role=Role.PARTY, **{"run": "first", "rounds_total": 90, **changes})


def wait_for(path: Path, holds: Callable[[Status], bool]) -> Status:
    """Bounded, and no race: what was told last is written sooner or later."""
    found: list[Status] = []

    def looked() -> bool:
        found[:] = [each for each in [read_status(path)] if each is not None]
        return bool(found) and holds(found[0])

    assert until(looked)
    return found[0]


def test_everything_that_is_told_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    limit = EpsilonSpent(limit="cell, strict, server", spent=1.25, epsilon=8.0, delta=1e-5)
    with StatusFile(path, site="clinic", role="server", work="train", job="j-1", run="r", parties=("a", "b")) as told:
        told.update(state=State.TRAINING)
        told.update(round=7, loss=0.5, bytes_up=10, bytes_down=20, parties_alive=("a",))
        told.spent((limit,))
        told.update(state=State.DONE)
    found = read_status(path)
    assert found == told.now
    assert found is not None
    assert (found.site, found.role, found.state, found.work, found.job) == ("clinic", "server", "done", "train", "j-1")
    assert (found.round, found.loss, found.bytes_up, found.bytes_down) == (7, 0.5, 10, 20)
    assert (found.parties, found.parties_alive, found.epsilon) == (("a", "b"), ("a",), (limit,))
    assert found.pid == os.getpid()
    assert json.loads(path.read_text())["state"] == "done"


def test_the_file_is_for_its_owner_alone_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        new(tmp_path / "status.json").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "status.json").stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]


def test_a_burst_of_rounds_is_written_a_few_times_and_its_last_round_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written = tmp_path / "status.json", []
    replaced = os.replace
    monkeypatch.setattr(module.os, "replace", lambda *paths: (written.append(paths), replaced(*paths)))
    began = time.monotonic()
    told = new(path)
    for i in range(5000):
        told.update(round=i)
    wait_for(path, lambda found: found.round == 4999)  # nobody closed it, nobody told it anything more
    # The first, one for each pause since, and never one a round: a slow machine makes it fewer.
    assert len(written) <= 2 + (time.monotonic() - began) / module.SHORTEST_PAUSE
    told.close()


def test_what_a_burst_ends_with_is_written_when_it_is_closed(tmp_path: Path) -> None:
    told = new(tmp_path / "status.json")
    for i in range(100):
        told.update(round=i)
    told.close()
    told.update(round=5)  # after the end: no news any more
    found = read_status(tmp_path / "status.json")
    assert found is not None
    assert found.round == 99


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 1}',
        '{"format": 2, "site": "a", "role": "party", "state": "done"}',
        '{"format": 1, "site": 5, "role": "party", "state": "done"}',
        '{"format": 1, "site": "a", "role": "party", "state": "dancing"}',
        '{"format": 1, "site": "a", "role": "party", "state": "done", "round": -1}',
        '{"format": 1, "site": "a", "role": "party", "state": "done", "round": true}',
        '{"format": 1, "site": "a", "role": "party", "state": "done", "epsilon": [{}]}',
        '{"format": 1, "site": "a", "role": "party", "state": "done", "epsilon": 3}',
        "[" * 100_000,
        "x" * 1_000_000,
    ],
)
def test_a_file_that_is_no_status_is_none_and_no_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "status.json"
    path.write_text(text)
    assert read_status(path) is None


def test_a_file_that_is_cut_anywhere_is_none_or_whole(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    new(path).close()
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read_status(path) is None
    path.unlink()
    assert read_status(path) is None
    assert read_status(tmp_path) is None


def test_a_dead_process_is_told_from_a_slow_one(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    code = (
        "import sys; from pathlib import Path; from pbmvfl.deploy.monitoring.status import StatusFile\n"
        "StatusFile(Path(sys.argv[1]), site='a', role='party'); print('told', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "told\n"
        told = read_status(path)
        assert told is not None
        assert told.pid == child.pid
        assert told.process_is_alive
        child.kill()
    assert not told.process_is_alive
    # A process that has the same number now is another one, and so is one of before the machine's last start.
    own = replace(told, pid=os.getpid())
    assert not own.process_is_alive
    assert not replace(told, boot="another").process_is_alive


def test_importing_status_and_reading_one_loads_no_torch() -> None:
    code = "import sys, pbmvfl.deploy.monitoring.status; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_a_status_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    told = new(tmp_path / "missing" / "status.json")
    told.update(round=3)
    told.failed(OSError("x"))
    told.close()
    assert "No such file" in told.trouble
    assert told.now.round == 3


def test_an_error_that_ends_the_job_is_its_state(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    new(path).failed(PartyLost({1: "its process ended"}))
    found = read_status(path)
    assert found is not None
    assert found.state is State.FAILED
    assert "party=1: its process ended" in found.last_error


def test_rounds_a_second_are_those_of_the_last_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    told = new(tmp_path / "status.json")
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    for i in range(1, 201):  # 4 s at 50 a second, then 10 s at 10 a second
        now[0] += 0.02
        told.update(round=i)
    assert told.now.rounds_per_second == pytest.approx(50, rel=0.01)
    for i in range(201, 301):
        now[0] += 0.1
        told.update(round=i)
    assert told.now.rounds_per_second == pytest.approx(10, rel=0.05)
    told.update(round=120)  # back to a checkpoint
    now[0] += 1
    told.update(round=140)
    assert told.now.rounds_per_second == pytest.approx(20, rel=0.01)
    monkeypatch.undo()
    told.close()


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    with new(path) as told:
        told.update(round=1, loss=math.nan)
        told.spent((EpsilonSpent(limit="cell", spent=math.inf, epsilon=8, delta=1e-5),))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(path.read_text(), parse_constant=refuse)
    found = read_status(path)
    assert found is not None
    assert found.loss is None
    assert found.epsilon[0].spent == math.inf


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        ValueError(SECRET),
        KeyError(SECRET),
        RuntimeError(torch.tensor([0.73125])),
        DataError(f"column age: {SECRET!r} is no number"),
        EncoderError(f"it cannot be used: {SECRET}"),
        LedgerError(f"row id {SECRET!r}; permitted: text, or a whole number"),
        OSError(SECRET),
        UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET),
        type("Own", (Exception,), {"__str__": lambda _: SECRET})(),
    ],
)
def test_no_private_value_of_an_error_is_kept(tmp_path: Path, error: Exception) -> None:
    path = tmp_path / "status.json"
    told = new(path)
    told.failed(raised(error))
    told.close()
    said = json.loads(path.read_text())
    for changing in ("started", "updated", "pid", "process_started", "boot"):  # which may have the same digits
        del said[changing]
    text = json.dumps(said)
    assert "4711" not in text
    assert "0.73" not in text
    assert type(error).__name__ in text


def test_words_of_others_do_nothing_to_a_terminal() -> None:
    said = redacted_error(PartyRefused(1, 2, "no\x1b[2J\nline\x07" + "x" * 10_000))
    assert said.isprintable()
    assert "\x1b" not in said
    assert len(said) <= 500


def test_a_party_without_a_ledger_has_no_limits(tmp_path: Path) -> None:
    assert limits_spent(tmp_path / "ledger.sqlite", "people") == ()
    (tmp_path / "ledger.sqlite").write_text("no database")
    assert limits_spent(tmp_path / "ledger.sqlite", "people") == ()


def test_a_status_follows_the_ledger_while_it_is_charged(tmp_path: Path) -> None:
    book, plan = tmp_path / "ledger.sqlite", small_plan()
    ledger = Ledger(book)
    ledger.set_limit(NAME, paper_limit(epsilon=50.0))
    # By hand: every row is released once an epoch, and at order 4 divergences add up.
    (once,) = plan.release.event.rdp(Unit.CELL, Adversary(), (4.0,))
    share = math.log1p(-1 / 4) - math.log(DELTA * 4) / 3
    path = tmp_path / "status.json"
    told = new(path)
    news = told.now.updated
    watch = SpentWatch(told, book, NAME, pause=0.01)
    rounds = len(plan.schedule) // plan.num_epochs  # of one epoch
    charge_all(ledger, plan, session="a", rounds=rounds)
    wait_for(path, lambda found: bool(found.epsilon) and found.epsilon[0].spent >= float(once) + share - 1e-9)
    charge_all(Ledger(book), plan, session="b", rounds=rounds, first_round=rounds)
    watch.close()
    told.close()
    last = read_status(path)
    assert last is not None
    said = last.epsilon[0]
    assert (said.limit, said.epsilon, said.delta) == ("cell, paper, server", 50.0, DELTA)
    assert said.spent == pytest.approx(2 * float(once) + share)
    assert last.updated == news  # reading a book is no news of the job
