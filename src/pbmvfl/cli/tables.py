"""Tables that several commands print."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table

from pbmvfl.privacy.accounting import NOT_A_PROOF, EpsilonBound, TrainingRun, epsilon_bound
from pbmvfl.privacy.table import (
    UNITS_LEGEND,
    PrivacyTable,
    attack_in_words,
    format_advantage,
    format_epsilon,
    label_in_words,
    privacy_table,
)
from pbmvfl.privacy.units import Accounting, Adversary, Unit

_STAR = "paper *"
#: A terminal with fewer columns than this is narrow.
_NARROW = 80


class _Table(Table):
    """Table that reduces its padding on a narrow terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.collapse_padding = options.max_width < _NARROW
        return super().__rich_console__(console, options)


def plain_table(*titles: str, left: int = 1, title: str | None = None) -> Table:
    """Return a table without rules; every column after the first `left` ones is right-aligned.

    On a narrow terminal headers wrap at spaces and longer text is folded: nothing is truncated.
    """
    table = _Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold", title_justify="left")
    table.title = None if title is None else escape(title)
    for i, name in enumerate(titles):
        table.add_column(name, justify="right" if i >= left else "left", overflow="fold")
    return table


def print_notes(console: Console, notes: Iterable[str], *, kind: str = "note") -> None:
    """Print notes with markup escaped, because a note may name files and columns."""
    for note in notes:
        console.print(f"[yellow]{kind}:[/] {escape(note)}")


def _against(adversary: Adversary) -> str:
    name = str(adversary)
    return "from " + (name.removesuffix(" parties").removesuffix(" party") if adversary.server else name)


def _with_advantage(row: EpsilonBound) -> str:
    return f"{format_epsilon(row.epsilon)} {format_advantage(row.advantage_upper_bound):>4}"


def print_privacy_of_rows(
    console: Console,
    run: TrainingRun,
    *,
    delta: float,
    title: str,
    legend: bool = True,
    noise_is_known: bool = False,
) -> None:
    """Print one privacy table, or one for each split where splits are charged separately."""
    apart = run.splits if run.charges_by_split and len(run.splits) > 1 else ()
    for split in apart or (None,):
        chosen = run if split is None else run.of_split(split)
        of_rows = "" if split is None else f", of {'training' if split == 'train' else 'predicted'} rows"
        table = privacy_table(chosen, delta=delta, noise_is_known=noise_is_known)
        strict = Accounting.STRICT if chosen.charges_by_split else None
        explained = table.bound(Unit.CELL, strict) if strict else None
        first = split is None or split == apart[0]
        if not chosen.has_joint_rounds:  # the paper counts otherwise only in joint rounds
            table = PrivacyTable(tuple(row for row in table.bounds if row.accounting is Accounting.STRICT))
        print_privacy(console, table, title=title + of_rows, legend=legend and first, explained=explained)
    if not run.releases and not noise_is_known:
        console.print("nothing is released here: a party's 0 covers neither predictions nor weights", style="dim")
    if apart and not noise_is_known:
        both = epsilon_bound(run.of_one_row(), Unit.CELL, Accounting.STRICT, delta=delta)
        console.print(
            f"a row that is trained on and also predicted: epsilon {format_epsilon(both.epsilon)}, advantage "
            f"{format_advantage(both.advantage_upper_bound)} (cell, strict, server)"
        )


def print_privacy(
    console: Console,
    table: PrivacyTable,
    *,
    title: str,
    legend: bool = True,
    explained: EpsilonBound | None = None,
    strict_only: bool = False,
) -> None:
    """Print a table with one line per unit and accounting, and one column per adversary.

    Args:
        console: The console to print to.
        table: The bounds to print.
        title: The title of the table.
        legend: Define the units above the table.
        explained: The bound that a sentence explains; the first one if None.
        strict_only: Omit the paper's count, where it equals the strict one.
    """
    if strict_only:
        table = PrivacyTable(tuple(row for row in table.bounds if row.accounting is Accounting.STRICT))
    bounds = table.of_columns
    adversaries = list(dict.fromkeys(row.adversary for row in bounds))
    delta = bounds[0].delta
    columns = [f"{_against(adversary)}\nepsilon adv." for adversary in adversaries]
    shown = plain_table("protects", "counting", *columns, left=2, title=f"{title} (delta {delta:g})")
    kinds = list(dict.fromkeys((row.unit, row.accounting) for row in bounds))
    for unit, accounting in kinds:
        values = [
            _with_advantage(row)
            for adversary in adversaries
            for row in bounds
            if (row.unit, row.accounting, row.adversary) == (unit, accounting, adversary)
        ]
        starred = accounting is Accounting.PAPER and NOT_A_PROOF in table.conditions and unit != "party"
        shown.add_row(unit, _STAR if starred else accounting, *values)
    if legend:
        console.print(UNITS_LEGEND, style="dim")
    console.print(shown)
    console.print(attack_in_words(explained or bounds[0]), style="dim", markup=False)
    if table.label is not None:
        console.print(label_in_words(table.label), markup=False)
    if NOT_A_PROOF in table.conditions:
        console.print(f"* {NOT_A_PROOF}", style="dim")
