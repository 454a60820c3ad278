"""The parts of a trained federation as files: one folder for each party, one for the server.

    part.json             what it is a part of, for which columns, and a digest of all of it
    weights.safetensors   the network and what prepares its columns, or the head and what votes are read by

A party's folder belongs to that party and a server's to the label holder: together they are a model, alone neither is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from pbmvfl._files import PRIVATE_FILE, Kinds, check_seal, make_private_folder, read_object, sealed, write_atomically
from pbmvfl.data.column_rules import PartyColumns
from pbmvfl.errors import DataError, ModelError, PlanError
from pbmvfl.plan.plan import Plan

#: Of part.json. Another number is refused: what it means is not known here.
FORMAT = 1
INDEX, WEIGHTS_FILE = "part.json", "weights.safetensors"
SERVER = "server"
_KINDS: Kinds = {"format": int, "role": str, "model": str, "plan": dict, "dataset": str, "weights_sha256": str}


def model_digest(plan: Plan, run_id: bytes) -> str:
    """Return the digest that parts of one training have in common, and those of another have not."""
    return plan.model_digest(run_id)


def folder_name(party: str) -> str:
    """Return the folder of a party's part, by its name.

    Names that cannot be a folder's, or are the server's, keep the letters that can, and get a digest after a tilde,
    which no other name has in it.
    """
    if re.fullmatch(r"[a-z0-9_][a-z0-9_-]{0,39}", party) and party != SERVER:
        return party
    kept = re.sub(r"[^A-Za-z0-9_-]+", "_", party)[:40].strip("_")
    return f"{kept}~{hashlib.sha256(party.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Public description of a part, and its private state."""

    role: ClassVar[str]

    #: The training that it came from (`model_digest`).
    model: str
    plan: Plan
    #: The owners' name of the people it was trained on.
    dataset: str
    #: Weights as named tensors. They stay with their owner.
    state: Mapping[str, Tensor]

    def save(self, folder: Path) -> None:
        """Write both files; the one that names the other comes last."""
        try:
            make_private_folder(folder)
            data = save(dict(self.state))
            write_atomically(folder / WEIGHTS_FILE, data, mode=PRIVATE_FILE)
            said = {
                "format": FORMAT,
                "role": self.role,
                "model": self.model,
                "plan": self.plan.to_dict(),
                "dataset": self.dataset,
                "weights_sha256": hashlib.sha256(data).hexdigest(),
                **self._own(),
            }
            write_atomically(folder / INDEX, json.dumps(sealed(said), indent=1) + "\n", mode=PRIVATE_FILE)
        except OSError as error:
            raise ModelError(f"{folder} cannot be written: {error}; free some space or give another folder") from error

    def _own(self) -> dict[str, Any]:
        """Return what parts of this role add to the description."""
        raise NotImplementedError

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a part as it was saved, to the bit; refuse anything else."""
        path = folder / INDEX
        if not path.is_file():
            raise ModelError(f"{folder} has no part of a model: {INDEX} is not there; ask its owner for the folder")
        said = read_object(path, _KINDS, ModelError)
        if said["format"] != FORMAT:
            raise ModelError(
                f"{path} has format={said['format']}; this version reads format {FORMAT}: use the version that wrote it"
            )
        check_seal(said, path, ModelError)
        if said["role"] != cls.role:
            raise ModelError(f"{path} is the part of a {said['role']}, not of a {cls.role}; give the right folder")
        try:
            plan = Plan.from_dict(said["plan"])
        except PlanError as error:
            raise _of_another_version(path, error) from error
        return cls(
            model=said["model"],
            plan=plan,
            dataset=said["dataset"],
            state=_read_weights(folder / WEIGHTS_FILE, said["weights_sha256"]),
            **cls._read_own(said, path),
        )

    @classmethod
    def _read_own(cls, said: dict[str, Any], path: Path) -> dict[str, Any]:
        raise NotImplementedError


def _read_weights(path: Path, digest: str) -> dict[str, Tensor]:
    try:
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise ModelError(f"{path} is damaged: it is not what was written there; restore it from a copy")
        return load(data)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}; restore it from a copy") from error


def _of_another_version(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path} was written by another version of this program ({error}); use that one")


@dataclass(frozen=True, kw_only=True, eq=False)
class PartyPart(Part):
    """One party's network, with what it needs to know to take new rows."""

    role = "party"

    index: int
    party: str
    #: Shape of one row, as its owner holds it.
    shape: tuple[int, ...]
    dtype: str
    #: What its columns are called and how they are encoded; None where it was trained on arrays without names.
    columns: PartyColumns | None = None
    #: Whether the network is the owner's own and not the plan's: then it must be given again.
    own_network: bool = False
    #: The run whose training was charged to this party's ledger, by which that ledger is known again; "" if none was.
    #: Predictions are then charged to the same ledger.
    ledger_run: str = ""

    def _own(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "party": self.party,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "columns": None if self.columns is None else self.columns.to_dict(),
            "own_network": self.own_network,
            "ledger_run": self.ledger_run,
        }

    @classmethod
    def _read_own(cls, said: dict[str, Any], path: Path) -> dict[str, Any]:
        try:
            columns = said["columns"]
            return {
                "index": int(said["index"]),
                "party": str(said["party"]),
                "shape": tuple(int(size) for size in said["shape"]),
                "dtype": str(said["dtype"]),
                "columns": None if columns is None else PartyColumns.from_dict(columns),
                "own_network": bool(said["own_network"]),
                "ledger_run": str(said["ledger_run"]),
            }
        except (KeyError, TypeError, ValueError, DataError) as error:
            raise _of_another_version(path, error) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerPart(Part):
    """The label holder's head, and what it calls classes and parties."""

    role = "server"

    party_names: tuple[str, ...]
    class_names: tuple[str, ...]
    #: The label's column in the training table, if it came from one.
    label: str | None = None
    #: Whether the fusion model is the label holder's own classifier: then it must be given again.
    own_fusion: bool = False

    def _own(self) -> dict[str, Any]:
        said = {"party_names": list(self.party_names), "class_names": list(self.class_names), "label": self.label}
        return {**said, "own_fusion": True} if self.own_fusion else said

    @classmethod
    def _read_own(cls, said: dict[str, Any], path: Path) -> dict[str, Any]:
        try:
            return {
                "party_names": tuple(map(str, said["party_names"])),
                "class_names": tuple(map(str, said["class_names"])),
                "label": said["label"],
                "own_fusion": said.get("own_fusion") is True,
            }
        except (KeyError, TypeError) as error:
            raise _of_another_version(path, error) from error
