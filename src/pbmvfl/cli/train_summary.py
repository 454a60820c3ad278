"""Short output of `pbmvfl train`: data, algorithm, cost and result in a few lines; --verbose prints tables instead."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.text import Text

from pbmvfl._text import counted
from pbmvfl.cli.descriptions import describe_algorithm, describe_widths
from pbmvfl.cli.tables import plain_table
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.federation.results import EXACT, SIMULATED, Result
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import NOT_A_PROOF, EpsilonBound, TrainingRun
from pbmvfl.privacy.table import PrivacyTable, format_epsilon, privacy_table
from pbmvfl.privacy.units import SERVER, Accounting, Unit
from pbmvfl.wire.traffic import human_bytes

#: Lines of a run on a terminal of 80 columns, and those of them that come after training: figures, which may take two,
#: rounds and the next command, and in a pipe one of progress.
MOST_LINES = 15
_AFTERWARDS = 4
#: The same of a run that a ledger ends: rounds, what was spent on two kinds of rows, the reason and the next command.
_AFTER_AN_EARLY_END = 7
_ROWS = {"train": "training rows", "test": "predicted rows"}


# --- Before training ---


def print_start(console: Console, plan: Plan, data: VerticalDataset) -> int:
    """Print the data and the algorithm, a line each; return how many lines that took."""
    sizes = (
        f"{data.num_samples:,} training and {counted(data.num_test_samples, 'test row')}",
        f"{data.num_classes} classes",
        f"{data.num_parties} parties of {describe_widths(data).partition(',')[0]}",
    )
    lines = _print(console, escape(f"{data.name}: {', '.join(sizes)}"))
    return lines + _print(console, escape(describe_algorithm(plan)))


def print_cost(console: Console, run: TrainingRun, *, delta: float, title: str, noise_is_known: bool = False) -> int:
    """Print what a run tells the server about training rows, predicted rows and labels; return the lines it took."""
    tables = _tables(run, delta, noise_is_known)
    shown = plain_table(title, "cell epsilon", "right of 100", "record epsilon", "right of 100")
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
    legend = f"cell: a row at one party; right: best attack's guesses, blind 50; delta {delta:g}"
    lines = _print(console, shown) + _print(console, f"[dim]{legend}[/]")
    lines += sum(_print(console, line) for line in _worse(tables))
    if run.has_joint_rounds and NOT_A_PROOF in whole.conditions:
        lines += _print(console, "[dim]* not a proof: weights carry a row into releases of other rows[/]")
    return lines


def _tables(run: TrainingRun, delta: float, noise_is_known: bool) -> dict[str, PrivacyTable]:
    """Return the account of each kind of rows that is charged apart, by its name."""
    return {
        _ROWS.get(split, split): privacy_table(run.of_split(split), delta=delta, noise_is_known=noise_is_known)
        for split in (run.splits if run.charges_by_split else ())
    } or {"rows": privacy_table(run, delta=delta, noise_is_known=noise_is_known)}


def _print(console: Console, text: RenderableType) -> int:
    """Print, and return how many lines that took."""
    console.print(text)
    return len(console.render_lines(text, pad=False))


def _cells(table: PrivacyTable, accounting: Accounting) -> list[str]:
    bounds = [table.bound(unit, accounting) for unit in (Unit.CELL, Unit.RECORD)]
    return [text for bound in bounds for text in (format_epsilon(bound.epsilon), _right(bound))]


def _right(bound: EpsilonBound) -> str:
    return str(math.ceil(50 + 50 * bound.advantage_upper_bound))


def _worse(tables: Mapping[str, PrivacyTable]) -> Iterator[str]:
    """Yield a line for each kind of rows of which an adversary learns more than the server."""
    for rows, table in tables.items():
        for unit in (Unit.CELL, Unit.RECORD):
            bounds = [each for each in table.of_columns if each.unit is unit and each.accounting is Accounting.STRICT]
            worst = max(bounds, key=lambda each: each.epsilon)
            if worst.epsilon > table.bound(unit, Accounting.STRICT, SERVER).epsilon:
                said = f"{unit} epsilon {format_epsilon(worst.epsilon)}, {_right(worst)} of 100"
                yield f"{rows}, attacked by {worst.adversary}: {said}"
                break


def room_for_notes(console: Console, used: int, *, may_end_early: bool = False) -> int:
    """Return how many lines of notes there may be before training, after so many other lines."""
    afterwards = _AFTER_AN_EARLY_END if may_end_early else _AFTERWARDS
    return MOST_LINES - afterwards - used - (not console.is_terminal)


def print_few_notes(console: Console, notes: Sequence[tuple[str, str]], *, room: float, others: str) -> int:
    """Print (kind, text) notes within so many lines, at least one, and return how many lines it took.

    A note that does not fit is cut at the end of its line; those for which there is no line are counted.
    """
    used = 0
    for index, (kind, note) in enumerate(notes):
        text = Text.assemble((f"{kind}:", "yellow"), " ", note) if kind else Text(note)
        lines = len(console.render_lines(text, pad=False))
        left = room - used - (index < len(notes) - 1)
        is_cut = lines > left
        lines = 1 if is_cut else lines
        if lines > left:
            more = "more note" if index else "note"
            return used + _print(console, f"[dim]{counted(len(notes) - index, more)} {others}[/]")
        console.print(text, no_wrap=is_cut, overflow="ellipsis" if is_cut else None)
        used += lines
    return used


# --- During training ---


class Paced:
    """Lines of progress for a pipe: after four seconds, after 16 more, and then one a minute."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._wait = 4.0
        self._last: float | None = None

    def __call__(self, line: str) -> bool:
        """Print the line if it is time; return whether it was."""
        now = self._clock()
        if self._last is None:  # what came before it was warm-up
            self._last = now
        if now - self._last < self._wait:
            return False
        self._say(line)
        self._last, self._wait = now, min(4 * self._wait, 60.0)
        return True


# --- After training ---


def print_outcome(
    console: Console, result: Result, *, delta: float, shown: TrainingRun | None, folder: Path, used: int = 0
) -> None:
    """Print the main figures, what was spent unless it was `shown` before training, and notes that matter.

    `used` is how many lines there are above.
    """
    figures = _figures(result)
    if figures:
        used += _print(console, escape(figures))
    run, known, traffic = result.training_run, result.noise_is_seeded, result.traffic
    is_planned = not known and run == shown
    moved = human_bytes(traffic.bytes_up + traffic.bytes_down + traffic.bytes_setup)
    spent = ", spent as planned" if is_planned else ""
    rounds = f"{counted(traffic.rounds, 'round')} in {result.seconds:.1f} s, {moved}{spent}"
    console.print(f"{rounds}; run folder: {folder}", markup=False, soft_wrap=True)
    used += 2  # with the command that comes next
    if not is_planned and shown is not None and result.stopped:
        used += _print_spent(console, _tables(run, delta, known))
    elif not is_planned:
        used += print_cost(console, run, delta=delta, title="spent, at most", noise_is_known=known)
    ended = {note for note in result.notes if result.stopped and result.stopped in note}
    said = {*result.warnings, *ended, *({result.how_measured} if figures else ())}
    notes = [("warning", note) for note in result.warnings]
    notes += [("note", note) for note in result.notes if note not in said]
    if result.stopped:  # the reason matters more than other notes: they get the lines that it leaves
        why = [("diverged" if result.diverged else "stopped by a ledger", result.stopped)]
        used += print_few_notes(console, why, room=max(1, MOST_LINES - used), others="in the report")
    if used < MOST_LINES or not result.stopped:
        print_few_notes(console, notes, room=max(1, MOST_LINES - used), others="in the report")


def _print_spent(console: Console, tables: Mapping[str, PrivacyTable]) -> int:
    """Print a line for each kind of rows that was released; return how many. The table of the plan has the legend."""
    released = [rows for rows, table in tables.items() if table.epsilon(Unit.CELL, Accounting.STRICT)]
    lines = 0 if released else _print(console, "spent: nothing on any row")
    for rows in released:
        cell, cell_right, record, record_right = _cells(tables[rows], Accounting.STRICT)
        said = f"cell {cell} ({cell_right} of 100), record {record} ({record_right} of 100)"
        lines += _print(console, f"spent on {rows}: {said}")
    return lines


def _figures(result: Result) -> str:
    """Return accuracy, or accuracy and AUPRC of two classes, with what they were measured on."""
    simulated = result.measured_on in (EXACT, SIMULATED)
    metrics = result.metrics if simulated else result.released
    titles = {"test_accuracy": "test accuracy", "train_accuracy": "train", "test_auprc": "AUPRC"}
    values = {name: f"{title} {metrics[name]:.4f}" for name, title in titles.items() if name in metrics}
    values.pop("test_auprc" if result.positive_class is None else "train_accuracy", None)
    if "test_accuracy" in values and (guess := result.majority.get("test")) is not None:
        values["test_accuracy"] += f" (always {guess.name!r}: {guess.rate:.4f})"
    source = f"simulator: {result.measured_on.removeprefix('simulated ')}" if simulated else "released predictions"
    return f"{', '.join(values.values())}; {source}" if values else ""
