"""The exact epsilon of a simulated plan, were it deployed: cell, the paper's count, the server, delta 1e-5."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import epsilon_bound
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import SERVER, Accounting, Unit

DELTA = 1e-5


def short_epsilon(epsilon: float) -> str:
    """Three significant digits, rounded up, and large ones in full: 1,980 and not 1.98e+03."""
    if not math.isfinite(epsilon) or epsilon < 100:
        return format_epsilon(epsilon)
    unit = 10 ** (math.floor(math.log10(epsilon)) - 2)
    return f"{math.ceil(epsilon / unit - 1e-9) * unit:,.0f}"


@lru_cache(maxsize=1024)
def paper_epsilon(plan: Plan, num_epochs: int) -> float:
    """As the paper counts: a cell's own releases only. Batch normalisation couples the rows of a batch, and the paper
    does not count that either; `coupled_epsilon` does."""
    run = replace(plan.replace(num_epochs=num_epochs).training_run(), rows_together=1)
    return epsilon_bound(run, Unit.CELL, Accounting.PAPER, SERVER, delta=DELTA).epsilon


def coupled_epsilon(plan: Plan, num_epochs: int) -> float:
    """The same, with every row of a coupled batch counted."""
    run = plan.replace(num_epochs=num_epochs).training_run()
    return epsilon_bound(run, Unit.CELL, Accounting.PAPER, SERVER, delta=DELTA).epsilon


def calibrated_ldp(plan: Plan) -> Plan:
    """The LDP plan with the least noise whose epsilon is at most that of this PBM plan.

    A Gaussian plan's variance is 2M/(b beta^2), so b and beta only set a number: b is taken large enough to reach it
    with a beta that is permitted, and beta is then bisected downwards.
    """
    goal = paper_epsilon(plan, plan.num_epochs)

    def at(num_trials: int, beta: float) -> Plan:
        return plan.replace(mechanism="ldp", secure_aggregation=False, num_trials=num_trials, beta=beta)

    # Twice the trials halve the variance, and so does beta * sqrt(2): the answer lies in one such step.
    num_trials, top = 1, max(plan.beta, 0.05)
    while paper_epsilon(at(num_trials, top), plan.num_epochs) <= goal:
        num_trials *= 2
    low, high = top / 2, top
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if paper_epsilon(at(num_trials, middle), plan.num_epochs) <= goal else (low, middle)
    return at(num_trials, math.floor(low * 1e6) / 1e6)
