"""Other readings of Table 6: which metric, which class, which scale of the columns would give the printed epochs?

    python reproduce/table6_readings.py        # writes reproduce/results/table6-readings.json, a quarter of an hour

For some cells of the table, the first epoch at which the mean over three seeds reaches 0.9, by five metrics (AUPRC of
either class from exact or noisy sums, and accuracy) on columns scaled to [0, 1] and on the raw {-1, 0, 1}.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import average_precision_score

from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.research.reproduction.studies import Cell, read_study
from pbmvfl.research.reproduction.study_runner import StudyRunner
from pbmvfl.research.simulation import Simulation
from pbmvfl.research.simulation.engine import noisy_sum
from pbmvfl.training.encoders import build_encoder

HERE = Path(__file__).parent
CELLS = ((64, 0.25), (32, 0.2), (16, 0.25), (64, 0.1), (32, 0.1), (8, 0.15), (16, 0.1))
READINGS = ("legitimate, exact", "phishing, exact", "legitimate, noisy", "phishing, noisy", "accuracy, exact")
TARGET, LIMIT, SEEDS = 0.9, 100, 3


def main() -> None:
    torch.set_num_threads(1)
    study = read_study("table6")
    runner = StudyRunner(study, out=HERE / "results", seeds=SEEDS)
    scaled = runner.data(5)
    raw = replace(
        scaled,
        train_features=tuple(2 * part - 1 for part in scaled.train_features),
        test_features=tuple(2 * part - 1 for part in scaled.test_features),
    )
    wanted = [cell for cell in study.cells if cell.mechanism == "none" or (cell.num_trials, cell.beta) in CELLS]
    results = []
    for scale, data in (("[0, 1]", scaled), ("{-1, 0, 1}", raw)):
        for cell in sorted(wanted, key=lambda cell: cell.printed_epochs or LIMIT):
            curves = np.array([curve(runner, cell, data, seed) for seed in range(SEEDS)])
            line = {
                "columns": scale,
                "cell": "NPQ" if cell.mechanism == "none" else [cell.num_trials, cell.beta],
                "printed": cell.printed_epochs,
                "ours": dict(zip(READINGS, (first(mean) for mean in curves.mean(0).T), strict=True)),
            }
            print(line, flush=True)
            results.append(line)
    values = {"target": TARGET, "limit_epochs": LIMIT, "seeds": SEEDS, "noise": "simulation", "cells": results}
    (HERE / "results" / "table6-readings.json").write_text(json.dumps(values, indent=1) + "\n")


def first(curve: np.ndarray) -> int | None:
    """The first epoch at the target."""
    return next((index + 1 for index, value in enumerate(curve) if value >= TARGET), None)


def curve(runner: StudyRunner, cell: Cell, data: VerticalDataset, seed: int) -> list[list[float]]:
    """Every reading after every epoch of one run."""
    plan = runner.plan(cell, seed)
    simulation = Simulation(plan, data)
    noise = noisy_sum(plan.replace(seed=seed + SEEDS), torch.device("cpu"))  # not the noise it was trained with
    parts = [torch.from_numpy(part) for part in data.train_features]
    encoders = [build_encoder(plan, index=m, input_shape=part.shape[1:]) for m, part in enumerate(parts)]
    labels = data.train_labels
    lines = []
    for _ in range(LIMIT):
        simulation.run_epoch()
        with torch.no_grad():
            parties, head = simulation.networks(encoders)
            embeddings = torch.stack([party(part) for party, part in zip(parties, parts, strict=True)])
            exact, noisy = (
                (scores[:, 1] - scores[:, 0]).numpy() for scores in (head(embeddings.sum(0)), head(noise(embeddings)))
            )
        precisions = [
            average_precision_score(labels == label, sign * scores)
            for scores in (exact, noisy)
            for label, sign in ((1, 1), (0, -1))
        ]
        lines.append([*precisions, float(((exact > 0) == labels).mean())])
    return lines


if __name__ == "__main__":
    main()
