"""View of a site's job for its operators: the status in words, whether it is over, and how it ended.

A site reads only its own status file. At the label holder that shows what the protocol's own noisy sums show; at a
party its own rounds, and its epsilon from its own ledger.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pbmvfl._text import counted
from pbmvfl.deploy.monitoring.status import Role, State, Status, read_status
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.wire.traffic import human_bytes

#: Seconds between two looks, until silence is reported, and until an ended process is taken for the end.
PAUSE, SILENCE, PATIENCE = 0.25, 3.0, 60.0


class Line(NamedTuple):
    """One line of the view: a title, a text, and the filled share of a bar."""

    title: str
    words: str
    share: float | None = None
    #: True if the operator should act on it: shown in another colour.
    is_trouble: bool = False


def heading(status: Status) -> str:
    """Return the title of the view: site, role, work and run."""
    parts = [status.site, str(status.role), status.work, f"run {status.run}" if status.run else ""]
    return " · ".join(part for part in parts if part)


def lines_of(status: Status) -> list[Line]:
    """Return a status as lines for a person; unknown values are left out."""
    lines = [_progress(status)]
    is_moving = status.seconds_since_news < SILENCE and status.process_is_alive and not status.state.is_over
    if status.rounds_per_second and is_moving:
        lines.append(Line("speed", f"{_rate(status.rounds_per_second)}{_left(status)}"))
    if status.role is Role.SERVER:
        if status.loss is not None:
            lines.append(Line("loss", f"{status.loss:.4g}, from what was released"))
        if status.parties and not status.state.is_over:
            lines.append(_parties(status))
    for each in status.epsilon:
        lines.append(_epsilon(each.spent, each.epsilon, f"{each.limit}, delta {each.delta:g}"))
    if status.bytes_up or status.bytes_down:
        lines.append(Line("traffic", f"{human_bytes(status.bytes_up)} up, {human_bytes(status.bytes_down)} down"))
    lines.append(_news(status))
    if status.last_error:
        lines.append(Line("error", status.last_error, is_trouble=True))
    return lines


def one_line(status: Status) -> str:
    """Return a status as one line, for a file or a pipe."""
    words = [f"{line.title}: {line.words}" for line in lines_of(status)]
    return f"{heading(status)}: " + "; ".join(words)


def as_json(status: Status) -> dict[str, Any]:
    """Return the status for machines, with what only this machine can tell."""
    return {
        **status.to_dict(),
        "process_is_alive": status.process_is_alive,
        "seconds_since_news": round(status.seconds_since_news, 3),
    }


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Result of one look at the status."""

    status: Status | None
    #: 0 or 1 once it is over, as an exit code.
    verdict: int | None
    words: str = ""


def watch(
    path: Path,
    *,
    run: str | None = None,
    once: bool = False,
    patience: float = PATIENCE,
    pause: float = PAUSE,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Watched]:
    """Look repeatedly until the job is done or has failed; the last look has a verdict.

    A process that ended without a result is not the end: the run may be submitted again, and another process resumes
    it. If none does for `patience` seconds, that is the end.
    """
    ended_at: float | None = None
    while True:
        status = read_status(path)
        if status is not None and run is not None and status.run != run:
            status = None
        if once:
            yield _single_look(status, run)
            return
        if status is None:
            yield Watched(status=None, verdict=None, words=_none(run))
        elif status.state.is_over:
            yield Watched(status=status, verdict=0 if status.state is State.DONE else 1)
            return
        elif status.process_is_alive:
            ended_at = None
            yield Watched(status=status, verdict=None)
        else:
            ended_at = clock() if ended_at is None else ended_at
            left = patience - (clock() - ended_at)
            if left <= 0:
                said = f"its process has ended without a word, and none went on for {patience:g} s"
                yield Watched(status=status, verdict=1, words=f"{said}; `pbmvfl logs` has what was said last")
                return
            words = f"waiting for another job that goes on with it, for {in_words(math.ceil(left))}"
            yield Watched(status=status, verdict=None, words=words)
        sleep(pause)


def _single_look(status: Status | None, run: str | None) -> Watched:
    if status is None:
        return Watched(status=None, verdict=1, words=_none(run))
    is_well = status.state is State.DONE or (status.state is not State.FAILED and status.process_is_alive)
    return Watched(status=status, verdict=0 if is_well else 1)


def _none(run: str | None) -> str:
    return "no job has said anything here yet" if run is None else f"no job of run {run} has said anything here yet"


def _progress(status: Status) -> Line:
    if not status.rounds_total:
        return Line(str(status.state), "", is_trouble=status.state is State.FAILED)
    share = min(status.round / status.rounds_total, 1.0)
    words = f"round {status.round:,} of {status.rounds_total:,} ({math.floor(100 * share)} %)"
    return Line(str(status.state), words, share, is_trouble=status.state is State.FAILED)


def _rate(rounds_per_second: float) -> str:
    if rounds_per_second < 1:
        return f"a round in {1 / rounds_per_second:.3g} s"
    return f"{rounds_per_second:,.3g} rounds/s" if rounds_per_second < 1000 else f"{rounds_per_second:,.0f} rounds/s"


def _left(status: Status) -> str:
    rounds = status.rounds_total - status.round
    if rounds <= 0 or not status.rounds_per_second:
        return ""
    return f", about {in_words(rounds / status.rounds_per_second)} left"


def _parties(status: Status) -> Line:
    missing = [name for name in status.parties if name not in status.parties_alive]
    words = f"{len(status.parties) - len(missing)} of {counted(len(status.parties), 'party', 'parties')} connected"
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        words += f"; missing: {shown}"
    return Line("parties", words, is_trouble=bool(missing))


def _epsilon(spent: float, limit: float, what: str) -> Line:
    share = min(spent / limit, 1.0) if limit > 0 and math.isfinite(spent) else 1.0
    return Line("epsilon", f"{format_epsilon(spent)} of {limit:g} ({what})", share, is_trouble=spent > limit)


def _news(status: Status) -> Line:
    seconds = status.seconds_since_news
    if status.state.is_over:
        took = in_words(max(status.updated - status.started, 0.0))
        return Line("took", f"{took}, ended {in_words(seconds)} ago")
    if not status.process_is_alive:
        return Line("news", f"none for {in_words(seconds)}; the process has ended", is_trouble=True)
    if seconds < SILENCE:
        return Line("news", "now; the process is alive")
    return Line("news", f"none for {in_words(seconds)}; the process is alive", is_trouble=seconds > 10 * SILENCE)


def in_words(seconds: float) -> str:
    """Format seconds: `0.4 s`, `12 s`, `3 min 20 s`, `5 h 2 min`, `3 days`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} days"
