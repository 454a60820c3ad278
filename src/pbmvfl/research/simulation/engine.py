"""Training of one federation without its messages: rounds, epochs, evaluation, and stopping at a target.

Plan, public schedule, first weights, estimator and steps are those of `Party` and `Server`; the gradient is float32.
`tests/research/simulation/test_engine.py` compares the two.

Shape suffixes: M parties, B rows, P embedding_dim, K classes.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pbmvfl.data.vertical import Array, VerticalDataset
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import NoisySum
from pbmvfl.plan.groups import Evaluation
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import JOINT
from pbmvfl.research.simulation.networks import DENSE, DenseStack, Everything, Networks, stacked_features
from pbmvfl.training.encoders import Bounded, build_head
from pbmvfl.training.metrics import classification_metrics
from pbmvfl.training.optimizer import Trainer
from pbmvfl.wire.gradient_codecs import GradientCodecName

#: Name of the noise in every result of this package.
SIMULATED = "simulation"


def noise_seed(plan: Plan) -> int:
    """Return a different seed for every configuration, so that no two share noise.

    It depends on the mechanism, the number of parties and the public seed, not on the run's length: a longer run starts
    alike.
    """
    release = plan.release
    own = [getattr(release, name) for name in release.own_settings()]
    text = json.dumps([release.name, *own, release.bound, plan.num_parties, release.embedding_dim, plan.seed])
    return int.from_bytes(hashlib.sha256(b"simulated noise" + text.encode()).digest()[:8], "big") >> 1


def noisy_sum(plan: Plan, device: torch.device) -> NoisySum:
    """Return the plan's mechanism as one draw of the sum."""
    return plan.release.simulated_sum(seed=noise_seed(plan), device=device)


def check_plan(plan: Plan) -> None:
    """Refuse plans that the engine would silently run otherwise than a deployment."""
    if plan.noise_multiplier:
        raise PlanError(f"noise_multiplier={plan.noise_multiplier:g}: the simulation has no noisy updates; use 0")
    if plan.gradient_codec is not GradientCodecName.FLOAT32:
        raise PlanError(f"gradient_codec={plan.gradient_codec}: the simulation's gradient is float32; use float32")
    for kind in plan.schedule.kinds:
        if kind != JOINT:
            raise PlanError(f"{kind.name} rounds: a simulation has joint rounds alone; use evaluation=simulator")
    for name in ("head", "loss", "averaging", "nesterov", "label_epsilon"):
        usual = Plan.of(num_parties=2, num_samples=1, num_classes=2)
        if getattr(plan, name) != getattr(usual, name):
            raise PlanError(f"{name}={getattr(plan, name)}: the simulation has {name}={getattr(usual, name)} alone")
    if plan.evaluation is not Evaluation.SIMULATOR:
        raise PlanError(f"evaluation={plan.evaluation}: a simulation evaluates on exact sums; use simulator")


class _Features:
    """Features of a split in the encoders' form, gathered by row."""

    def __init__(self, parts: Sequence[Any], *, dense: bool) -> None:
        self._stacked = stacked_features(parts) if dense else None
        self._parts = [] if dense else [torch.from_numpy(np.ascontiguousarray(part)) for part in parts]

    def rows(self, rows: Tensor) -> Any:
        if self._stacked is not None:
            return self._stacked.index_select(0, rows)
        return [part.index_select(0, rows) for part in self._parts]

    @property
    def whole(self) -> Any:
        return self._stacked if self._stacked is not None else self._parts


class Simulation:
    """Simulated training of a plan on data, epoch by epoch, on the CPU; `graphed` has the engine for a GPU.

    Args:
        plan: A plan with joint rounds, plain updates and evaluation=simulator.
        data: Data of the plan's sizes.

    Raises:
        PlanError: If plan and data do not fit, or the engine cannot run the plan.
    """

    noise = SIMULATED

    def __init__(self, plan: Plan, data: VerticalDataset) -> None:
        check_plan(plan)
        for name in ("num_parties", "num_samples", "num_classes", "num_test_samples"):
            if getattr(plan, name) != getattr(data, name):
                raise PlanError(f"{name}={getattr(plan, name)} in the plan, {getattr(data, name)} in the data")
        self.plan = plan
        dense = plan.encoder in DENSE
        shapes = [part.shape[1:] for part in data.train_features]
        self.encoders = (DenseStack if dense else Networks)(plan, shapes)
        self.head = build_head(plan)
        head: Any = self.head
        self._head_weight, self._head_bias = head.weight.detach().numpy(), head.bias.detach().numpy()  # the same memory
        self._trainer = Trainer(plan, Everything(self.encoders, self.head))
        self._noisy_sum = noisy_sum(plan, torch.device("cpu"))
        self._schedule = plan.schedule
        self._train = _Features(data.train_features, dense=dense)
        self._test = _Features(data.test_features, dense=dense)
        self._labels = {"train": data.train_labels, "test": data.test_labels}
        self._numbers = np.arange(plan.batch_size)
        self.completed_epochs = 0
        self.history: list[dict[str, Any]] = []

    # --- learning ---

    def run_round(self, number: int) -> float:
        """Run one round of the schedule and return the loss at the noisy sum."""
        rows = self._schedule[number].rows
        with torch.set_grad_enabled(isinstance(self.encoders, Networks)):
            embedding_MBP = self.encoders(self._train.rows(torch.from_numpy(rows.copy())))
        estimated_sum_BP = self._noisy_sum(embedding_MBP)
        loss, gradient_BP, head_slopes = self._head_slopes(estimated_sum_BP, self._labels["train"][rows])
        self._trainer.step([*self.encoders.slopes(gradient_BP), *head_slopes])
        return loss

    def _head_slopes(self, estimated_sum_BP: Tensor, labels_B: Array) -> tuple[float, Tensor, list[Tensor]]:
        """Return the cross-entropy of the head, its gradient at the sums, and the slopes of the head's weights."""
        # Written out in numpy: the loops of `training.head` are compiled by Numba, which a machine that simulates may
        # not have, and for a hundred rows torch's calls take nearly twice the time and autograd two and a half times.
        sum_BP = estimated_sum_BP.numpy()
        scores_BK = sum_BP @ self._head_weight.T + self._head_bias
        scores_BK -= scores_BK.max(1, keepdims=True)
        slope_BK = np.exp(scores_BK)
        total_B1 = slope_BK.sum(1, keepdims=True)
        own = (self._numbers[: len(labels_B)], labels_B)
        loss = float((np.log(total_B1[:, 0]) - scores_BK[own]).mean())
        slope_BK /= total_B1
        slope_BK[own] -= 1
        slope_BK /= np.float32(len(labels_B))
        head_slopes = [torch.from_numpy(slope_BK.T @ sum_BP), torch.from_numpy(slope_BK.sum(0))]
        return loss, torch.from_numpy(slope_BK @ self._head_weight), head_slopes

    def run_epoch(self) -> float:
        """Run all rounds of one epoch and return the mean loss."""
        rounds = range(*self._schedule.pass_of(self._schedule.end_of_epoch(self.completed_epochs)))
        losses = [self.run_round(number) for number in rounds]
        self.completed_epochs += 1
        return float(np.mean(losses))

    @torch.no_grad()
    def evaluate(self, splits: Sequence[str] = ("train", "test")) -> dict[str, float]:
        """Return metrics from exact sums, on all rows; no role of the protocol ever sees these."""
        metrics: dict[str, float] = {}
        for split in splits:
            if len(self._labels[split]):
                features = self._train if split == "train" else self._test
                scores = self.head(self.encoders.exact_sums(features.whole)).numpy()
                metrics |= classification_metrics(scores, self._labels[split], prefix=split)
        return metrics

    def fit(
        self, *, limit_epochs: int | None = None, splits: Sequence[str] = ("train", "test")
    ) -> list[dict[str, Any]]:
        """Train to the end of the plan or to `limit_epochs`, whichever is first.

        Args:
            limit_epochs: Last epoch, at most the plan's.
            splits: Splits to evaluate after every epoch.

        Returns:
            The history, one line per epoch.
        """
        last = self.plan.num_epochs if limit_epochs is None else min(limit_epochs, self.plan.num_epochs)
        while self.completed_epochs < last:
            started = time.perf_counter()
            loss = self.run_epoch()
            line = {"epoch": self.completed_epochs, "train_loss": loss, **self.evaluate(splits)}
            line["seconds"] = round(time.perf_counter() - started, 4)
            self.history.append(line)
            if not math.isfinite(loss):
                break
        return self.history

    def networks(self, encoders: Sequence[Bounded]) -> tuple[Sequence[Bounded], nn.Module]:
        """Write the trained weights into ordinary party networks; return these and the head."""
        self.encoders.load_encoders(encoders)
        return encoders, self.head
