"""Network encoders under strict training with correlated noise: digits and CIFAR-10, a quadrant of the picture a party.

    python -m benchmarks.utility.networks benchmarks/utility/networks.json --only digits --out results.json

Local rounds: each party trains a network of its own on its own quadrant with the labels, by noisy sums of clipped row
gradients; scores are added up at test. Nothing is released but each party's noisy sums, so a CELL costs its party's
updates: one Gaussian of mu = 2 |c| sqrt(passes) / noise_multiplier, beside noisy means if features are standardised.

This is a study: the arithmetic is float32 on whatever device, and noise comes from an ordinary generator with a seed.
`pbmvfl.training.updates` has the exact integers; tests/system/test_network_study.py compares the clipped sums and the
estimates. What is public here: filters, networks, their first weights, the order of rows. Settings are chosen on the
last training rows (`--hold-out`), which no training of that run sees; the test rows are for the final run.

Shape suffixes: N rows, V variants of a row (mirrored, moved), C channels, H height, W width, F features,
K classes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pbmvfl.privacy.noise_band import Band, check_band

#: Rows whose gradients are in memory at a time, times weights.
_CHUNK = 1 << 28


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One configuration: all that a run depends on but its seed and its rows."""

    dataset: str
    #: The budget: epsilon 8 at delta 1e-5 is mu = 1.666.
    mu: float = 1.666
    features: str = "pixels"
    network: str = "linear"
    #: Whether a row and its mirror image share one clipped gradient, and one score at test.
    flips: bool = False
    #: Pixels only: so many variants of a row, moved at random in every step, share one clipped gradient.
    augment: int = 0
    #: Share of mu^2 that goes to a noisy mean and noisy second moments of the features; 0 for none.
    moments_share: float = 0.0
    batches: int = 10
    passes: int = 10
    band: int = 10
    clip: float = 1.0
    learning_rate: float = 1.0
    momentum: float = 0.9
    #: The last so many of all steps are averaged.
    averaged: float = 0.5
    noise: bool = True

    def __post_init__(self) -> None:
        check_band(Band(self.band), self.batches)
        if not 0 <= self.moments_share < 1:
            raise ValueError(f"moments_share={self.moments_share} must be in [0, 1)")

    @property
    def noise_multiplier(self) -> float:
        """Return the noise on mixtures of sums, in clip norms, after the moments have had their share."""
        mu = self.mu * math.sqrt(1 - self.moments_share)
        return 2 * Band(self.band).norm * math.sqrt(self.passes) / mu if self.noise else 0.0


# --- pictures ---

#: Training quadrants, labels, test quadrants, labels.
Pictures = tuple[list[Tensor], Tensor, list[Tensor], Tensor]


def quadrants_of(dataset: str) -> Pictures:
    """Return the quadrants, each (N, C, H, W) in [-1, 1]."""
    if dataset == "digits":
        from pbmvfl.data.datasets import load_dataset

        data = load_dataset("digits")
        parts = [
            [torch.from_numpy(np.asarray(each, dtype=np.float32)).reshape(len(each), 1, 4, 4) for each in features]
            for features in (data.train_features, data.test_features)
        ]
        return parts[0], torch.from_numpy(data.train_labels), parts[1], torch.from_numpy(data.test_labels)
    from pbmvfl.data.images import read_cifar10_sheets

    train, y_train, test, y_test = read_cifar10_sheets(Path(os.environ["PBMVFL_DATA"]) / "cifar10")
    scaled = [[torch.from_numpy(each).float() / 127.5 - 1 for each in quadrants] for quadrants in (train, test)]
    return scaled[0], torch.from_numpy(y_train), scaled[1], torch.from_numpy(y_test)


# --- public features ---


def _gabor(sigma: float, theta: float, xi: float, slant: float, radius: int) -> Tensor:
    """Return a complex wave under a Gaussian envelope, (2, size, size): its real and its imaginary part."""
    at = torch.arange(-radius, radius + 1, dtype=torch.float64)
    y, x = torch.meshgrid(at, at, indexing="ij")
    along, across = x * math.cos(theta) + y * math.sin(theta), -x * math.sin(theta) + y * math.cos(theta)
    envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
    wave = torch.stack([envelope * torch.cos(xi * along), envelope * torch.sin(xi * along)])
    wave -= envelope * (wave.sum((1, 2), keepdim=True) / envelope.sum())  # blind to a constant
    return (wave / wave.square().sum().sqrt()).float()


def _wavelets(scale: int, angles: int) -> Tensor:
    sigma, xi = 0.8 * 2.0**scale, 0.75 * math.pi / 2.0**scale
    bank = [_gabor(sigma, math.pi * k / angles, xi, 4 / angles, min(7, math.ceil(4 * sigma))) for k in range(angles)]
    return torch.cat(bank)[:, None]  # (2 * angles, 1, size, size)


def _modulus(pictures: Tensor, bank: Tensor) -> Tensor:
    """Return |picture * wavelet| for every picture (n, 1, H, W) and wavelet: (n, angles, H, W)."""
    radius = bank.shape[-1] // 2
    padded = nn.functional.pad(pictures, [radius] * 4, mode="reflect")
    found = nn.functional.conv2d(padded, bank)
    return (found[:, 0::2].square() + found[:, 1::2].square() + 1e-12).sqrt()


def _pooled(pictures: Tensor, window: int) -> Tensor:
    """Return Gaussian averages around the centres of windows: (n, C, H/window, W/window)."""
    size = 3 * window
    at = torch.arange(size, dtype=torch.float64, device=pictures.device) - (size - 1) / 2
    bump = torch.exp(-(at**2) / (2 * (0.4 * window) ** 2))
    kernel = (bump[:, None] * bump[None] / bump.sum() ** 2).float().expand(pictures.shape[1], 1, -1, -1)
    padded = nn.functional.pad(pictures, [window] * 4, mode="reflect")
    return nn.functional.conv2d(padded, kernel, stride=window, groups=pictures.shape[1])


def scattering(pictures_NCHW: Tensor, *, angles: int = 8, window: int = 4) -> Tensor:
    """Return scattering features of two scales, (N, channels, H/window, W/window): fixed wavelets, moduli, averages.

    Orders 0, 1 and 2 (Bruna, Mallat, 2013). Moduli are compressed by a square root, which evens out contrast.
    """
    device = pictures_NCHW.device
    first, second = (_wavelets(scale, angles).to(device) for scale in (0, 1))
    count, colours = pictures_NCHW.shape[:2]
    alone = pictures_NCHW.reshape(count * colours, 1, *pictures_NCHW.shape[2:])
    fine, coarse = _modulus(alone, first), _modulus(alone, second)
    twice = _modulus(fine.reshape(-1, 1, *fine.shape[2:]), second).reshape(count * colours, -1, *fine.shape[2:])
    moduli = _pooled(torch.cat([fine, coarse, twice], dim=1), window).clamp_min(0).sqrt()
    low = _pooled(alone, window)
    return torch.cat([low, moduli], dim=1).reshape(count, -1, *low.shape[2:])


def featured(pictures_NCHW: Tensor, name: str, device: torch.device, *, rows: int = 2048) -> Tensor:
    """Return public features of pictures, computed some rows at a time on the device."""
    parts = []
    for start in range(0, len(pictures_NCHW), rows):
        part = pictures_NCHW[start : start + rows].to(device)
        if name == "scattering":
            part = scattering(part)
        elif name == "scattering-fine":
            part = scattering(part, window=2)
        elif name == "scattering-grouped":
            part = grouped(scattering(part))
        elif name != "pixels":
            raise ValueError(f"features={name!r} must be pixels, scattering, scattering-fine or scattering-grouped")
        parts.append(part)
    return torch.cat(parts)


def grouped(features_NCHW: Tensor) -> Tensor:
    """Normalise each row's features to mean 0 and variance 1, group by group: one order and scale together."""
    count, channels = features_NCHW.shape[:2]
    by_colour = features_NCHW.reshape(count, 3, channels // 3, *features_NCHW.shape[2:])
    parts = []
    for low, high in ((0, 1), (1, 9), (9, 17), (17, channels // 3)):
        part = by_colour[:, :, low:high]
        mean = part.mean((1, 2, 3, 4), keepdim=True)
        spread = part.var((1, 2, 3, 4), keepdim=True, correction=0).add(1e-3).sqrt()
        parts.append((part - mean) / spread)
    return torch.cat(parts, dim=2).reshape(features_NCHW.shape)


@dataclasses.dataclass
class Moments:
    """Noisy mean and noisy spreads of features, each from one use of every row."""

    mean: Tensor
    spread: Tensor

    @classmethod
    def of(cls, rows_NF: Tensor, mu: float, generator: torch.Generator) -> Moments:
        """Release both as one Gaussian of mu: rows, and then their squares, are clipped to a public norm and summed.

        Features have sizes of about 1 (square roots of moduli of values in [-1, 1]); the bounds are public.
        """
        each = mu / math.sqrt(2)
        bound = 0.6 * math.sqrt(rows_NF.shape[1])
        mean = _noisy_mean(rows_NF, bound, each, generator)
        squares = _noisy_mean((rows_NF - mean).square(), bound, each, generator)
        return cls(mean, squares.clamp_min(float(squares.median()) / 16).sqrt())

    def standardised(self, rows_NF: Tensor) -> Tensor:
        return (rows_NF - self.mean) / self.spread


def _noisy_mean(rows_NF: Tensor, bound: float, mu: float, generator: torch.Generator) -> Tensor:
    factors = (bound / rows_NF.norm(dim=1).clamp_min(1e-9)).clamp_max(1.0)
    total: Tensor = factors @ rows_NF
    noise = torch.randn(total.shape, generator=generator, device=total.device)
    mean: Tensor = (total + noise * (2 * bound / mu)) / len(rows_NF)
    return mean


# --- networks ---


class ScaledTanh(nn.Module):
    """Bounded activation: activations, and so gradients, stay small where noise moves weights."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.7 * torch.tanh(x)


class Grouped(nn.Module):
    """Group normalisation without weights of its own: each row by itself."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.group_norm(x, min(self.groups, x.shape[1]))


def build(name: str, shape: Sequence[int], classes: int, seed: int) -> nn.Sequential:
    """Build a public network with public first weights. The last layer starts at zero."""
    torch.manual_seed(seed)
    channels = shape[0]
    size = math.prod(shape)
    kind, _, width_text = name.partition("-")
    width = int(width_text or 0)
    if kind == "linear":
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(size, classes)]
    elif kind == "mlp":
        layers = [nn.Flatten(), nn.Linear(size, width), ScaledTanh(), nn.Linear(width, classes)]
    elif kind == "mlprelu":
        layers = [nn.Flatten(), nn.Linear(size, width), nn.ReLU(), nn.Linear(width, classes)]
    elif kind == "head":  # on features of 4 x 4: one convolution, one dense layer
        layers = [nn.Conv2d(channels, width, 3, padding=1), Grouped(8), nn.ReLU(), nn.Flatten()]
        layers.append(nn.Linear(width * size // channels, classes))
    elif kind == "pooled":  # on features of 8 x 8
        layers = [nn.Conv2d(channels, width, 3, padding=1), Grouped(8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()]
        layers.append(nn.Linear(width * size // channels // 4, classes))
    elif kind == "deep":  # on features of 4 x 4: two convolutions
        layers = [nn.Conv2d(channels, width, 3, padding=1), Grouped(8), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1), Grouped(8), nn.ReLU(), nn.Flatten()]
        layers.append(nn.Linear(width * size // channels, classes))
    elif kind in ("conv", "convtanh"):  # on pixels of 16 x 16
        act: type[nn.Module] = nn.ReLU if kind == "conv" else ScaledTanh
        layers = [nn.Conv2d(channels, width, 3, padding=1), Grouped(8), act()]
        layers += [nn.Conv2d(width, width, 3, padding=1), Grouped(8), act(), nn.AvgPool2d(2)]
        layers += [nn.Conv2d(width, 2 * width, 3, padding=1), Grouped(8), act()]
        layers += [nn.Conv2d(2 * width, 2 * width, 3, padding=1), Grouped(8), act(), nn.AvgPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(2 * width * 16, classes)]
    else:
        raise ValueError(
            f"network={name!r} must be linear, or one of mlp, mlprelu, head, pooled, deep, conv, convtanh, and -WIDTH"
        )
    network = nn.Sequential(*layers)
    last = network[-1]
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.weight)
    for layer in network:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return network


# --- clipped sums ---


def clipped_sum(network: nn.Sequential, rows: Tensor, labels_N: Tensor, clip: float) -> tuple[list[Tensor], Tensor]:
    """Return the sum over rows of their clipped gradients, weight by weight, and the norms before clipping.

    `rows` is (N, V, ...): a row's loss is the mean cross-entropy of its variants. At a layer a row's gradient is the
    product of its slopes (outputs x places) and its inputs (inputs x places); a dense layer has one place a variant, a
    convolution many. With few places its norm comes from products between places, and it is never formed.
    """
    count, variants = rows.shape[:2]
    values = rows.flatten(0, 1)
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []
    for layer in network:
        before = values
        values = layer(before)
        if isinstance(layer, nn.Linear | nn.Conv2d):
            seen.append((layer, before.detach(), values))
    loss = nn.functional.cross_entropy(values, labels_N.repeat_interleave(variants), reduction="sum") / variants
    slopes = torch.autograd.grad(loss, [output for _, _, output in seen])
    squares_N = torch.zeros(count, device=rows.device)
    factors: list[tuple[Tensor, Tensor, Tensor | None]] = []
    with torch.no_grad():
        for (layer, before, _), slope in zip(seen, slopes, strict=True):
            if isinstance(layer, nn.Linear):
                ins, outs = before.view(count, variants, -1).mT, slope.view(count, variants, -1).mT
            else:
                assert isinstance(layer, nn.Conv2d)
                ins, outs = _patches(layer, before, count), _by_row(slope, count)
            gradient = None
            if 2 * ins.shape[2] ** 2 < ins.shape[1] * outs.shape[1]:
                squares_N += ((ins.mT @ ins + 1) * (outs.mT @ outs)).sum((1, 2))
            else:
                gradient = outs @ ins.mT
                squares_N += gradient.square().sum((1, 2)) + outs.sum(2).square().sum(1)
            factors.append((ins, outs, gradient))
        norms_N = squares_N.clamp_min(0).sqrt()
        scale_N = torch.nan_to_num((clip / norms_N.clamp_min(1e-12)).clamp_max(1.0), nan=0.0)
        sums: list[Tensor] = []
        shapes = [weight.shape for weight in network.parameters() if weight.dim() > 1]
        for shape, (ins, outs, gradient) in zip(shapes, factors, strict=True):
            if gradient is None:
                scaled = (outs * scale_N[:, None, None]).transpose(0, 1).flatten(1)
                weight = scaled @ ins.transpose(1, 2).flatten(0, 1)
            else:
                weight = (scale_N @ gradient.flatten(1)).view(gradient.shape[1:])
            sums += [weight.view(shape), scale_N @ outs.sum(2)]
    return sums, norms_N


def _patches(layer: nn.Conv2d, before: Tensor, count: int) -> Tensor:
    """Return patches, (N, inputs of a filter, variants * places)."""
    (high, wide), (up, left) = layer.kernel_size, (int(each) for each in layer.padding)
    padded = nn.functional.pad(before, [left, left, up, up])
    found = padded.unfold(2, high, 1).unfold(3, wide, 1)  # (N * V, C, H, W, high, wide): a view, unlike torch's unfold
    found = found.reshape(count, -1, *found.shape[1:])
    return found.permute(0, 2, 5, 6, 1, 3, 4).flatten(4).flatten(1, 3)


def _by_row(slope: Tensor, count: int) -> Tensor:
    """Return slopes by row, (N, filters, variants * places)."""
    flat = slope.flatten(2)
    return flat.view(count, -1, *flat.shape[1:]).transpose(1, 2).flatten(2)


class Estimates:
    """Estimates of sums from noisy mixtures: `training.correlated.BandMemory` in floats, with simulated noise."""

    def __init__(self, band: Band, deviation: float, generator: torch.Generator) -> None:
        self._coefficients = band.coefficients[1:]
        self._deviation = deviation
        self._generator = generator
        self._errors: deque[Tensor] = deque(maxlen=band.width - 1)

    def of(self, sum_D: Tensor) -> Tensor:
        """Return the sum plus its error e_t = z_t - c_1 e_(t-1) - ...: equal to solving the noisy mixtures."""
        error_D = torch.randn(sum_D.shape, generator=self._generator, device=sum_D.device) * self._deviation
        for coefficient, earlier in zip(self._coefficients, self._errors, strict=False):
            error_D -= coefficient * earlier
        self._errors.appendleft(error_D)
        return sum_D + error_D


# --- training ---


def train(setting: Setting, network: nn.Sequential, rows: Tensor, labels: Tensor, seed: int) -> list[float]:
    """Train one party's network, leaving the average of its last weights; return each step's clipped share."""
    device = rows.device
    generator = torch.Generator(device=device).manual_seed(seed)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows))).to(device)
    weights = [weight.detach() for weight in network.parameters()]
    velocity = [torch.zeros_like(weight) for weight in weights]
    average = [torch.zeros_like(weight) for weight in weights]
    sizes = [weight.numel() for weight in weights]
    estimates = Estimates(Band(setting.band), setting.noise_multiplier * setting.clip, generator)
    size = math.ceil(len(rows) / setting.batches)
    steps = setting.batches * setting.passes
    first_averaged = steps - max(1, round(setting.averaged * steps))
    dense = all(not isinstance(layer, nn.Conv2d) for layer in network)
    chunk = size if dense else max(64, _CHUNK // max(1, sum(sizes)) // max(rows.shape[1], setting.augment))
    clipped_share = []
    for step in range(steps):
        at = step % setting.batches * size
        batch = order[at : at + size]
        total = [torch.zeros_like(weight) for weight in weights]
        clipped = 0
        for start in range(0, len(batch), chunk):
            part = batch[start : start + chunk]
            given = augmented(rows[part].float(), setting.augment, generator)
            sums, norms = clipped_sum(network, given, labels[part], setting.clip)
            for so_far, more in zip(total, sums, strict=True):
                so_far += more
            clipped += int((norms > setting.clip).sum())
        clipped_share.append(clipped / len(batch))
        noisy = estimates.of(torch.cat([each.flatten() for each in total])) / size
        for weight, speed, slope, mean in zip(weights, velocity, torch.split(noisy, sizes), average, strict=True):
            gradient = slope.view_as(weight)
            speed.mul_(setting.momentum).add_(gradient)
            weight.sub_(gradient + setting.momentum * speed, alpha=setting.learning_rate)  # Nesterov
            if step >= first_averaged:
                mean.add_(weight, alpha=1 / (steps - first_averaged))
    for weight, mean in zip(weights, average, strict=True):
        weight.copy_(mean)
    return clipped_share


@torch.no_grad()
def scores(network: nn.Sequential, rows: Tensor) -> Tensor:
    """Return mean scores of a row's variants, (N, K)."""
    parts = []
    for start in range(0, len(rows), 2048):
        part = rows[start : start + 2048]
        found = network(part.float().flatten(0, 1))
        parts.append(found.view(len(part), rows.shape[1], -1).mean(1))
    return torch.cat(parts)


def with_variants(pictures_NCHW: Tensor, setting: Setting, device: torch.device) -> Tensor:
    """Return features of a row's variants, (N, V, ...)."""
    variants = [pictures_NCHW]
    if setting.flips:
        variants.append(pictures_NCHW.flip(3))
    half = torch.float16 if device.type == "cuda" else torch.float32
    return torch.stack([featured(each, setting.features, device).to(half) for each in variants], dim=1)


def augmented(rows: Tensor, variants: int, generator: torch.Generator) -> Tensor:
    """Return variants of pictures (N, 1, C, H, W), moved by up to two pixels. The draws are public."""
    if not variants:
        return rows
    height, width = rows.shape[3:]
    padded = nn.functional.pad(rows[:, 0], [2] * 4, mode="reflect")
    found = []
    for y, x in torch.randint(0, 5, (variants, 2), generator=generator, device=rows.device).tolist():
        found.append(padded[:, :, y : y + height, x : x + width])
    return torch.stack(found, dim=1)


def run_one(
    setting: Setting,
    pictures: Pictures,
    seed: int,
    device: torch.device,
    cache: dict[Any, tuple[Tensor, Tensor]],
    hold_out: int = 0,
) -> dict[str, Any]:
    """Run one seed: every party's training, and the accuracy of the sum of scores.

    On the test rows, or, with `hold_out`, on so many of the last training rows, which then are not trained on.
    """
    train_quadrants, train_labels, test_quadrants, test_labels = pictures
    y_train, y_test = train_labels.to(device), test_labels.to(device)
    if hold_out:
        y_train, y_test = y_train[:-hold_out], y_train[-hold_out:]
    classes = int(y_train.max()) + 1
    total = torch.zeros(len(y_test), classes, device=device)
    alone, clipped = [], []
    began = time.perf_counter()
    for party, (mine, theirs) in enumerate(zip(train_quadrants, test_quadrants, strict=True)):
        key = (setting.features, setting.flips, party)
        if key not in cache:
            cache[key] = (with_variants(mine, setting, device), with_variants(theirs, setting, device))
        rows, evaluated = cache[key]
        if hold_out:
            rows, evaluated = rows[:-hold_out], rows[-hold_out:]
        if setting.moments_share:
            generator = torch.Generator(device=device).manual_seed(1000 * seed + party)
            mu = setting.mu * math.sqrt(setting.moments_share) if setting.noise else 1e6
            moments = Moments.of(rows.float().mean(1).flatten(1), mu, generator)
            rows, evaluated = (
                moments.standardised(each.float().flatten(2)).view(each.shape).to(each.dtype)
                for each in (rows, evaluated)
            )
        network = build(setting.network, rows.shape[2:], classes, seed).to(device)
        clipped.append(train(setting, network, rows, y_train, 100 * seed + party)[-1])
        found = scores(network, evaluated)
        alone.append(float((found.argmax(1) == y_test).float().mean()))
        total += found
    return {
        "seed": seed,
        "accuracy": round(float((total.argmax(1) == y_test).float().mean()), 4),
        "alone": [round(each, 4) for each in alone],
        "clipped_at_the_end": [round(each, 3) for each in clipped],
        "seconds": round(time.perf_counter() - began, 1),
    }


def by_program(setting: Setting, seed: int) -> dict[str, Any]:
    """Run the setting in the program itself: its integers, its secret randomness, its account."""
    from pbmvfl.data.datasets import load_dataset
    from pbmvfl.federation.federation import Federation
    from pbmvfl.plan.groups import Activation
    from pbmvfl.plan.plan import Plan
    from pbmvfl.privacy.units import Accounting, Unit
    from pbmvfl.training.encoders import Bounded, weights_digest

    if setting.features != "pixels" or setting.augment or setting.flips or setting.moments_share:
        raise ValueError(f"features={setting.features!r}: the program is given pixels alone, as they are")
    data = load_dataset(setting.dataset)
    shape = data.train_features[0].shape[1:]
    encoders = [
        Bounded(build(setting.network, shape, data.num_classes, seed), activation=Activation.NONE)
        for _ in range(data.num_parties)
    ]
    plan = Plan.for_data(
        data,
        training="local",
        labels="parties",
        head="fixed",
        mechanism="none",
        activation=Activation.NONE,
        embedding_dim=data.num_classes,
        batch_size=math.ceil(data.num_samples / setting.batches),
        num_epochs=setting.passes,
        noise_multiplier=setting.noise_multiplier,
        noise_band=setting.band,
        clip_norm=setting.clip,
        learning_rate=setting.learning_rate,
        momentum=setting.momentum,
        nesterov=True,
        averaging=setting.averaged,
        seed=seed,
        first_weights=[weights_digest(encoder) for encoder in encoders],
    )
    began = time.perf_counter()
    result = Federation(plan, encoders=encoders).fit(data)
    (strict,) = (
        bound.epsilon
        for bound in result.privacy().bounds
        if bound.unit is Unit.CELL
        and bound.accounting is Accounting.STRICT
        and bound.adversary.server
        and not bound.adversary.colluding_parties
    )
    return {
        "seed": seed,
        "accuracy": round(result.metrics["test_accuracy"], 4),
        "strict_cell_epsilon": strict,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", type=Path, help="JSON: name -> setting.")
    parser.add_argument("--only", nargs="*", help="Names of settings to run; all without it.")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--hold-out", type=int, default=0, help="Evaluate on so many last training rows, untrained.")
    parser.add_argument("--program", action="store_true", help="By the program itself: test rows, pixels alone.")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    loaded: dict[str, Any] = {}
    caches: dict[str, Any] = {}
    results: dict[str, Any] = {}
    for name, values in json.loads(chosen.settings.read_text()).items():
        if chosen.only and name not in chosen.only:
            continue
        setting = Setting(**values)
        if setting.dataset not in loaded:
            loaded = {setting.dataset: quadrants_of(setting.dataset)}
            caches = {setting.dataset: {}}
        pictures = loaded[setting.dataset]
        cache = caches[setting.dataset]
        runs = [
            by_program(setting, seed)
            if chosen.program
            else run_one(setting, pictures, seed, device, cache, chosen.hold_out)
            for seed in range(chosen.seeds)
        ]
        found = np.array([run["accuracy"] for run in runs])
        results[name] = {
            "setting": dataclasses.asdict(setting),
            "noise_multiplier": round(setting.noise_multiplier, 4),
            "rows": len(pictures[1]) - chosen.hold_out,
            "evaluated_on": "held-out training rows" if chosen.hold_out else "test rows",
            "accuracy_mean": round(float(found.mean()), 4),
            "accuracy_deviation": round(float(found.std(ddof=1)), 4) if len(found) > 1 else None,
            "runs": runs,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        }
        print(f"{found.mean():.4f}  {name}  {found.round(4).tolist()}", flush=True)
        chosen.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
