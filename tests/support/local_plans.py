"""Small plans of local training for tests, and the training itself in numpy, written down once more from the words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.plan.plan import Plan

Array = npt.NDArray[np.float64]
LOCAL, MEAN, GRAM, FUSION = 3, 4, 5, 9


def local_plan(data: VerticalDataset, **choices: Any) -> Plan:
    """Every party's own linear scores, in batches with a short last one, without noise unless asked for."""
    usual = {
        "training": "local",
        "labels": "parties",
        "head": "fixed",
        "mechanism": "none",
        "embedding_dim": data.num_classes,
        "activation": "none",
        "start": "zero",
        "encoder": "linear",
        "batch_size": 10,
        "num_epochs": 3,
        "learning_rate": 0.5,
        "seed": 7,
    }
    return Plan.for_data(data, **{**usual, **choices})


WHITENED = {"preparation": "whiten", "mean_noise": 4.0, "gram_noise": 5.0, "mean_clip": 1.0, "gram_clip": 0.8}


def voting_plan(data: VerticalDataset, **choices: Any) -> Plan:
    """All there is: whitening, noisy local steps, fusion rows, predictions by randomised response."""
    usual = {
        **WHITENED,
        "noise_multiplier": 6.0,
        "evaluation": "released",
        "vote": "top",
        "num_fusion_samples": max(2, data.num_samples // 7),
        "prediction_mechanism": "krr",
        "prediction_symbols": data.num_classes,
        "prediction_response_epsilon": 2.0,
        "prediction_secure_aggregation": False,
    }
    return local_plan(data, **{**usual, **choices})


def log_shares(labels: npt.NDArray[np.int64], num_classes: int) -> Array:
    counts = np.maximum(np.bincount(labels, minlength=num_classes), 0.5)
    return np.asarray(np.log(counts / counts.sum()))


def row_slopes(scores: Array, labels: npt.NDArray[np.int64], plan: Plan, prior: Array) -> Array:
    """Of each row's own loss."""
    goals = np.eye(plan.num_classes)[labels]
    if plan.loss == "squared":
        return np.asarray(scores - goals)
    weights = np.exp(scores + prior - (scores + prior).max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True) - goals)


def trained_in_numpy(
    plan: Plan, columns: npt.NDArray[Any], labels: npt.NDArray[np.int64], *, clipped: bool = False
) -> tuple[Array, Array]:
    """One party's weights and bias after all local rounds of a plan with encoder=linear, from zeros, in float64."""
    rows = np.hstack([columns.astype(np.float64), np.ones((len(columns), 1))])
    weights = np.zeros((plan.num_classes, rows.shape[1]))
    velocity, total = np.zeros_like(weights), np.zeros_like(weights)
    prior = log_shares(labels, plan.num_classes) if plan.loss == "cross-entropy" else np.zeros(plan.num_classes)
    batches = [current.rows for current in plan.schedule if current.kind.code == LOCAL]
    averaged = math.ceil(plan.averaging * len(batches))
    for step, batch in enumerate(batches, start=1):
        inside, outside = rows[batch] @ weights.T, labels[batch]
        if plan.activation == "tanh":
            scores = plan.bound * np.tanh(inside)
            slopes = row_slopes(scores, outside, plan, prior) * plan.bound * (1 - np.tanh(inside) ** 2)
        else:
            slopes = row_slopes(inside, outside, plan, prior)
        gradients = slopes[:, :, None] * rows[batch][:, None, :]
        if clipped:
            norms = np.sqrt((gradients**2).sum(axis=(1, 2), keepdims=True))
            gradients = gradients * np.minimum(1, plan.clip_norm / norms)
        gradient = gradients.mean(axis=0)
        velocity = plan.momentum * velocity + gradient
        weights = weights - plan.learning_rate * (gradient + plan.momentum * velocity if plan.nesterov else velocity)
        if step > len(batches) - averaged:
            total += weights
    final = total / averaged if averaged else weights
    return final[:, :-1], final[:, -1]
