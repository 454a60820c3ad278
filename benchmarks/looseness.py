"""Distance of reported epsilons from lower bounds, on random settings: `python -m benchmarks.looseness`.

The lower bound shares no code with the package. It is the epsilon of one fixed pair of laws, the best of a few k: the
others' bits at hi. Laws come from scipy's binomials. One release, and few releases of few bits, are summed directly,
some with k changing from one release to the next. For more of them delta(epsilon) is the inverse Laplace transform of
M(z)^count / (z (z + 1)), M the moment generating function of the pair's loss, integrated along the vertical line
through the saddle point: no loss is moved onto a grid.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom

from pbmvfl.privacy import adaptive, large_sums, loss_distribution, poisson_binomial, renyi
from pbmvfl.privacy.accounting import Activity, TrainingRun, epsilon_bound
from pbmvfl.privacy.events import PoissonBinomialRelease
from pbmvfl.privacy.units import Accounting, Adversary, Unit

Vector = NDArray[np.float64]

#: Delta is raised by this share for the lower bound: more than the error of the integral, and of a direct sum.
SAFETY, SAFETY_OF_SUMS = 1e-3, 1e-6
#: Standard deviations on either side that the oracle looks at.
REACH = 9.5
RANGES = ((2, 64), (64, 1024), (1024, 8192), (8192, 65535))


@dataclass(frozen=True)
class Setting:
    unit: str
    num_trials: int
    num_parties: int
    beta_16: int
    colluding_parties: int
    embedding_dim: int
    num_epochs: int
    delta: float

    @property
    def bits(self) -> int:
        """Return the bits in the sum that an adversary sees."""
        return self.num_trials * (self.num_parties - self.colluding_parties)

    @property
    def releases(self) -> int:
        return self.embedding_dim * self.num_epochs

    @property
    def pure(self) -> float:
        lo, hi = ends(self.beta_16)
        moved = self.bits if self.unit == "record" else self.num_trials
        return self.releases * moved * math.log(hi / lo)


@dataclass(frozen=True)
class Outcome:
    reported: float
    method: str
    lower: float
    pure: float
    seconds: float

    @property
    def ratio(self) -> float:
        if self.lower > 0:
            return self.reported / self.lower
        return 1.0 if self.reported == 0 else math.inf


def ends(beta_16: int) -> tuple[float, float]:
    return (32768 - beta_16) / 65536, (32768 + beta_16) / 65536


# ------------------------------------------------------------------------------------------------- the lower bound


def _binomial(count: int, p: float) -> tuple[int, Vector]:
    width = REACH * 1.5 * math.sqrt(count * p * (1 - p)) + 12
    first, last = max(0, math.floor(count * p - width)), min(count, math.ceil(count * p + width))
    return first, binom.pmf(np.arange(first, last + 1), count, p)


def log_law(n: int, high: int, beta_16: int, first: int, last: int) -> Vector:
    """Return logarithms of the law of n bits, `high` of them at hi, at first..last."""
    lo, hi = ends(beta_16)

    def mean(log_tilt: float) -> float:
        t = math.exp(log_tilt)
        return high * hi * t / (lo + hi * t) + (n - high) * lo * t / (hi + lo * t)

    middle = min(max((first + last) / 2, 0.4), n - 0.4)
    log_tilt = 0.0 if abs(mean(0.0) - middle) < 2 else brentq(lambda x: mean(x) - middle, -40, 40, xtol=1e-9)
    t = math.exp(log_tilt)
    start_1, pmf_1 = _binomial(high, hi * t / (lo + hi * t))
    start_2, pmf_2 = _binomial(n - high, lo * t / (hi + lo * t))
    whole = np.convolve(pmf_1, pmf_2)
    values = np.arange(first, last + 1)
    inside = (values >= start_1 + start_2) & (values < start_1 + start_2 + len(whole))
    law = np.zeros(len(values))
    law[inside] = whole[values[inside] - start_1 - start_2]
    with np.errstate(divide="ignore"):
        logs = np.log(law)
    untilt: Vector = high * math.log(lo + hi * t) + (n - high) * math.log(hi + lo * t) - values * log_tilt
    return logs + untilt


def pair(n: int, changed: int, k: int, beta_16: int) -> tuple[Vector, Vector]:
    """Return masses under the first law and losses, without what is too rare to matter."""
    lo, hi = ends(beta_16)
    mean = n * lo + (k + changed) * (hi - lo)
    width = REACH * math.sqrt(n * lo * hi) + 8
    first, last = max(0, math.floor(mean - width)), min(n, math.ceil(mean + width))
    log_p, log_q = log_law(n, k + changed, beta_16, first, last), log_law(n, k, beta_16, first, last)
    good = np.isfinite(log_p) & np.isfinite(log_q)
    return np.exp(log_p[good]), log_p[good] - log_q[good]


def _smallest(delta_at: Callable[[float], float], delta: float, largest: float) -> float:
    if delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, largest
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return low


def direct_epsilon(masses: Vector, losses: Vector, delta: float) -> float:
    def delta_at(epsilon: float) -> float:
        above = losses > epsilon
        return float(np.dot(-np.expm1(epsilon - losses[above]), masses[above]))

    return _smallest(delta_at, delta, max(float(losses.max()), 0.0))


def enumerated(releases: list[tuple[Vector, Vector]]) -> tuple[Vector, Vector] | None:
    """Return masses and sums of one loss of each, nearly equal sums merged at the lower one; None if too many."""
    unit = 1e-9 * max(float(np.abs(losses).max()) for _, losses in releases)
    sums, weights = np.zeros(1), np.ones(1)
    for masses, losses in releases:
        if len(sums) * len(losses) > 2_000_000:
            return None
        index, inverse = np.unique(
            np.floor(np.add.outer(sums, losses).ravel() / unit + 1e-4).astype(np.int64), return_inverse=True
        )
        weights = np.bincount(inverse, weights=np.multiply.outer(weights, masses).ravel())
        sums = index * unit
    return weights, sums


def composed_epsilon(masses: Vector, losses: Vector, count: int, delta: float) -> float:
    """Return the epsilon of `count` independent releases of one pair, by the integral in this module's docstring."""

    def cumulant(s: float) -> tuple[float, float, float]:
        """Return ln M(s) and its first two derivatives."""
        exponents = s * losses
        peak = float(exponents.max())
        weights = np.exp(exponents - peak) * masses
        total = float(weights.sum())
        mean = float(np.dot(weights, losses)) / total
        return peak + math.log(total), mean, float(np.dot(weights, (losses - mean) ** 2)) / total

    spread = math.sqrt(count * cumulant(0.0)[2])
    powers = np.geomspace(0.05, 12, 120) / spread
    theta = float(powers[np.argmin([(count * cumulant(s)[0] - math.log(delta)) / s for s in powers])])
    log_moment, mean, variance = cumulant(theta)
    deviation = math.sqrt(count * variance)
    # The law repeats with this period, and dies out as soon as its transform does, or as 1/t^2 does.
    step = 2 * math.pi / (60 * deviation + 60 / theta)
    values: list[Vector] = []
    nodes: list[Vector] = []
    block = max(16, 400_000 // len(losses))
    tilted = masses * np.exp(theta * losses - log_moment)
    for start in range(0, 40_000, block):
        t = (start + np.arange(block)) * step
        # powers in polar form: ln|phi| and the angle, count times each
        transform = np.exp(1j * np.multiply.outer(t, losses - mean)) @ tilted
        with np.errstate(divide="ignore"):
            values.append(np.abs(transform) ** count * np.exp(1j * count * np.angle(transform)))
        nodes.append(t)
        if np.abs(values[-1]).max() < 1e-9 and t[0] * deviation > 3:
            break
    t, powers_of_it = np.concatenate(nodes), np.concatenate(values)
    z = theta + 1j * t
    kernel = powers_of_it / (z * (z + 1)) * np.where(t == 0, 0.5, 1.0)

    def delta_at(epsilon: float) -> float:
        integral = float(np.sum((kernel * np.exp(1j * t * (count * mean - epsilon))).real)) * step / math.pi
        return math.exp(min(count * log_moment - theta * epsilon, 700.0)) * integral

    # far from the saddle point the sum is of no use: look near it
    low, high = max(0.0, count * mean - 6 * deviation), count * mean + 4 * deviation
    if delta_at(high) > delta:
        return high
    if delta_at(low) <= delta:
        return 0.0
    return float(brentq(lambda epsilon: delta_at(epsilon) - delta, low, high, xtol=1e-12, rtol=1e-10))


def lower_bound(setting: Setting) -> float:
    """Return the best of a few pairs; parties may hold every pair, so the truth is not below it."""
    delta = setting.delta * (1 + SAFETY_OF_SUMS)
    if setting.unit == "record":
        total, (lo, hi) = setting.bits * setting.releases, ends(setting.beta_16)
        width = REACH * math.sqrt(total * lo * hi) + 8
        ones = np.arange(max(0, math.floor(total * hi - width)), min(total, math.ceil(total * hi + width)) + 1)
        return direct_epsilon(binom.pmf(ones, total, hi), (2.0 * ones - total) * math.log(hi / lo), delta)
    others, count = setting.bits - setting.num_trials, setting.releases
    several = {0, others // 4, others // 2, others}
    if count == 1 and others <= 100:
        several = set(range(others + 1))
    pairs = {k: pair(setting.bits, setting.num_trials, k, setting.beta_16) for k in sorted(several)}
    mixed = [pairs[0], pairs[others]] * count
    best = 0.0
    for releases in [*([one] * count for one in pairs.values()), mixed[:count]]:
        atoms = enumerated(releases) if count <= 30 else None
        if atoms is not None:
            best = max(best, direct_epsilon(*atoms, delta))
        elif releases[0] is releases[-1]:
            best = max(best, composed_epsilon(*releases[0], count, setting.delta * (1 + SAFETY)))
    return best


# ---------------------------------------------------------------------------------------------------- the report


def random_settings(number: int, seed: int) -> Iterator[Setting]:
    """Draw settings: b * M log-uniform up to 65,535, up to 10^6 composed coordinates, four of five for cells."""
    rng = np.random.default_rng(seed)

    def log_uniform(low: float, high: float) -> float:
        return float(math.exp(rng.uniform(math.log(low), math.log(high))))

    while number:
        bits = int(log_uniform(2, 65536))
        parties = int(log_uniform(2, min(bits, 1000) + 1))
        trials = bits // parties
        dim = int(log_uniform(1, 129))
        epochs = int(log_uniform(1, 1e6 / dim)) if rng.random() < 0.7 else 1
        if rng.random() < 0.25:
            dim = epochs = 1
        yield Setting(
            unit="cell" if rng.random() < 0.8 else "record",
            num_trials=trials,
            num_parties=parties,
            beta_16=int(log_uniform(512, 16385)),
            colluding_parties=int(rng.integers(0, parties)) if rng.random() < 0.3 else 0,
            embedding_dim=dim,
            num_epochs=epochs,
            delta=log_uniform(1e-10, 1e-2),
        )
        number -= 1


def clear_caches() -> None:
    for cached in (
        renyi.cell_rdp,
        renyi.record_rdp,
        renyi.bernoulli_rdp,
        large_sums.pairs,
        adaptive.adaptive_losses,
        loss_distribution.cell_losses,
        poisson_binomial.log_sum_pmfs_and_error,
    ):
        cached.cache_clear()


def reported(setting: Setting) -> tuple[float, str, float]:
    """Return epsilon, method and seconds of one core as the package reports them, with cold caches."""
    event = PoissonBinomialRelease(
        num_trials=setting.num_trials,
        beta=setting.beta_16 / 65536,
        num_parties=setting.num_parties,
        embedding_dim=setting.embedding_dim,
    )
    uses = setting.num_epochs
    part = Activity(
        split="train", release=event, update=None, row_releases=uses, row_updates=0, total_releases=1000 * uses
    )
    run = TrainingRun(activities=(part,), num_parties=event.num_parties, first_batch=100)
    adversary = Adversary(colluding_parties=setting.colluding_parties)
    clear_caches()
    start = time.process_time()
    answer = epsilon_bound(run, Unit(setting.unit), Accounting.PAPER, adversary, delta=setting.delta)
    return answer.epsilon, answer.method, time.process_time() - start


def measure(setting: Setting) -> Outcome:
    epsilon, method, seconds = reported(setting)
    return Outcome(epsilon, method, lower_bound(setting), setting.pure, seconds)


def table(outcomes: list[tuple[Setting, Outcome]]) -> list[str]:
    lines = [f"{'bits in a sum':>16}{'settings':>10}{'median':>9}{'95%':>9}{'max':>9}{'max seconds':>13}"]
    for low, high in (*RANGES, (1, 65535)):
        chosen = [outcome for setting, outcome in outcomes if low <= setting.bits < high + (high == 65535)]
        if chosen:
            ratios = np.array([outcome.ratio for outcome in chosen])
            lines.append(
                f"{f'{low}..{high}':>16}{len(chosen):>10}{np.median(ratios):>9.4f}"
                f"{np.quantile(ratios, 0.95, method='higher'):>9.4f}{ratios.max():>9.4f}"
                f"{max(outcome.seconds for outcome in chosen):>13.2f}"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.looseness", description=__doc__)
    parser.add_argument("--settings", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    outcomes = []
    for setting in random_settings(given.settings, given.seed):
        outcome = measure(setting)
        outcomes.append((setting, outcome))
        print(f"{outcome.ratio:.4f} {setting} {outcome}", file=sys.stderr, flush=True)
    print("\n".join(lines := table(outcomes)))
    below = sum(outcome.reported < outcome.lower for _, outcome in outcomes)
    above = sum(outcome.reported > outcome.pure * (1 + 1e-12) for _, outcome in outcomes)
    print(f"below a lower bound: {below}; above the pure bound: {above}")
    if given.out:
        rows = [asdict(setting) | asdict(outcome) for setting, outcome in outcomes]
        given.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"seed": given.seed, "below_lower": below, "above_pure": above, "table": lines, "rows": rows}
        given.out.write_text(json.dumps(content, indent=None, separators=(",", ":")).replace("},{", "},\n{") + "\n")
    return 1 if below or above else 0


if __name__ == "__main__":
    sys.exit(main())
