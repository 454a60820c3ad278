"""Exact laws of what a party sends, by the numbers of the event that is charged, and draws that are held against them.

A law is written down here from the event's meaning, and shares no code with the samplers. Draws come from the code
that a party runs: `Mechanism.randomize`, `LabelResponse.draw`, `rounded_normal` and `noisy_counts`, with the entropy
that parties use. Values that no network makes are drawn too (beyond the bound, infinite, NaN): the account needs the
clamp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy import stats

from pbmvfl.audit.constants import DEVIATIONS, LARGEST_DRAWS
from pbmvfl.audit.statistics import Finding, IntegerLaw, count_test, law_tests, normal_tests, of_case
from pbmvfl.crypto import rounded_normal as noise
from pbmvfl.crypto.entropy import Entropy
from pbmvfl.mechanisms import Mechanism
from pbmvfl.mechanisms.label_response import LabelResponse
from pbmvfl.mechanisms.laplace import PolyaLaplaceRelease, PolyaLaplaceSharesRelease
from pbmvfl.mechanisms.randomized_response import RandomisedResponse
from pbmvfl.privacy.events import Event, LocalGaussianRelease, PoissonBinomialRelease

#: Values of a coordinate in units of the bound, and the value that the mechanism must take each for.
VALUES: tuple[tuple[str, float, float], ...] = (
    ("+C", 1.0, 1.0),
    ("-C", -1.0, -1.0),
    ("0", 0.0, 0.0),
    ("C/2", 0.5, 0.5),
    ("3C", 3.0, 1.0),
    ("-infinity", -math.inf, -1.0),
    ("NaN", math.nan, 0.0),
)
#: Law of a sum is cut off where less than this is left.
_CUT = 1e-18


def sent_law(event: Event, unit: float) -> IntegerLaw | None:
    """Return the law of one party's integer for a coordinate, before it is reduced into a ring.

    Args:
        event: The event that is charged.
        unit: The coordinate in units of the bound, in [-1, 1].

    Returns:
        The law, or None if the event has no law of integers that is known here.
    """
    match event:
        case PoissonBinomialRelease():
            probability = (32768 + math.floor(event.beta_16 * unit + 0.5)) / 65536
            return _binomial(event.num_trials, probability)
        case RandomisedResponse():
            own = math.floor((unit + 1) * (event.symbols - 1) / 2 + 0.5)
            probabilities = np.full(event.symbols, event.other_weight / 2**32)
            probabilities[own] = 1 - (event.symbols - 1) * event.other_weight / 2**32
            return IntegerLaw(0, probabilities)
        case PolyaLaplaceRelease():
            return _laplace_share(math.floor(event.levels * unit + 0.5), event.scale, event.noisy_parties)
        case PolyaLaplaceSharesRelease():
            return _laplace_share(math.floor(event.levels * max(unit, 0.0)), event.scale, event.noisy_parties)
    return None


def _binomial(trials: int, probability: float) -> IntegerLaw:
    return IntegerLaw(0, np.asarray(stats.binom.pmf(np.arange(trials + 1), trials, probability)))


def _laplace_share(centre: int, scale: float, shares: int) -> IntegerLaw:
    """Return the law of `centre` plus the difference of two NegativeBinomial(1/shares, exp(-1/scale))."""
    longest = math.ceil(-scale * math.log(_CUT))
    one = np.asarray(stats.nbinom.pmf(np.arange(longest + 1), 1 / shares, -math.expm1(-1 / scale)))
    law = IntegerLaw(0, one).plus(IntegerLaw(-longest, one[::-1]))
    return IntegerLaw(law.first + centre, law.probabilities)


def signed(values: npt.NDArray[np.integer], bits: int) -> npt.NDArray[np.int64]:
    """Return residues modulo 2^bits as numbers from -2^(bits-1) on."""
    wide = values.astype(np.int64)
    return np.where(wide >= 1 << (bits - 1), wide - (1 << bits), wide)


def trials_for(mechanism: Mechanism, trials: int) -> int:
    """Return how many draws find a beta that is wrong by 1%; at least `trials`, as far as time permits."""
    event = mechanism.event
    if not isinstance(event, PoissonBinomialRelease):
        return trials
    beta = event.beta_16 / 65536
    bits = (DEVIATIONS / (0.01 * beta)) ** 2 * (0.25 - beta**2)
    needed = math.ceil(bits / event.num_trials / sum(abs(taken) == 1 for *_, taken in VALUES))
    return max(trials, min(needed, LARGEST_DRAWS))


def mechanism_tests(mechanism: Mechanism, entropy: Entropy, trials: int) -> Iterator[Finding]:
    """Draw each of VALUES by the mechanism, and hold the draws against the law of its event.

    Args:
        mechanism: The mechanism, with the numbers of a plan.
        entropy: Source of the noise, as a party has it.
        trials: Draws of each value, at least.
    """
    one = replace(mechanism, embedding_dim=1)
    event, name = one.event, one.describe()
    count = trials_for(one, trials)
    towards_end = 0
    for value_name, value, taken in VALUES:
        given = np.full((count, 1), value * one.bound, dtype=np.float32)
        sent = one.randomize(given, entropy).reshape(-1)
        if isinstance(event, LocalGaussianRelease):
            clear = (sent.astype(np.float64) - taken * one.bound) / math.sqrt(event.variance)
            yield from of_case(normal_tests(name, clear), value_name)
            continue
        law = sent_law(event, taken)
        if law is None:
            return
        if law.first < 0 and one.ring is not None:
            sent = signed(sent, one.ring.bits)
        yield from of_case(law_tests(name, sent, law), value_name)
        if isinstance(event, PoissonBinomialRelease) and abs(taken) == 1:
            total = int(sent.sum(dtype=np.int64))
            towards_end += total if taken > 0 else count * event.num_trials - total
    if isinstance(event, PoissonBinomialRelease):
        bits = sum(abs(taken) == 1 for *_, taken in VALUES) * count * event.num_trials
        high = (32768 + event.beta_16) / 65536
        yield count_test(name, "beta", towards_end, bits, high)


def has_law(mechanism: Mechanism) -> bool:
    """Return whether the mechanism's draws can be held against an exact law here."""
    return isinstance(mechanism.event, LocalGaussianRelease) or sent_law(mechanism.event, 0.0) is not None


def label_tests(response: LabelResponse, entropy: Entropy, trials: int) -> Iterator[Finding]:
    """Draw labels of the first and of the last class, and hold them against randomised response."""
    event, classes = response.event, response.num_classes
    for true in (0, classes - 1):
        probabilities = np.full(classes, event.other_weight / 2**32)
        probabilities[true] = 1 - (classes - 1) * event.other_weight / 2**32
        drawn = response.draw(np.full(trials, true, dtype=np.int64), entropy)
        what = f"drawn labels, epsilon {response.epsilon:g}, {classes} classes"
        yield from of_case(law_tests(what, drawn, IntegerLaw(0, probabilities)), f"class {true}")


def noise_tests(entropy: Entropy, trials: int) -> Sequence[Finding]:
    """Draw the noise of updates and statistics, and hold it against the normal law of deviation 2^28."""
    drawn = noise.rounded_normal(entropy, trials)
    # floor(X) + 1/2 is X up to half a step of 2^-28 deviations, which no test here can see.
    return normal_tests("noise of updates, rounded normal", (drawn.astype(np.float64) + 0.5) / 2.0**28)
