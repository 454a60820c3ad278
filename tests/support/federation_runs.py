"""What the tests of a whole federation share: bytes on the wire, transports, networks, runs that end early."""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.federation.federation import Federation
from pbmvfl.federation.in_process import InProcess
from pbmvfl.federation.model import FederatedModel
from pbmvfl.federation.party_processes import Processes
from pbmvfl.federation.results import Result
from pbmvfl.ledger.database import file_name
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit, epsilon_at
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.schedule import RowUses
from pbmvfl.privacy.accounting import rdp_curve
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.training.encoders import Bounded

HEADER = 44
EMBEDDING = 6
JOINT, PREDICTION = 1, 2


def process_of(transport: Processes, party: int) -> BaseProcess:
    """Return the process of one party, to end or to stop it from outside."""
    return transport._children[party]._process


def forget_answers(model: FederatedModel) -> None:
    """Leave a model what is on the disk alone: another program would not remember the last answers."""
    model._released.clear()


class Wire:
    """Everything that crossed the wire, read from the bytes alone: kind at 5, round at 32, round kind at 40."""

    def __init__(self, federation: Federation) -> None:
        self.messages: list[tuple[str, int, bytes]] = []
        federation.taps.append(lambda *message: self.messages.append(message))

    def embeddings(self, round_kind: int) -> list[tuple[int, int, bytes]]:
        """(round, party, payload) of every release of this kind."""
        return [
            (struct.unpack_from("<I", message, 32)[0], party, message[HEADER:])
            for direction, party, message in self.messages
            if direction == "up" and message[5] == EMBEDDING and message[40] == round_kind
        ]

    def row_releases(self, plan: Plan, round_kind: int) -> Counter[tuple[int, int]]:
        """How often each (party, row) was released."""
        seen: Counter[tuple[int, int]] = Counter()
        for number, party, _ in self.embeddings(round_kind):
            seen.update((party, int(row)) for row in plan.schedule[number].rows)
        return seen


def fitted(plan: Plan, data: VerticalDataset, **options: Any) -> tuple[Result, Wire]:
    federation = Federation(plan)
    wire = Wire(federation)
    return federation.fit(data, **options), wire


def newest_states(checkpoints: Path) -> dict[str, Path]:
    """The file of every role's newest state, by the name of its folder. Files are named by their rounds."""
    folders = (path for path in sorted(checkpoints.iterdir()) if path.is_dir())
    return {folder.name: max(folder.glob("round-*.safetensors")) for folder in folders}


def weights(checkpoints: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Every role's newest state."""
    return {role: load_file(path) for role, path in newest_states(checkpoints).items()}


def files_of(folder: Path) -> set[str]:
    """What a role's folder must have after several checkpoints: two indexes, the states of the last one, and the epochs
    if it is the server's."""
    index = json.loads((folder / "checkpoints.json").read_text())
    history = {"history.jsonl"} if folder.name == "server" else set()
    return {"checkpoints.json", "checkpoints.previous.json", *(state["file"] for state in index["states"]), *history}


def change_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a role's index of checkpoints so that nothing but its meaning can give that away."""
    path = folder / "checkpoints.json"
    index = json.loads(path.read_text())
    del index["sha256"]
    change(index)
    text = json.dumps(index, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**index, "sha256": hashlib.sha256(text.encode()).hexdigest()}))


def counted_uses(plan: Plan, spans: Iterable[tuple[int, int]]) -> dict[str, tuple[int, int, int]]:
    """(releases, updates, all releases) by kind of round: every row of every round of every span, one by one."""
    seen: dict[str, Counter[int]] = {kind.name: Counter() for kind in plan.schedule.kinds}
    for first, until in spans:
        for number in range(first, until):
            current = plan.schedule[number]
            seen[current.kind.name].update(int(row) for row in current.rows)
    updating = {kind.name for kind in plan.schedule.kinds if kind.updates}
    most = {name: max(rows.values(), default=0) for name, rows in seen.items()}
    return {
        name: (most[name], most[name] if name in updating else 0, sum(rows.values())) for name, rows in seen.items()
    }


def shown_uses(uses: Iterable[RowUses]) -> dict[str, tuple[int, int, int]]:
    """What a result says, in the form of `counted_uses`."""
    return {use.kind.name: (use.releases, use.updates, use.total_releases) for use in uses}


def spans_of(result: Result) -> list[tuple[int, int]]:
    return [(session.first_round, session.charged_until) for session in result.sessions]


def own_networks(plan: Plan, data: VerticalDataset, *, bound: float | None = 1.0) -> list[nn.Module]:
    torch.manual_seed(3)
    networks: list[nn.Module] = [nn.Linear(part.shape[1], plan.embedding_dim) for part in data.train_features]
    return networks if bound is None else [Bounded(network, bound=bound) for network in networks]


class Killed(Exception):
    pass


def killer() -> Callable[..., NoReturn]:
    def kill(*_: object) -> NoReturn:
        raise Killed

    return kill


def recorded_transports(
    monkeypatch: pytest.MonkeyPatch, base: type[InProcess] | type[Processes] = InProcess
) -> list[Any]:
    """Every transport that a federation opens from now on; `closed` says whether it was closed."""
    opened: list[Any] = []

    class Recorded(base):  # type: ignore[misc,valid-type]  # which of the two is known only here
        closed = False

        def __init__(self, *arguments: Any) -> None:
            opened.append(self)
            super().__init__(*arguments)

        def close(self) -> None:
            self.closed = True
            super().close()

    monkeypatch.setattr(f"pbmvfl.federation.federation.{base.__name__}", Recorded)
    return opened


def limit_of(plan: Plan, uses: float) -> Limit:
    """Room for so many uses of every row."""
    one = plan.replace(num_epochs=1).training_run()
    divergence = uses * rdp_curve(one, Unit.CELL, Accounting.PAPER, orders=(4.0,))[0]
    epsilon = epsilon_at(divergence, 1e-5, 4.0)
    return Limit.choose(unit="cell", accounting="paper", epsilon=epsilon, delta=1e-5, order=4.0)


def make_ledgers(folder: Path, parties: Iterable[str]) -> None:
    """Every owner's ledger, without a limit: a folder with a limit knows no other parties."""
    for party in parties:
        Ledger(folder / file_name(party), owner=party).close()


def set_limit(path: Path, dataset: str, limit: Limit) -> None:
    book = Ledger(path)
    book.set_limit(dataset, limit)
    book.close()
