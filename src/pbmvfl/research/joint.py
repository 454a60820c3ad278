"""Training where columns of different parties act on the label together: screen, verdict, training, and the cost.

There are two runs, so that no schedule depends on an outcome. The first releases symbols of all columns (pure epsilon
e_A) and nothing else; the server searches them for products of columns that move the label, which costs nothing more.
The second is a local run with the remaining budget, or, if products were found, a run with symbols of the found columns
and context.

The second run is chosen by what the first released. If each possible one is within (epsilon - e_A, delta) by itself,
the whole is within (epsilon, delta): docs/explanation/theory.md 2.20. So that is what both are planned for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl._files import PRIVATE_FILE, checked_object, make_private_folder, read_json, write_atomically
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import BudgetExceeded, PlanError, RunFolderError
from pbmvfl.federation.federation import Federation, OnEpoch, OnRound, Parties
from pbmvfl.federation.results import Result
from pbmvfl.mechanisms.interactions.plan_group import Interactions, ShownColumn
from pbmvfl.mechanisms.interactions.screen import (
    CONTEXT_LEVELS,
    Column,
    Finding,
    Offer,
    ScreenSize,
    Selection,
    joint_offer,
    screen,
    select,
    verdict,
)
from pbmvfl.mechanisms.interactions.symbols import shown_levels
from pbmvfl.mechanisms.label_response import USUAL_LABEL_EPSILON
from pbmvfl.mechanisms.randomized_response import LARGEST_EPSILON, WEIGHT_ONE, RandomisedResponse
from pbmvfl.plan.flat_names import data_sizes
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.schedule import SYMBOLS, Order, Phase, Split
from pbmvfl.plan.search import Budget
from pbmvfl.privacy.accounting import EpsilonBound, TrainingRun, epsilon_bound
from pbmvfl.privacy.table import named
from pbmvfl.privacy.units import Accounting, Adversary, Unit
from pbmvfl.protocol.stored_answers import StoredAnswers

#: Levels of a numeric column in the screen.
SCREEN_LEVELS = 2
#: Scale of a context feature beside whitened own ones, chosen on synthetic tables.
CONTEXT_SCALE = 2.6
#: Files of a folder: the finished screen's findings, and its result.
_DONE, _RESULT = "screen.json", "screen-result.json"


class Joint(StrEnum):
    """Choice of whether to run a screen."""

    AUTO = "auto"  #: if it can pay
    ON = "on"  #: also if it cannot be expected to
    OFF = "off"  #: never


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Public facts about the columns of every party: how many, and either a range or a number of values."""

    counts: tuple[int, ...]
    #: Of numeric columns.
    column_range: tuple[float, float] | None = None
    #: Of columns with few values, equally spaced from 0 to 1.
    column_values: int | None = None

    @classmethod
    def of(cls, data: VerticalDataset, column_range: tuple[float, float] | None) -> Columns:
        counts = tuple(math.prod(part.shape[1:]) for part in data.train_features)
        if column_range is None:
            return cls(counts=counts, column_values=data.column_values)
        low, high = column_range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise PlanError(f"column_range=({low!r}, {high!r}) must be two finite numbers that rise")
        return cls(counts=counts, column_range=(float(low), float(high)))

    @property
    def are_known(self) -> bool:
        return self.column_range is not None or self.column_values is not None

    @property
    def screen_levels(self) -> int:
        return SCREEN_LEVELS if self.column_values is None else self.column_values

    def shown(self, column: int, *, numeric_levels: int) -> ShownColumn:
        """Return a column in symbols: a numeric one at so many levels, another at one for each value."""
        if self.column_values is None:
            assert self.column_range is not None
            return ShownColumn(column, *self.column_range, numeric_levels)
        half = 0.5 / (self.column_values - 1)  # the values are then the middles of equal parts
        return ShownColumn(column, -half, 1 + half, self.column_values)


# --- plans ---


def screen_offer(
    data_size: tuple[int, int], columns: Columns, *, epsilon: float, unit: Unit, adversary: Adversary
) -> Offer:
    """Decide from public numbers whether a screen can pay; `data_size` is (rows, classes)."""
    size = ScreenSize(
        num_rows=data_size[0], columns=columns.counts, base=columns.screen_levels, num_classes=data_size[1]
    )
    return joint_offer(epsilon=epsilon, size=size, symbols_a_unit=_symbols_a_unit(unit, adversary, len(columns.counts)))


def _symbols_a_unit(unit: Unit, adversary: Adversary, num_parties: int) -> int:
    return adversary.honest_parties(num_parties) if unit is Unit.RECORD else 1


def screen_plan(
    data: VerticalDataset,
    columns: Columns,
    *,
    shown: int,
    epsilon: float,
    seed: int = 0,
    label_epsilon: float | None = None,
) -> Plan:
    """Return a plan of one pass of symbols of all columns, `epsilon` each, and nothing else.

    `label_epsilon` is that of the training that follows: what parties learn of the screen is read by drawn labels.
    """
    interactions = Interactions(
        columns=tuple(
            tuple(columns.shown(column, numeric_levels=SCREEN_LEVELS) for column in range(count))
            for count in columns.counts
        ),
        shown=shown,
        response_epsilon=epsilon,
    )
    return Plan.of(
        **{
            **data_sizes(data),
            "mechanism": "none",
            "embedding_dim": data.num_classes,
            "interactions": interactions,
            "phases": (Phase(kind=SYMBOLS, passes=1, order=Order.AS_GIVEN),),
            "batch_size": data.num_samples,
            # A screen has no metric, so there is nothing to evaluate.
            "evaluation": "released" if data.num_test_samples else "simulator",
            "seed": seed,
            "label_epsilon": label_epsilon,
        }
    )


def context_interactions(selection: Selection, columns: Columns, *, epsilon: float) -> Interactions:
    """Return finer symbols of the selected columns, which all parties learn."""
    return Interactions(
        columns=tuple(
            tuple(columns.shown(column, numeric_levels=CONTEXT_LEVELS) for column in selection.columns(party))
            for party in range(len(columns.counts))
        ),
        shown=1,
        response_epsilon=epsilon,
        pairs=selection.pairs,
        context_scale=CONTEXT_SCALE,
    )


def read_screen(plan: Plan, symbols_MN: npt.NDArray[np.int64], labels_N: npt.NDArray[np.int64]) -> tuple[Finding, ...]:
    """Return the server's findings from the symbols of a screen: post-processing of released values."""
    shared = plan.interactions
    if shared is None or shared.publishes:
        raise PlanError("this plan has no screen: interactions without pairs")
    seen = [
        shown_levels(
            symbols_MN[party],
            shared.places(party, num_rows=plan.num_samples, seed=plan.seed),
            num_columns=len(of),
            base=shared.base,
        )
        for party, of in enumerate(shared.columns)
    ]
    return screen(seen, labels_N, base=shared.base, num_classes=plan.num_classes)


# --- cost ---


def runs_together(runs: Sequence[TrainingRun]) -> TrainingRun:
    """Combine several runs over the same rows into one account."""
    if not runs or len({run.num_parties for run in runs}) > 1:
        raise PlanError("give runs of the same parties")
    return TrainingRun(
        activities=tuple(part for run in runs for part in run.activities),
        num_parties=runs[0].num_parties,
        public_start=all(run.public_start for run in runs),
        rows_together=max(run.rows_together for run in runs),
    )


def pure_epsilon(plan: Plan, unit: Unit, adversary: Adversary) -> float:
    """Return the exact cost to a unit of the symbols of a plan by themselves."""
    event = plan.mechanism_for(SYMBOLS).event
    if plan.interactions is None or not isinstance(event, RandomisedResponse):
        return 0.0
    own = WEIGHT_ONE - (event.symbols - 1) * event.other_weight
    return event.copies(unit, adversary) * math.log(own / event.other_weight)


@dataclass(frozen=True, kw_only=True)
class JointPrivacy:
    """Cost of a training row over both runs."""

    #: Proved for a second run that is chosen by what the first released: e_A and the second run's epsilon.
    epsilon: float
    delta: float
    screen_epsilon: float
    training_epsilon: float
    #: What was released, composed as if both runs had been planned beforehand; at most `epsilon`.
    composed: EpsilonBound

    def __str__(self) -> str:
        parts = f"{self.screen_epsilon:.4g} of the screen and {self.training_epsilon:.4g} of training"
        return (
            f"epsilon {self.epsilon:.4g} at delta {self.delta:g} for a {self.composed.unit} ({parts}); composed as one "
            f"plan {self.composed.epsilon:.4g}"
        )


def joint_privacy(plans: Sequence[Plan], budget: Budget, *, runs: Sequence[TrainingRun] | None = None) -> JointPrivacy:
    """Account for a screen's plan and the plan that followed, or for the latter alone; `runs` are the actual runs."""
    found = [plan.training_run() for plan in plans] if runs is None else list(runs)
    *before, last = [run.of_split(Split.TRAIN) for run in found]
    kind = (budget.unit, budget.accounting, budget.adversary)
    screened = sum(
        part.row_releases * pure_epsilon(plan, budget.unit, budget.adversary)
        for plan, run in zip(plans, before, strict=False)
        for part in run.activities
    )
    trained = epsilon_bound(last, *kind, delta=budget.delta).epsilon
    composed = epsilon_bound(runs_together([*before, last]), *kind, delta=budget.delta)
    return JointPrivacy(
        epsilon=screened + trained,
        delta=budget.delta,
        screen_epsilon=screened,
        training_epsilon=trained,
        composed=composed,
    )


# --- training ---


@dataclass(frozen=True, kw_only=True)
class JointResult:
    """Results of a screen, if there was one, and of the training that followed."""

    #: Why a screen was run, or why not; then what it said.
    words: tuple[str, ...]
    offer: Offer | None
    screen: Result | None
    findings: tuple[Finding, ...]
    selection: Selection
    training: Result
    privacy: JointPrivacy

    @property
    def is_joint(self) -> bool:
        """Return True if training used columns that act together."""
        return bool(self.selection.pairs)

    @property
    def metrics(self) -> dict[str, float]:
        return self.training.metrics


NO_COLUMNS = (
    "columns have no public levels: a screen needs column_range=(low, high) of numeric columns, or data with "
    "column_values; training is local"
)
EXACT_LEVELS = (
    "exact metrics show every party the exact levels of the others' test rows, as only a simulator can; no epsilon "
    "covers that"
)


def train_jointly(
    data: VerticalDataset,
    *,
    epsilon: float,
    delta: float = 1e-5,
    unit: Unit | str = Unit.CELL,
    colluding_parties: int = 0,
    joint: Joint | str = Joint.AUTO,
    column_range: tuple[float, float] | None = None,
    parties: Parties | str = Parties.IN_PROCESS,
    folder: Path | str | None = None,
    ledger: Path | str | None = None,
    exact_metrics: bool = False,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
    on_round: OnRound | None = None,
    on_epoch: OnEpoch | None = None,
    **choices: Any,
) -> JointResult:
    """Train within a strict total epsilon: with a screen for columns that act together if it can pay, else locally.

    `column_range` is the public range of numeric columns; it is not needed where the data say how many values a column
    has. `choices` fix other settings of the plan that trains. Metrics are the simulator's. `say` receives every
    sentence of `JointResult.words` as soon as it is known. With `folder` both runs keep their checkpoints there, and an
    interrupted call resumes: a finished screen is not released again.
    """
    mode = joint_mode(joint)
    budget = Budget(
        epsilon=epsilon,
        delta=delta,
        unit=named(Unit, unit, "unit"),
        accounting=Accounting.STRICT,
        adversary=Adversary(colluding_parties=colluding_parties),
    )
    if budget.unit is Unit.PARTY:
        raise PlanError("unit=party: local training protects a cell or a record; use unit=cell or unit=record")

    kept = None if folder is None else Path(folder)
    # The screen and the training that follows use one draw of the labels.
    store: Path | StoredAnswers = StoredAnswers() if kept is None else kept / "labels"

    def fit(plan: Plan, name: str) -> tuple[Result, Federation]:
        federation = Federation(plan, parties=parties)
        if ledger is None or not data.rows_are_named:  # otherwise the ledgers' folder has it
            federation.label_store = store
        result = federation.fit(
            data,
            checkpoints=None if kept is None else kept / name,
            ledger=ledger,
            exact_metrics=exact_metrics,
            on_round=on_round,
            on_epoch=on_epoch,
        )
        return result, federation

    said: list[str] = []

    def tell(words: str) -> None:
        said.append(words)
        if say is not None:
            say(words)

    columns = Columns.of(data, column_range)
    offer = None
    if mode is not Joint.OFF and columns.are_known:
        size = (data.num_samples, data.num_classes)
        offer = screen_offer(size, columns, epsilon=epsilon, unit=budget.unit, adversary=budget.adversary)
    if mode is not Joint.OFF:
        tell(NO_COLUMNS if offer is None else offer.words)
    if offer is None or not (offer.pays or mode is Joint.ON):
        training, _ = fit(_training_plan(data, budget, seed, {}, choices), "training")
        return JointResult(
            words=tuple(said),
            offer=offer,
            screen=None,
            findings=(),
            selection=Selection(pairs=()),
            training=training,
            privacy=_spent([training], budget),
        )
    each = _each(offer.split.screen_epsilon, budget, data.num_parties)
    label_epsilon = choices.get("label_epsilon", USUAL_LABEL_EPSILON)
    first_plan = screen_plan(data, columns, shown=offer.shown, epsilon=each, seed=seed, label_epsilon=label_epsilon)
    planned = replace(budget, epsilon=epsilon - pure_epsilon(first_plan, budget.unit, budget.adversary))
    for possible in (Selection(pairs=()), Selection(pairs=((Column(0, 0), Column(1, 0)),))):
        # There must be a plan for every outcome of the screen before anything is released.
        context = _context(possible, columns, offer, budget)
        Federation(_training_plan(data, planned, seed, context, choices)).check(data)
    done = None if kept is None else _read_done(kept, first_plan)
    if done is None:
        screened, federation = fit(first_plan, "screen")
        if screened.stopped:
            raise BudgetExceeded(f"the screen ended before its plan did, and nothing was trained: {screened.stopped}")
        assert federation.symbols is not None
        assert federation.labels is not None
        findings = read_screen(first_plan, federation.symbols, federation.labels)
        selection = select(findings)
        if kept is not None:
            _write_done(kept, screened, selection)
    else:
        (screened, selection), findings = done, ()
    tell(verdict(selection))
    if selection.pairs:
        tell(EXACT_LEVELS)
    left = replace(budget, epsilon=epsilon - _screened(screened, budget))
    training, _ = fit(
        _training_plan(data, left, seed, _context(selection, columns, offer, budget), choices), "training"
    )
    return JointResult(
        words=tuple(said),
        offer=offer,
        screen=screened,
        findings=findings,
        selection=selection,
        training=training,
        privacy=_spent([screened, training], budget),
    )


def joint_mode(name: Joint | str) -> Joint:
    """Parse an option's value."""
    if name not in tuple(Joint):
        raise PlanError(f"joint={name!r} is not one of {', '.join(Joint)}")
    return Joint(name)


def _each(epsilon: float, budget: Budget, num_parties: int) -> float:
    """Return the epsilon of one symbol, as large as the mechanism permits."""
    return min(epsilon / _symbols_a_unit(budget.unit, budget.adversary, num_parties), LARGEST_EPSILON)


def _context(selection: Selection, columns: Columns, offer: Offer, budget: Budget) -> dict[str, Any]:
    if not selection.pairs:
        return {}
    each = _each(offer.split.symbol_epsilon, budget, len(columns.counts))
    return {"interactions": context_interactions(selection, columns, epsilon=each)}


def _training_plan(
    data: VerticalDataset, budget: Budget, seed: int, context: dict[str, Any], choices: dict[str, Any]
) -> Plan:
    """Return the plan with the least noise that the remaining budget allows."""
    return Plan.for_budget(
        serving_epsilon=None,
        epsilon=budget.epsilon,
        delta=budget.delta,
        unit=budget.unit,
        colluding_parties=budget.adversary.colluding_parties,
        data=data,
        **{"algorithm": "staged", "seed": seed, **context, **choices},
    )


def _screened(result: Result, budget: Budget) -> float:
    """Return the cost of a screen: more than planned if it was interrupted and released again."""
    most = max(use.releases for use in result.row_uses)
    spent = most * pure_epsilon(result.plan, budget.unit, budget.adversary)
    if most > 1:  # each takes half of the total
        raise BudgetExceeded(
            f"the screen was released {most} times, which cost epsilon {spent:.4g} of {budget.epsilon:.4g}: nothing is "
            "left to train with"
        )
    return spent


def _write_done(folder: Path, result: Result, selection: Selection) -> None:
    """Record that the screen is over, and its findings, before anything follows from it."""
    pairs = [[list(one), list(other)] for one, other in selection.pairs]
    make_private_folder(folder)
    write_atomically(folder / _RESULT, result.to_json(), mode=PRIVATE_FILE)
    written = {"plan": result.plan.hash.hex(), "pairs": pairs}
    write_atomically(folder / _DONE, json.dumps(written) + "\n", mode=PRIVATE_FILE)


def _read_done(folder: Path, plan: Plan) -> tuple[Result, Selection] | None:
    path = folder / _DONE
    if not path.exists():
        return None
    known = checked_object(read_json(path, RunFolderError), {"plan": str, "pairs": list}, path, RunFolderError)
    if known["plan"] != plan.hash.hex():
        raise RunFolderError(
            f"{path} is of a screen with another plan, {known['plan'][:16]}; this one is {plan.hash.hex()[:16]}: give "
            "the same budget and data as then, or another folder"
        )
    try:
        pairs = tuple((Column(*one), Column(*other)) for one, other in known["pairs"])
    except (TypeError, ValueError):
        raise RunFolderError(f"{path} has pairs={known['pairs']!r}; put back a copy, or give another folder") from None
    return Result.read(folder / _RESULT), Selection(pairs=pairs)


def _spent(results: list[Result], budget: Budget) -> JointPrivacy:
    return joint_privacy([each.plan for each in results], budget, runs=[each.training_run for each in results])
