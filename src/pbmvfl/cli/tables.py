"""Tables that several commands print."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pbmvfl.privacy.accounting import NOT_A_PROOF
from pbmvfl.privacy.table import PrivacyTable, format_epsilon
from pbmvfl.privacy.units import Accounting, Adversary

_STAR = "paper *"


def plain_table(*titles: str) -> Table:
    """Without lines; every column but the first is right-aligned."""
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i else "left", no_wrap=True)
    return table


def _against(adversary: Adversary) -> str:
    name = str(adversary)
    return "from " + (name.removesuffix(" parties").removesuffix(" party") if adversary.server else name)


def print_privacy(console: Console, table: PrivacyTable, *, title: str, legend: bool = True) -> None:
    """One line for each unit and accounting, one column for each adversary."""
    adversaries = list(dict.fromkeys(row.adversary for row in table.bounds))
    delta = table.bounds[0].delta
    shown = Table(
        box=None, padding=(0, 2), header_style="bold", title=f"{title} (delta {delta:g})", title_justify="left"
    )
    for name in ("protects", "counting"):
        shown.add_column(name)
    for adversary in adversaries:
        shown.add_column(_against(adversary), justify="right")
    kinds = list(dict.fromkeys((row.unit, row.accounting) for row in table.bounds))
    for unit, accounting in kinds:
        values = [
            format_epsilon(row.epsilon)
            for adversary in adversaries
            for row in table.bounds
            if (row.unit, row.accounting, row.adversary) == (unit, accounting, adversary)
        ]
        starred = accounting is Accounting.PAPER and NOT_A_PROOF in table.conditions and unit != "party"
        shown.add_row(unit, _STAR if starred else accounting, *values)
    console.print(shown)
    if not legend:
        return
    console.print(
        "cell: one party's values of one row; record: a whole row; party: all values of one party", style="dim"
    )
    if NOT_A_PROOF in table.conditions:
        console.print(f"* {NOT_A_PROOF}", style="dim")
