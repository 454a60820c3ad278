"""`pbmvfl ledger`: a party's own book of what it has released."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pbmvfl.cli.options import check_target
from pbmvfl.errors import LedgerError
from pbmvfl.files import write_atomically
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit, unit_and_accounting
from pbmvfl.ledger.spending import fixed_plan_epsilon, spending
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import Accounting, Unit

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    help="A party's own book: what it has released about its rows over all runs, and the limits it keeps.",
)
_BOOK = typer.Argument(help="A ledger file, or a folder of a simulation's ledgers (all its parties).")


@contextlib.contextmanager
def _books(path: Path, *, read_only: bool = False, may_be_new: bool = False) -> Iterator[list[Ledger]]:
    """Every book that a path stands for; all can be opened, or none is touched."""
    files = sorted(path.glob("*.sqlite")) if path.is_dir() else [path]
    if not files:
        raise LedgerError(f"ledger={str(path)!r} has no ledgers in it (*.sqlite); name a ledger, or the folder of some")
    may_be_new = may_be_new and path.suffix == ".sqlite"  # a new file is made if it is named like a book
    with contextlib.ExitStack() as opened:
        yield [
            opened.enter_context(contextlib.closing(Ledger(file, must_exist=not may_be_new, read_only=read_only)))
            for file in files
        ]


@app.command()
def show(
    book: Annotated[Path, _BOOK],
    delta: Annotated[float, typer.Option(help="For totals of data without a limit.")] = 1e-5,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """What was spent on each dataset, what its limits leave, and every session behind it."""
    if json_:
        print(_exported(book))
        return
    from rich.console import Console

    console = Console(highlight=False)
    with _books(book, read_only=True) as books:
        for each in books:
            console.print(str(each.path), style="bold", markup=False, soft_wrap=True)
            if (trouble := each.trouble()) is not None:
                console.print(f"  note: it {trouble}", style="yellow", markup=False, soft_wrap=True)
            if not each.datasets():
                console.print("  nothing yet")
            for dataset in each.datasets():
                _show_dataset(console, each, dataset, delta)
    console.print(
        "spent: at the order fixed with the limit, valid whatever is run next. "
        "As one plan: at the best order, valid only if all runs were planned before the first",
        style="dim",
    )


def _exported(path: Path) -> str:
    with _books(path, read_only=True) as books:
        return json.dumps({str(each.path): each.export() for each in books}, indent=2)


def _show_dataset(console: Console, book: Ledger, dataset: str, delta: float) -> None:
    from pbmvfl.cli.tables import plain_table, print_notes

    sessions = book.sessions(dataset)
    releases = sum(entry.row_releases for entry in sessions)
    console.print(
        f"  {dataset}: {len({e.run for e in sessions})} runs, {len(sessions)} sessions, {releases:,} row releases",
        markup=False,
    )
    print_notes(console, book.notes(dataset))
    table = plain_table("  protects", "counting", "from", "limit", "spent", "as one plan", "delta")
    limits = book.limits(dataset)
    for limit in limits:
        spent = spending(book, dataset, limit).epsilon
        whole = fixed_plan_epsilon(
            book,
            dataset,
            unit=limit.unit,
            accounting=limit.accounting,
            colluding_parties=limit.colluding_parties,
            delta=limit.delta,
        )
        whole = min(whole, spent)  # both are bounds; the best order is looked for on a coarse grid
        adversary = "server" + (f" + {limit.colluding_parties}" if limit.colluding_parties else "")
        row = (
            limit.unit,
            limit.accounting,
            adversary,
            f"{limit.epsilon:g}",
            format_epsilon(spent),
            format_epsilon(whole),
        )
        table.add_row("  " + row[0], *row[1:], f"{limit.delta:g}")
    for unit, accounting in ((Unit.CELL, Accounting.PAPER), (Unit.CELL, Accounting.STRICT)):
        if not any((limit.unit, limit.accounting) == (unit, accounting) for limit in limits):
            whole = fixed_plan_epsilon(
                book, dataset, unit=unit, accounting=accounting, colluding_parties=0, delta=delta
            )
            table.add_row("  " + unit, accounting, "server", "none", "", format_epsilon(whole), f"{delta:g}")
    console.print(table)
    for entry in sessions:
        rounds = (
            f"rounds {entry.first_round} to {entry.charged_until - 1}"
            if entry.charged_until > entry.first_round
            else "no round"
        )
        console.print(f"    {entry.opened}  run {entry.run}  {rounds}  {entry.terms.words}", style="dim", markup=False)
        for number, reason, at in book.refusals(entry.id):
            console.print(f"    {at}  refused round {number}: {reason}", style="yellow", markup=False)


@app.command()
def limit(
    book: Annotated[Path, _BOOK],
    dataset: Annotated[str, typer.Option(help="The owner's name for the data.")],
    unit: Annotated[str, typer.Option(help="cell | record | party.")],
    accounting: Annotated[str, typer.Option(help="paper (not a proof) | strict (a theorem).")],
    epsilon: Annotated[float | None, typer.Option(help="The limit.")] = None,
    delta: Annotated[float, typer.Option(help="Its delta.")] = 1e-5,
    colluding_parties: Annotated[int, typer.Option(help="t: parties on the server's side.")] = 0,
    order: Annotated[
        float | None, typer.Option(help="Renyi order to count at; fixed from now on. Default: best for small releases.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take this limit away.")] = False,
) -> None:
    """Set a limit. The round that would cross it is refused before anything is sent, also in a run under way."""
    from rich.console import Console

    from pbmvfl.cli.tables import print_notes

    console = Console(highlight=False)
    if remove:
        names = unit_and_accounting(unit, accounting)
        with _books(book) as books:
            for ledger in books:
                ledger.remove_limit(dataset, *names, colluding_parties)
                console.print(f"{ledger.path}: limit removed", markup=False, soft_wrap=True)
        return
    if epsilon is None:
        raise LedgerError("give --epsilon, or --remove")
    chosen = Limit.choose(
        unit=unit,
        accounting=accounting,
        epsilon=epsilon,
        delta=delta,
        colluding_parties=colluding_parties,
        order=order,
    )
    with _books(book, may_be_new=True) as books:  # a limit may come before the first run
        for ledger in books:
            known = {name for name in ledger.datasets() if ledger.sessions(name)}
            held = ledger.set_limit(dataset, chosen)
            spent = spending(ledger, dataset, held).epsilon
            console.print(
                f"{ledger.path}: {dataset}: {held}, counted at order {held.order:g}; spent {format_epsilon(spent)}",
                markup=False,
                soft_wrap=True,
            )
            if known and dataset not in known:
                print_notes(console, [f"no run of {dataset!r} is in this book; it has runs of {', '.join(known)}"])
            if spent > epsilon:
                console.print("[yellow]note:[/] more than that is spent already: every further round will be refused")


@app.command()
def allow(
    book: Annotated[Path, _BOOK],
    dataset: Annotated[str, typer.Option(help="The owner's name for the data.")],
) -> None:
    """Say that a dataset is about other people, although its values are known under another name."""
    with _books(book) as books:
        for ledger in books:
            ledger.allow(dataset)
            _say(f"{ledger.path}: {dataset} is about other people; noted")


@app.command()
def accept(book: Annotated[Path, _BOOK]) -> None:
    """Take a ledger as it is although releases may be missing: an older copy, or one that something else changed."""
    with _books(book) as books:
        for ledger in books:
            found = ledger.accept()
            _say(
                f"{ledger.path}: " + ("nothing to accept" if found is None else f"accepted, although it {found}; noted")
            )


def _say(text: str) -> None:
    from rich.console import Console

    Console(highlight=False).print(text, markup=False, soft_wrap=True)


@app.command()
def export(
    book: Annotated[Path, _BOOK],
    out: Annotated[Path | None, typer.Option(help="File to write; default stdout.")] = None,
) -> None:
    """The whole book as JSON, for a reviewer."""
    check_target("out", out)
    text = _exported(book) + "\n"
    if out is None:
        print(text, end="")
        return
    write_atomically(out, text)
