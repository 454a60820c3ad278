"""Log of the rounds that a run has released, over all its sessions.

A round that is run again after a resume is a second release. `sessions.json` says what may have been released, and is
written before it happens, so that a killed process leaves a count that is too high and never one that is too low. One
process at a time may write it, and every record says for which plan. Each has a digest of itself and of those before
it: a count that was damaged on disk is refused, as it might be too low.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pbmvfl._descriptors import lock_folder
from pbmvfl._files import PRIVATE_FILE, Kinds, checked_object, make_private_folder, read_json, write_atomically
from pbmvfl._text import counted
from pbmvfl.errors import CheckpointError, PbmvflError
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.schedule import RowUses

_SESSIONS = "sessions.json"
_LOCK = "sessions.lock"
_DIGEST = "sha256"
_KINDS: Kinds = {"session": str, "first_round": int, "charged_until": int, "noise_is_seeded": bool}


@dataclass(frozen=True, kw_only=True)
class ReleasedRounds:
    """Rounds first_round <= r < charged_until that one session released, or may have released before it was killed."""

    session: str
    first_round: int
    charged_until: int
    #: True only in tests: the session's noise is known, also to readers of the run's later sessions.
    noise_is_seeded: bool
    #: What was released depends on the plan. None in records of versions that did not write it.
    plan_hash: str | None = None
    #: Whether the weights that the run began with are public. Records of versions that did not look at them keep what
    #: they were charged.
    public_start: bool = True

    @classmethod
    def from_value(cls, value: object, path: Path, error: type[PbmvflError]) -> ReleasedRounds:
        """Read one record of the JSON in `path`."""
        record: dict[str, Any] = checked_object(value, _KINDS, path, error)
        later = {"plan_hash": record.get("plan_hash"), "public_start": record.get("public_start", True)}
        checked_object(later, {"plan_hash": str | None, "public_start": bool}, path, error)
        return cls(**{name: record[name] for name in _KINDS}, **later)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, which `from_value` reads."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class ReleaseLog:
    """Every session of a run, charged ahead: the file names a block of rounds before the first of them is sent.

    A log locks its folder until `close`, or until it is collected.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        plan_hash: str | None = None,
        moved_from: Path | None = None,
    ) -> None:
        """Open the log in `folder`, with what earlier sessions released there.

        Args:
            folder: Folder of the file; None for a log in memory.
            plan_hash: Hash of the run's plan; records of another are refused.
            moved_from: Folder where an earlier version kept the file.

        Raises:
            CheckpointError: Another process has the folder, or the file is damaged or another run's.
        """
        self.records: list[ReleasedRounds] = []
        self._plan_hash = plan_hash
        self._path: Path | None = None
        self._release_lock: weakref.finalize[..., ReleaseLog] | None = None
        if folder is None:
            return
        make_private_folder(folder)
        self._path = folder / _SESSIONS
        self._release_lock = weakref.finalize(self, os.close, _lock(folder))
        older = None if moved_from is None else moved_from / _SESSIONS
        path = older if older is not None and older.exists() and not self._path.exists() else self._path
        try:
            if path.exists():
                self.records = _read_records(path)
                _check_plan(self.records, plan_hash, path)
        except BaseException:
            self.close()
            raise

    def must_cover(self, completed_rounds: int) -> None:
        """Refuse a log with fewer rounds than a checkpoint: rounds are charged before they are sent."""
        charged = max((record.charged_until for record in self.records), default=0)
        if self._path is not None and (not self.records or charged < completed_rounds):
            raise CheckpointError(
                f"{self._path} counts releases of {counted(charged, 'round')}, the checkpoint has {completed_rounds}: "
                "the epsilon would be too small; restore the file from a copy, or start a new run"
            )

    def close(self) -> None:
        """Release the lock of the folder. Nothing can be charged after this."""
        if self._release_lock is not None:
            self._release_lock()

    @property
    def noise_is_seeded(self) -> bool:
        """True if any session's noise is known: one is enough to learn its rows."""
        return any(record.noise_is_seeded for record in self.records)

    @property
    def public_start(self) -> bool:
        """True if all sessions began with public weights, or resumed one that did."""
        return all(record.public_start for record in self.records)

    def open(
        self, session: str, *, first_round: int, until: int, noise_is_seeded: bool, public_start: bool = True
    ) -> None:
        self.records.append(
            ReleasedRounds(
                session=session,
                first_round=first_round,
                charged_until=until,
                noise_is_seeded=noise_is_seeded,
                plan_hash=self._plan_hash,
                public_start=public_start,
            )
        )
        self._write()

    def charge_until(self, until: int) -> None:
        self.records[-1] = replace(self.records[-1], charged_until=until)
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        if self._release_lock is None or not self._release_lock.alive:
            raise CheckpointError(f"{self._path} was closed, and another process may write it; open it again")
        records = [record.to_dict() for record in self.records]
        signed = [{**each, _DIGEST: digest} for each, digest in zip(records, _digests(records), strict=True)]
        write_atomically(self._path, json.dumps(signed, indent=2) + "\n", mode=PRIVATE_FILE)

    def uses_after(self, plan: Plan, *, first_round: int) -> tuple[RowUses, ...]:
        """Return what `uses` will be if one more session runs from this round to the plan's end."""
        rest = (min(first_round, plan.schedule.settled_at), len(plan.schedule))
        return plan.schedule.uses([*self._spans, rest])

    def uses_until(self, plan: Plan, completed_rounds: int) -> tuple[RowUses, ...]:
        """Return what `uses` would be if the session under way ended after these rounds."""
        *earlier, (first_round, _) = self._spans
        return plan.schedule.uses([*earlier, (first_round, completed_rounds)])

    def uses(self, plan: Plan) -> tuple[RowUses, ...]:
        """Return the largest number of releases of any one row, and of updates with it, over all sessions."""
        return plan.schedule.uses(self._spans)

    @property
    def _spans(self) -> list[tuple[int, int]]:
        return [(record.first_round, record.charged_until) for record in self.records]


def _lock(folder: Path) -> int:
    """Return a descriptor that locks the folder until it is closed or the process ends."""
    descriptor = _try_to_lock(folder)
    if descriptor is None:
        gc.collect()  # a run of this process that was interrupted may hold it until it is collected
        descriptor = _try_to_lock(folder)
    if descriptor is None:
        raise CheckpointError(
            f"{folder}: another process is training in this folder, or another run of this one, and each would "
            "overwrite the other's count of releases; wait for it, or choose another folder"
        )
    return descriptor


def _try_to_lock(folder: Path) -> int | None:
    """Lock the folder; None if another process has it."""
    try:
        return lock_folder(folder, _LOCK, blocking=False)
    except OSError as failure:
        raise CheckpointError(
            f"{folder} cannot be locked against a second process ({failure}); keep the run on a file system with locks"
        ) from failure


def _read_records(path: Path) -> list[ReleasedRounds]:
    values = read_json(path, CheckpointError)
    if not isinstance(values, list):
        raise CheckpointError(f"{path} is damaged: it must be a list of sessions; restore it from a copy")
    records = [ReleasedRounds.from_value(value, path, CheckpointError) for value in values]
    if any(_DIGEST in value for value in values):  # earlier versions wrote none
        contents = [{name: known for name, known in value.items() if name != _DIGEST} for value in values]
        if [value.get(_DIGEST) for value in values] != _digests(contents):
            raise CheckpointError(
                f"{path} is damaged: it is not what was written there, and may count too few releases; restore it from "
                "a copy, or start a new run"
            )
    return records


def _digests(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a digest of each record and all before it."""
    chain = hashlib.sha256()
    found = []
    for record in records:
        chain.update(json.dumps(record, sort_keys=True, separators=(",", ":")).encode() + b"\n")
        found.append(chain.hexdigest())
    return found


def _check_plan(records: list[ReleasedRounds], plan_hash: str | None, path: Path) -> None:
    """Refuse records of another plan: its rounds release something else and cannot be counted as this one's."""
    for record in records:
        if None not in (record.plan_hash, plan_hash) and record.plan_hash != plan_hash:
            raise CheckpointError(
                f"{path} belongs to another plan: it has releases of plan {record.plan_hash}, this plan is "
                f"{plan_hash}; resume with the run's own plan (and version of this program), or choose another folder"
            )
