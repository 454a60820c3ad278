"""`pbmvfl watch` and `pbmvfl logs`: status and log of an organisation's own job, read from its own folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from pbmvfl.deploy.monitoring.log_reader import LogLine
    from pbmvfl.deploy.monitoring.status import Status
    from pbmvfl.deploy.monitoring.watch import Line, Watched

_HOME = typer.Option("--home", help="The organisation's folder.", show_default=True)
_JSON = typer.Option("--json", help="Print JSON and nothing else: an object a line.")
#: Seconds between two lines if the output is not a terminal.
_SELDOM = 5.0
#: Widths in columns: titles, bars, and the least terminal width for a bar and its text on one line.
_TITLE, _BAR, _WIDE = 10, 32, 100
_STYLES = {"debug": "dim", "info": "", "warning": "yellow", "error": "red", "critical": "bold red"}
_INTERRUPTED = 130


def watch(
    home: Annotated[Path, _HOME] = Path("."),
    run: Annotated[str | None, typer.Option(help="Wait for this run. Default: whatever job was here last.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once and leave.")] = False,
    json_: Annotated[bool, _JSON] = False,
) -> None:
    """Watch this organisation's job until it is done (exit code 0) or has failed (1).

    Ctrl-C leaves; the job goes on. At the label holder: rounds, speed, loss, traffic and who is connected. At a party:
    its own rounds, and what its ledger has spent of its limits. Only this organisation's own files are read. A job
    whose process ended without a word may be submitted again, and is waited for a minute.

    [bold]Try[/]  pbmvfl watch --home clinic

    [bold]In a script[/]  pbmvfl watch --home clinic --once --json
    """
    from rich.console import Console

    from pbmvfl.deploy.monitoring import watch as watching
    from pbmvfl.deploy.site.folder import SiteFolder

    looks = watching.watch(SiteFolder.at(home).status, run=run, once=once)
    console = Console(highlight=False)
    try:
        if json_:
            verdict = _watch_in_json(looks)
        elif once or not console.is_terminal:
            verdict = _watch_in_lines(console, looks, whole=once)
        else:
            verdict = _watch_live(console, looks)
    except KeyboardInterrupt:
        Console(stderr=True).print("not watching any more; the job goes on", style="dim")
        verdict = _INTERRUPTED
    raise SystemExit(verdict)


def logs(
    home: Annotated[Path, _HOME] = Path("."),
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines, until Ctrl-C.")] = False,
    level: Annotated[str, typer.Option(help="debug | info | warning | error: nothing below it.")] = "info",
    run: Annotated[str | None, typer.Option(help="Only lines of this run.")] = None,
    lines: Annotated[int, typer.Option(help="Of old lines the last ones; 0 for all.", min=0)] = 200,
    json_: Annotated[bool, _JSON] = False,
) -> None:
    """Show this organisation's own log: HOME/logs/pbmvfl.jsonl and what was rotated out of it.

    No feature value, row id, weight or key is in it.

    [bold]What went wrong[/]  pbmvfl logs --home bank --level warning
    """
    from rich.console import Console

    from pbmvfl.deploy.monitoring.log import FILE
    from pbmvfl.deploy.monitoring.log_reader import LEVELS, LogReader
    from pbmvfl.deploy.site.folder import SiteFolder
    from pbmvfl.errors import FederationError

    if level not in LEVELS:
        raise FederationError(f"level={level!r}; permitted: {', '.join(LEVELS)}")
    path = SiteFolder.at(home).logs / FILE
    reader = LogReader(path)
    console, aside = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        found = reader.old_lines(level=level, run=run, last=lines or None)
        _print_lines(console, found, json_)
        if not found and not json_:
            aside.print(f"nothing to show in {path}", style="dim", markup=False, soft_wrap=True)
        if reader.unreadable and not json_:
            aside.print(f"{reader.unreadable} lines were cut and cannot be read", style="yellow")
        while follow:
            time.sleep(0.25)
            _print_lines(console, reader.new_lines(level=level, run=run), json_)
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None


# --- Watch ---


def _watch_in_json(looks: Iterable[Watched]) -> int:
    """Print a JSON line at every change and at the end; return the exit code."""
    from pbmvfl.deploy.monitoring.watch import as_json

    verdict, before = 1, object()
    for look in looks:
        seen = (look.status, look.status is not None and look.status.process_is_alive)
        if seen != before or look.verdict is not None:
            print(json.dumps(None if look.status is None else as_json(look.status)), flush=True)
        before = seen
        verdict = look.verdict if look.verdict is not None else verdict
    return verdict


def _watch_in_lines(console: Console, looks: Iterable[Watched], *, whole: bool) -> int:
    """Print a line at every change of state and at intervals, or the whole view; return the exit code."""
    from pbmvfl.deploy.monitoring.watch import one_line

    verdict, before, said_at = 1, object(), 0.0
    for look in looks:
        seen = None if look.status is None else (look.status.state, look.status.pid, look.status.process_is_alive)
        is_time = look.status is not None and time.monotonic() - said_at >= _SELDOM
        if whole:
            console.print(_view(look, console.width))
        elif seen != before or is_time or look.verdict is not None:
            said = look.words if look.status is None else one_line(look.status)
            console.print(said, markup=False, soft_wrap=True)
            said_at = time.monotonic()
        before = seen
        verdict = look.verdict if look.verdict is not None else verdict
    return verdict


def _watch_live(console: Console, looks: Iterable[Watched]) -> int:
    from rich.live import Live

    verdict = 1
    with Live(console=console, auto_refresh=False) as live:
        for look in looks:
            live.update(_view(look, console.width), refresh=True)
            verdict = look.verdict if look.verdict is not None else verdict
    return verdict


def _view(look: Watched, width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from pbmvfl.deploy.monitoring.watch import heading

    shown: list[RenderableType] = []
    if look.status is not None:
        shown += [Text(heading(look.status), style="bold"), _table(look.status, width)]
    if look.words:
        shown.append(Text(look.words, style="dim" if look.status is None else "yellow"))
    return Group(*shown)


def _table(status: Status, width: int) -> Table:
    from rich.table import Table

    from pbmvfl.deploy.monitoring.watch import lines_of

    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(width=_TITLE)
    table.add_column(overflow="fold")
    for line in lines_of(status):
        table.add_row(line.title, _words(line, width), style="yellow" if line.is_trouble else "")
    return table


def _words(line: Line, width: int) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    if line.share is None:
        return Text(line.words)
    bar = ProgressBar(total=1.0, completed=line.share, width=_BAR if width >= _WIDE else _BAR // 2)
    both = Table.grid(padding=(0, 1, 0, 0))
    both.add_row(bar, Text(line.words))
    return both


# --- Logs ---


def _print_lines(console: Console, lines: Iterable[LogLine], json_: bool) -> None:
    from rich.text import Text

    for line in lines:
        if json_:
            print(json.dumps(line.values), flush=True)
            continue
        said = Text()
        said.append(f"{_local(line.text('time'))}  ", style="dim")
        said.append(f"{line.level:<8}", style=_STYLES[line.level])
        said.append(line.text("words"), style=_STYLES[line.level])
        if run := line.text("run"):
            said.append(f"  ({run})", style="dim")
        console.print(said, soft_wrap=True)


def _local(moment: str) -> str:
    """Format a time stamp in this machine's local time, like other logs there."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return moment
