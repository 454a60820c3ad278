"""What the tests of a whole federation share: the bytes on the wire, links, networks and runs that end early."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import pbmvfl
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.federation import Federation
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit, epsilon_at
from pbmvfl.plan import Plan
from pbmvfl.privacy.accounting import rdp_curve
from pbmvfl.privacy.table import training_run
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.runs.results import Result
from pbmvfl.schedule import Schedule
from pbmvfl.transport.links import InProcessLink, PartyInputs

HEADER = 44
EMBEDDING = 6
JOINT, PREDICTION = 1, 2


class Wire:
    """Everything that crossed the wire, read from the bytes alone: kind at 5, round at 32, round kind at 40."""

    def __init__(self, federation: Federation) -> None:
        self.messages: list[tuple[str, int, bytes]] = []
        federation._taps.append(lambda *message: self.messages.append(message))

    def embeddings(self, round_kind: int) -> list[tuple[int, int, bytes]]:
        """(round, party, payload) of every release of this kind."""
        return [
            (struct.unpack_from("<I", message, 32)[0], party, message[HEADER:])
            for direction, party, message in self.messages
            if direction == "up" and message[5] == EMBEDDING and message[40] == round_kind
        ]

    def row_releases(self, plan: Plan, round_kind: int) -> Counter[tuple[int, int]]:
        """How often each (party, row) was released."""
        schedule = Schedule(plan)
        seen: Counter[tuple[int, int]] = Counter()
        for number, party, _ in self.embeddings(round_kind):
            seen.update((party, int(row)) for row in schedule[number].rows)
        return seen


def fitted(plan: Plan, data: VerticalDataset, **options: Any) -> tuple[Result, Wire]:
    federation = Federation(plan)
    wire = Wire(federation)
    return federation.fit(data, **options), wire


def weights(checkpoints: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.stem: load_file(path) for path in sorted(checkpoints.glob("round-*/*.safetensors"))}


def own_networks(plan: Plan, data: VerticalDataset, *, bound: float | None = 1.0) -> list[nn.Module]:
    torch.manual_seed(3)
    networks: list[nn.Module] = [nn.Linear(part.shape[1], plan.embedding_dim) for part in data.train_features]
    return networks if bound is None else [pbmvfl.Bounded(network, bound=bound) for network in networks]


class Killed(Exception):
    pass


def killer() -> Callable[..., NoReturn]:
    def kill(*_: object) -> NoReturn:
        raise Killed

    return kill


def recorded_links(monkeypatch: pytest.MonkeyPatch, base: type = InProcessLink) -> list[Any]:
    """Every link that a federation opens from now on; `closed` says whether it was closed."""
    links: list[Any] = []

    class Recorded(base):  # type: ignore[misc]  # which of the two links is known only here
        closed = False

        def __init__(self, inputs: PartyInputs, *others: object) -> None:
            super().__init__(inputs, *others)
            links.append(self)

        def close(self) -> None:
            self.closed = True
            super().close()

    monkeypatch.setattr(f"pbmvfl.federation.{base.__name__}", Recorded)
    return links


def limit_of(plan: Plan, uses: float) -> Limit:
    """Room for so many uses of every row."""
    one = training_run(plan.replace(num_epochs=1))
    divergence = uses * rdp_curve(one, Unit.CELL, Accounting.PAPER, orders=(4.0,))[0]
    epsilon = epsilon_at(divergence, 1e-5, 4.0)
    return Limit.choose(unit="cell", accounting="paper", epsilon=epsilon, delta=1e-5, order=4.0)


def set_limit(path: Path, dataset: str, limit: Limit) -> None:
    book = Ledger(path)
    book.set_limit(dataset, limit)
    book.close()
