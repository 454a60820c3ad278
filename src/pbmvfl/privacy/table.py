"""The epsilon table of a plan, and of what a run has really spent.

A plan is turned into events here, once: the account charges what `release_event` says, and the mechanisms are built
from it. There is no epsilon without its unit, adversary and accounting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from pbmvfl.errors import PlanError
from pbmvfl.plan import COUPLES_ROWS, Evaluation, MechanismName, Plan
from pbmvfl.privacy.accounting import NOT_A_PROOF, Bound, TrainingRun, bound, bounds
from pbmvfl.privacy.events import (
    ExactRelease,
    LocalGaussianRelease,
    NoisyUpdate,
    PoissonBinomialRelease,
    ReleaseEvent,
    local_gaussian_variance,
)
from pbmvfl.privacy.units import CURIOUS_PARTY, SERVER, Accounting, Adversary, Unit

if TYPE_CHECKING:
    from pbmvfl.runs.results import Result

SEEDED_NOISE = "the noise was seeded for a test, so it hides nothing"
#: exp(20) is half a billion: with such odds an adversary may be as good as certain of a value.
_PROTECTS_NOBODY = 20.0

_Kind = TypeVar("_Kind", bound=StrEnum)


def named(kind: type[_Kind], value: str, name: str) -> _Kind:
    """The unit or the accounting that is meant."""
    try:
        return kind(value)
    except ValueError:
        raise PlanError(f"{name}={value!r} is not one of {', '.join(kind)}: say which epsilon is meant") from None


@dataclass(frozen=True)
class PrivacyTable:
    """Bounds with their conditions; prints as a table."""

    bounds: tuple[Bound, ...]

    def epsilon(
        self, unit: Unit | str, accounting: Accounting | str, *, server: bool = True, colluding_parties: int = 0
    ) -> float:
        """One number of the table."""
        adversary = Adversary(server=server, colluding_parties=colluding_parties)
        wanted = (named(Unit, unit, "unit"), named(Accounting, accounting, "accounting"), adversary)
        for row in self.bounds:
            if (row.unit, row.accounting, row.adversary) == wanted:
                return row.epsilon
        looked_at = ", ".join(dict.fromkeys(str(row.adversary) for row in self.bounds))
        raise PlanError(
            f"server={server}, colluding_parties={colluding_parties}: the table has no row for {adversary}; it has "
            f"{looked_at}; ask privacy() for other adversaries"
        )

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
            counting = f"{row.accounting}{' *' if NOT_A_PROOF in row.conditions else ''}"
            lines.append(
                f"{row.unit:8}{counting:12}{row.adversary!s:22}{format_epsilon(row.epsilon):>12}  "
                f"{row.delta:g} ({row.method})"
            )
        if NOT_A_PROOF in self.conditions:
            lines.append(f"* {NOT_A_PROOF}")
        return "\n".join(lines)


def format_epsilon(epsilon: float) -> str:
    """Three significant digits, rounded up: a printed epsilon is never below the computed one."""
    if epsilon == 0 or not math.isfinite(epsilon):
        return "infinity" if epsilon else "0"
    # In decimals: a product of floats would now and then round a number up that has three digits already.
    exact = Decimal(repr(float(epsilon)))
    rounded = exact.quantize(Decimal((0, (1,), exact.adjusted() - 2)), rounding=ROUND_CEILING)
    if not Decimal("0.001") <= rounded < 100_000:
        return f"{float(rounded):.2e}"
    return f"{rounded:,.{max(0, 2 - rounded.adjusted())}f}"


def release_event(plan: Plan) -> ReleaseEvent:
    """What one row's release of this plan is: what the account charges, and what the mechanism is built from."""
    sizes = {"num_parties": plan.num_parties, "embedding_dim": plan.embedding_dim}
    if plan.mechanism is MechanismName.NONE:
        return ExactRelease(**sizes)
    if plan.mechanism is MechanismName.LDP:
        variance = local_gaussian_variance(
            num_parties=plan.num_parties, num_trials=plan.num_trials, beta=plan.beta, bound=plan.bound
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


def privacy_notes(plan: Plan, delta: float) -> list[str]:
    """What a person should know who is shown this plan's epsilons: numbers that are right and protect nobody."""
    notes = []
    if delta * plan.num_samples >= 1:
        notes.append(
            f"delta={delta:g} is not below 1/num_samples = 1/{plan.num_samples:,}: such a delta permits publishing a "
            f"row outright; use a smaller one, such as {0.1 / plan.num_samples:.0e}"
        )
    run = training_run(plan)
    # The Renyi number alone is fast, and an upper bound: the exact one matters only where that is large.
    for pld in (False, True):
        epsilon = bound(run, Unit.CELL, Accounting.PAPER, SERVER, delta=delta, pld=pld).epsilon
        if epsilon <= _PROTECTS_NOBODY:
            return notes
    notes.append(
        f"epsilon {format_epsilon(epsilon)} (cell, paper, server): an epsilon this large protects nobody in practice; "
        "see pbmvfl plan --epsilon 8 ... for a plan within a budget"
    )
    return notes


def spent_privacy(result: Result, *, delta: float, adversaries: Iterable[Adversary] | None = None) -> PrivacyTable:
    """What a run spent, over all its sessions: rounds that ran again after a resume count again."""
    table = privacy_of_uses(result.plan, result.row_uses, delta=delta, adversaries=adversaries)
    if not result.noise_is_seeded:
        return table
    known = (replace(row, epsilon=math.inf, order=None, conditions=(SEEDED_NOISE,)) for row in table.bounds)
    return PrivacyTable(tuple(known))


def privacy_of_uses(
    plan: Plan, row_uses: dict[str, int], *, delta: float, adversaries: Iterable[Adversary] | None = None
) -> PrivacyTable:
    """The account of a plan whose training and test rows were released so many times."""
    chosen = usual_adversaries(plan.num_parties) if adversaries is None else tuple(adversaries)
    train, test = row_uses["train"], row_uses["test"]
    run = replace(
        training_run(plan),
        num_epochs=train,
        # A row is a training row or a test row, so the one that was released most often has the larger number.
        extra_row_releases=max(0, test - train),
        extra_releases=plan.num_test_samples * test,
    )
    return PrivacyTable(bounds(run, delta=delta, adversaries=chosen))
