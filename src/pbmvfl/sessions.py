"""Which rounds a run has released, over all its sessions.

A round that is run again after a resume is a second release. `sessions.json` says what may have been released, and is
written before it happens, so that a killed process leaves a count that is too high and never one that is too low.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pbmvfl.files import write_atomically
from pbmvfl.plan import Plan

_SESSIONS = "sessions.json"


@dataclass(frozen=True, kw_only=True)
class SessionRecord:
    """Rounds that one session released, or may have released before it was killed: first_round <= r < charged_until."""

    session: str
    first_round: int
    charged_until: int


class SessionLog:
    """Every session of a run, charged ahead: the file names a block of rounds before the first of them is sent."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / _SESSIONS
        self.records: list[SessionRecord] = []
        if self._path is not None and self._path.exists():
            self.records = [SessionRecord(**record) for record in json.loads(self._path.read_text())]

    def open(self, session: str, *, first_round: int, until: int) -> None:
        self.records.append(SessionRecord(session=session, first_round=first_round, charged_until=until))
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
