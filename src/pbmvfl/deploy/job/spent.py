"""What a party's ledger has charged against each limit of its owner, for its status."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from pbmvfl.deploy.monitoring.status import EpsilonSpent, StatusFile
from pbmvfl.errors import PbmvflError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.spending import spending
from pbmvfl.privacy.units import Adversary

#: In seconds between two looks at least; and how much longer than a look the time to the next one is: reading the book
#: of 500,000 named rows takes 1 to 4 s, in which rounds are slower.
SHORTEST_PAUSE, SHARE = 10.0, 20.0
#: In seconds: a job does not wait longer than about this for its last look.
_LONGEST_LAST_LOOK = 5.0


def limits_spent(ledger: Path, dataset: str) -> tuple[EpsilonSpent, ...]:
    """Every limit of a dataset, read from the book as it is, also while it is charged; nothing where there is no book.

    Rounds that are charged ahead count as spent. The whole book is read: `SpentWatch` does it beside the rounds.
    """
    try:
        book = Ledger(ledger, must_exist=True, read_only=True)
    except (PbmvflError, OSError):
        return ()
    try:
        return tuple(_spent(book, dataset, limit) for limit in book.limits(dataset))
    except (PbmvflError, OSError):  # it changes while it is read; the next time will do
        return ()
    finally:
        book.close()


class SpentWatch:
    """Keeps a status up to date with the ledger, in a thread of its own, for a small share of the time."""

    def __init__(self, status: StatusFile, ledger: Path, dataset: str, *, pause: float = SHORTEST_PAUSE) -> None:
        self._status, self._ledger, self._dataset, self._pause = status, ledger, dataset, pause
        self._closed = threading.Event()
        self._took = 0.0
        # Daemon: a thread that is none holds a job's process at its end.
        self._thread = threading.Thread(target=self._watch, name="pbmvfl-spent", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look a last time, where that is quick: what the job spent is in the status that it leaves."""
        self._closed.set()
        self._thread.join(timeout=_LONGEST_LAST_LOOK)
        if not self._thread.is_alive() and self._took <= _LONGEST_LAST_LOOK:
            self._look()

    def _watch(self) -> None:
        self._look()
        while not self._closed.wait(max(self._pause, SHARE * self._took)):
            self._look()

    def _look(self) -> None:
        began = time.monotonic()
        found = limits_spent(self._ledger, self._dataset)
        self._took = time.monotonic() - began
        if found:  # a book that cannot be read now keeps what it said before
            self._status.spent(found)


def _spent(book: Ledger, dataset: str, limit: Limit) -> EpsilonSpent:
    against = Adversary(colluding_parties=limit.colluding_parties)
    return EpsilonSpent(
        limit=f"{limit.unit}, {limit.accounting}, {against}",
        spent=spending(book, dataset, limit).epsilon,
        epsilon=limit.epsilon,
        delta=limit.delta,
    )
