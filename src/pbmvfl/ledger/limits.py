"""Limits that hold although later runs depend on earlier results.

Choosing the best Renyi order after the fact, or composing privacy-loss distributions, is valid only for a plan that was
fixed beforehand. A limit must hold for whatever comes, so its order is fixed when it is set: at that order divergences
add up, whoever chose the next release, and the sum may not pass the budget (a Renyi filter: Feldman and Zrnic, 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pbmvfl.errors import PlanError
from pbmvfl.plan import Plan
from pbmvfl.privacy.conversion import check_delta
from pbmvfl.privacy.orders import ORDERS
from pbmvfl.privacy.rdp import release_rdp, update_rdp
from pbmvfl.privacy.table import format_epsilon, training_run
from pbmvfl.privacy.units import Accounting, Adversary, Unit
from pbmvfl.schedule import RoundKind


def divergence_budget(epsilon: float, delta: float, order: float) -> float:
    """How much divergence at this order still gives (epsilon, delta): the conversion of `conversion.py`, solved."""
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
    """What a party's owner permits for one unit, against one adversary, by one way of counting."""

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
    ) -> Limit:
        """A limit with the order that leaves most room for many small releases, unless one is given."""
        check_delta(delta)
        if isinstance(epsilon, bool) or not 0 < epsilon < math.inf:
            raise PlanError(f"epsilon={epsilon!r} must be a finite number above 0")
        Adversary(colluding_parties=colluding_parties)  # names a value below 0
        unit, accounting = unit_and_accounting(unit, accounting)
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
        return cls(
            unit=unit,
            accounting=accounting,
            colluding_parties=colluding_parties,
            epsilon=float(epsilon),
            delta=float(delta),
            order=chosen,
        )

    @property
    def budget(self) -> float:
        return divergence_budget(self.epsilon, self.delta, self.order)

    @property
    def counts_rows(self) -> bool:
        """Whether rows are charged one by one; otherwise one number holds for every row."""
        return self.unit is not Unit.PARTY

    def __str__(self) -> str:
        adversary = Adversary(colluding_parties=self.colluding_parties)
        return f"{self.unit}, {self.accounting}, {adversary}: epsilon {self.epsilon:g} at delta {self.delta:g}"


@dataclass(frozen=True)
class Rates:
    """What a plan's rounds add at a limit's order: to each row of the round, and to every row whatever."""

    #: Added to the rows of a round, for each of them.
    own: float
    #: Added to the rows of a joint round for the party's noisy weight update.
    update: float
    #: Added to all rows for each row of a round, once the run's weights depend on private rows.
    everywhere: float
    #: Whether a use of a row is a release of its whole batch.
    couples_rows: bool

    @classmethod
    def of(cls, plan: Plan, limit: Limit) -> Rates:
        run = training_run(plan)
        # A limit for more colluders than a run has parties is a limit for all but one of them.
        adversary = Adversary(colluding_parties=min(limit.colluding_parties, plan.num_parties - 1))
        orders = (limit.order,)
        rate = float(
            release_rdp(run.event, limit.unit, adversary, secure_aggregation=run.secure_aggregation, orders=orders)[0]
        )
        rate = rate if rate >= 0 else math.inf  # NaN too
        if limit.unit is Unit.PARTY:
            return cls(own=0.0, update=0.0, everywhere=rate, couples_rows=run.couples_rows)
        if limit.accounting is Accounting.PAPER:
            return cls(own=rate, update=0.0, everywhere=0.0, couples_rows=run.couples_rows)
        if run.update is not None:
            parties = adversary.honest_parties(plan.num_parties) if limit.unit is Unit.RECORD else 1
            update = parties * float(update_rdp(run.update, orders)[0])
            return cls(own=rate, update=update, everywhere=0.0, couples_rows=run.couples_rows)
        return cls(own=0.0, update=0.0, everywhere=rate, couples_rows=run.couples_rows)

    def for_row(self, kind: RoundKind, num_rows: int) -> float:
        """What one use in a round of this kind adds to a row of it."""
        together = num_rows if self.couples_rows else 1
        return self.own * together + (self.update if kind is RoundKind.JOINT else 0.0)

    def for_all(self, num_rows: int, *, first_round_of_run: bool, party_unit: bool) -> float:
        """What a round adds to every row. In a run's first round only a row's own release depends on it."""
        if first_round_of_run and not party_unit and not self.couples_rows:
            return self.everywhere
        return self.everywhere * num_rows
