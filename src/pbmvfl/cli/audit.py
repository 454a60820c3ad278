"""`pbmvfl audit`: test that what is drawn has the law that is charged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pbmvfl._files import PRIVATE_FILE, write_atomically
from pbmvfl.cli.options import AsJson
from pbmvfl.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console

    from pbmvfl.audit.audit import Report, Subject
    from pbmvfl.audit.statistics import Finding

#: Exit code if a law is not the charged one.
ALARM = 5
#: N games cannot show more than ln(N / 3.7): beyond this epsilon only advantages are worth comparing.
_LARGE_EPSILON = 12.0


def audit(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A run folder, a plan of `pbmvfl plan --out`, or a named dataset: what that plan uses is audited. "
            "Without it: every mechanism, with usual numbers.",
            metavar="RUN | DATASET",
            show_default=False,
        ),
    ] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Audit what this plan's file uses.")] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            help="Games of each world, and draws of each value. Default: 1,000,000 and 200,000.", show_default=False
        ),
    ] = None,
    sessions: Annotated[
        int | None,
        typer.Option(help="Trainings with the cell at each extreme. Default: 200.", show_default=False),
    ] = None,
    json_: AsJson = False,
) -> None:
    """Test that what is drawn has the law that is charged. Exit code 0: sound. 5: alarm.

    Mechanisms, masks, drawn labels and noise are drawn by the code that parties run, and held against their exact laws
    (mean, tails, chi-square). Then an adversary plays: it sees one release, or all weights of a training, and says
    which of two worlds it is in. How often it is right is a [bold]lower bound[/] on epsilon, beside the exact one.

    A sound build raises an alarm less than once in a million audits. Passing is no proof: a lower bound below the
    charged epsilon shows that the games found nothing, not that there is nothing.

    All values are made up: no row of a run or a dataset is drawn from, no ledger is opened, nothing is charged.
    The audit of a run is kept in its folder (audit.json), for its page.

    [bold]Try[/]  pbmvfl audit, then pbmvfl audit runs/phishing-001
    """
    subject = _subject(source, plan_file)
    from rich.console import Console

    from pbmvfl import __version__
    from pbmvfl.audit.audit import audit as run_audit
    from pbmvfl.report.facts import AUDIT_FILE

    with _progress(Console(stderr=True, highlight=False), quiet=json_) as on_part:
        report = run_audit(subject, trials=trials, sessions=sessions, on_part=on_part)
    shown = json.dumps({"version": __version__, **report.to_dict()}, indent=2)
    if source is not None and (Path(source) / "plan.json").is_file():  # for the run's page
        write_atomically(Path(source) / AUDIT_FILE, shown + "\n", mode=PRIVATE_FILE)
    if json_:
        print(shown)
    else:
        show(Console(highlight=False), report)
    if not report.sound:
        raise typer.Exit(ALARM)


def _subject(source: str | None, plan_file: Path | None) -> Subject:
    """Return what is audited. Of a run or a plan only its public numbers are read, of a dataset only its sizes."""
    from pbmvfl.audit.audit import Subject

    if source is not None and plan_file is not None:
        raise DataError("SOURCE and --plan both say what is audited; give one of them")
    if source is None and plan_file is None:
        return Subject.everything()
    from pbmvfl.cli.data_options import known_data
    from pbmvfl.cli.options import TableOptions
    from pbmvfl.cli.train import read_plan
    from pbmvfl.federation.run_folder import RunFolder
    from pbmvfl.plan.plan import Plan

    known = known_data(source=source, table=TableOptions(), plan_file=plan_file, given={}, load=False)
    if known.folder is not None:
        return Subject.of_plan(RunFolder.existing(known.folder).read_plan(), name=f"the plan of {known.folder.name}")
    if known.plan_file is not None:
        return Subject.of_plan(read_plan(known.plan_file), name=f"the plan {known.plan_file.name}")
    assert known.data is not None
    return Subject.of_plan(Plan.for_data(known.data), name=f"the usual plan for {source}")


@contextmanager
def _progress(console: Console, *, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show the part that runs, on a terminal."""
    if quiet or not console.is_terminal:
        yield lambda *_: None
        return
    with console.status("audit") as status:
        yield lambda name, number, count: status.update(f"{number + 1} of {count}: {name}" if name else "")


def show(console: Console, report: Report) -> None:
    """Print the table of laws, the bounds beside the exact numbers, and what they mean."""
    from rich.markup import escape

    from pbmvfl.cli.tables import plain_table, print_notes

    table = plain_table("what", "law tested", "verdict", "trials", "oddest finding", left=3, title=report.subject)
    groups: dict[str, list[Finding]] = {}
    for each in report.findings:
        groups.setdefault(each.what, []).append(each)
    for what, found in groups.items():
        oddest = min(found, key=lambda each: each.p_value)
        verdict = "[bold red]ALARM[/]" if oddest.p_value < report.level else "[green]sound[/]"
        tested = ", ".join(dict.fromkeys(each.law for each in found))
        where = f" ({oddest.case})" if oddest.case else ""
        most: dict[str, int] = {}
        for each in found:
            most[each.case] = max(most.get(each.case, 0), each.trials)
        text = f"{oddest.law}{where}: {oddest.statistic}, p={oddest.p_value:.2g}"
        table.add_row(escape(what), escape(tested), verdict, f"{sum(most.values()):,}", escape(text))
    console.print(table)
    _show_bounds(console, report)
    print_notes(console, (f"not tested: {each}" for each in report.not_tested))
    for alarm in report.alarms:
        console.print(f"[bold red]alarm:[/] {escape(alarm)}", soft_wrap=True)
    rate = f"a sound build raises an alarm less than once in {1 / report.false_alarm_rate:,.0f} audits"
    if report.sound:
        console.print(f"[bold green]sound:[/] {report.num_tests} tests contradict nothing that is charged; {rate}")
    else:
        console.print(
            f"[bold red]{len(report.alarms)} of {report.num_tests} tests contradict what is charged[/]; {rate}: stop "
            "releasing with this build, and report it"
        )


def _show_bounds(console: Console, report: Report) -> None:
    from pbmvfl.cli.tables import plain_table

    if report.epsilons:
        table = plain_table(
            "one release of a row", "games", "epsilon, exact", "at least", "share", "advantage, at most", "at least"
        )
        for each in report.epsilons:
            table.add_row(
                each.what,
                f"2 x {each.trials:,}",
                f"{each.epsilon:.3f}",
                f"{each.epsilon_lower_bound:.3f}",
                f"{each.share:.0%}",
                f"{each.advantage:.3f}",
                f"{each.advantage_lower_bound:.3f}",
            )
        console.print()
        console.print(table)
    found = report.training
    if found is not None:
        console.print(
            f"\n{found.what}: the worlds are {found.shift:.3f} deviations apart, {found.mu:.3f} are charged (epsilon "
            f"{found.epsilon:.2f}); {found.sessions} sessions of each prove {found.mu_lower_bound:.3f} (epsilon "
            f"{found.epsilon_lower_bound:.2f})",
            soft_wrap=True,
        )
    if report.epsilons or found is not None:
        console.print(
            "\nThe adversary of these games tells the worlds apart at least this well, with 95% confidence: near the "
            "exact number, no smaller epsilon could have been charged. It does not mean that nobody can do better: "
            "that is what the proof and the tests of the laws are for.",
            soft_wrap=True,
        )
    if any(each.epsilon > _LARGE_EPSILON for each in report.epsilons):
        console.print(
            "Above epsilon 12 no affordable number of games shows the epsilon: compare the advantages.", soft_wrap=True
        )
    console.print()
