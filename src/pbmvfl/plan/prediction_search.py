"""From a budget for one row's prediction to a mechanism, a vote and how many rows teach the model that reads it.

The rules use public numbers alone: epsilon, whose it is, who looks, how many parties, classes and training rows there
are. They were chosen on held-out training rows of four tables (docs/explanation/privacy.md, "Predictions"):

- Randomised response says one symbol of k a party. Its noise is added M times, and falls exponentially in epsilon.
- Laplace noise in shares is added once to the sum of all votes, and falls like 1/epsilon.

So the first is for large budgets and few parties, and where a secure sum is not trusted; the second for the rest.
A record costs M - t times as much, which is the second's again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pbmvfl._settings import check_whole, finite
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import Mechanism, PolyaLaplace, RandomisedSymbols
from pbmvfl.mechanisms.laplace import LARGEST_SCALE, SMALLEST_SCALE
from pbmvfl.mechanisms.randomized_response import LARGEST_EPSILON, SMALLEST_EPSILON
from pbmvfl.mechanisms.votes import LARGEST_SYMBOLS, Vote, VoteKind
from pbmvfl.privacy.composition import epsilon_by_losses
from pbmvfl.privacy.conversion import check_delta, epsilon_from_rdp
from pbmvfl.privacy.units import SERVER, Adversary, Unit, column_unit

#: Randomised response is chosen where so many times its noise is below that of the other: its laws have longer tails.
#: Two classes have more to gain from it, as their symbols say how sure a party is.
_MANY_CLASSES_FACTOR, _TWO_CLASSES_FACTOR = 1.6, 1.2
#: A symbol is the true one at least so many times as often as all others together would be by guessing: e^epsilon / k.
_SYMBOL_RATIO = 9.0
#: Fewer training rows than this for each symbol and class, a fifth of them fusion rows, make finer symbols worse.
_ROWS_PER_ENTRY = 20.0
#: With fewer training rows than this for each class a second class says more than how sure a party is: on hold-outs of
#: 1,500 rows of three tables, and of one of 1,437, by 0 to 3 points; of 3,000 by 0 to 2; from 6,000 on it says less.
_ROWS_OF_GRADES = 500
_MOST_BINS = 16
#: How far the best score of a row is typically above the second. Too small a value costs less than too large a one.
TYPICAL_LEAD = 2.0
#: Gains at a typical lead of 1: of bins and grades, of shares, and of margins, of which noise leaves little but signs.
_SYMBOL_GAIN, _SHARES_GAIN, _MARGIN_GAIN = 1.2, 4.0, 2.8
#: What (votes, grades) are tried for many classes, the one that says most first.
_SYMBOLS = ((VoteKind.RANKS, 3), (VoteKind.RANKS, 2), (VoteKind.RANKS, 1), (VoteKind.TOP, 2), (VoteKind.TOP, 1))
#: Share of the training rows that are fusion rows, and the fewest of them for each class: below, there are none.
_FUSION_SHARE, _LEAST_FUSION = 0.2, 20
#: The same where symbols can be read as scores without a model. On hold-outs of three tables of two classes with 960 to
#: 3,000 rows no fusion rows were better by 0 to 3 points; from 6,000 rows on the two were equal, or a model better.
_LEAST_OF_SCORES = 1000
#: Up to here a vote is a ballot: noise is so large that how sure a party is does not matter.
_BALLOT_EPSILON = 3.0
#: Fewer levels have a little less noise, and lose as much to rounding.
_LEVELS = 64
_LARGEST_SEARCHED = 1e4
#: By this share of epsilon a setting is made noisier until its account is within the budget.
_STEP = 1e-4
#: A search for an epsilon ends this share above it at the most, and where it ends differs from search to search.
_SEARCH_SHARE = 1e-5
_Made = TypeVar("_Made", bound=Mechanism)


@dataclass(frozen=True, kw_only=True)
class PredictionChoice:
    """Mechanism and vote of predictions, and the reason."""

    mechanism: Mechanism
    vote: Vote
    words: str

    def vote_settings(self) -> dict[str, str | float | int]:
        """Return the vote by its flat names."""
        return {
            "vote": str(self.vote.kind),
            "vote_gain": self.vote.gain,
            "vote_grades": self.vote.grades,
        }


def fusion_rows(num_samples: int, num_classes: int, epsilon: float) -> int:
    """Return how many of the training rows are fusion rows; 0 where there are too few to learn from.

    Args:
        num_samples: Training rows.
        num_classes: Classes of the label.
        epsilon: Budget of one release. A symbol of two classes that is sent truly enough is a score already.
    """
    found = int(_FUSION_SHARE * num_samples)
    least = _LEAST_OF_SCORES if num_classes == 2 and epsilon > _BALLOT_EPSILON else _LEAST_FUSION * num_classes
    return found if found >= least else 0


def plan_prediction(
    *,
    epsilon: float,
    delta: float,
    unit: Unit | str = Unit.CELL,
    adversary: Adversary = SERVER,
    num_parties: int,
    num_classes: int,
    num_rows: int,
    secure_sum: bool = True,
    fused: bool = True,
) -> PredictionChoice:
    """Choose mechanism and vote for one release of each row to be predicted.

    Args:
        epsilon: Budget of one release for the unit.
        delta: Delta of the budget.
        unit: What the budget protects.
        adversary: Whom the budget holds against.
        num_parties: M.
        num_classes: Classes of the label.
        num_rows: Training rows.
        secure_sum: Whether only sums are readable.
        fused: Whether a fusion model reads votes; otherwise they are read as the scores that they stand for.

    Raises:
        PlanError: A value is out of range, or the budget is too small to predict anything.
    """
    epsilon = finite("prediction_epsilon", epsilon)
    if epsilon <= 0:
        raise PlanError(f"prediction_epsilon={epsilon:g} must be above 0; predictions without privacy are exact sums")
    check_delta(delta)
    unit = column_unit(unit)
    check_whole("num_classes", num_classes, least=2)
    check_whole("num_rows", num_rows, least=1)
    honest = adversary.honest_parties(num_parties)
    cells = honest if unit is Unit.RECORD else 1
    cell_epsilon = min(epsilon / cells, LARGEST_EPSILON)

    def cost(mechanism: Mechanism) -> float:
        losses = epsilon_by_losses([(1, mechanism.event.losses(unit, adversary))], delta, _LARGEST_SEARCHED)
        return min(losses, epsilon_from_rdp(mechanism.event.rdp(unit, adversary), delta)[0])

    def within(made: Callable[[float], _Made]) -> _Made:
        """Return the mechanism at the given pure epsilon, or a little below: the account rounds up."""
        for step in (0, 1, 2, 4, 8, 16, 32, 64):
            found = made(1 - step * _STEP)
            if cost(found) <= epsilon * (1 - _SEARCH_SHARE):
                return found
        raise PlanError(f"prediction_epsilon={epsilon:g} is not met by {found.describe()}: its account is too coarse")

    said = f"epsilon {epsilon:g} for a {unit}, {num_parties} parties, {num_classes} classes"
    response = _response_noise(cell_epsilon, num_parties, num_classes)
    laplace = _laplace_noise(epsilon, cells, num_parties / honest, num_classes)
    factor = _TWO_CLASSES_FACTOR if num_classes == 2 else _MANY_CLASSES_FACTOR
    if not secure_sum or factor * response <= laplace:
        vote = _symbols(cell_epsilon, num_classes, num_rows if fused else math.inf)
        symbols = vote.symbols(num_classes)
        assert symbols is not None
        _check_least(epsilon, unit, adversary, cells * SMALLEST_EPSILON)
        mechanism = within(
            lambda share: RandomisedSymbols(
                num_parties=num_parties,
                embedding_dim=1,
                symbols=symbols,
                response_epsilon=max(SMALLEST_EPSILON, share * cell_epsilon),
            )
        )
        why = "its noise is the smaller one here" if secure_sum else "each party is read by itself"
        return PredictionChoice(
            mechanism=mechanism,
            vote=vote,
            words=f"{said}: randomised response with {symbols} symbols ({vote.kind}), as {why}",
        )
    vote, levels = _votes(cell_epsilon, num_classes)
    _check_least(epsilon, unit, adversary, 2 * cells / LARGEST_SCALE)
    levels = min(levels, int(epsilon * LARGEST_SCALE / (2 * cells)))
    shared = within(
        lambda share: PolyaLaplace(
            num_parties=num_parties,
            embedding_dim=vote.width(num_classes),
            levels=levels,
            scale=min(LARGEST_SCALE, max(SMALLEST_SCALE, 2 * levels * cells / (epsilon * share))),
            honest_parties=0 if honest == num_parties else honest,
            bounded_total=num_classes > 2,
            secure_aggregation=True,
        )
    )
    return PredictionChoice(
        mechanism=shared,
        vote=vote,
        words=f"{said}: Laplace noise on the secure sum of votes ({vote.kind}), as its noise is the smaller one here",
    )


def _check_least(epsilon: float, unit: Unit, adversary: Adversary, least: float) -> None:
    if epsilon < least:
        raise PlanError(
            f"prediction_epsilon={epsilon:g} for unit={unit} against {adversary} must be at least {least:.3g}: below, "
            "predictions say nothing"
        )


# --- the rules ---


def _response_noise(cell_epsilon: float, num_parties: int, num_classes: int) -> float:
    """Variance of the number of votes for a class, estimated from everybody's randomised `top`."""
    odds = math.exp(cell_epsilon)
    return num_parties * (odds + num_classes - 2) / (odds - 1) ** 2


def _laplace_noise(epsilon: float, cells: int, surplus: float, num_classes: int) -> float:
    """Variance of the same with Laplace noise: a vote moves two counts by one, or one margin by its whole range."""
    if num_classes == 2:
        return surplus * 2 * (cells / epsilon) ** 2
    q = math.exp(-epsilon / (2 * cells))
    return surplus * 2 * q / (1 - q) ** 2


def _symbols(cell_epsilon: float, num_classes: int, num_rows: float) -> Vote:
    """The vote whose symbol says most, of those that the budget sends truly enough and a model can learn.

    Without a model there is nothing to learn: symbols are read as the scores that they stand for.
    """
    most, gain = math.exp(cell_epsilon) / _SYMBOL_RATIO, _SYMBOL_GAIN / TYPICAL_LEAD
    if num_classes == 2:
        return Vote(kind=VoteKind.BINS, gain=gain, grades=max(2, min(_MOST_BINS, 2 ** int(math.log2(max(most, 2))))))
    for kind, grades in _SYMBOLS:
        vote = Vote(kind=kind, gain=gain, grades=grades)
        symbols = vote.symbols(num_classes) or 0
        enough = kind is VoteKind.TOP or num_rows >= _ROWS_PER_ENTRY * num_classes * symbols
        if (kind, grades) == (VoteKind.RANKS, 1):
            enough = num_rows < _ROWS_OF_GRADES * num_classes
        if symbols <= min(most, LARGEST_SYMBOLS) and enough:
            break
    vote.check_classes(num_classes)
    return vote


def _votes(cell_epsilon: float, num_classes: int) -> tuple[Vote, int]:
    """Return the vote of sums and its levels. The more noise, the more a decided vote is worth."""
    if num_classes > 2:
        if cell_epsilon <= _BALLOT_EPSILON:
            return Vote(kind=VoteKind.BALLOT), 1
        return Vote(kind=VoteKind.SHARES, gain=_SHARES_GAIN / TYPICAL_LEAD), _LEVELS
    return Vote(kind=VoteKind.MARGIN, gain=_MARGIN_GAIN / TYPICAL_LEAD), _LEVELS
