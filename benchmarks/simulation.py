"""Epoch of the batched simulation against a plain loop in the authors' style, evaluation included in both."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.measure import Row, alternate
from benchmarks.steps import PlainLoop, activity_plan
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.plan.round_kinds import JOINT
from pbmvfl.research.simulation import Simulation

PARTIES, COLUMNS, ROWS, CLASSES = 5, 112, 7352, 6


def activity_like() -> VerticalDataset:
    """Make random rows in the shape of Activity: time does not depend on the values."""
    random = np.random.default_rng(0)
    parts = tuple(random.normal(size=(ROWS, COLUMNS)).astype(np.float32) for _ in range(PARTIES))
    labels = random.integers(0, CLASSES, ROWS).astype(np.int64)
    return VerticalDataset(
        name="activity-like",
        party_names=tuple(f"party-{m}" for m in range(PARTIES)),
        train_features=parts,
        test_features=tuple(part[:1] for part in parts),
        train_labels=labels,
        test_labels=labels[:1],
        class_names=tuple(str(k) for k in range(CLASSES)),
        default_encoder="mlp",
    )


def plain_epoch(loop: PlainLoop, rounds: int) -> float:
    """Run all rounds, then measure the accuracy on all rows without noise, one network after the other."""
    for _ in range(rounds):
        loop()
    with torch.no_grad():
        total = sum(encoder(features) for encoder, features in zip(loop._encoders, loop._features, strict=True))
        scores = loop._head(total)
    return float((scores.argmax(1) == loop._labels).float().mean())


def epochs() -> Iterator[Row]:
    data = activity_like()
    plan = activity_plan(num_trials=64, num_test_samples=1)
    simulation = Simulation(plan, data)
    loop = PlainLoop(plan, list(data.train_features), data.train_labels)

    def batched() -> None:
        simulation.run_epoch()
        simulation.evaluate(("train",))

    ratio, slow, fast = alternate(
        lambda: plain_epoch(loop, plan.schedule.rounds_per_pass(JOINT)), batched, calls=1, blocks=9
    )
    detail = f"{slow * 1e3:.0f} against {fast * 1e3:.0f} ms"
    yield Row("epoch, Activity, 5 parties, b=64: times a plain loop's speed", ratio, 4, "x", False, detail)
