"""Local training of many settings at once: the computation of the program's parties, with shared matrices.

The map of columns and their preparation are the program's own classes. The steps are written out again for several
learning rates and clip norms side by side, because a party by itself spends its time in reading the same rows.
`tests/system/test_planner_benchmark.py` compares scores with those of `Federation`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.planner.tables import Floats, Table
from pbmvfl.plan.local_search import LocalRules
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import GRAM, MEAN
from pbmvfl.plan.search import plan_for_budget
from pbmvfl.training.features import mapped
from pbmvfl.training.head import log_shares
from pbmvfl.training.preparation import preparation_for

#: Rows whose scores are in memory at a time, times settings and classes.
_CHUNK_NUMBERS = 1 << 17
_MOMENTUM, _AVERAGED = 0.9, 0.5


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that a grid varies."""

    features: str
    preparation: str
    steps: int
    clip_norm: float
    learning_rate: float
    gram_clip: float = 0.3
    ridge: float = 0.5
    column_values: int = 3

    @property
    def rows(self) -> tuple[Any, ...]:
        """Return the key of the rows to learn from: equal keys share rows."""
        return (self.features, self.preparation, self.gram_clip, self.ridge, self.column_values)

    @classmethod
    def of(cls, plan: Plan) -> Settings:
        return cls(
            features=str(plan.features),
            preparation=str(plan.preparation),
            steps=plan.num_epochs,
            clip_norm=plan.clip_norm,
            learning_rate=plan.learning_rate,
            gram_clip=plan.gram_clip,
            ridge=plan.ridge,
            column_values=plan.column_values,
        )


class Seeded:
    """Random bytes of a seed, for a study: a reader of the seed knows the noise."""

    seeded = True

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def fill(self, buffer: npt.NDArray[Any]) -> None:
        flat = np.frombuffer(self._random.bytes(buffer.nbytes), dtype=buffer.dtype)
        np.copyto(buffer, flat.reshape(buffer.shape))


@cache
def delta_of(num_samples: int) -> float:
    """Return the planner's own delta."""
    return min(1e-5, 0.1 / num_samples)


def noises(table: Table, settings: Settings, shift: float) -> dict[str, float]:
    """Return the noise of every part, such that all together have this shift."""
    rules = LocalRules(num_samples=table.num_samples, num_classes=table.num_classes)
    prepared = settings.preparation != "none"
    found = rules.strength(shift, num_epochs=settings.steps, prepared=prepared)
    return {name: value for name, value in found.items() if name.endswith(("noise", "multiplier"))}


def plan_of(table: Table, settings: Settings, shift: float) -> Plan:
    """Return these settings as a plan of the program."""
    values = dict(vars(settings))
    rules = LocalRules(num_samples=table.num_samples, num_classes=table.num_classes)
    values["num_epochs"] = values.pop("steps")
    return Plan.of(
        num_parties=table.num_parties,
        num_samples=table.num_samples,
        num_classes=table.num_classes,
        num_test_samples=len(table.test_labels),
        **{**rules.settings(), **noises(table, settings, shift), **values},
    )


def scores(
    table: Table, grid: Sequence[Settings], shift: float, seed: int, *, noisy: bool = True
) -> tuple[dict[Settings, Floats], dict[Settings, Floats]]:
    """Return class scores (N, K) of the hold-out and of the test rows by settings, from one draw of noise.

    Settings that learn from the same rows share the draw of their preparation.
    """
    prior_K = log_shares(torch.from_numpy(table.train_labels), table.num_classes)
    found: tuple[dict[Settings, Floats], dict[Settings, Floats]] = ({}, {})
    for rows in dict.fromkeys(each.rows for each in grid):
        alike = [each for each in grid if each.rows == rows]
        for party in range(table.num_parties):
            random = np.random.default_rng([seed, party, *map(ord, repr(rows))])
            plan = plan_of(table, alike[0], shift)
            train, *others = _prepared(table, plan, party, random)
            for steps in dict.fromkeys(each.steps for each in alike):
                settings = [each for each in alike if each.steps == steps]
                multiplier = noises(table, settings[0], shift)["noise_multiplier"] if noisy else 0.0
                weights_CKD = _trained(train, table, prior_K, settings, multiplier, random)
                for where, judged_ND in zip(found, others, strict=True):
                    for each, weights_KD in zip(settings, weights_CKD, strict=True):
                        own = (judged_ND @ weights_KD.T).numpy()
                        where[each] = where[each] + own if each in where else own + prior_K.numpy()
    return found


def _prepared(table: Table, plan: Plan, party: int, random: np.random.Generator) -> Iterable[Tensor]:
    """Return training, hold-out and test rows of a party as its network takes them, and a constant."""
    splits = (table.train, table.hold_out, table.test)
    parts = [torch.from_numpy(mapped(plan, split[party], index=party)) for split in splits]
    preparation = preparation_for(plan, index=party, rows=parts[0][:8])
    if plan.preparation != "none":
        for statistic in (MEAN.statistic, GRAM.statistic):
            preparation.learn(statistic, [parts[0]], Seeded(random))
    for part in parts:
        rows = preparation(part)
        yield torch.cat((rows, torch.ones(len(rows), 1)), dim=1).contiguous()


def _trained(
    rows_ND: Tensor,
    table: Table,
    prior_K: Tensor,
    settings: Sequence[Settings],
    multiplier: float,
    random: np.random.Generator,
) -> Tensor:
    """Return averaged weights (C, K, D) after noisy steps on all rows."""
    count, width, classes = *rows_ND.shape, table.num_classes
    rates_C11 = torch.tensor([each.learning_rate for each in settings]).view(-1, 1, 1)
    clips_C1 = torch.tensor([each.clip_norm for each in settings]).view(-1, 1)
    shape, steps = (len(settings), classes, width), settings[0].steps
    weights_CKD, velocity_CKD, total_CKD = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    lengths_N = torch.linalg.vector_norm(rows_ND, dim=1)
    labels_N = torch.from_numpy(table.train_labels)
    chunk = max(64, _CHUNK_NUMBERS // (len(settings) * classes))
    averaged = math.ceil(_AVERAGED * steps)
    for step in range(steps):
        sums_CKD = torch.zeros(len(settings) * classes, width)
        for start in range(0, count, chunk):
            batch_ND = rows_ND[start : start + chunk]
            slopes_CKN = (weights_CKD.view(-1, width) @ batch_ND.T).view(len(settings), classes, -1)
            slopes_CKN += prior_K[:, None]
            slopes_CKN -= slopes_CKN.amax(dim=1, keepdim=True)
            slopes_CKN.exp_()
            slopes_CKN /= slopes_CKN.sum(dim=1, keepdim=True)
            labels = labels_N[start : start + chunk]
            slopes_CKN[:, labels, torch.arange(len(labels))] -= 1
            squares_CN = slopes_CKN.square().sum(dim=1)
            norms_CN = squares_CN.sqrt_() * lengths_N[start : start + chunk]
            slopes_CKN *= (clips_C1 / norms_CN.clamp_min(1e-30)).clamp_max(1.0)[:, None, :]
            sums_CKD.addmm_(slopes_CKN.view(-1, slopes_CKN.shape[2]), batch_ND)
        noise_CKD = torch.from_numpy(random.standard_normal(shape, dtype=np.float32)) * multiplier
        gradient_CKD = (sums_CKD.view(shape) + noise_CKD * clips_C1[:, :, None]) / count
        velocity_CKD = _MOMENTUM * velocity_CKD + gradient_CKD
        weights_CKD = weights_CKD - rates_C11 * (gradient_CKD + _MOMENTUM * velocity_CKD)
        if step >= steps - averaged:
            total_CKD += weights_CKD
    return total_CKD / averaged


def measures(scores_NK: Floats, labels_N: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return accuracy, and the mean recall over classes."""
    right_N = scores_NK.argmax(axis=1) == labels_N
    found = [float(right_N[labels_N == each].mean()) for each in np.unique(labels_N)]
    return {"accuracy": float(right_N.mean()), "balanced": float(np.mean(found))}


def planned(table: Table, epsilon: float) -> Settings:
    """Return the choice of the program's planner for this table, from its sizes alone."""
    found = plan_for_budget(
        Plan,
        epsilon=epsilon,
        delta=None,
        unit="cell",
        accounting="strict",
        num_parties=table.num_parties,
        num_samples=table.num_samples,
        num_classes=table.num_classes,
        num_test_samples=len(table.test_labels),
        columns=table.columns,
        column_values=table.column_values,
    )
    return Settings.of(found.plan)
