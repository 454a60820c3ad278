"""`python -m benchmarks.attacks.cifar --out FOLDER`: pictures from sums of embeddings, CIFAR-10, on a GPU.

Four parties hold a quadrant each and train ResNet18s jointly, with exact sums or by PBM. The attacker is the server: it
knows the labels and half of the rows (auxiliary rows), and fits a decoder from what it saw of these to their pictures:
the better of ridge and kernel ridge, chosen on a part of the auxiliary rows. It decodes target rows of the other half.

Baseline: the mean picture of the row's label. `gain` is the squared error below that baseline's; `found` is how often
the true row is the likeliest of 10,000 candidates if the networks are known. Writes cifar-SEED.json with the figures
and, for the first seed, cifar-pictures.npz; `draw` makes the picture from it.

Shape suffixes: N rows, F numbers that were seen of a row, D pixels, P embedding_dim.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pbmvfl.data.datasets import load_dataset
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.plan.plan import Plan
from pbmvfl.research.simulation.engine import noisy_sum
from pbmvfl.research.simulation.graphed import Execution, GraphedSimulation, take_turns

EPOCHS, REPEATS, TARGETS, CANDIDATES, SHOWN = 20, 40, 5000, 10_000, 10
SETTINGS: dict[str, dict[str, Any]] = {
    "exact sums": {"mechanism": "none"},
    "PBM (16, .15)": {"num_trials": 16, "beta": 0.15},
    "PBM (4, .1)": {"num_trials": 4, "beta": 0.1},
}
#: Rows that the decoder is fitted on, and those on which it is chosen.
_FITTED, _CHOSEN_ON = 16_000, 2000
_RIDGES, _WIDTHS = (1e-3, 1e-1, 10.0, 1e3), (0.3, 1.0, 3.0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks.cifar", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seed", type=int, default=0, help="public seed of the plans, and of the choice of rows")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    given = parser.parse_args()
    started = time.perf_counter()
    data = load_dataset("cifar10")
    device = torch.device(given.device)
    transcripts = dict(_trained(data, device, given.seed, given.epochs))
    print(f"trained after {time.perf_counter() - started:.0f} s", flush=True)
    results, pictures = _attack(data, transcripts, device, given.seed)
    config = {"seed": given.seed, "epochs": given.epochs, "targets": TARGETS, "candidates": CANDIDATES}
    seconds = round(time.perf_counter() - started)
    (given.out / f"cifar-{given.seed}.json").write_text(
        json.dumps({"config": config, "seconds": seconds, "results": results}, indent=1) + "\n"
    )
    if given.seed == 0:
        np.savez_compressed(given.out / "cifar-pictures.npz", **pictures)
    return 0


# --- training, with what the server sees of every row ---


@dataclass(frozen=True, eq=False)
class Transcript:
    """Released sums of every training row: in each epoch, once with the finished networks, and their mean."""

    epochs_NF: Tensor
    once_NP: Tensor
    mean_NP: Tensor
    exact_NP: Tensor
    test_accuracy: float


class _Recorder:
    """Noisy sum that keeps what it released in the rounds of one epoch."""

    def __init__(self, simulation: GraphedSimulation) -> None:
        plan = simulation.plan
        self._inner, self._position = simulation._noisy_sum, simulation._position
        self.generator = getattr(self._inner, "generator", None)
        rounds = -(-plan.num_samples // plan.batch_size)
        self.seen_RBP = torch.zeros(rounds, plan.batch_size, plan.embedding_dim, device=self._position.device)

    def __call__(self, embedding_MBP: Tensor) -> Tensor:
        released_BP = self._inner(embedding_MBP)
        self.seen_RBP.index_copy_(0, self._position, released_BP[None])
        return released_BP

    def state(self) -> Tensor:
        return self._inner.state()

    def load_state(self, state: Tensor) -> None:
        self._inner.load_state(state)


def _trained(
    data: VerticalDataset, device: torch.device, seed: int, num_epochs: int
) -> Iterator[tuple[str, Transcript]]:
    simulations, recorders = [], []
    for choices in SETTINGS.values():
        plan = Plan.for_data(
            data,
            encoder="resnet18",
            embedding_dim=16,
            batch_size=100,
            learning_rate=0.01,
            momentum=0.9,
            num_epochs=num_epochs,
            seed=seed,
            **choices,
        )
        simulation = GraphedSimulation(plan, data, execution=Execution.on(str(device), compiled=False))
        recorder = _Recorder(simulation)
        simulation._noisy_sum = recorder
        simulations.append(simulation)
        recorders.append(recorder)
    seen: list[list[Tensor]] = [[] for _ in simulations]
    for epoch in range(num_epochs):
        take_turns(simulations)
        torch.cuda.synchronize()
        first, _ = simulations[0].plan.schedule.pass_of(epoch * recorders[0].seen_RBP.shape[0])
        order = np.concatenate(
            [simulations[0].plan.schedule[first + r].rows for r in range(recorders[0].seen_RBP.shape[0])]
        )
        place_N = torch.from_numpy(np.argsort(order)).to(device)
        for recorder, kept in zip(recorders, seen, strict=True):
            kept.append(recorder.seen_RBP.flatten(0, 1)[place_N].clone())
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1}", flush=True)
    for name, simulation, kept in zip(SETTINGS, simulations, seen, strict=True):
        embedding_MNP = _embeddings(simulation, data.train_features, device)
        draw = noisy_sum(simulation.plan, device)
        draw.load_state(simulation._noisy_sum.state())
        released = [draw(embedding_MNP) for _ in range(REPEATS)]
        test_NP = _embeddings(simulation, data.test_features, device).sum(0)
        with torch.no_grad():
            scores_NK = simulation.head(test_NP)
        right = scores_NK.argmax(1).cpu().numpy() == data.test_labels
        yield (
            name,
            Transcript(
                epochs_NF=torch.cat(kept, dim=1),
                once_NP=released[0],
                mean_NP=torch.stack(released).mean(0),
                exact_NP=embedding_MNP.sum(0),
                test_accuracy=float(right.mean()),
            ),
        )


@torch.no_grad()
def _embeddings(simulation: GraphedSimulation, parts: Any, device: torch.device) -> Tensor:
    simulation.encoders.eval()
    found = []
    for encoder, part in zip(simulation.encoders, parts, strict=True):
        pieces = [
            encoder(torch.from_numpy(part[first : first + 2000]).to(device)) for first in range(0, len(part), 2000)
        ]
        found.append(torch.cat(pieces))
    return torch.stack(found)


# --- the attack ---


def _whole(parts: Any) -> Tensor:
    """Return pictures (N, 3, 32, 32) in [0, 1] from quadrants."""
    quadrants = [torch.from_numpy(np.asarray(part)).float() / 255 for part in parts]
    top, bottom = torch.cat(quadrants[:2], dim=3), torch.cat(quadrants[2:], dim=3)
    return torch.cat([top, bottom], dim=2)


def _attack(
    data: VerticalDataset, transcripts: dict[str, Transcript], device: torch.device, seed: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    order = np.random.default_rng(seed).permutation(data.num_samples)
    half = data.num_samples // 2
    auxiliary, targets = (torch.from_numpy(rows).to(device) for rows in (order[:half], order[half : half + TARGETS]))
    candidates = torch.from_numpy(order[half : half + CANDIDATES]).to(device)
    images_ND = _whole(data.train_features).flatten(1).to(device)
    labels_N = torch.from_numpy(data.train_labels).to(device)
    means_KD = torch.stack([images_ND[auxiliary][labels_N[auxiliary] == k].mean(0) for k in range(data.num_classes)])
    truth_TD, guess_TD = images_ND[targets], means_KD[labels_N[targets]]
    baseline_T = (truth_TD - guess_TD).square().mean(1)
    results: list[dict[str, Any]] = [
        {"setting": "guess from the label", "seen": "", "gain": 0.0, "ssim": _ssim(truth_TD, guess_TD)}
    ]
    pictures = {"original": truth_TD[:SHOWN], "guess from the label": guess_TD[:SHOWN]}
    for name, transcript in transcripts.items():
        views = {"once": transcript.once_NP, f"mean of {REPEATS}": transcript.mean_NP}
        views |= {"training": transcript.epochs_NF}
        for what, seen_NF in views.items():
            if name == "exact sums" and what.startswith("mean"):
                continue
            decoded_TD = _decoded(seen_NF, labels_N, images_ND, means_KD, auxiliary, targets)
            saved_T = 1 - (truth_TD - decoded_TD).square().mean(1) / baseline_T.mean()
            gain = 1 - (truth_TD - decoded_TD).square().mean() / baseline_T.mean()
            # Paired: each target against its own baseline.
            paired_T = (baseline_T - (truth_TD - decoded_TD).square().mean(1)) / baseline_T.mean()
            line = {
                "setting": name,
                "seen": what,
                "gain": float(gain),
                "gain_error": float(1.96 * paired_T.std() / len(saved_T) ** 0.5),
                "ssim": _ssim(truth_TD, decoded_TD),
                "test_accuracy": transcript.test_accuracy,
            }
            if what != "training":
                distance_TC = torch.cdist(seen_NF[targets], transcript.exact_NP[candidates])
                found = distance_TC.argmin(1) == torch.arange(len(targets), device=device)
                line["found"] = float(found.float().mean())
            results.append(line)
            print(line, flush=True)
            pictures[f"{name}, {what}"] = decoded_TD[:SHOWN]
    return results, {
        name: (value.clamp(0, 1).reshape(-1, 3, 32, 32) * 255).byte().cpu().numpy() for name, value in pictures.items()
    }


def _decoded(
    seen_NF: Tensor, labels_N: Tensor, images_ND: Tensor, means_KD: Tensor, auxiliary: Tensor, targets: Tensor
) -> Tensor:
    """Return the targets' pictures by the better of ridge and kernel ridge: the label's mean and what is added."""
    fitted, chosen_on = auxiliary[:_FITTED], auxiliary[_FITTED : _FITTED + _CHOSEN_ON]
    classes = means_KD.shape[0]
    mean_F, spread_F = seen_NF[fitted].mean(0), seen_NF[fitted].std(0).clamp_min(1e-6)

    def features(rows: Tensor) -> Tensor:
        label_NK = functional.one_hot(labels_N[rows], classes).float()
        return torch.cat([(seen_NF[rows] - mean_F) / spread_F, label_NK], dim=1)

    def goal(rows: Tensor) -> Tensor:
        return images_ND[rows] - means_KD[labels_N[rows]]

    known_NF, wanted_ND = features(fitted).double(), goal(fitted)
    asked = torch.cat([chosen_on, targets])
    asked_NF = features(asked).double()
    best: tuple[float, Tensor] | None = None
    for width in (None, *_WIDTHS):
        if width is None:
            known, there = known_NF @ known_NF.T, asked_NF @ known_NF.T
        else:
            scale = 1 / (width * known_NF.shape[1])
            known = torch.exp(-scale * torch.cdist(known_NF, known_NF).square())
            there = torch.exp(-scale * torch.cdist(asked_NF, known_NF).square())
        for ridge in _RIDGES:
            eye = ridge * torch.eye(len(known), dtype=known.dtype, device=known.device)
            factor, failed = torch.linalg.cholesky_ex(known + eye)
            if failed:
                continue
            made = (there @ torch.cholesky_solve(wanted_ND.double(), factor)).float()
            error = (goal(chosen_on) - made[: len(chosen_on)]).square().mean().item()
            if best is None or error < best[0]:
                best = error, made[len(chosen_on) :]
    assert best is not None
    return means_KD[labels_N[targets]] + best[1]


def _ssim(first_ND: Tensor, second_ND: Tensor) -> float:
    """Return the mean structural similarity over windows of 7 x 7, by its definition with K1 = .01 and K2 = .03."""
    first, second = (each.reshape(-1, 3, 32, 32) for each in (first_ND, second_ND))

    def window(values: Tensor) -> Tensor:
        return functional.avg_pool2d(values, 7, stride=1)

    a, b = window(first), window(second)
    variance_a, variance_b = window(first**2) - a**2, window(second**2) - b**2
    together = window(first * second) - a * b
    c1, c2 = 0.01**2, 0.03**2
    similarity = (2 * a * b + c1) * (2 * together + c2) / ((a**2 + b**2 + c1) * (variance_a + variance_b + c2))
    return float(similarity.mean())


# --- the picture ---


def draw(source: Path, target: Path) -> None:
    """Draw the grid of originals, baseline and decoded pictures."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with np.load(source) as found:
        names = found.files
        figure, axes = plt.subplots(len(names), SHOWN, figsize=(SHOWN * 0.75 + 1.9, len(names) * 0.78), squeeze=False)
        for line, name in zip(axes, names, strict=True):
            for axis, picture in zip(line, found[name], strict=True):
                axis.imshow(picture.transpose(1, 2, 0), interpolation="nearest")
                axis.set_xticks([])
                axis.set_yticks([])
                for side in axis.spines.values():
                    side.set_visible(False)
            line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    figure.subplots_adjust(left=0.24, right=0.995, top=0.995, bottom=0.005, wspace=0.05, hspace=0.05)
    figure.savefig(target, dpi=85)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
