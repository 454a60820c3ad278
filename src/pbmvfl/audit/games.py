"""A lower bound on epsilon by the distinguishing game, for one release of one row.

The adversary chooses two worlds: one party's coordinates are all at +C, or all at -C, and the other parties' values are
known to it. It sees one release and says which world it is. Who is where, the statistic and the threshold are chosen
from the claimed law alone, before anything is drawn; otherwise the bound would be too large. With

    d = P(says +C | +C),   f = P(says +C | -C)      d <= e^epsilon f + delta

epsilon is at least ln((d - delta) / f). Clopper-Pearson ends of d and f turn counts into a bound that holds with a
stated confidence. N games a world cannot show more than about ln(N / 3.7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from pbmvfl.audit.constants import CONFIDENCE, DELTA
from pbmvfl.audit.laws import sent_law, signed
from pbmvfl.audit.statistics import IntegerLaw
from pbmvfl.crypto.entropy import Entropy
from pbmvfl.mechanisms import Mechanism
from pbmvfl.mechanisms.laplace import PolyaLaplaceSharesRelease
from pbmvfl.mechanisms.randomized_response import RandomisedResponse
from pbmvfl.privacy.composition import bounds_by_losses
from pbmvfl.privacy.units import Unit

#: Values that are drawn at a time.
_AT_ONCE = 1 << 18
_LARGEST_EPSILON = 1e4
#: Far below one game in the most that anyone plays.
_NO_TAIL = 1e-13
#: Up to so many parties every number of other parties at +C is tried.
_FEW_PARTIES = 16


@dataclass(frozen=True, kw_only=True)
class EpsilonFinding:
    """Result of the distinguishing game.

    Args:
        what: The mechanism.
        trials: Games in each world.
        delta: Delta of all epsilons.
        epsilon: Exact epsilon of the release, by the account.
        epsilon_lower_bound: Bound by the games, at the confidence.
        epsilon_alarm_bound: The same at the level of an alarm: a verdict uses this one.
        advantage: Upper bound on any attack's advantage, by the account.
        advantage_lower_bound: Advantage of the best threshold, by the games, at the confidence.
        confidence: Of the lower bounds that are printed.
    """

    what: str
    trials: int
    delta: float
    epsilon: float
    epsilon_lower_bound: float
    epsilon_alarm_bound: float
    advantage: float
    advantage_lower_bound: float
    confidence: float

    @property
    def sound(self) -> bool:
        """Return whether the games contradict nothing."""
        return self.epsilon_alarm_bound <= self.epsilon

    @property
    def share(self) -> float:
        """Return the lower bound as a share of the exact epsilon."""
        return self.epsilon_lower_bound / self.epsilon if self.epsilon > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share, "sound": self.sound}


def at_least(successes: int, trials: int, error: float) -> float:
    """Return the Clopper-Pearson lower end of a probability, wrong with at most this probability."""
    return 0.0 if successes == 0 else float(stats.beta.ppf(error, successes, trials - successes + 1))


def at_most(successes: int, trials: int, error: float) -> float:
    """Return the Clopper-Pearson upper end of a probability, wrong with at most this probability."""
    return 1.0 if successes == trials else float(stats.beta.isf(error, successes + 1, trials - successes))


def epsilon_at_least(detections: int, false_alarms: int, trials: int, *, delta: float, error: float) -> float:
    """Return a lower bound on epsilon from so many detections and false alarms, of as many games each.

    Most of the error is given to false alarms, which are few, and whose end is the wider one.
    """
    d, f = at_least(detections, trials, 0.1 * error), at_most(false_alarms, trials, 0.9 * error)
    return max(0.0, math.log((d - delta) / f)) if d > delta else 0.0


@dataclass(frozen=True)
class Game:
    """Choices of the adversary, made from the claimed law."""

    #: Values of the other parties in units of the bound, the same in both worlds.
    others: tuple[float, ...]
    #: The adversary says +C if the statistic is at least this.
    threshold: int
    #: And the threshold with the largest advantage.
    fair_threshold: int


def totals(mechanism: Mechanism, unit: float, others: tuple[float, ...]) -> IntegerLaw:
    """Return the claimed law of the adversary's statistic."""
    event = mechanism.event
    if isinstance(event, RandomisedResponse):
        # The party's own symbols are readable: +1 for the top one, -1 for the lowest, else 0.
        top, rest = 1 - (event.symbols - 1) * event.other_weight / 2**32, event.other_weight / 2**32
        law = IntegerLaw(-1, np.array([rest, 1 - top - rest, top] if unit > 0 else [top, 1 - top - rest, rest]))
    else:
        law = _sent(mechanism, unit)
        for value in sorted(set(others)):
            law = _trimmed(law.plus(_times(_sent(mechanism, value), others.count(value))))
    return _times(law, mechanism.embedding_dim)


def _sent(mechanism: Mechanism, unit: float) -> IntegerLaw:
    law = sent_law(mechanism.event, unit)
    assert law is not None
    return law


def _times(law: IntegerLaw, count: int) -> IntegerLaw:
    """Return the law of the sum of so many independent ones, at least one."""
    half = law if count == 1 else _times(law, count // 2)
    if count == 1:
        return half
    both = _trimmed(half.plus(half))
    return _trimmed(both.plus(law)) if count % 2 else both


def _trimmed(law: IntegerLaw) -> IntegerLaw:
    """Return the law without its far tails, which no threshold lies in; only the adversary's choice depends on it."""
    from_below, from_above = np.cumsum(law.probabilities), np.cumsum(law.probabilities[::-1])[::-1]
    kept = np.flatnonzero((from_below > _NO_TAIL) & (from_above > _NO_TAIL))
    return IntegerLaw(law.first + int(kept[0]), law.probabilities[kept[0] : kept[-1] + 1])


def choose_game(mechanism: Mechanism, trials: int) -> Game:
    """Choose the game that promises the largest bound by the claimed law. Nothing is drawn."""
    parties = mechanism.num_parties
    # All at one end is the best choice wherever it was tried (theory.md, section 3); a few others are tried too.
    tops = range(parties) if parties <= _FEW_PARTIES else (0, parties // 2, parties - 1)
    mixed = [(1.0,) * top + (-1.0,) * (parties - 1 - top) for top in tops]
    best = (-1.0, Game((), 0, 0))
    for others in [()] if reads_alone(mechanism) else mixed:
        high, low = (totals(mechanism, unit, others) for unit in (1.0, -1.0))
        first = min(high.first, low.first)
        last = max(high.first + len(high.probabilities), low.first + len(low.probabilities))
        d, f = (_survival(law, first, last) for law in (high, low))
        fair = first + int(np.argmax(d - f))
        # Thresholds are many where the law is wide: a few hundred of them, in equal steps of probability, are enough.
        quantiles = np.concatenate((np.geomspace(1e-9, 0.5, 150), 1 - np.geomspace(1e-9, 0.5, 150)))
        places = np.unique(np.searchsorted(-f, -quantiles).clip(0, len(f) - 1))
        for place in places.tolist():
            # At a deviation of bad luck: a threshold that few cross promises most and keeps least of it.
            seen = trials * d[place] - math.sqrt(trials * d[place] * (1 - d[place]))
            alarms = min(trials, trials * f[place] + math.sqrt(trials * f[place]))
            expected = epsilon_at_least(
                max(0, math.floor(seen)), math.ceil(alarms), trials, delta=DELTA, error=1 - CONFIDENCE
            )
            if expected > best[0]:
                best = (expected, Game(others, first + place, fair))
    return best[1]


def _survival(law: IntegerLaw, first: int, last: int) -> npt.NDArray[np.float64]:
    """Return P(X >= v) for v = first .. last."""
    padded = np.zeros(last - first + 1)
    padded[law.first - first : law.first - first + len(law.probabilities)] = law.probabilities
    return np.minimum(np.cumsum(padded[::-1])[::-1], 1.0)


def play(
    mechanism: Mechanism, game: Game, unit: float, new_entropy: Callable[[], Entropy], trials: int
) -> tuple[int, int]:
    """Return how often the adversary says +C in a world, by its threshold and by the fair one."""
    said = fair = 0
    for statistic in _statistics(mechanism, game, unit, new_entropy, trials):
        said += int((statistic >= game.threshold).sum())
        fair += int((statistic >= game.fair_threshold).sum())
    return said, fair


def _statistics(
    mechanism: Mechanism, game: Game, unit: float, new_entropy: Callable[[], Entropy], trials: int
) -> Iterator[npt.NDArray[np.int64]]:
    width, ring = mechanism.embedding_dim, mechanism.ring
    assert ring is not None
    entropies = [new_entropy() for _ in range(1 + len(game.others))]
    rows = max(1, _AT_ONCE // width)
    for start in range(0, trials, rows):
        size = min(rows, trials - start)
        payloads = []
        for value, entropy in zip((unit, *game.others), entropies, strict=True):
            given = np.full((size, width), value * mechanism.bound, dtype=np.float32)
            payloads.append(mechanism.payload.encode(mechanism.randomize(given, entropy)))
        total = mechanism.payload.total(payloads, size * width).reshape(size, width)
        if isinstance(mechanism.event, RandomisedResponse):
            seen = (total == mechanism.event.symbols - 1).astype(np.int64) - (total == 0)
        else:
            seen = total.astype(np.int64) if mechanism.largest_sum is not None else signed(total, ring.bits)
        yield seen.sum(axis=1)


def reads_alone(mechanism: Mechanism) -> bool:
    """Return whether the adversary reads the party's own integers: then other parties' noise hides nothing."""
    return isinstance(mechanism.event, RandomisedResponse) or not mechanism.secure_aggregation


def can_play(mechanism: Mechanism) -> bool:
    """Return whether there is a game for this mechanism: it sends integers of a known law."""
    return mechanism.ring is not None and sent_law(mechanism.event, 0.0) is not None


def epsilon_test(
    mechanism: Mechanism,
    new_entropy: Callable[[], Entropy],
    trials: int,
    *,
    level: float,
) -> EpsilonFinding:
    """Play the game and compare the bound with the exact epsilon of one release of one row.

    Args:
        mechanism: The mechanism, with the numbers of a plan.
        new_entropy: Makes a party's source of noise.
        trials: Games in each world.
        level: Probability with which a sound mechanism may raise an alarm.

    Returns:
        The bounds. `sound` is false if the games contradict the exact epsilon.
    """
    if isinstance(mechanism.event, PolyaLaplaceSharesRelease):
        mechanism = replace(mechanism, embedding_dim=1)  # of several, only one can be the whole
    exact, attack = bounds_by_losses([(1, mechanism.event.losses(Unit.CELL))], DELTA, _LARGEST_EPSILON)
    game = choose_game(mechanism, trials)
    (detections, fair_detections), (alarms, fair_alarms) = (
        play(mechanism, game, unit, new_entropy, trials) for unit in (1.0, -1.0)
    )
    error = (1 - CONFIDENCE) / 2
    advantage = at_least(fair_detections, trials, error) - at_most(fair_alarms, trials, error)
    return EpsilonFinding(
        what=mechanism.describe() + f", M={mechanism.num_parties}, P={mechanism.embedding_dim}",
        trials=trials,
        delta=DELTA,
        epsilon=exact,
        epsilon_lower_bound=epsilon_at_least(detections, alarms, trials, delta=DELTA, error=1 - CONFIDENCE),
        epsilon_alarm_bound=epsilon_at_least(detections, alarms, trials, delta=DELTA, error=level),
        advantage=attack.advantage,
        advantage_lower_bound=max(0.0, advantage),
        confidence=CONFIDENCE,
    )
