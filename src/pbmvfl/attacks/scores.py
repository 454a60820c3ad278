"""Attackers by what they see, and scores: what an attack gets, what the baseline gets, and what the account permits.

An attack that is above its bound is an alarm: the program does not do what its account says. Alarms are raised at a
false-alarm rate of one in a million, so that a user who runs attacks every day never sees a false one; the printed
intervals are the usual 95% ones.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.privacy.accounting import EpsilonBound
from pbmvfl.privacy.units import Adversary

#: Probability that a sound program raises one given alarm.
ALARM_RATE = 1e-6
#: Exit code of a command that raised an alarm.
ALARM_EXIT = 5


@dataclass(frozen=True, kw_only=True)
class Attacker:
    """Reader of some of what leaves.

    Args:
        name: A few words.
        sees: What it sees.
        adversary: The adversary of the account whose epsilon bounds it.
        sums: Whether it sees sums over the honest parties; False: each party's values.
    """

    name: str
    sees: str
    adversary: Adversary
    sums: bool = True


SERVER_ALONE = Attacker(name="server", sees="labels, and the sums of every round", adversary=Adversary())
CURIOUS_PARTY = Attacker(
    name="curious party",
    sees="its own columns, and the gradients or drawn labels that it receives",
    adversary=Adversary(server=False, colluding_parties=1),
)


def server_with(num_parties: int, colluding_parties: int) -> Attacker:
    """Return the server together with so many parties, which subtract what they added.

    Raises:
        PlanError: No party would be left.
    """
    adversary = Adversary(colluding_parties=colluding_parties)
    adversary.honest_parties(num_parties)
    return Attacker(name=str(adversary), sees="sums without the parts of its parties", adversary=adversary)


def network_observer(num_parties: int) -> Attacker:
    """Return a reader of all messages of a federation without masks: it reads each party's values."""
    return Attacker(
        name="network observer, no masks",
        sees="each party's values of every round; with masks it would see uniform noise",
        adversary=Adversary(colluding_parties=num_parties - 1),
        sums=False,
    )


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Confidence interval of a mean."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Score:
    """Result of one attack in one setting."""

    attack: str
    attacker: str
    setting: str
    #: What `value`, `baseline` and `bound` are.
    measure: str
    value: float
    #: The same side knowledge, nothing seen.
    baseline: float
    #: Of value minus baseline, paired, 95%.
    gain: Interval
    #: Most that the account permits; None where it says nothing about this measure.
    bound: float | None
    #: The account of the bound, or the reason why there is none.
    bound_words: str
    #: Lower end for `value` that a sound program exceeds once in a million; None where there is no bound.
    surely_above: float | None
    tries: int

    @property
    def is_alarm(self) -> bool:
        """True if the attack is surely above its bound."""
        return self.bound is not None and self.surely_above is not None and self.surely_above > self.bound

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**asdict(self), "is_alarm": self.is_alarm}


def lower_end(right: int, tries: int, rate: float) -> float:
    """Return the lower end of Clopper and Pearson's interval: above the true share with probability `rate`."""
    from scipy import stats

    return float(stats.beta.ppf(rate, right, tries - right + 1)) if right else 0.0


def upper_end(right: int, tries: int, rate: float) -> float:
    """Return the upper end of Clopper and Pearson's interval for a share."""
    return 1.0 - lower_end(tries - right, tries, rate)


def paired_interval(differences: npt.NDArray[Any]) -> Interval:
    """Return the normal 95% interval of the mean of paired differences."""
    spread = 1.96 * float(differences.std(ddof=1)) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    mean = float(differences.mean())
    return Interval(low=mean - spread, high=mean + spread)


def share_right(
    right: npt.NDArray[Any],
    guessed: npt.NDArray[Any] | float,
    *,
    attack: str,
    attacker: Attacker,
    setting: str,
    bound: float | None,
    bound_words: str,
    measure: str = "share right",
) -> Score:
    """Score an attack whose tries are right or wrong.

    Args:
        right: Whether the attack was right, one value a try.
        guessed: Whether the baseline was, one value a try; or its probability.
        attack: Name of the attack.
        attacker: Who it is.
        setting: What was attacked.
        bound: Most that the account permits as the share of right tries; None if it says nothing.
        bound_words: Where that comes from.
        measure: What is counted.
    """
    right = np.asarray(right, dtype=np.float64)
    base = np.broadcast_to(np.asarray(guessed, dtype=np.float64), right.shape)
    return Score(
        attack=attack,
        attacker=attacker.name,
        setting=setting,
        measure=measure,
        value=float(right.mean()),
        baseline=float(base.mean()),
        gain=paired_interval(right - base),
        bound=bound,
        bound_words=bound_words,
        surely_above=None if bound is None else lower_end(int(right.sum()), len(right), ALARM_RATE),
        tries=len(right),
    )


def most_right(bound: EpsilonBound, prior: float) -> float:
    """Return the largest share of right guesses that an account permits.

    Let a guess that sees nothing be right with probability `prior`, and take what is released about the commonest value
    as a reference: seeing it, no guess is right more often than `prior`. Against any other value the chance rises by at
    most the advantage, and at most by the factor e^epsilon and delta.

    Args:
        bound: The account's bound of the unit that is guessed.
        prior: Probability of the best guess that sees nothing.
    """
    by_advantage = prior + bound.advantage_upper_bound * (1 - prior)
    by_epsilon = math.exp(min(bound.epsilon, 700.0)) * prior + bound.delta
    return min(1.0, by_advantage, by_epsilon)
