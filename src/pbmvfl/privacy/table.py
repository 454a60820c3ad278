"""The epsilon table of a plan, and of what a run has really spent.

A plan is turned into events here, with the same event that its mechanism names; `tests` hold the two equal. There is no
epsilon without its unit, adversary and accounting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pbmvfl.plan import COUPLES_ROWS, Evaluation, MechanismName, Plan
from pbmvfl.privacy.accounting import Bound, TrainingRun, bounds
from pbmvfl.privacy.events import (
    ExactRelease,
    LocalGaussianRelease,
    NoisyUpdate,
    PoissonBinomialRelease,
    ReleaseEvent,
)
from pbmvfl.privacy.units import CURIOUS_PARTY, SERVER, Accounting, Adversary, Unit

if TYPE_CHECKING:
    from pbmvfl.results import Result

SEEDED_NOISE = "the noise was seeded for a test, so it hides nothing"


@dataclass(frozen=True)
class PrivacyTable:
    """Bounds with their conditions; prints as a table."""

    bounds: tuple[Bound, ...]

    def epsilon(
        self, unit: Unit | str, accounting: Accounting | str, *, server: bool = True, colluding_parties: int = 0
    ) -> float:
        """One number of the table."""
        wanted = (Unit(unit), Accounting(accounting), Adversary(server=server, colluding_parties=colluding_parties))
        for row in self.bounds:
            if (row.unit, row.accounting, row.adversary) == wanted:
                return row.epsilon
        raise KeyError(f"the table has no row for {wanted}")

    def to_dicts(self) -> list[dict[str, Any]]:
        """For JSON, where infinity is written as the string "inf"."""
        return [
            row.to_dict() | {"epsilon": row.epsilon if math.isfinite(row.epsilon) else "inf"} for row in self.bounds
        ]

    @property
    def conditions(self) -> tuple[str, ...]:
        """Every condition of any row, once."""
        return tuple(dict.fromkeys(condition for row in self.bounds for condition in row.conditions))

    def __str__(self) -> str:
        lines = [f"{'unit':8}{'accounting':12}{'adversary':22}{'epsilon':>12}  at delta"]
        for row in self.bounds:
            lines.append(
                f"{row.unit:8}{row.accounting:12}{row.adversary!s:22}{format_epsilon(row.epsilon):>12}  "
                f"{row.delta:g} ({row.method})"
            )
        return "\n".join(lines)


def format_epsilon(epsilon: float) -> str:
    """Rounded up to three significant digits: a printed epsilon is never below the computed one."""
    if epsilon == 0 or not math.isfinite(epsilon):
        return "infinity" if epsilon else "0"
    digits = 2 - math.floor(math.log10(epsilon))
    rounded = math.ceil(epsilon * 10.0**digits - 1e-9) / 10.0**digits
    return f"{rounded:.3g}" if rounded < 1e6 else f"{rounded:.2e}"


def release_event(plan: Plan) -> ReleaseEvent:
    """What one row's release of this plan is, without loading the mechanism's code."""
    sizes = {"num_parties": plan.num_parties, "embedding_dim": plan.embedding_dim}
    if plan.mechanism is MechanismName.NONE:
        return ExactRelease(**sizes)
    if plan.mechanism is MechanismName.LDP:
        from pbmvfl.privacy.paper import ldp_variance

        variance = plan.bound**2 * ldp_variance(
            num_parties=plan.num_parties, num_trials=plan.num_trials, beta=plan.beta
        )
        return LocalGaussianRelease(variance=variance, bound=plan.bound, **sizes)
    return PoissonBinomialRelease(num_trials=plan.num_trials, beta=plan.beta, **sizes)


def training_run(plan: Plan) -> TrainingRun:
    """Everything that an undisturbed run of the plan releases."""
    update = None
    if plan.noise_multiplier:
        update = NoisyUpdate(clip_norm=plan.clip_norm, noise_multiplier=plan.noise_multiplier)
    return TrainingRun(
        num_samples=plan.num_samples,
        batch_size=plan.batch_size,
        num_epochs=plan.num_epochs,
        event=release_event(plan),
        update=update,
        # Test rows are rows of their own: each is released once, and every release counts for the strict account.
        extra_releases=plan.num_test_samples if plan.evaluation is Evaluation.RELEASED else 0,
        secure_aggregation=bool(plan.secure_aggregation),
        couples_rows=plan.encoder in COUPLES_ROWS,
    )


def usual_adversaries(num_parties: int) -> tuple[Adversary, ...]:
    """The server, one curious party, and the server with every party but one."""
    everyone = Adversary(server=True, colluding_parties=num_parties - 1)
    return (SERVER, CURIOUS_PARTY, everyone)


def planned_privacy(plan: Plan, *, delta: float, adversaries: Iterable[Adversary] | None = None) -> PrivacyTable:
    chosen = usual_adversaries(plan.num_parties) if adversaries is None else tuple(adversaries)
    return PrivacyTable(bounds(training_run(plan), delta=delta, adversaries=chosen))


def spent_privacy(result: Result, *, delta: float, adversaries: Iterable[Adversary] | None = None) -> PrivacyTable:
    """What a run spent, over all its sessions: rounds that ran again after a resume count again."""
    plan = result.plan
    chosen = usual_adversaries(plan.num_parties) if adversaries is None else tuple(adversaries)
    run = replace(
        training_run(plan),
        num_epochs=result.row_uses["train"],
        extra_releases=plan.num_test_samples * result.row_uses["test"],
    )
    table = PrivacyTable(bounds(run, delta=delta, adversaries=chosen))
    if not result.noise_is_seeded:
        return table
    known = (replace(row, epsilon=math.inf, order=None, conditions=(SEEDED_NOISE,)) for row in table.bounds)
    return PrivacyTable(tuple(known))
