"""Checkpoints: each role's weights as safetensors, and one JSON file that says which of them belong together.

They hold no keys and no noise state: after a resume there are new session keys and every party draws anew.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from pbmvfl.errors import CheckpointError
from pbmvfl.files import sync_folder, write_atomically
from pbmvfl.plan import Plan

_INDEX = "checkpoint.json"


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
    name = f"round-{progress.completed_rounds:07d}"
    target = folder / name
    if target.exists():
        shutil.rmtree(target)
    target.mkdir()
    for role, state in (("server", server), *((f"party-{i}", state) for i, state in enumerate(parties))):
        write_atomically(target / f"{role}.safetensors", save(state))
    sync_folder(folder)
    index = {"plan": plan.to_dict(), "plan_hash": plan.hash.hex(), "weights": name, **asdict(progress)}
    write_atomically(folder / _INDEX, json.dumps(index, indent=1) + "\n")
    for other in folder.glob("round-*"):
        if other.name != name:
            shutil.rmtree(other)


def load_progress(folder: Path, plan: Plan) -> Progress | None:
    """Where the run stands; None if it never reached its first checkpoint."""
    path = folder / _INDEX
    if not path.exists():
        return None
    index = _read_index(path)
    if index.pop("plan_hash") != plan.hash.hex():
        saved, now = index["plan"], plan.to_dict()
        name = next(name for name in now if saved.get(name) != now[name])
        raise CheckpointError(
            f"{path} belongs to another plan: it has {name}={saved.get(name)!r}, this plan has {name}={now[name]!r}; "
            "resume with the run's own plan, or start a new run"
        )
    return Progress(**{name: value for name, value in index.items() if name not in ("plan", "weights")})


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
    try:
        index: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return index
