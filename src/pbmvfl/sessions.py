"""Which rounds a run has released, over all its sessions.

A round that is run again after a resume is a second release. `sessions.json` says what may have been released, and is
written before it happens, so that a killed process leaves a count that is too high and never one that is too low.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pbmvfl.errors import CheckpointError, PbmvflError
from pbmvfl.files import write_atomically
from pbmvfl.json_files import Kinds, checked_object, read_json
from pbmvfl.plan import Plan

_SESSIONS = "sessions.json"
_KINDS: Kinds = {"session": str, "first_round": int, "charged_until": int, "noise_is_seeded": bool}


@dataclass(frozen=True, kw_only=True)
class SessionRecord:
    """Rounds that one session released, or may have released before it was killed: first_round <= r < charged_until."""

    session: str
    first_round: int
    charged_until: int
    #: True only in tests: somebody knows the session's noise, and so does everyone who reads the run's later sessions.
    noise_is_seeded: bool

    @classmethod
    def from_value(cls, value: object, path: Path, error: type[PbmvflError]) -> SessionRecord:
        """One record of the JSON in `path`."""
        record: dict[str, Any] = checked_object(value, _KINDS, path, error)
        return cls(**{name: record[name] for name in _KINDS})


class SessionLog:
    """Every session of a run, charged ahead: the file names a block of rounds before the first of them is sent."""

    def __init__(self, folder: Path | None, *, checkpointed_rounds: int | None = None) -> None:
        """`checkpointed_rounds` of the checkpoint beside it, all of which were released: the log must know of them."""
        self._path = None if folder is None else folder / _SESSIONS
        self.records: list[SessionRecord] = []
        if self._path is not None and (self._path.exists() or checkpointed_rounds is not None):
            self.records = _read_records(self._path)
            _check_covered(self.records, checkpointed_rounds or 0, self._path)

    @property
    def noise_is_seeded(self) -> bool:
        """Whether any session's noise is known: one is enough to know its rows."""
        return any(record.noise_is_seeded for record in self.records)

    def open(self, session: str, *, first_round: int, until: int, noise_is_seeded: bool) -> None:
        self.records.append(
            SessionRecord(
                session=session, first_round=first_round, charged_until=until, noise_is_seeded=noise_is_seeded
            )
        )
        self._write()

    def charge_until(self, until: int) -> None:
        self.records[-1] = replace(self.records[-1], charged_until=until)
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            write_atomically(self._path, json.dumps([asdict(record) for record in self.records], indent=2) + "\n")

    def row_uses(self, plan: Plan) -> dict[str, int]:
        """The largest number of releases about any one row, over all sessions."""
        train = test = 0
        for record in self.records:
            joint_end = min(record.charged_until, plan.num_rounds)
            if record.first_round < joint_end:
                train += -(-joint_end // plan.rounds_per_epoch) - record.first_round // plan.rounds_per_epoch
            if record.charged_until > plan.num_rounds:
                test += 1
        return {"train": train, "test": test}


def _read_records(path: Path) -> list[SessionRecord]:
    values = read_json(path, CheckpointError)
    if not isinstance(values, list):
        raise CheckpointError(f"{path} is damaged: it must be a list of sessions; restore it from a copy")
    return [SessionRecord.from_value(value, path, CheckpointError) for value in values]


def _check_covered(records: list[SessionRecord], completed_rounds: int, path: Path) -> None:
    """Rounds are charged before they are sent, so a log that knows of fewer than the checkpoint is not this run's."""
    charged = max((record.charged_until for record in records), default=0)
    if charged < completed_rounds:
        raise CheckpointError(
            f"{path} counts releases of {charged} rounds, the checkpoint has {completed_rounds}: the epsilon would be "
            "too small; restore the file from a copy, or start a new run"
        )
