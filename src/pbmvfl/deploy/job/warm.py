"""Warming up: a tiny federation of the same kind of plan, in this process, before the first round of the real one.

The first use of torch's optimisers, of gradients row by row and of compiled loops takes seconds; in a round that others
wait for, a timeout. The tiny one has made-up rows, keys of its own, no ledger and no files. It leaves nothing behind
but code that is loaded: every random stream of a run is drawn from the run's own seed, keys or entropy, and torch's
global generator is put back as it was.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import PbmvflError
from pbmvfl.federation.federation import Federation
from pbmvfl.federation.in_process import InProcess
from pbmvfl.plan.groups import Evaluation, Head, Labels, PreparationName
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.schedule import COUNTS, JOINT, LOCAL, PREDICTION, SYMBOLS, Order, Phase
from pbmvfl.protocol.server import Server
from pbmvfl.protocol.session import Meter, drive
from pbmvfl.training.encoders import own_generator

_PARTIES, _COLUMNS, _BATCH = 2, 3, 4
#: Sides of pictures: small ones take the same layers.
_PICTURE = (1, 16, 16)
_PICTURE_ENCODERS = frozenset({"multiview-conv", "resnet18", "resnet18-batchnorm"})


def warm_up(plan: Plan) -> float:
    """Load and compile what rounds of this plan need; how many seconds it took.

    It ends no job: what cannot be made tiny stays cold, and the first round takes as long as it takes.
    """
    began = time.perf_counter()
    with contextlib.suppress(PbmvflError, ArithmeticError, RuntimeError):
        train_tiny(plan)
    return time.perf_counter() - began


def train_tiny(plan: Plan) -> None:
    """All rounds of the tiny plan, by parties and a server that nobody else sees."""
    small = tiny_plan(plan)
    rows = _made_up_rows(small)
    with own_generator():
        transport = InProcess(Federation(small).party_setups(rows, None, None, 1))
        try:
            server = Server(small, train_labels=rows.train_labels)
            drive(server, transport, Meter(), on_open=_nothing, on_round=_nothing, on_epoch_end=_nothing)
        finally:
            transport.close()


def _nothing() -> None:
    """No figures are made of it: what makes them takes longer to load than all the rest, and no party needs it."""


def tiny_plan(plan: Plan) -> Plan:
    """The same mechanisms, updates, networks and kinds of rounds, of a few rows and two parties."""
    values = plan.flat()
    for name in ("num_epochs", "training"):
        values.pop(name, None)
    phases = _tiny_phases(plan)
    # Correlated noise needs as many steps between two uses of a row as its band is wide.
    rows = max(2, plan.noise_band) * _BATCH
    predicted = phases[-1].kind == PREDICTION
    return Plan.of(
        **{
            **values,
            "num_parties": _PARTIES,
            "num_samples": max(rows, plan.num_classes),
            "num_test_samples": _BATCH if predicted else 0,
            "batch_size": _BATCH,
            "phases": phases,
            "evaluation": Evaluation.RELEASED if predicted else Evaluation.NONE,
            "preparation": PreparationName.NONE if plan.model else plan.preparation,
            "labels": Labels.PARTIES if any(phase.kind.needs_labels for phase in phases) else plan.labels,
            "interactions": None,
            "first_weights": (),
            "model": "",
            "seed": 0,
        }
    )


def _tiny_phases(plan: Plan) -> tuple[Phase, ...]:
    """One pass of each phase. A plan that only predicts goes with a model, so here one is trained before it."""
    phases = [Phase(kind=phase.kind, passes=1, order=phase.order) for phase in plan.rounds.phases]
    phases = [phase for phase in phases if phase.kind != SYMBOLS]
    if plan.model:
        learns = LOCAL if plan.head is Head.FIXED else JOINT
        before = [learns, COUNTS] if plan.voting.has_tables else [learns]
        phases = [*(Phase(kind=kind, passes=1, order=Order.AS_GIVEN) for kind in before), *phases]
    return tuple(phases)


def _made_up_rows(plan: Plan) -> VerticalDataset:
    def features(rows: int) -> npt.NDArray[Any]:
        if plan.encoder in _PICTURE_ENCODERS:
            return np.full((rows, *_PICTURE), 100, dtype=np.uint8)
        cells = np.arange(rows * _COLUMNS, dtype=np.float32) % 7 / 6
        return cells.reshape(rows, _COLUMNS)

    labels = np.arange(plan.num_samples) % plan.num_classes
    return VerticalDataset(
        name="warm-up",
        party_names=tuple(f"party-{index}" for index in range(plan.num_parties)),
        train_features=tuple(features(plan.num_samples) for _ in range(plan.num_parties)),
        test_features=tuple(features(plan.num_test_samples) for _ in range(plan.num_parties)),
        train_labels=labels,
        test_labels=labels[: plan.num_test_samples],
        class_names=tuple(f"class-{index}" for index in range(plan.num_classes)),
        default_encoder=plan.encoder,
    )
