"""Training in one process, as a bit-exact reference for organisations' runs without noise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.deploy.alignment.aligned_rows import AlignedRows
from pbmvfl.deploy.alignment.runner import LabelRows
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.federation.federation import Federation
from pbmvfl.plan.plan import Plan


def train_together(homes: Mapping[str, SiteFolder], plan: Plan, folder: Path, *, alignment: str = "people") -> None:
    """Train on the organisations' aligned rows, all in this process, and save the model's parts in the folder."""
    server, parties = _roles(homes)
    rows = LabelRows.load(homes[server], alignment)
    features = tuple(np.array(AlignedRows.load(homes[name].alignment(alignment)).features) for name in parties)
    data = VerticalDataset(
        name=alignment,
        party_names=parties,
        train_features=features,
        test_features=tuple(part[:0] for part in features),
        train_labels=rows.train_labels,
        test_labels=rows.test_labels,
        class_names=rows.class_names,
        default_encoder="mlp",
    )
    here = Federation(plan)
    here.fit(data)
    here.save(folder)


def differing_tensors(homes: Mapping[str, SiteFolder], run: str, folder: Path) -> list[str]:
    """Return the names of tensors of a run's model that differ from the model in the folder in any bit."""
    server, _ = _roles(homes)
    found = []
    for name, home in homes.items():
        apart = load_file(home.model(run) / "weights.safetensors")
        together = load_file(folder / ("server" if name == server else name) / "weights.safetensors")
        if not apart or not together:
            raise AssertionError(f"{name}: a model without weights")
        keys = sorted(apart.keys() | together.keys())
        found += [f"{name}: {key}" for key in keys if not _same(apart.get(key), together.get(key))]
    return found


def _roles(homes: Mapping[str, SiteFolder]) -> tuple[str, tuple[str, ...]]:
    federation = next(iter(homes.values())).federation
    return federation.server, tuple(federation.parties)


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is not None and other is not None and one.tobytes() == other.tobytes()
