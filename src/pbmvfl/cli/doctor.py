"""`pbmvfl doctor`: check that this machine can run a federation."""

from __future__ import annotations

import json

import typer

from pbmvfl.cli.options import AsJson


def doctor(
    json_: AsJson = False,
) -> None:
    """Check this machine: versions, randomness, known answers of masks, noise and account, folders, locks, disk.

    A few seconds; nothing is left behind. Each [bold]trouble[/] has a way out beside it, and ends in code 1.

    [bold]Try[/]  pbmvfl doctor
    """
    from pbmvfl import __version__
    from pbmvfl.cli.doctor_checks import Status, examine

    findings = examine()
    bad = [each for each in findings if each.status is Status.TROUBLE]
    if json_:
        shown = {"version": __version__, "ok": not bad, "checks": [each.to_dict() for each in findings]}
        print(json.dumps(shown, indent=2))
        raise typer.Exit(1 if bad else 0)
    from rich.console import Console
    from rich.markup import escape

    from pbmvfl.cli.tables import plain_table

    console = Console(highlight=False)
    colours = {Status.OK: "green", Status.NOTE: "yellow", Status.TROUBLE: "bold red"}
    table = plain_table("check", "", "found", left=3)
    for each in findings:
        words = escape(each.found) + (f"\n[bold]do:[/] {escape(each.way_out)}" if each.way_out else "")
        table.add_row(each.name, f"[{colours[each.status]}]{each.status}[/]", words)
    console.print(table)
    if bad:
        console.print(f"trouble with {', '.join(each.name for each in bad)}", style="bold red", markup=False)
        raise typer.Exit(1)
    console.print(f"pbmvfl {__version__}: ready", style="bold green", markup=False)
