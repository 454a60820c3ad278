"""Forecast of the parties' ledgers before a run's first round, and a plan within their remaining budgets."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pbmvfl._text import counted
from pbmvfl.errors import AnswersError, BudgetExceeded, LedgerError, PlanError
from pbmvfl.ledger.database import is_begun
from pbmvfl.ledger.forecast import Forecast, forecasts_for_plan
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.ledger_folder import (
    LABEL_HOLDER,
    PartyForecast,
    check_reaches_end,
    ledger_files_of,
    party_ledgers,
)
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.session_terms import SessionTerms
from pbmvfl.ledger.spending import spending
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import Adversary

if TYPE_CHECKING:
    from pbmvfl.cli.train import RunOptions
    from pbmvfl.data.vertical import VerticalDataset
    from pbmvfl.federation.run_folder import RunFolder, RunSource
    from pbmvfl.plan.plan import Plan
    from pbmvfl.plan.search import PlannedBudget


def look_ahead(
    plan: Plan,
    data: VerticalDataset,
    source: RunSource,
    how: RunOptions,
    resumed: RunFolder | None = None,
) -> list[str]:
    """Return lines on what every ledger has spent and will have spent; refuse a run that a limit would end.

    A refusal prints the lines. With --until-limit such a run is permitted, unless it is the label holder's limit.
    """
    from rich.console import Console

    from pbmvfl.federation.federation import Federation

    ended = None if resumed is None else resumed.read_result()
    if source.ledger is None or (ended is not None and not ended.stopped):
        return []
    checkpoints = None if resumed is None else resumed.checkpoints
    folder = Path(source.ledger)
    if resumed is not None and not folder.is_dir():
        return []  # training reports the missing folder of ledgers
    found = Federation(plan).forecast(
        data,
        folder,
        checkpoints=checkpoints,
        exact_metrics=how.exact_metrics,
        redraw_labels=how.redraw_labels,
    )
    lines = forecast_lines(found, dataset=data.name, plan=plan)
    ending = [each for each in found if not how.until_limit or each.party == LABEL_HOLDER]
    try:
        check_reaches_end(ending, dataset=data.name, rounds=len(plan.schedule))
    except BudgetExceeded:
        console = Console(stderr=how.json_, quiet=how.json_, highlight=False)
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)
        raise
    return lines


#: Note where an owner has a limit for these rows and has not permitted exact metrics.
NOT_LOOKED_AT = (
    "a ledger has a limit for these rows, and no limit counts exact metrics: none are looked at (evaluation=none). "
    "`pbmvfl evaluate RUN` measures by a release; --exact-metrics: the owners permit exact ones"
)


def has_limits(data: VerticalDataset, source: RunSource) -> bool:
    """Return whether a party's ledger has a limit for these rows."""
    if source.ledger is None:
        return False
    for path in ledger_files_of(Path(source.ledger), data.party_names, dataset=data.name):
        if is_begun(path):
            with contextlib.closing(Ledger(path, read_only=True)) as ledger:
                if ledger.limits(data.name):
                    return True
    return False


def forecast_lines(found: Sequence[PartyForecast], *, dataset: str, plan: Plan) -> list[str]:
    """Return one line per limit, or one line without limits, for each group of parties with equal forecasts.

    The label holder has lines of its own.
    """
    alike: dict[tuple[bool, int, tuple[Forecast, ...], int | None], list[str]] = {}
    for each in found:
        key = (each.party == LABEL_HOLDER, each.runs, each.limits, each.charged_rows)
        alike.setdefault(key, []).append(each.party)
    num_parties = sum(each.party != LABEL_HOLDER for each in found)
    lines = []
    for (draws_labels, runs, limits, charged), parties in alike.items():
        who = "every party" if len(parties) == num_parties and not draws_labels else ", ".join(parties)
        has = counted(runs, "draw of labels", "draws of labels") if draws_labels else counted(runs, "run")
        has = has if runs else "nothing"
        begin = f"ledger of {who}: {has} of {dataset!r}"
        if charged is not None and not draws_labels and charged < plan.num_test_samples:
            known = plan.num_test_samples - charged
            begin += f"; {known:,} of {counted(plan.num_test_samples, 'row')} have stored answers and cost nothing"
        if not limits:
            lines.append(f"{begin}, and no limit")
        for limit in limits:
            other = "" if limit.dataset == dataset else f"{limit.dataset!r}, whose rows the weights may know, "
            lines.append(f"{begin}; {other}{_says(limit, plan)}")
    return lines


def _says(found: Forecast, plan: Plan) -> str:
    limit = found.limit
    colluding = f", {Adversary(colluding_parties=limit.colluding_parties)}" if limit.colluding_parties else ""
    what = (
        f"{limit.unit}, {limit.accounting}{colluding}: epsilon {format_epsilon(found.spent)} of {limit.epsilon:g} is "
        f"spent, {format_epsilon(found.will_be)} after this run, counted {limit.how}"
    )
    if found.stops_at is None:
        return what
    epochs = plan.schedule.num_epochs
    done = f", after {found.epochs:.4g} of {counted(epochs, 'epoch')}" if epochs else ""
    return f"{what}; the limit would end it at round {found.stops_at:,} of {len(plan.schedule):,}{done}"


@contextlib.contextmanager
def without_stub(folder: RunFolder) -> Iterator[None]:
    """Remove the folder of a new run that a ledger refused before any release."""
    try:
        yield
    except (LedgerError, AnswersError, BudgetExceeded):
        if not (folder.sessions / "sessions.json").exists():
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


# --- A plan within the remaining privacy budget ---

#: Smallest epsilon that is tried; below it no useful model can be trained.
_SMALLEST = 0.01
#: Relative precision of the search for the largest epsilon.
_SHARE = 0.005


def plan_within(
    folder: Path, dataset: str | None, make: Callable[[float], PlannedBudget], epsilon: float
) -> PlannedBudget:
    """Return the plan with the largest epsilon, at most `epsilon`, that every ledger's limits permit to the end."""
    with contextlib.ExitStack() as opened:
        files = party_ledgers(folder) if folder.is_dir() else [folder]
        ledgers = [opened.enter_context(contextlib.closing(Ledger(file, read_only=True))) for file in files]
        name = _dataset(folder, ledgers, dataset)
        ledgers = [ledger for ledger in ledgers if ledger.limits(name)]

        def ahead(planned: PlannedBudget) -> list[Forecast]:
            terms = SessionTerms.of(planned.plan, public_start=True)
            return [limit for ledger in ledgers for limit in forecasts_for_plan(ledger, name, terms)]

        likely = min(_left(ledger, name, limit) for ledger in ledgers for limit in ledger.limits(name))
        fits = partial(_all_fit, ahead)
        planned, tried = _largest(make, fits, epsilon, likely)
        said = ahead(planned)
    tightest = max(said, key=lambda each: each.will_be / each.limit.epsilon)
    less = f"; {epsilon:g} would cross it" if tried < epsilon else ""
    words = (
        f"the ledgers in {folder} have {format_epsilon(tightest.spent)} of {tightest.limit.epsilon:g} for {name!r} "
        f"({tightest.limit.unit}, {tightest.limit.accounting}), and will have {format_epsilon(tightest.will_be)} after "
        f"this plan, counted {tightest.limit.how}{less}"
    )
    return replace(planned, words=(*planned.words, words))


def _all_fit(ahead: Callable[[PlannedBudget], list[Forecast]], planned: PlannedBudget) -> bool:
    return all(each.stops_at is None for each in ahead(planned))


def _left(ledger: Ledger, dataset: str, limit: Limit) -> float:
    """Estimate the epsilon that a limit leaves; exact for Gaussian noise in the limit's unit."""
    spent = spending(ledger, dataset, limit)
    if spent.epsilon >= limit.epsilon:
        raise LedgerError(
            f"ledger={str(ledger.path)!r} has spent {format_epsilon(spent.epsilon)} on {dataset!r}, and its limit is "
            f"{limit}: nothing is left to plan with; raise a limit (`pbmvfl ledger limit`), or take other rows"
        )
    return limit.epsilon_of(max(limit.budget - spent.worst, 0.0))


def _dataset(folder: Path, ledgers: Sequence[Ledger], dataset: str | None) -> str:
    """Return the dataset that has limits; where there are several, `dataset` must name one."""
    known = sorted({name for ledger in ledgers for name in ledger.datasets() if ledger.limits(name)})
    if dataset in known or (dataset is None and len(known) == 1):
        return dataset or known[0]
    has = f"limits for {', '.join(known)}" if known else "no limits"
    how = "name one of them: --dataset NAME" if known else "set one: `pbmvfl ledger limit`"
    asked = "" if dataset is None else f", and dataset={dataset!r} is asked for"
    raise LedgerError(f"ledger={str(folder)!r} has {has}{asked}; {how}")


def _largest(
    make: Callable[[float], PlannedBudget], fits: Callable[[PlannedBudget], bool], epsilon: float, likely: float
) -> tuple[PlannedBudget, float]:
    """Return the plan with the largest epsilon that fits, and that epsilon, by bisection."""
    planned = make(epsilon)
    if fits(planned):
        return planned, epsilon
    low, high = 0.0, epsilon
    best: PlannedBudget | None = None
    refused: PlanError | None = None
    tries = [each for each in (likely * (1 - _SHARE / 4), likely * (1 + _SHARE / 2)) if each < epsilon]
    while high - low > _SHARE * high and high > _SMALLEST:
        middle = tries.pop(0) if tries and low < tries[0] < high else (low + high) / 2
        try:
            planned = make(middle)
        except PlanError as error:  # this epsilon is too small for any plan
            refused, low = error, middle
            continue
        if fits(planned):
            best, low = planned, middle
        else:
            high = middle
    if best is None:
        raise LedgerError(
            f"no plan up to epsilon {epsilon:g} fits into what the limits leave"
            + (f" ({refused})" if refused is not None else "")
            + "; raise a limit (`pbmvfl ledger limit`), or take other rows"
        )
    return best, low
