"""Status file of a site: what its job does now, for the operators of that site alone.

The file is replaced as a whole, so a reader finds an old status or a new one. It is written at most five times a
second, and the last status of a burst is always written. Nothing here can end a run: a status that cannot be written is
left out.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pbmvfl._descriptors import NO_FOLLOW, set_mode
from pbmvfl._files import PRIVATE_FILE
from pbmvfl.deploy.monitoring.redaction import printable, redacted_error
from pbmvfl.ledger.session_lock import boot_id, start_of

FORMAT = 1
#: Shortest time between two writes, and the window of the rounds per second, in seconds.
SHORTEST_PAUSE, RATE_WINDOW = 0.2, 5.0
#: Largest status file in bytes; a status has about 1,000, and more with many parties and limits.
LARGEST_FILE = 256 * 1024
_LONGEST_NAME = 100


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
    #: Last error, or empty; the job may have continued since.
    last_error: str = ""
    error_at: float = 0.0
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
            return _checked(values)
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
        self._temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._recent: deque[tuple[float, int]] = deque(maxlen=512)
        self._written_at = -math.inf
        self._is_news = self._is_closed = False
        self._thread: threading.Thread | None = None
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
        self._remove_remains()
        self._write()

    @property
    def now(self) -> Status:
        """Newest status, written or not."""
        with self._changed:
            return self._status

    # --- news ---

    def state(self, state: State) -> None:
        """Set the state of the job."""
        self._update({"state": state}, at_once=state.is_over)

    def count(
        self,
        completed: int,
        *,
        loss: float | None = None,
        bytes_up: int | None = None,
        bytes_down: int | None = None,
        parties_alive: tuple[str, ...] | None = None,
    ) -> None:
        """Set the number of completed rounds and what is known with it; values that are not given stay."""
        told = {"loss": loss, "bytes_up": bytes_up, "bytes_down": bytes_down, "parties_alive": parties_alive}
        changes = {name: value for name, value in told.items() if value is not None}
        self._update({**changes, "round": completed}, at_once=False)

    def alive(self, parties: tuple[str, ...]) -> None:
        """Set the parties that are connected now."""
        self._update({"parties_alive": tuple(parties)}, at_once=False)

    def spent(self, epsilon: tuple[EpsilonSpent, ...]) -> None:
        """Set what the ledger has charged; see `deploy.job.reporting`.

        It does not count as progress of the job: a ledger can be read while the job stands still.
        """
        if tuple(epsilon) != self.now.epsilon:
            self._update({"epsilon": tuple(epsilon), "updated": self.now.updated}, at_once=False)

    def error(self, error: BaseException) -> None:
        """Record an error that the job survives, such as a disconnection."""
        self._update({"last_error": redacted_error(error), "error_at": time.time()}, at_once=False)

    def done(self) -> None:
        """Record that the job completed; written at once."""
        self._update({"state": State.DONE}, at_once=True)

    def failed(self, error: BaseException) -> None:
        """Record that the job failed, with its redacted error; written at once."""
        told = {"state": State.FAILED, "last_error": redacted_error(error), "error_at": time.time()}
        self._update(told, at_once=True)

    def close(self) -> None:
        """Write what is pending. The state of an unfinished job stays: its process ends."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
        self._write_news()

    def __enter__(self) -> StatusFile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not self.now.state.is_over:
            self.failed(error)
        self.close()

    # --- writing ---

    def _update(self, changes: Mapping[str, Any], *, at_once: bool) -> None:
        with self._changed:
            if self._is_closed:
                return
            if "round" in changes:
                changes = {**changes, "rounds_per_second": self._rate(int(changes["round"]))}
            self._status = replace(self._status, **{"updated": time.time(), **changes})
            self._is_news = True
            if not at_once:
                if self._thread is None:
                    # A thread that is no daemon would keep a job's process alive at its end.
                    self._thread = threading.Thread(target=self._write_later, name="pbmvfl-status", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        if at_once:
            self._write_news()

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
        while True:
            with self._changed:
                while not self._is_news and not self._is_closed:
                    self._changed.wait()
                while not self._is_closed and (left := self._written_at + SHORTEST_PAUSE - time.monotonic()) > 0:
                    self._changed.wait(left)
                if self._is_closed:
                    return
            self._write_news()

    def _write_news(self) -> None:
        if self._is_news:
            self._write()

    def _write(self) -> None:
        with self._writing:
            with self._changed:
                status, self._is_news = self._status, False
                self._written_at = time.monotonic()
            try:
                self._replace(json.dumps(status.to_dict()).encode())
                self.trouble = ""
            except OSError as error:
                self.trouble = redacted_error(error)
                with contextlib.suppress(OSError):
                    self._temporary.unlink()

    def _replace(self, data: bytes) -> None:
        # Not forced to disk: after a power cut there is no job to watch either.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NO_FOLLOW
        descriptor = os.open(self._temporary, flags, PRIVATE_FILE)
        with open(descriptor, "wb") as file:
            set_mode(descriptor, PRIVATE_FILE)
            file.write(data)
        os.replace(self._temporary, self._path)

    def _remove_remains(self) -> None:
        """Remove temporary files of killed processes."""
        with contextlib.suppress(OSError):
            for path in self._path.parent.glob(f"{self._path.name}.*.tmp"):
                number = path.name.removesuffix(".tmp").rpartition(".")[2]
                if number.isdecimal() and start_of(int(number)) is None:
                    path.unlink()


def _checked(values: Mapping[str, Any]) -> Status:
    known = {each.name for each in fields(Status)}
    said = {name: value for name, value in values.items() if name in known}
    said["role"], said["state"] = Role(said["role"]), State(said["state"])
    for name in ("site", "work", "job", "run", "last_error", "process_started", "boot"):
        said[name] = printable(_text(said.get(name, "")))
    for name in ("round", "rounds_total", "bytes_up", "bytes_down", "pid"):
        said[name] = _count(said.get(name, 0))
    for name in ("started", "updated", "error_at"):
        said[name] = _number(said.get(name, 0.0))
    for name in ("rounds_per_second", "loss"):
        said[name] = None if said.get(name) is None else _number(said[name])
    for name in ("parties", "parties_alive"):
        said[name] = tuple(printable(_text(each), _LONGEST_NAME) for each in said.get(name, ()))
    said["epsilon"] = tuple(
        EpsilonSpent(
            limit=printable(_text(each["limit"])),
            spent=math.inf if each["spent"] is None else _number(each["spent"]),
            epsilon=_number(each["epsilon"]),
            delta=_number(each["delta"]),
        )
        for each in said.get("epsilon", ())
    )
    return Status(**said)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError("no count")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("no number")
    return float(value)
