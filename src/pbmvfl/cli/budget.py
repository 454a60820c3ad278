"""Options that say a budget, alike in every command that plans, and what they mean together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from pbmvfl.errors import PlanError
from pbmvfl.plan.search import USUAL_EPSILON

_PANEL = "Budget"

Epsilon = Annotated[float | None, typer.Option(help="What training may cost. Default: 8.", rich_help_panel=_PANEL)]
UnitName = Annotated[
    str | None,
    typer.Option(help="cell | record | party: what the epsilon protects. Default: cell.", rich_help_panel=_PANEL),
]
RecordFlag = Annotated[bool, typer.Option("--record", help="Short for --unit record.", rich_help_panel=_PANEL)]
AccountingName = Annotated[
    str | None,
    typer.Option(
        help="strict (a theorem) | paper (as the paper counts, not a proof). Default: strict.", rich_help_panel=_PANEL
    ),
]
PredictionEpsilon = Annotated[
    float | None,
    typer.Option(
        help="What the prediction of a test row may cost. Without it: exact sums, outside the epsilon.",
        rich_help_panel=_PANEL,
    ),
]
Delta = Annotated[
    float | None,
    typer.Option(help="Of every epsilon. Default: a tenth of 1/N, at most 1e-5.", rich_help_panel=_PANEL),
]


@dataclass(frozen=True, kw_only=True)
class AskedBudget:
    """What the user wants to spend."""

    epsilon: float
    unit: str
    accounting: str
    prediction_epsilon: float | None = None
    same_rows: bool = False


def unit_of(unit: str | None, *, record: bool) -> str | None:
    """What --unit and --record say together; None if neither was given."""
    if not record:
        return unit
    if unit not in (None, "record"):
        raise PlanError(f"--unit {unit} and --record contradict each other; give one of them")
    return "record"


def asked_budget(
    *,
    epsilon: float | None,
    unit: str | None,
    accounting: str | None,
    prediction_epsilon: float | None,
    same_rows: bool = False,
    instead: str | None = None,
    by_hand: bool = False,
) -> AskedBudget | None:
    """The budget that was asked for, or the usual one; None where a plan was given, or numbers of one.

    `instead` is an option that says what is spent by itself: it goes with none of the others.
    """
    asked = {"epsilon": epsilon, "unit": unit, "accounting": accounting, "prediction_epsilon": prediction_epsilon}
    named = [f"--{name.replace('_', '-')}" for name, value in asked.items() if value is not None]
    if instead is not None and named:
        way_out = "; a budget as the paper counts is --epsilon 8 --accounting paper" if instead == "--paper" else ""
        raise PlanError(f"{named[0]} and {instead} both say what is spent; give one of them{way_out}")
    if instead is not None or (not named and by_hand):
        return None
    if prediction_epsilon is not None and not prediction_epsilon > 0:
        raise PlanError(f"prediction_epsilon={prediction_epsilon:g} must be above 0; leave it out for exact sums")
    if same_rows and prediction_epsilon is None:
        raise PlanError("--same-rows goes with --prediction-epsilon: without it nothing is predicted at a cost")
    return AskedBudget(
        epsilon=USUAL_EPSILON if epsilon is None else epsilon,
        unit=unit or "cell",
        accounting=accounting or "strict",
        prediction_epsilon=prediction_epsilon,
        same_rows=same_rows,
    )


def refuse_on_resume(asked: dict[str, object]) -> None:
    """A run that goes on has its plan: another budget would be ignored, or be another run."""
    for name, value in asked.items():
        if value is not None:
            raise PlanError(
                f"--{name.replace('_', '-')} with --resume: a run goes on with its own plan; leave it out, or start a "
                "new run"
            )
