"""Strict training with and without a screen for columns that act together, on made tables, paired.

`python -m benchmarks.utility.joint` makes 5 fresh tables of each sort, trains on each within the same strict total
epsilon, once locally and once by `train_jointly`, and writes benchmarks/results/joint.json. Metrics are of test rows
and exact (the simulator's). Nothing was chosen on these tables: choices were made on others (seeds 300 to 322).

    xor           logit 2 (x00 x10 + x20 x30) + .7 of four columns; 4 parties of 6 normal columns
    categorical   two 4 x 4 tables of columns of different parties, and four additive columns; 6 columns of 4 values
    and           thresholds of three parties' columns at once, an XOR of thresholds of two, and two additive columns
    additive      four columns, nothing together: the screen should be silent

Normal columns come with the public range [-4, 4] and are scaled by it to [-1, 1], as tables with a schema are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl import VerticalDataset
from pbmvfl.data.datasets import load_dataset
from pbmvfl.privacy.units import SERVER, Unit
from pbmvfl.research.joint import Columns, screen_offer, train_jointly

RESULTS = Path(__file__).resolve().parent.parent / "results" / "joint.json"
DELTA = 1e-5
PARTIES, COLUMNS = 4, 6
ROWS, TEST_ROWS = 20_000, 10_000
FIRST_SEED = 9000
Table = tuple[npt.NDArray[Any], npt.NDArray[np.float64]]


def _xor(random: np.random.Generator, rows: int) -> Table:
    x = random.normal(size=(PARTIES, rows, COLUMNS))
    products = x[0, :, 0] * x[1, :, 0] + x[2, :, 0] * x[3, :, 0]
    return x, 2 * products + 0.7 * x[:, :, 1].sum(axis=0)


def _categorical(random: np.random.Generator, rows: int) -> Table:
    codes = random.integers(0, 4, size=(PARTIES, rows, COLUMNS))

    def table() -> npt.NDArray[np.float64]:
        entries = random.normal(size=(4, 4))
        entries -= entries.mean(axis=0)
        entries -= entries.mean(axis=1, keepdims=True)
        return np.asarray(1.5 * entries / entries.std())

    logit = table()[codes[0, :, 0], codes[1, :, 0]] + table()[codes[2, :, 3], codes[3, :, 4]]
    for party in range(PARTIES):
        main = random.normal(size=4)
        main -= main.mean()
        logit = logit + 0.7 * (main / main.std())[codes[party, :, 1]]
    return codes / 3, logit


def _and(random: np.random.Generator, rows: int) -> Table:
    x = random.normal(size=(PARTIES, rows, COLUMNS))
    all_three = (x[0, :, 2] > 0) & (x[1, :, 3] > 0) & (x[2, :, 4] > 0)
    either = (x[3, :, 0] > 0) != (x[0, :, 5] > 0)
    return x, -1 + 4 * all_three + 1.5 * (2 * either - 1) + 0.5 * (x[1, :, 1] + x[3, :, 1])


def _additive(random: np.random.Generator, rows: int) -> Table:
    x = random.normal(size=(PARTIES, rows, COLUMNS))
    return x, -0.7 + 0.9 * x[:, :, 1].sum(axis=0)


#: What is public about a table, and how parties map their columns: the same for both ways of training.
NUMERIC: dict[str, Any] = {"column_range": (-1.0, 1.0)}
TABLES: dict[str, tuple[Callable[[np.random.Generator, int], Table], int | None, dict[str, Any]]] = {
    "xor": (_xor, None, NUMERIC),
    "categorical": (_categorical, 4, {"features": "values", "column_values": 4}),
    "and": (_and, None, NUMERIC),
    "additive": (_additive, None, NUMERIC),
}


def made_table(name: str, seed: int, *, rows: int = ROWS, test_rows: int = TEST_ROWS) -> VerticalDataset:
    """Generate a table of one of the sorts above."""
    make, values, _ = TABLES[name]
    random = np.random.default_rng(seed)
    x, logit = make(random, rows + test_rows)
    labels = (random.random(rows + test_rows) < 1 / (1 + np.exp(-logit))).astype(np.int64)
    scaled = np.clip(x / 4, -1, 1) if values is None else x
    features = [np.ascontiguousarray(part, dtype=np.float32) for part in scaled]
    return VerticalDataset(
        name=f"{name}-{seed}",
        party_names=tuple(f"party-{party}" for party in range(PARTIES)),
        train_features=tuple(part[:rows] for part in features),
        test_features=tuple(part[rows:] for part in features),
        train_labels=labels[:rows],
        test_labels=labels[rows:],
        class_names=("0", "1"),
        default_encoder="linear",
        column_values=values,
    )


def paired(name: str, seed: int, epsilon: float, **sizes: int) -> dict[str, Any]:
    """Train on one table in both ways within the same total."""
    data = made_table(name, seed, **sizes)
    started = time.perf_counter()
    found = {
        joint: train_jointly(data, epsilon=epsilon, delta=DELTA, joint=joint, **TABLES[name][2])
        for joint in ("off", "auto")
    }
    local, together = found["off"], found["auto"]
    return {
        "table": name,
        "seed": seed,
        "epsilon": epsilon,
        "local_accuracy": local.metrics["test_accuracy"],
        "joint_accuracy": together.metrics["test_accuracy"],
        "gain": together.metrics["test_accuracy"] - local.metrics["test_accuracy"],
        "pairs": [[list(one), list(other)] for one, other in together.selection.pairs],
        "screened": together.screen is not None,
        "local_epsilon": local.privacy.epsilon,
        "joint_epsilon": together.privacy.epsilon,
        "joint_epsilon_composed": together.privacy.composed.epsilon,
        "words": list(together.words),
        "seconds": round(time.perf_counter() - started, 1),
    }


def offers(epsilons: tuple[float, ...]) -> list[dict[str, Any]]:
    """Compute whether a screen is offered on data sets that have no such columns."""
    found = []
    for name, column_range in (("phishing", None), ("activity", (-1.0, 1.0))):
        data = load_dataset(name, num_parties=5)
        columns = Columns.of(data, column_range)
        for epsilon in epsilons:
            size = (data.num_samples, data.num_classes)
            offer = screen_offer(size, columns, epsilon=epsilon, unit=Unit.CELL, adversary=SERVER)
            found.append(
                {"data": name, "epsilon": epsilon, "pays": offer.pays, "power": offer.power, "words": offer.words}
            )
    return found


def summary(runs: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = ["| table | local | joint | paired gain, points (least to most) |", "|---|---|---|---|"]
    for name in dict.fromkeys(run["table"] for run in runs):
        mine = [run for run in runs if run["table"] == name]
        local, joint, gain = (
            np.array([run[key] for run in mine]) for key in ("local_accuracy", "joint_accuracy", "gain")
        )
        spread = f"{100 * gain.mean():+.1f} ({100 * gain.min():+.1f} to {100 * gain.max():+.1f})"
        lines.append(f"| {name} | {local.mean():.4f} | {joint.mean():.4f} | {spread} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    runs = []
    for name in arguments.tables:
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            runs.append(paired(name, seed, arguments.epsilon))
            print(json.dumps(runs[-1]), flush=True)
    found: dict[str, Any] = {"delta": DELTA, "unit": "cell", "runs": runs, "offers": offers((16.0, 8.0, 4.0, 2.0, 1.0))}
    arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    print(summary(runs))
    for offer in found["offers"]:
        print(offer["data"], offer["epsilon"], offer["pays"], f"{offer['power']:.3f}")


if __name__ == "__main__":
    main()
