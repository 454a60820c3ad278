"""What the tests of the ledger share: a small plan, a limit, and ways to charge a book and to be killed over it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pbmvfl.errors import BudgetExceeded
from pbmvfl.ledger.charging import Charging
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.session_opening import Opening, SessionRows
from pbmvfl.ledger.store import LedgerStore
from pbmvfl.plan.plan import Plan

DELTA = 1e-5
NAME = "people"


def small_plan(**choices: Any) -> Plan:
    sizes = {"num_parties": 3, "num_samples": 23, "num_classes": 2, "num_test_samples": 7, "batch_size": 5}
    return Plan.from_dict({**sizes, "num_epochs": 4, "num_trials": 2, "beta": 0.1, "embedding_dim": 2, **choices})


def paper_limit(epsilon: float = 1000.0, **choices: Any) -> Limit:
    usual: dict[str, Any] = {"unit": "cell", "accounting": "paper", "delta": DELTA, "order": 4.0}
    return Limit.choose(**{**usual, "epsilon": epsilon, **choices})


def opening(**values: Any) -> Opening:
    """Return a session to open or to forecast; values and ids of its rows are flat names among the others."""
    rows = {
        name: values.pop(name) for name in ("train_values", "test_values", "train_ids", "test_ids") if name in values
    }
    return Opening(rows=SessionRows(**rows), **values)


def store_of(ledger: Ledger) -> LedgerStore:
    """Return what a ledger keeps its file with, for tests of the file's own state."""
    return ledger._store


def charge(opened: Charging, plan: Plan, number: int) -> None:
    """Charge one round of a plan, with the events that the plan has for it."""
    current = plan.schedule[number]
    opened.charge(current, plan.events(current.kind))


def charge_all(
    ledger: Ledger,
    plan: Plan,
    *,
    run: str = "run",
    session: str = "s",
    rounds: int | None = None,
    first_round: int = 0,
    **choices: Any,
) -> int:
    """Charge rounds until the end or a refusal; the number that went through."""
    opened = ledger.open_session(
        opening(
            dataset=NAME,
            plan=plan,
            run=run,
            session=session,
            first_round=first_round,
            **{"public_start": True, "exact_metrics": True, **choices},
        )
    )
    last = len(plan.schedule) if rounds is None else first_round + rounds
    done = 0
    try:
        for number in range(first_round, last):
            charge(opened, plan, number)
            done += 1
    except BudgetExceeded:
        pass
    opened.close()
    return done


def book_with_limit(path: Path, epsilon: float) -> None:
    book = Ledger(path)
    book.set_limit(NAME, paper_limit(epsilon))
    book.close()


def on_disk(folder: Path) -> dict[str, bytes]:
    """Every byte, but for the memory that readers and a writer of this process share while a book is open."""
    return {file.name: b"" if file.name.endswith("-shm") else file.read_bytes() for file in folder.iterdir()}


def release_until_killed(plan: Plan, path: Path, first: int, session: str, pipe: int) -> None:
    """A party reduced to its ledger, as fast as it can: charge a round, then let its bytes leave."""
    opened = Ledger(path).open_session(
        opening(dataset=NAME, plan=plan, run="run", session=session, exact_metrics=True, first_round=first)
    )
    for number in range(first, len(plan.schedule)):
        charge(opened, plan, number)
        os.write(pipe, number.to_bytes(4, "little"))


def kill_after(reports: int, work: Callable[[int], None]) -> int:
    """Run `work` in a child, wait for so many reports, strike at whatever point it has reached; what had left it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with contextlib.suppress(BaseException):
            work(writing)
        os._exit(1)
    os.close(writing)
    received = b""
    while len(received) < 4 * reports:
        part = os.read(reading, 4 * reports - len(received))
        assert part, "the child ended by itself"
        received += part
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    while part := os.read(reading, 65536):
        received += part
    os.close(reading)
    return len(received) // 4


#: Noisy steps at every party alone, fusion rows, and predictions of two classes with a pure epsilon.
LOCAL_NUMBERS: dict[str, Any] = {
    "training": "local",
    "labels": "parties",
    "head": "fixed",
    "mechanism": "none",
    "embedding_dim": 2,
    "activation": "none",
    "encoder": "linear",
    "num_epochs": 3,
    "noise_multiplier": 6.0,
    "evaluation": "released",
    "vote": "top",
    "num_fusion_samples": 2,
    "prediction_mechanism": "krr",
    "prediction_symbols": 2,
    "prediction_response_epsilon": 1.5,
}
