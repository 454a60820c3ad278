"""What the parties' ledgers will say to a run, shown before its first round, and a plan within what they leave."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pbmvfl.errors import LedgerError
from pbmvfl.ledger.books import PartyForecast, check_reaches_end
from pbmvfl.ledger.forecast import Forecast
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import Adversary

if TYPE_CHECKING:
    from pbmvfl.data.vertical import VerticalDataset
    from pbmvfl.plan import Plan
    from pbmvfl.runs.folder import RunFolder
    from pbmvfl.runs.source import RunSource


def look_ahead(
    plan: Plan,
    data: VerticalDataset,
    source: RunSource,
    resumed: RunFolder | None = None,
    *,
    exact_metrics: bool,
    until_limit: bool,
    quiet: bool,
) -> None:
    """Say what every book has and will have; refuse a run that a limit would end, unless that is wanted."""
    from rich.console import Console

    from pbmvfl.federation import Federation

    ended = None if resumed is None else resumed.read_result()
    if source.ledger is None or (ended is not None and not ended.stopped):
        return
    checkpoints = None if resumed is None else resumed.checkpoints
    books = Path(source.ledger)
    found = Federation(plan).forecast(data, books, checkpoints=checkpoints, exact_metrics=exact_metrics)
    console = Console(stderr=quiet, quiet=quiet, highlight=False)
    for line in forecast_lines(found, dataset=data.name, plan=plan):
        console.print(line, markup=False, soft_wrap=True)
    if not until_limit:
        check_reaches_end(found, dataset=data.name, rounds=len(plan.schedule))


def forecast_lines(found: Sequence[PartyForecast], *, dataset: str, plan: Plan) -> list[str]:
    """One line for all parties whose books say the same, and one for each of their limits."""
    alike: dict[tuple[int, tuple[Forecast, ...]], list[str]] = {}
    for book in found:
        alike.setdefault((book.runs, book.limits), []).append(book.party)
    lines = []
    for (runs, limits), parties in alike.items():
        who = "every party" if len(parties) == len(found) else ", ".join(parties)
        has = "nothing" if not runs else "1 run" if runs == 1 else f"{runs} runs"
        begin = f"ledger of {who}: {has} of {dataset!r}"
        if not limits:
            lines.append(f"{begin}, and no limit; what this run releases is written down")
        lines += [f"{begin}; {_says(limit, plan)}" for limit in limits]
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
    done = f", after {found.epochs:.4g} of {epochs} epochs" if epochs else ""
    return f"{what}; the limit would end it at round {found.stops_at:,} of {len(plan.schedule):,}{done}"


@contextlib.contextmanager
def without_stub(folder: RunFolder) -> Iterator[None]:
    """A new run that a ledger refused, and that released nothing, leaves no folder behind."""
    try:
        yield
    except LedgerError:
        if not (folder.sessions / "sessions.json").exists():
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
