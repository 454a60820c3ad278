"""Checkpoints: each role's weights as safetensors, and one JSON file that says which of them belong together.

They hold no keys and no noise state: after a resume there are new session keys and every party draws anew.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from pbmvfl.errors import CheckpointError
from pbmvfl.files import sync_folder, write_atomically
from pbmvfl.json_files import Kinds, checked_object, read_object
from pbmvfl.plan import Plan
from pbmvfl.runs.results import TRAFFIC_KINDS

_INDEX = "checkpoint.json"
_KINDS: Kinds = {
    "plan": dict,
    "plan_hash": str,
    "weights": str,
    "completed_rounds": int,
    "run_id": str,
    "seconds": int | float,
    "traffic": dict,
    "history": list,
}
_RUN_ID = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a checkpointed run stands, apart from the weights."""

    completed_rounds: int
    run_id: str
    seconds: float
    traffic: dict[str, int]
    history: list[dict[str, Any]]


def save_checkpoint(
    folder: Path, plan: Plan, progress: Progress, *, server: dict[str, Tensor], parties: Sequence[dict[str, Tensor]]
) -> None:
    """Write a complete checkpoint, then make it the current one in a single step, then drop the older one."""
    folder.mkdir(parents=True, exist_ok=True)
    name = _free_name(folder, progress.completed_rounds)
    target = folder / name
    target.mkdir()
    for role, state in (("server", server), *((f"party-{i}", state) for i, state in enumerate(parties))):
        write_atomically(target / f"{role}.safetensors", save(state))
    sync_folder(folder)
    index = {"plan": plan.to_dict(), "plan_hash": plan.hash.hex(), "weights": name, **asdict(progress)}
    write_atomically(folder / _INDEX, json.dumps(index, indent=1) + "\n")
    for other in folder.glob("round-*"):
        if other.name != name:
            shutil.rmtree(other)


def _free_name(folder: Path, completed_rounds: int) -> str:
    """A name of its own also for a second checkpoint of one round: the first is what there is until the other is."""
    name = f"round-{completed_rounds:07d}"
    others = (f"{name}-{number}" for number in itertools.count(2))
    return next(free for free in itertools.chain([name], others) if not (folder / free).exists())


def load_progress(folder: Path, plan: Plan) -> Progress | None:
    """Where the run stands; None if it never reached its first checkpoint."""
    path = folder / _INDEX
    if not path.exists():
        return None
    index = _read_index(path)
    if index["plan_hash"] != plan.hash.hex():
        raise CheckpointError(f"{path} {_difference(index['plan'], plan.to_dict())}")
    rounds = len(plan.schedule)
    if not 0 <= index["completed_rounds"] <= rounds:
        raise CheckpointError(f"{path} is damaged: completed_rounds={index['completed_rounds']} must be in 0..{rounds}")
    if not _RUN_ID.fullmatch(index["run_id"]):
        raise CheckpointError(f"{path} is damaged: run_id={index['run_id']!r} must be 16 hexadecimal digits")
    return Progress(**{field.name: index[field.name] for field in fields(Progress)})


def _difference(saved: dict[str, Any], now: dict[str, Any]) -> str:
    """Why two plans have different hashes."""
    for name, value in now.items():
        if saved.get(name) != value:
            return (
                f"belongs to another plan: it has {name}={saved.get(name)!r}, this plan has {name}={value!r}; "
                "resume with the run's own plan, or start a new run"
            )
    return (
        "was written by another version of this program: the same plan has another hash there; "
        "continue it with that version, or start a new run"
    )


def load_weights(folder: Path, plan: Plan) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The server's and every party's state of the current checkpoint."""
    weights = folder / str(_read_index(folder / _INDEX)["weights"])
    try:
        server = load_file(weights / "server.safetensors")
        parties = [load_file(weights / f"party-{i}.safetensors") for i in range(plan.num_parties)]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{weights} cannot be read: {error}") from error
    return server, parties


def _read_index(path: Path) -> dict[str, Any]:
    index = read_object(path, _KINDS, CheckpointError)
    checked_object(index["traffic"], TRAFFIC_KINDS, path, CheckpointError)
    for line in index["history"]:
        checked_object(line, {"epoch": int | float}, path, CheckpointError)
    return index
