"""Short output of `pbmvfl train`: data, algorithm, cost and result in a few lines; --verbose prints tables instead."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from pbmvfl._text import counted
from pbmvfl.cli.descriptions import describe_algorithm, describe_widths
from pbmvfl.cli.tables import plain_table, print_notes
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.federation.results import EXACT, SIMULATED, Result
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import NOT_A_PROOF, EpsilonBound, TrainingRun
from pbmvfl.privacy.table import PrivacyTable, format_epsilon, privacy_table
from pbmvfl.privacy.units import SERVER, Accounting, Unit
from pbmvfl.wire.traffic import human_bytes

#: More notes than these are printed only by --verbose.
_MOST_NOTES = 3
_ROWS = {"train": "training rows", "test": "predicted rows"}


# --- Before training ---


def print_start(console: Console, plan: Plan, data: VerticalDataset) -> None:
    """Print the data and the algorithm, a line each."""
    sizes = (
        counted(data.num_samples, "training row"),
        counted(data.num_test_samples, "test row"),
        f"{data.num_classes} classes",
        f"{data.num_parties} parties of {describe_widths(data)}",
    )
    console.print(escape(f"{data.name}: {', '.join(sizes)}"))
    console.print(escape(describe_algorithm(plan)))


def print_cost(console: Console, run: TrainingRun, *, delta: float, title: str, noise_is_known: bool = False) -> None:
    """Print what a run tells the server about training rows, predicted rows and labels, and how to read it."""
    tables = {
        _ROWS.get(split, split): privacy_table(run.of_split(split), delta=delta, noise_is_known=noise_is_known)
        for split in (run.splits if run.charges_by_split else ())
    } or {"rows": privacy_table(run, delta=delta, noise_is_known=noise_is_known)}
    shown = plain_table(title, "cell\nepsilon", "right\nof 100", "record\nepsilon", "right\nof 100")
    for rows, table in tables.items():
        shown.add_row(rows, *_cells(table, Accounting.STRICT))
    if run.has_joint_rounds and not noise_is_known:
        shown.add_row("as the paper counts *", *_cells(next(iter(tables.values())), Accounting.PAPER))
    if run.charges_by_split and "test" not in run.splits:
        shown.add_row(_ROWS["test"], "none", "", "none", "")
    whole = next(iter(tables.values()))
    if (label := whole.label) is not None:
        epsilon = format_epsilon(label.epsilon) if math.isfinite(label.epsilon) else "in clear"
        shown.add_row("training labels", epsilon, _right(label))
    console.print(shown)
    console.print(
        "right of 100: guesses that the server's best attack gets right; 50 is blind. cell: a row at one party; "
        f"record: a row; delta {delta:g}",
        style="dim",
    )
    for line in _worse(tables):
        console.print(line)
    if run.has_joint_rounds and NOT_A_PROOF in whole.conditions:
        console.print(f"* {NOT_A_PROOF}", style="dim")


def _cells(table: PrivacyTable, accounting: Accounting) -> list[str]:
    bounds = [table.bound(unit, accounting) for unit in (Unit.CELL, Unit.RECORD)]
    return [text for bound in bounds for text in (format_epsilon(bound.epsilon), _right(bound))]


def _right(bound: EpsilonBound) -> str:
    return str(math.ceil(50 + 50 * bound.advantage_upper_bound))


def _worse(tables: Mapping[str, PrivacyTable]) -> Iterator[str]:
    """Yield a line for every adversary who learns more than the server."""
    for rows, table in tables.items():
        for unit in (Unit.CELL, Unit.RECORD):
            bounds = [each for each in table.of_columns if each.unit is unit and each.accounting is Accounting.STRICT]
            worst = max(bounds, key=lambda each: each.epsilon)
            if worst.epsilon > table.bound(unit, Accounting.STRICT, SERVER).epsilon:
                said = f"{unit} epsilon {format_epsilon(worst.epsilon)}, {_right(worst)} of 100"
                yield f"{rows}, attacked by {worst.adversary}: {said}"


def print_few_notes(console: Console, notes: Sequence[str]) -> None:
    """Print the first notes, and how many there are beyond them."""
    print_notes(console, notes[:_MOST_NOTES])
    if len(notes) > _MOST_NOTES:
        console.print(f"{counted(len(notes) - _MOST_NOTES, 'more note')} with --verbose", style="dim")


# --- During training ---


class Paced:
    """Lines of progress for a pipe: the first after two seconds, each later one after twice as long, up to a minute."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._wait = 2.0
        self._last: float | None = None

    def __call__(self, line: str) -> None:
        now = self._clock()
        if self._last is None:  # what came before it was warm-up
            self._last = now
        if now - self._last >= self._wait:
            self._say(line)
            self._last, self._wait = now, min(2 * self._wait, 60.0)


# --- After training ---


def print_outcome(console: Console, result: Result, *, delta: float, is_news: bool, folder: Path) -> None:
    """Print the main figures, what was spent if it is not what was planned, and notes that matter."""
    figures = _figures(result)
    if figures:
        console.print(figures, markup=False)
    run, known, traffic = result.training_run, result.noise_is_seeded, result.traffic
    is_planned = not (is_news or known or run != result.plan.training_run())
    moved = human_bytes(traffic.bytes_up + traffic.bytes_down + traffic.bytes_setup)
    spent = ", spent as planned" if is_planned else ""
    rounds = f"{counted(traffic.rounds, 'round')} in {result.seconds:.1f} s, {moved}{spent}"
    console.print(f"{rounds}; run folder: {folder}", markup=False, soft_wrap=True)
    if not is_planned:
        print_cost(console, run, delta=delta, title="spent, at most", noise_is_known=known)
    said = {*result.warnings, *(note for note in result.notes if result.diverged and result.stopped in note)}
    said |= {result.how_measured} if figures else set()
    print_notes(console, [note for note in result.notes if note not in said])
    print_notes(console, result.warnings, kind="warning")
    if result.diverged:
        console.print("[bold red]diverged:[/]", end=" ")
        console.print(result.stopped, markup=False)


def _figures(result: Result) -> str:
    """Return accuracy, or accuracy and AUPRC of two classes, with what they were measured on."""
    simulated = result.measured_on in (EXACT, SIMULATED)
    metrics = result.metrics if simulated else result.released
    titles = {"test_accuracy": "test accuracy", "train_accuracy": "train", "test_auprc": "test AUPRC"}
    values = {name: f"{title} {metrics[name]:.4f}" for name, title in titles.items() if name in metrics}
    if result.positive_class is None:
        values.pop("test_auprc", None)
    if "test_accuracy" in values and (guess := result.majority.get("test")) is not None:
        values["test_accuracy"] += f" (always {guess.name!r}: {guess.rate:.4f})"
    source = f"simulator's {result.measured_on.removeprefix('simulated ')}" if simulated else "released predictions"
    return f"{', '.join(values.values())}; {source}" if values else ""
