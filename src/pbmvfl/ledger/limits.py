"""Limits that hold although later runs depend on earlier results.

Choosing the best Renyi order after the fact, or composing privacy-loss distributions, is valid only for a plan that was
fixed beforehand. A limit must hold for whatever comes, so the way of counting is fixed when it is set. There are two:

- `gaussian`: squared shifts in standard deviations add up, whoever chose the next release. Exact for Gaussian noise.
  On a row that has no Gaussian noise yet, releases with a pure epsilon add up by that (privacy.md has the proof).
- `renyi`: at one order divergences add up (Feldman and Zrnic, 2021). For whatever is not Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from pbmvfl.errors import PlanError
from pbmvfl.ledger.session_terms import SessionTerms
from pbmvfl.plan.round_kinds import LABELS, RoundKind
from pbmvfl.privacy.conversion import check_delta
from pbmvfl.privacy.events import ReleaseEvent, UpdateEvent
from pbmvfl.privacy.gaussian_filter import gaussian_epsilon, largest_square, pure_epsilon, squared_shift
from pbmvfl.privacy.orders import ORDERS, Curve
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import Accounting, Adversary, Unit

#: What stands in a ledger where a limit by divergences has its order: an order that none of those can have.
GAUSSIAN_ORDER = math.inf


class Counting(StrEnum):
    """Quantity that a limit adds up."""

    GAUSSIAN = "gaussian"
    RENYI = "renyi"


def divergence_budget(epsilon: float, delta: float, order: float) -> float:
    """Return the largest divergence at this order that gives (epsilon, delta): `conversion.py`, solved."""
    return epsilon - math.log1p(-1 / order) + math.log(delta * order) / (order - 1)


def epsilon_at(divergence: float, delta: float, order: float) -> float:
    """The epsilon of a divergence at a fixed order; nothing spent is 0, anything spent pays the conversion's share."""
    if divergence == 0:
        return 0.0
    return max(divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1), 0.0)


def unit_and_accounting(unit: Unit | str, accounting: Accounting | str) -> tuple[Unit, Accounting]:
    """Both by their names, or an error that has the permitted ones."""
    try:
        return Unit(unit), Accounting(accounting)
    except ValueError:
        raise PlanError(
            f"unit={str(unit)!r}, accounting={str(accounting)!r}; permitted: unit {', '.join(Unit)}, "
            f"accounting {', '.join(Accounting)}."
        ) from None


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Privacy budget that a party's owner permits for one unit, against one adversary, by one way of counting."""

    unit: Unit
    accounting: Accounting
    colluding_parties: int
    epsilon: float
    delta: float
    order: float

    @classmethod
    def choose(
        cls,
        *,
        unit: Unit | str,
        accounting: Accounting | str,
        epsilon: float,
        delta: float,
        colluding_parties: int = 0,
        order: float | None = None,
        counting: Counting | str | None = None,
    ) -> Limit:
        """Return a limit.

        Args:
            unit: What it protects.
            accounting: Which releases are charged to the unit.
            epsilon: The most that may be spent.
            delta: Delta of that epsilon.
            colluding_parties: Parties on the adversary's side.
            order: Renyi order to count at; None for the one that leaves most room for many small releases.
            counting: How costs add up; None for Gaussian if the limit is strict, else Renyi.

        Raises:
            PlanError: A value is out of range, or leaves no room for any release.
        """
        check_delta(delta)
        if isinstance(epsilon, bool) or not 0 < epsilon < math.inf:
            raise PlanError(f"epsilon={epsilon!r} must be a finite number above 0")
        Adversary(colluding_parties=colluding_parties)  # names a value below 0
        unit, accounting = unit_and_accounting(unit, accounting)
        if _counting(counting, order, unit, accounting) is Counting.GAUSSIAN:
            chosen = GAUSSIAN_ORDER
        else:
            chosen = _renyi_order(epsilon, delta, order)
        return cls(
            unit=unit,
            accounting=accounting,
            colluding_parties=colluding_parties,
            epsilon=float(epsilon),
            delta=float(delta),
            order=chosen,
        )

    @property
    def counting(self) -> Counting:
        """Ways of adding up costs."""
        return Counting.GAUSSIAN if self.order == GAUSSIAN_ORDER else Counting.RENYI

    @property
    def budget(self) -> float:
        """Return how much may add up on a row."""
        return self.left_beside(0.0)

    def left_beside(self, pure: float) -> float:
        """Return how much may add up beside a pure epsilon of the row; below 0 if that alone is too much.

        Args:
            pure: The pure epsilon of a row's releases.
        """
        if self.counting is Counting.GAUSSIAN:
            return largest_square(self.epsilon - pure, self.delta)
        return divergence_budget(self.epsilon, self.delta, self.order)

    def epsilon_of(self, amount: float, pure: float = 0.0) -> float:
        """Return the epsilon of what has added up on a row, beside a pure one before it.

        Args:
            amount: Divergence, or squared shift, that has added up on a row.
            pure: The pure epsilon of its other releases.
        """
        if self.counting is Counting.GAUSSIAN:
            return pure + gaussian_epsilon(amount, self.delta)
        return epsilon_at(amount, self.delta, self.order)

    def cost_of(self, event: ReleaseEvent | UpdateEvent, colluding_parties: int) -> Cost:
        """Return the cost of one event.

        Args:
            event: What a round of a session does to a row.
            colluding_parties: Parties on the server's side.
        """
        adversary = Adversary(colluding_parties=colluding_parties)
        if self.counting is Counting.RENYI:
            orders = (self.order,)
            curve = event.rdp(orders) if isinstance(event, UpdateEvent) else event.rdp(self.unit, adversary, orders)
            return Cost(_divergence(curve))
        losses = event.losses() if isinstance(event, UpdateEvent) else event.losses(self.unit, adversary)
        return Cost(squared_shift(losses), pure_epsilon(losses))

    @property
    def how(self) -> str:
        """Describe how it is counted."""
        if self.counting is Counting.RENYI:
            return f"at order {self.order:g}"
        return "as a sum of pure epsilons" if self.unit is Unit.LABEL else "as Gaussian noise"

    @property
    def counts_rows(self) -> bool:
        """Return whether rows are charged one by one; otherwise one number holds for every row."""
        return self.unit is not Unit.PARTY

    def __str__(self) -> str:
        return f"{self.unit}, {self.accounting}, {self.against}: epsilon {self.epsilon:g} at delta {self.delta:g}"

    @property
    def against(self) -> str:
        """Name the adversary."""
        if self.unit is Unit.LABEL:  # the label holder's own noise hides a label from all parties together
            return "all parties"
        return str(Adversary(colluding_parties=self.colluding_parties))


class Cost(NamedTuple):
    """Cost of a release or an update, in the unit that a limit counts in."""

    amount: float
    #: The same as a pure epsilon; infinity if it has none.
    pure: float = math.inf

    def times(self, count: int) -> Cost:
        """Return the cost of so many."""
        return Cost(self.amount * count, self.pure * count) if count else NOTHING

    def plus(self, other: Cost) -> Cost:
        """Return the cost of both."""
        return Cost(self.amount + other.amount, self.pure + other.pure)


NOTHING = Cost(0.0, 0.0)


@dataclass(frozen=True)
class KindRates:
    """Cost of one round of a kind, as a limit counts."""

    #: To each row of the round, for its own release.
    own: Cost = NOTHING
    #: To each row of the round, for the noisy update with it.
    update: Cost = NOTHING
    #: To every row whatever, for each row of the round: once weights know rows, every release may be about any of them.
    everywhere: Cost = NOTHING


@dataclass(frozen=True)
class Rates:
    """Cost of a session's rounds, as a limit counts, by kind of round."""

    kinds: Mapping[RoundKind, KindRates]
    #: Whether a use of a row is a release of its whole batch.
    couples_rows: bool
    #: Whether the first round of a run is charged in full to every row: all rows hold a party's values, or the weights
    #: may know any of them before the run begins.
    all_rows_alike: bool

    @classmethod
    def of(cls, terms: SessionTerms, limit: Limit) -> Rates:
        """Return what a session's rounds cost, as a limit counts."""
        kinds = {kind: _kind_rates(terms, kind, limit) for kind in terms.events}
        return cls(kinds, terms.couples_rows, limit.unit is Unit.PARTY or not terms.public_start)

    @property
    def counts_rows(self) -> bool:
        """Return whether anything is added to the rows of a round and not to others."""
        return any(rates.own.amount or rates.update.amount for rates in self.kinds.values())

    @property
    def elsewhere(self) -> Rates:
        """Return the rates for rows of another dataset, none of which is in a round."""
        return replace(self, kinds={kind: KindRates(everywhere=each.everywhere) for kind, each in self.kinds.items()})

    def for_row(self, kind: RoundKind, num_rows: int) -> Cost:
        """Return the cost of one use in a round of this kind for a row of it."""
        rates = self.kinds[kind]
        return rates.own.times(num_rows if self.couples_rows else 1).plus(rates.update)

    def for_all(self, kind: RoundKind, num_rows: int, *, first_of_run: bool) -> Cost:
        """Return the cost of a round for every row. In a run's first round only a row's own release depends on it."""
        if first_of_run and not self.all_rows_alike and not self.couples_rows:
            return self.kinds[kind].everywhere
        return self.kinds[kind].everywhere.times(num_rows)


def _kind_rates(terms: SessionTerms, kind: RoundKind, limit: Limit) -> KindRates:
    if limit.unit is Unit.LABEL:
        if kind != LABELS:  # all that parties release is computed from drawn labels
            return KindRates()
        limit = replace(limit, unit=Unit.CELL)  # a label is all that its holder has of a row
    # A limit for more colluders than a run has parties is a limit for all but one of them.
    colluding = min(limit.colluding_parties, terms.num_parties - 1)
    release, update = terms.release(kind), terms.update(kind)
    rate = NOTHING if release is None else limit.cost_of(release, colluding)
    parties = terms.num_parties - colluding if limit.unit is Unit.RECORD else 1
    noise = NOTHING if update is None or not update.is_noisy else limit.cost_of(update, colluding).times(parties)
    # A noisy sum that leaves its party, all of whose n rows may be others, moves n times as far: n^2 times its price,
    # and a round adds what is said here n times.
    told = noise.times(terms.schedule.rows_of(kind.split)) if kind.told else NOTHING
    if limit.unit is Unit.PARTY:
        return KindRates(everywhere=rate.plus(told))
    if limit.accounting is Accounting.PAPER:
        return KindRates(own=rate) if release is not None else KindRates(update=noise)
    if terms.has_plain_updates or not terms.public_start:  # weights that may know rows without noise
        return KindRates(everywhere=rate.plus(told))
    return KindRates(own=rate, update=noise)


def _renyi_order(epsilon: float, delta: float, order: float | None) -> float:
    """Return the order that a limit counts at: the given one, or the best one for small releases."""
    # Small releases cost about order * constant, so this ratio counts how many of them fit.
    best = max(ORDERS, key=lambda alpha: divergence_budget(epsilon, delta, alpha) / alpha)
    chosen = best if order is None else order
    if not 1 < chosen < math.inf:
        raise PlanError(
            f"order={chosen!r}; permitted: a finite number above 1, or none for the best one for small releases."
        )
    if divergence_budget(epsilon, delta, chosen) <= 0:
        smallest = epsilon_at(1e-12, delta, ORDERS[-1] if order is None else chosen)
        raise PlanError(
            f"epsilon={epsilon:g} at delta={delta:g} leaves no room at order {chosen:g}; "
            f"permitted: above {format_epsilon(smallest)}, or a larger delta"
        )
    return chosen


def _counting(counting: Counting | str | None, order: float | None, unit: Unit, accounting: Accounting) -> Counting:
    if counting is None:
        strict = accounting is Accounting.STRICT and unit is not Unit.PARTY
        return Counting.GAUSSIAN if strict and order is None else Counting.RENYI
    if counting not in tuple(Counting):
        raise PlanError(f"counting={str(counting)!r}; permitted: {', '.join(Counting)}")
    if order is not None and Counting(counting) is Counting.GAUSSIAN:
        raise PlanError(f"order={order:g} goes with counting=renyi; leave one of them out")
    return Counting(counting)


def _divergence(curve: Curve) -> float:
    """The one value of a curve at one order; whatever is no divergence counts as infinity."""
    value = float(curve[0])
    return value if value >= 0 else math.inf  # NaN too
