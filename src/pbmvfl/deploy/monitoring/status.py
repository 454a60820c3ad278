"""Status file of a site: what its job does now, for the operators of that site alone.

The file is replaced as a whole, so a reader finds an old status or a new one. It is written at most five times a
second, and the last status of a burst is always written. Nothing here can end a run: a status that cannot be written is
left out.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pbmvfl._files import PRIVATE_FILE, write_atomically
from pbmvfl.deploy.monitoring.redaction import printable, redacted_error
from pbmvfl.errors import WriteError
from pbmvfl.ledger.session_lock import boot_id, start_of

FORMAT = 1
#: Shortest time between two writes, and the window of the rounds per second, in seconds.
SHORTEST_PAUSE, RATE_WINDOW = 0.2, 5.0
#: Largest status file in bytes; a status has about 1,000, and more with many parties and limits.
LARGEST_FILE = 256 * 1024
_LONGEST_NAME = 100
_Kind = TypeVar("_Kind")


class Role(StrEnum):
    """Side of the federation that a site is on."""

    SERVER = "server"
    PARTY = "party"


class State(StrEnum):
    """State of a job at a site."""

    JOINING = "joining"
    HANDSHAKE = "handshake"
    WARMING_UP = "warming up"
    ALIGNING = "aligning"
    TRAINING = "training"
    PREDICTING = "predicting"
    DONE = "done"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self in (State.DONE, State.FAILED)


@dataclass(frozen=True, kw_only=True)
class EpsilonSpent:
    """One limit of a party's owner, and what its ledger has charged against it."""

    #: Unit, accounting and adversary: `cell, strict, server`.
    limit: str
    #: Infinity where no epsilon holds any more; null in the file.
    spent: float
    epsilon: float
    delta: float


@dataclass(frozen=True, kw_only=True)
class Status:
    """Status of a job at its site: public numbers, and figures for the site's own operators."""

    site: str
    role: Role
    state: State
    work: str = ""
    job: str = ""
    run: str = ""
    #: Number of completed rounds.
    round: int = 0
    rounds_total: int = 0
    rounds_per_second: float | None = None
    #: At the server alone, from the protocol's own noisy sums.
    loss: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    #: At the server alone.
    parties: tuple[str, ...] = ()
    parties_alive: tuple[str, ...] = ()
    #: At a party alone, from its own ledger.
    epsilon: tuple[EpsilonSpent, ...] = ()
    #: The error that ended the job, or empty.
    last_error: str = ""
    #: Seconds since 1970. `updated` is the time of the last change, not of the last write.
    started: float = 0.0
    updated: float = 0.0
    #: The job's process, to tell an ended one from a slow one.
    pid: int = 0
    process_started: str = ""
    boot: str = ""

    @property
    def process_is_alive(self) -> bool:
        """Return whether the process that wrote this is alive; valid on the same machine only."""
        return self.pid > 0 and self.boot == boot_id() and start_of(self.pid) == self.process_started

    @property
    def seconds_since_news(self) -> float:
        return max(time.time() - self.updated, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        said = asdict(self)
        for name in ("parties", "parties_alive", "epsilon"):
            said[name] = list(said[name])
        for each in (said, *said["epsilon"]):  # JSON has no infinity or NaN
            for name, value in each.items():
                if isinstance(value, float) and not math.isfinite(value):
                    each[name] = None
        return {"format": FORMAT, **said, "role": str(self.role), "state": str(self.state)}

    @classmethod
    def from_dict(cls, values: object) -> Status | None:
        """Parse the result of `to_dict`; return None for anything else. Fields of a later version are ignored."""
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            return None
        try:
            return _checked(cls, values)
        except (KeyError, TypeError, ValueError, OverflowError):
            return None


def read_status(path: Path) -> Status | None:
    """Read a status file; return None if there is no readable one."""
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE + 1)
        return None if len(data) > LARGEST_FILE else Status.from_dict(json.loads(data))
    except (OSError, ValueError, RecursionError):
        return None


class StatusFile:
    """Writer of a site's status; thread-safe, and never raises because of a disk."""

    def __init__(
        self,
        path: Path,
        *,
        site: str,
        role: Role | str,
        work: str = "",
        job: str = "",
        run: str = "",
        rounds_total: int = 0,
        parties: tuple[str, ...] = (),
        state: State = State.JOINING,
    ) -> None:
        self._path = Path(path)
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._recent: deque[tuple[float, int]] = deque(maxlen=512)
        self._is_news = False
        self._closed = threading.Event()
        #: Redacted error of the last write; empty if it succeeded.
        self.trouble = ""
        now = time.time()
        self._status = Status(
            site=printable(site, _LONGEST_NAME),
            role=Role(role),
            state=state,
            work=printable(work, _LONGEST_NAME),
            job=printable(job, _LONGEST_NAME),
            run=printable(run, _LONGEST_NAME),
            rounds_total=rounds_total,
            parties=tuple(parties),
            started=now,
            updated=now,
            pid=os.getpid(),
            process_started=start_of(os.getpid()) or "",
            boot=boot_id(),
        )
        self._write()
        # A thread that is no daemon would keep a job's process alive at its end.
        self._thread = threading.Thread(target=self._write_later, name="pbmvfl-status", daemon=True)
        self._thread.start()

    @property
    def now(self) -> Status:
        """Newest status, written or not."""
        with self._lock:
            return self._status

    def update(self, **changes: Any) -> None:
        """Set fields of the status; None leaves a field as it is. The end of a job is written at once."""
        known = {name: value for name, value in changes.items() if value is not None}
        with self._lock:
            if self._closed.is_set():
                return
            if "round" in known:
                known["rounds_per_second"] = self._rate(known["round"])
            self._status = replace(self._status, **{"updated": time.time(), **known})
            self._is_news = True
        if "state" in known and known["state"].is_over:
            self._write()

    def spent(self, epsilon: tuple[EpsilonSpent, ...]) -> None:
        """Set what the ledger has charged; see `deploy.job.reporting`.

        It does not count as progress of the job: a ledger can be read while the job stands still.
        """
        if epsilon != self.now.epsilon:
            self.update(epsilon=epsilon, updated=self.now.updated)

    def failed(self, error: BaseException) -> None:
        """Record that the job failed, with its redacted error."""
        self.update(state=State.FAILED, last_error=redacted_error(error))

    def close(self) -> None:
        """Write what is pending. The state of an unfinished job stays: its process ends."""
        self._closed.set()
        self._thread.join(timeout=2.0)
        if self._is_news:
            self._write()

    def __enter__(self) -> StatusFile:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    # --- writing ---

    def _rate(self, completed: int) -> float | None:
        """Return the rounds per second of the last seconds; a resumed run starts to count anew."""
        now = time.monotonic()
        if self._recent and completed < self._recent[-1][1]:
            self._recent.clear()
        # One point for each small part of the window bounds the memory at many rounds a second.
        if not self._recent or now - self._recent[-1][0] >= RATE_WINDOW / 256:
            self._recent.append((now, completed))
        while len(self._recent) > 2 and now - self._recent[0][0] > RATE_WINDOW:
            self._recent.popleft()
        first_at, first = self._recent[0]
        seconds = now - first_at
        return round((completed - first) / seconds, 3) if seconds > 0.05 and completed > first else None

    def _write_later(self) -> None:
        while not self._closed.wait(SHORTEST_PAUSE):
            if self._is_news:
                self._write()

    def _write(self) -> None:
        with self._writing:
            with self._lock:
                status, self._is_news = self._status, False
            try:
                # Not forced to disk: after a power cut there is no job to watch either.
                write_atomically(self._path, json.dumps(status.to_dict()), mode=PRIVATE_FILE, durable=False)
                self.trouble = ""
            except WriteError as error:
                self.trouble = redacted_error(error)


def _checked(kind: type[_Kind], values: Mapping[str, Any]) -> _Kind:
    """Return a dataclass of these values, each of its field's type; names that are not its own are left out."""
    hints = get_type_hints(kind)
    return kind(**{name: _READERS[hints[name]](values[name]) for name in hints if name in values})


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return printable(value)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError("no count")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise TypeError("no number")
    return math.inf if value is None else float(value)


#: Readers of values by the type of their field.
_READERS: Mapping[Any, Callable[[Any], Any]] = {
    str: _text,
    int: _count,
    float: _number,
    float | None: lambda value: None if value is None else _number(value),
    Role: Role,
    State: State,
    tuple[str, ...]: lambda value: tuple(map(_text, value)),
    tuple[EpsilonSpent, ...]: lambda value: tuple(_checked(EpsilonSpent, each) for each in value),
}
