"""`pbmvfl ledger`: an organisation's own ledger of its releases."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pbmvfl._text import counted
from pbmvfl.cli.help_text import App
from pbmvfl.cli.options import AsJson, OutFile, check_target, print_or_write, say
from pbmvfl.data.vertical import numbered_parties
from pbmvfl.errors import LedgerError
from pbmvfl.ledger.database import ENDING, file_name
from pbmvfl.ledger.forecast import session_words
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.ledger_folder import LABEL_HOLDER, check_folder, ledger_file_of, make_folder, party_ledgers
from pbmvfl.ledger.limits import Limit, unit_and_accounting
from pbmvfl.ledger.spending import fixed_plan_epsilon, spending
from pbmvfl.plan.round_kinds import LABELS
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import Accounting, Unit

if TYPE_CHECKING:
    from rich.console import Console

app = App(
    no_args_is_help=True,
    help="An organisation's own ledger: what it has released about its rows over all runs, and the limits it keeps.",
)
_LEDGER = typer.Argument(
    metavar="LEDGER", help="A ledger file, or a folder of a simulation's ledgers (all parties, and the label holder)."
)


def _files(path: Path, unit: str | None) -> list[Path]:
    """Return the ledgers that a path names: of a folder all, or those that a limit for `unit` is for."""
    is_folder = path.is_dir() or (path.suffix != ENDING and not path.exists())
    if is_folder and unit == Unit.LABEL:
        return [path / file_name(LABEL_HOLDER)]
    if not path.is_dir():
        return [path]
    return sorted(path.glob(f"*{ENDING}")) if unit is None else party_ledgers(path)


@contextlib.contextmanager
def _ledgers(
    path: Path, *, read_only: bool = False, may_be_new: bool = False, unit: str | None = None
) -> Iterator[list[Ledger]]:
    """Open every ledger that a path names; if one cannot be opened, the caller changes none."""
    files = _files(path, unit)
    if not files or (may_be_new and files == [path] and not path.exists() and path.suffix != ENDING):
        has = "has no ledgers in it (*.sqlite)" if path.is_dir() else "is not there yet"
        new = "; to make the ledgers of its parties: --parties bank,shop" if may_be_new else ""
        raise LedgerError(f"ledger={str(path)!r} {has}; name a ledger, or the folder of some{new}")
    with contextlib.ExitStack() as opened:  # with may_be_new, a missing file named *.sqlite is created
        yield [
            opened.enter_context(contextlib.closing(Ledger(file, must_exist=not may_be_new, read_only=read_only)))
            for file in files
        ]


@contextlib.contextmanager
def _ledgers_of_parties(folder: Path, parties: str, dataset: str) -> Iterator[list[Ledger]]:
    """Open the ledgers of these parties, and create those that are missing."""
    names = [name.strip() for name in parties.split(",")]
    if len(names) == 1 and names[0].isdecimal():
        names = list(numbered_parties(int(names[0])))
    if not all(names) or len(set(names)) < len(names):
        raise LedgerError(
            f"parties={parties!r}; permitted: different names, such as bank,shop, or how many there are, such as 4 for "
            "those of a named dataset"
        )
    check_folder(folder)
    files = [ledger_file_of(folder, index, name, dataset=dataset) for index, name in enumerate(names)]
    for file, name in zip(files, names, strict=True):
        if file.is_file():  # refuse an unusable ledger before any other is created
            Ledger(file, owner=name, read_only=True).close()
    make_folder(folder)
    with contextlib.ExitStack() as opened:
        yield [
            opened.enter_context(contextlib.closing(Ledger(file, owner=name)))
            for file, name in zip(files, names, strict=True)
        ]


@app.command()
def show(
    path: Annotated[Path, _LEDGER],
    delta: Annotated[float, typer.Option(help="For totals of data without a limit.")] = 1e-5,
    json_: AsJson = False,
) -> None:
    """Show what was spent on each dataset, what its limits leave, and every session behind it."""
    if json_:
        print(_exported(path))
        return
    from rich.console import Console

    console = Console(highlight=False)
    with _ledgers(path, read_only=True) as ledgers:
        for each in ledgers:
            whose = f", the ledger of {each.owner}" if each.owner else ""
            console.print(f"{each.path}{whose}", style="bold", markup=False, soft_wrap=True)
            if (trouble := each.trouble()) is not None:
                console.print(f"  note: it {trouble}", style="yellow", markup=False, soft_wrap=True)
            if not each.datasets():
                console.print("  nothing yet")
            for dataset in each.datasets():
                _show_dataset(console, each, dataset, delta)
    console.print(
        "spent: counted as was fixed with the limit, valid whatever is run next. "
        "As one plan: counted the best way, valid only if all runs were planned before the first",
        style="dim",
    )


def _exported(path: Path) -> str:
    with _ledgers(path, read_only=True) as ledgers:
        return json.dumps({str(each.path): each.export() for each in ledgers}, indent=2)


def _show_dataset(console: Console, ledger: Ledger, dataset: str, delta: float) -> None:
    from pbmvfl.cli.tables import plain_table, print_notes

    sessions = ledger.sessions(dataset)
    counts = ((len({e.run for e in sessions}), "run"), (len(sessions), "session"))
    releases = sum(entry.row_releases for entry in sessions)
    totals = ", ".join(counted(number, name) for number, name in (*counts, (releases, "row release")))
    console.print(f"  {dataset}: {totals}", markup=False)
    print_notes(console, ledger.notes(dataset))
    table = plain_table("  protects", "counting", "from", "limit", "spent", "as one plan", "delta")
    limits = ledger.limits(dataset)
    for limit in limits:
        spent = spending(ledger, dataset, limit).epsilon
        whole = fixed_plan_epsilon(
            ledger,
            dataset,
            unit=limit.unit,
            accounting=limit.accounting,
            colluding_parties=limit.colluding_parties,
            delta=limit.delta,
        )
        whole = min(whole, spent)  # both are upper bounds; the grid of orders is coarse, so either can be the smaller
        adversary = limit.against if limit.unit is Unit.LABEL else "server"
        adversary += f" + {limit.colluding_parties}" if limit.colluding_parties else ""
        row = (
            limit.unit,
            limit.accounting,
            adversary,
            f"{limit.epsilon:g}",
            format_epsilon(spent),
            format_epsilon(whole),
        )
        table.add_row("  " + row[0], *row[1:], f"{limit.delta:g}")
    columns = ((Unit.CELL, Accounting.PAPER), (Unit.CELL, Accounting.STRICT))
    for unit, accounting in ((Unit.LABEL, Accounting.STRICT),) if _has_labels(ledger, dataset) else columns:
        if not any((limit.unit, limit.accounting) == (unit, accounting) for limit in limits):
            whole = fixed_plan_epsilon(
                ledger, dataset, unit=unit, accounting=accounting, colluding_parties=0, delta=delta
            )
            against = "all parties" if unit is Unit.LABEL else "server"
            table.add_row("  " + unit, accounting, against, "none", "", format_epsilon(whole), f"{delta:g}")
    console.print(table)
    for entry in sessions:
        said = f"    {entry.opened}  run {entry.run}  {session_words(entry)}"
        console.print(said, style="dim", markup=False, soft_wrap=True)
        for number, reason, at in ledger.refusals(entry.id):
            said = f"    {at}  refused round {number}: {reason}"
            console.print(said, style="yellow", markup=False, soft_wrap=True)


def _has_labels(ledger: Ledger, dataset: str) -> bool:
    return any(LABELS in entry.terms.events for entry in ledger.sessions(dataset))


@app.command()
def limit(
    path: Annotated[Path, _LEDGER],
    dataset: Annotated[str, typer.Option(help="The owner's name for the data.")],
    epsilon: Annotated[float | None, typer.Option(help="The limit.")] = None,
    unit: Annotated[
        str,
        typer.Option(
            help="cell | record | party | label: what the epsilon protects. label: in the label holder's ledger."
        ),
    ] = "cell",
    accounting: Annotated[str, typer.Option(help="strict (a theorem) | paper (not a proof).")] = "strict",
    delta: Annotated[float, typer.Option(help="Its delta; stay below 1/N.")] = 1e-5,
    colluding_parties: Annotated[int, typer.Option(help="t: parties on the server's side.")] = 0,
    parties: Annotated[
        str | None,
        typer.Option(help='Whose ledgers in the folder, which are made if need be: "bank,shop", or how many: 4.'),
    ] = None,
    counting: Annotated[
        str | None,
        typer.Option(
            help="gaussian (exact for strict training) | renyi (for all else); fixed from now on. Default: gaussian if "
            "strict, else renyi."
        ),
    ] = None,
    order: Annotated[
        float | None, typer.Option(help="Renyi order to count at; fixed from now on. Default: best for small releases.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take this limit away.")] = False,
) -> None:
    """Set a limit. The round that would cross it is refused before anything is sent, also in a run under way.

    [bold]Before the first run[/]  pbmvfl ledger limit ledgers --parties bank,shop --dataset people --epsilon 8

    [bold]Of drawn labels[/]  pbmvfl ledger limit ledgers --unit label --dataset people --epsilon 8
    """
    from rich.console import Console

    console = Console(highlight=False)
    if parties is not None and unit == Unit.LABEL:
        raise LedgerError(f"unit=label is for the label holder's ledger; leave out --parties {parties}")
    if parties is not None and path.is_file():
        raise LedgerError(f"ledger={str(path)!r} is one party's ledger; --parties goes with the folder of them")
    if remove:
        names = unit_and_accounting(unit, accounting)
        with _ledgers(path, unit=unit) if parties is None else _ledgers_of_parties(path, parties, dataset) as ledgers:
            for ledger in ledgers:
                ledger.remove_limit(dataset, *names, colluding_parties)
                say(f"{ledger.path}: limit removed")
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
        counting=counting,
    )
    # A limit may come before the first run.
    named = (
        _ledgers(path, may_be_new=True, unit=unit) if parties is None else _ledgers_of_parties(path, parties, dataset)
    )
    with named as ledgers:
        for ledger in ledgers:
            _set_limit(console, ledger, dataset, chosen)


def _set_limit(console: Console, ledger: Ledger, dataset: str, chosen: Limit) -> None:
    from pbmvfl.cli.tables import print_notes

    known = {name for name in ledger.datasets() if ledger.sessions(name)}
    held = ledger.set_limit(dataset, chosen)
    spent = spending(ledger, dataset, held).epsilon
    console.print(
        f"{ledger.path}: {dataset}: {held}, counted {held.how}; spent {format_epsilon(spent)}",
        markup=False,
        soft_wrap=True,
    )
    notes = []
    if held.order != chosen.order:
        notes.append(
            f"it goes on being counted {held.how}: another way, chosen after releases were seen, proves nothing"
        )
    if known and dataset not in known:
        notes.append(f"no run of {dataset!r} is in this ledger; it has runs of {', '.join(sorted(known))}")
    if held.unit is Unit.LABEL and dataset in known and not _has_labels(ledger, dataset):
        notes.append("it counts drawn labels alone, and this ledger has none: they are in the label holder's")
    if spent > held.epsilon:
        notes.append("more than that is spent already: every further round will be refused")
    print_notes(console, notes)


@app.command()
def allow(
    path: Annotated[Path, _LEDGER],
    dataset: Annotated[str, typer.Option(help="The owner's name for the data.")],
) -> None:
    """Say that a dataset is about other people, although its values are known under another name."""
    with _ledgers(path) as ledgers:
        for ledger in ledgers:
            ledger.allow(dataset)
            say(f"{ledger.path}: {dataset} is about other people; noted")


@app.command()
def accept(path: Annotated[Path, _LEDGER]) -> None:
    """Take a ledger as it is although releases may be missing: an older copy, or one that something else changed."""
    with _ledgers(path) as ledgers:
        for ledger in ledgers:
            found = ledger.accept()
            say(
                f"{ledger.path}: " + ("nothing to accept" if found is None else f"accepted, although it {found}; noted")
            )


@app.command()
def backup(
    path: Annotated[Path, _LEDGER],
    out: Annotated[Path, typer.Option(help="Folder for the copies; copies of the same ledgers are replaced.")],
) -> None:
    """Copy ledgers to another place, also while a site or a run charges them.

    Keep copies on another disk. The tamper evidence of a ledger stays on this machine, so that an older copy that is
    put back is recognised.
    """
    from pbmvfl.ledger.backup import back_up

    files = _files(path, None)
    if not files:
        raise LedgerError(f"ledger={str(path)!r} has no ledgers in it (*.sqlite); name a ledger, or the folder of some")
    make_folder(out)
    for file in files:
        made = back_up(file, out / file.name)
        say(f"{made.path}: {made.changes} changes")


@app.command()
def restore(
    copy: Annotated[Path, typer.Argument(help="A file that `ledger backup` wrote.", show_default=False)],
    path: Annotated[
        Path, typer.Argument(metavar="LEDGER", help="The lost, damaged or older ledger.", show_default=False)
    ],
) -> None:
    """Put a copy in the place of a ledger. A ledger that has more in it than the copy is never replaced.

    A copy that is older than the last charge on this machine is recognised: runs refuse it until its owner accepts, by
    `pbmvfl ledger accept`, that releases are missing from it.
    """
    from pbmvfl.ledger.backup import restore as put_back

    made = put_back(copy, path)
    say(f"{made.path}: restored, {made.changes} changes")
    with contextlib.closing(Ledger(path, read_only=True)) as ledger:
        if (found := ledger.trouble()) is not None:
            say(
                f"note: it {found}. Runs are refused. If no newer copy can be found, lower its limits by what is "
                f"missing and run `pbmvfl ledger accept {path}`"
            )


@app.command()
def export(
    path: Annotated[Path, _LEDGER],
    out: OutFile = None,
) -> None:
    """The whole ledger as JSON, for a reviewer."""
    check_target("out", out)
    print_or_write(_exported(path) + "\n", out)
