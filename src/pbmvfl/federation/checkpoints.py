"""A role's own checkpoints: its weights as safetensors in its own folder, and one JSON file that says what is there.

Every party has a folder of its own, and no other role reads it. The last two states are kept: when a run is killed
while some roles have written the newest one and others have not, all of them still have the one before. The index
before the last is kept too: if the last one is damaged, the states in the one before that are still whole are used. One
process at a time writes here: a party's ledger has one session, and a run's log of releases one writer. Files hold no
keys and no noise: after a resume there are new session keys and every party draws anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from pbmvfl._files import (
    PRIVATE_FILE,
    Kinds,
    checked_object,
    make_private_folder,
    not_written,
    read_object,
    remove_leftovers,
    seal,
    sealed,
    write_atomically,
)
from pbmvfl.errors import CheckpointError
from pbmvfl.plan.plan import Plan

#: Format 2 kept all epochs in the notes of the server's states, format 3 a digest of them.
FORMAT, _READ = 3, (2, 3)
_INDEX, _PREVIOUS = "checkpoints.json", "checkpoints.previous.json"
#: How version 0.1 called its index, beside all roles' weights.
_OLD_INDEX = "checkpoint.json"
_KEPT = 2
_KINDS: Kinds = {"format": int, "plan": dict, "plan_hash": str, "run_id": str, "states": list, "sha256": str}
_STATE: Kinds = {"completed_rounds": int, "file": str, "sha256": str, "notes": dict}
_WEIGHTS = "round-*.safetensors"
_log = logging.getLogger(__name__)


class _DamagedIndex(CheckpointError):
    """An index that is not what was written."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The folder of one role's checkpoints of one plan."""

    folder: Path
    plan: Plan
    #: In epochs; the end of the last epoch is always kept.
    every: int = 1
    #: Refuse a damaged index instead of using the one before it: for a model, which is of the last round or of none.
    strict: bool = False
    #: Notes that the next state is saved with, for people and for the role itself.
    notes: dict[str, Any] = field(default_factory=dict)

    # --- Keeper ---

    def rounds(self, run_id: bytes) -> list[int]:
        """Return the rounds of a run that have a state; none for another run."""
        return sorted(state["completed_rounds"] for state in self._states(run_id))

    def wants(self, completed_rounds: int) -> bool:
        """Return whether the state after these rounds, the end of an epoch, is to be kept."""
        epochs = round(self.plan.schedule.epochs_before(completed_rounds))
        return epochs % self.every == 0 or epochs == self.plan.num_epochs

    def save(self, run_id: bytes, completed_rounds: int, state: dict[str, Tensor]) -> None:
        """Write a state, then make it known in a single step, then drop what is older than the one before.

        Round 0 has no state: the first weights can be made again.
        """
        if completed_rounds == 0:
            return
        try:
            make_private_folder(self.folder)
        except OSError as error:
            raise not_written(self.folder, error) from error
        data = save(state)
        digest = hashlib.sha256(data).hexdigest()
        name = f"round-{completed_rounds:07d}-{digest[:8]}.safetensors"
        write_atomically(self.folder / name, data, mode=PRIVATE_FILE)
        # Later states belong to a history that was given up when the run resumed from before them.
        states = [each for each in self._states(run_id) if each["completed_rounds"] < completed_rounds]
        known = {"completed_rounds": completed_rounds, "file": name, "sha256": digest, "notes": dict(self.notes)}
        states = [*states, known][-_KEPT:]
        text = {
            "format": FORMAT,
            "plan": self.plan.to_dict(),
            "plan_hash": self.plan.hash.hex(),
            "run_id": run_id.hex(),
            "states": states,
        }
        self._keep_index()
        write_atomically(self.folder / _INDEX, json.dumps(sealed(text), indent=1) + "\n", mode=PRIVATE_FILE)
        for other in self.folder.glob(_WEIGHTS):
            if other.name not in {each["file"] for each in states}:
                other.unlink(missing_ok=True)
        remove_leftovers(self.folder, _WEIGHTS)

    def load(self, run_id: bytes, completed_rounds: int) -> dict[str, Tensor]:
        """Return a state as it was saved, to the bit; refuse a damaged file."""
        state = self._state(run_id, completed_rounds)
        try:
            return load(self._weights(state))
        except SafetensorError as error:
            path = self.folder / state["file"]
            raise CheckpointError(f"{path} cannot be read: {error}; restore it from a copy") from error

    # --- notes beside the weights ---

    def notes_of(self, run_id: bytes, completed_rounds: int) -> Mapping[str, Any]:
        notes: dict[str, Any] = self._state(run_id, completed_rounds)["notes"]
        return notes

    @property
    def run_id(self) -> bytes | None:
        """Id of the run whose states are here; None if there are none."""
        index = self._read()
        return None if index is None else bytes.fromhex(index["run_id"])

    def _state(self, run_id: bytes, completed_rounds: int) -> dict[str, Any]:
        for state in self._states(run_id):
            if state["completed_rounds"] == completed_rounds:
                return dict(state)
        raise CheckpointError(f"{self.folder} has no checkpoint of round={completed_rounds} of run {run_id.hex()}")

    # --- the index ---

    def _states(self, run_id: bytes) -> list[dict[str, Any]]:
        """Return the states of a run; there are none if the index is another run's."""
        index = self._read()
        return [] if index is None or index["run_id"] != run_id.hex() else index["states"]

    def _read(self) -> dict[str, Any] | None:
        """Return the index, or the one before it if it is missing or damaged; None if there was none ever."""
        damage: CheckpointError | None = None
        try:
            index = self._checked(_INDEX)
            if index is not None:
                return index
        except _DamagedIndex as error:
            damage = error
        if not self.strict and (self.folder / _PREVIOUS).exists():
            return self._previous(damage)
        if damage is not None:
            raise damage
        if (self.folder / _OLD_INDEX).exists() or (self.folder.parent / _OLD_INDEX).exists():
            raise CheckpointError(
                f"{self.folder.parent} was written by version 0.1 of this program, whose messages mean something "
                "else; continue it with that version, or start a new run"
            )
        return None

    def _previous(self, damage: CheckpointError | None) -> dict[str, Any]:
        """Return the index before the last, with the states whose weights are whole: its oldest ones are removed."""
        path = self.folder / _PREVIOUS
        try:
            index = self._checked(_PREVIOUS)
            states = [] if index is None else [state for state in index["states"] if self._is_whole(state)]
        except CheckpointError as error:
            raise damage or error from error
        if index is None or not states:
            raise damage or CheckpointError(f"{path} has no state with whole weights; restore it from a copy")
        _log.warning("%s is missing or damaged; using %s", self.folder / _INDEX, _PREVIOUS)
        return {**index, "states": states}

    def _keep_index(self) -> None:
        """Give the index a second name, as the one before, unless it is damaged.

        Where a file can have one name alone, no index before is kept.
        """
        second = self.folder / f"{_PREVIOUS}.new"
        with contextlib.suppress(_DamagedIndex, OSError):
            if self._checked(_INDEX) is not None:
                second.unlink(missing_ok=True)  # of a killed process
                os.link(self.folder / _INDEX, second)
                os.replace(second, self.folder / _PREVIOUS)
                second.unlink(missing_ok=True)  # two names of one file are both left by `replace`

    def _checked(self, name: str) -> dict[str, Any] | None:
        """Return an index as it was written; None if there is none."""
        path = self.folder / name
        if not path.exists():
            return None
        index = read_object(path, _KINDS, _DamagedIndex)
        if index["format"] not in _READ:
            known = " and ".join(map(str, _READ))
            raise CheckpointError(f"{path} has format={index['format']}; this version reads formats {known}")
        if index["sha256"] != seal(index):  # a state taken for one of another round would fit every network
            raise _DamagedIndex(
                f"{path} is damaged: it is not what was written there; restore it from a copy, or start a new run"
            )
        if index["plan_hash"] != self.plan.hash.hex():
            raise CheckpointError(f"{path} {_difference(index['plan'], self.plan.to_dict())}")
        for state in index["states"]:
            checked_object(state, _STATE, path, _DamagedIndex)
            if not 0 < state["completed_rounds"] <= len(self.plan.schedule):
                raise _DamagedIndex(
                    f"{path} is damaged: completed_rounds={state['completed_rounds']} must be in "
                    f"1..{len(self.plan.schedule)}"
                )
        if len(index["run_id"]) != 16 or not set(index["run_id"]) <= set("0123456789abcdef"):
            raise _DamagedIndex(f"{path} is damaged: run_id={index['run_id']!r} must be 16 hexadecimal digits")
        return index

    def _weights(self, state: Mapping[str, Any]) -> bytes:
        """Return the bytes of a state's weights; refuse those that were not written with it."""
        path: Path = self.folder / state["file"]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}; restore it from a copy") from error
        if hashlib.sha256(data).hexdigest() != state["sha256"]:
            raise CheckpointError(
                f"{path} is damaged: it is not what was written there; restore it from a copy, or start a new run"
            )
        return data

    def _is_whole(self, state: Mapping[str, Any]) -> bool:
        try:
            self._weights(state)
        except CheckpointError:
            return False
        return True


def _difference(saved: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe why two plans have different hashes."""
    for name, value in now.items():
        if saved.get(name) != value:
            was, is_now = saved.get(name), value
            if isinstance(was, dict) and isinstance(is_now, dict):
                name, was, is_now = next(
                    (each, was.get(each), is_now.get(each))
                    for each in (*is_now, *was)
                    if was.get(each) != is_now.get(each)
                )
            return (
                f"belongs to another plan: it has {name}={was!r}, this plan has {name}={is_now!r}; "
                "resume with the run's own plan, or start a new run"
            )
    return (
        "was written by another version of this program: the same plan has another hash there; "
        "continue it with that version, or start a new run"
    )
