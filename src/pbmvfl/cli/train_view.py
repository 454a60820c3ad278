"""Terminal output of a training run: the plan before it, progress and epochs during it, the result after it."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pbmvfl._compiled import is_compiling
from pbmvfl._files import not_written
from pbmvfl._text import counted
from pbmvfl.cli.descriptions import coupling_notes, describe_plan, print_result
from pbmvfl.cli.tables import print_notes, print_privacy_of_rows
from pbmvfl.cli.train import Prepared, RunOptions, uses_pictures
from pbmvfl.cli.train_summary import Paced, print_cost, print_few_notes, print_outcome, print_start, room_for_notes
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import LedgerError, ModelError, ProtocolError, TransportError
from pbmvfl.federation.epoch_history import EpochLine
from pbmvfl.federation.federation import Federation, Parties, newest_common_round
from pbmvfl.federation.metrics_summary import describe_classes, notes_on_classes
from pbmvfl.federation.release_log import ReleaseLog
from pbmvfl.federation.results import Result
from pbmvfl.federation.run_folder import TableSource
from pbmvfl.plan.learning_notes import learning_notes_for
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.schedule import RowUses
from pbmvfl.privacy.accounting import TrainingRun as ReleasedRun
from pbmvfl.privacy.table import privacy_notes
from pbmvfl.report.plots import draw_curves
from pbmvfl.training.metrics import ClassFigures, class_figures
from pbmvfl.wire.traffic import Traffic, human_bytes

#: Exit codes of runs that ended early without an error: a party's ledger ended it, or training diverged.
STOPPED_BY_LEDGER, DIVERGED = 3, 4
_MOST_LINES = 30


class TrainingRun:
    """Training run of `pbmvfl train`, shown on the terminal, or silent with --json."""

    def __init__(self, run: Prepared, how: RunOptions, *, parties: Parties, resumed: bool, delta: float) -> None:
        """Show and train a run; `delta` is of every epsilon."""
        self._run, self._how, self._parties, self._resumed, self._delta = run, how, parties, resumed, delta
        self._folder, self._plan, self._data = run.folder, run.plan, run.data
        self._ledger = None if run.source.ledger is None else Path(run.source.ledger)
        usual_threads = (os.cpu_count() or 1) if uses_pictures(run.source.rows.dataset) else 1
        self._threads = usual_threads if how.threads is None else how.threads
        self._shown: ReleasedRun | None = None
        self._lines = 0
        self._console = Console(stderr=how.json_, quiet=how.json_, highlight=False)

    def go(self) -> None:
        import torch

        torch.set_num_threads(self._threads)
        result = self._folder.read_result() if self._resumed else None
        if result is not None and result.diverged:
            self._say(f"{self._folder.path} has diverged and is not continued; this is its result.")
        elif result is not None and not result.stopped:
            self._say(f"{self._folder.path} is finished already; this is its result.")
        else:
            if self._resumed:
                self._require_ledgers()
            if result is not None and self._how.verbose:
                self._say(f"{self._folder.path} was ended by a party's ledger; training continues from there.")
            self._show_plan()
            with self._saying_how_to_go_on():
                result = self._train()
                model = self._folder.new_model()  # replaces the model of an earlier session
                if result.model is not None and not result.diverged:
                    result.model.save(model)
                self._draw(result)
                self._folder.write_result(result, delta=self._delta)
        if self._how.json_:
            print(result.to_json(delta=self._delta), end="")
        else:
            if self._how.verbose:
                is_news = self._resumed or bool(result.stopped)
                print_result(self._console, result, delta=self._delta, is_news=is_news)
                others = ", curves.png and model/" if self._folder.model.is_dir() else " and curves.png"
                self._say(f"result.json, history.csv{others} are in {self._folder.path}")
            else:
                print_outcome(
                    self._console,
                    result,
                    delta=self._delta,
                    shown=self._shown,
                    folder=self._folder.path,
                    used=self._lines,
                )
            self._show_next()
        if result.stopped:
            raise SystemExit(DIVERGED if result.diverged else STOPPED_BY_LEDGER)

    def _show_next(self) -> None:
        """Print the commands that use the model, or without one those that say why the run ended."""
        run = shlex.quote(str(self._folder.path))
        if not self._folder.model.is_dir():
            shown = "" if self._ledger is None else f"ledger show {shlex.quote(os.path.relpath(self._ledger))}, pbmvfl "
            self._say(f"next: pbmvfl {shown}report {run}")
        else:
            rows = self._folder.read_source().rows
            ask = f"evaluate {run}"
            if isinstance(rows, TableSource):
                files = "NEW.csv" if isinstance(rows.data, str) else "PARTY=NEW.csv ..."
                named = "" if rows.id is None else f" --id {shlex.quote(rows.id)}"
                ask = f"predict {run} --data {files}{named}"
            self._say(f"next: pbmvfl {ask}, pbmvfl report {run}")

    @contextlib.contextmanager
    def _saying_how_to_go_on(self) -> Iterator[None]:
        """Print the resume command if training fails: checkpoints and charges are kept."""
        try:
            yield
        except KeyboardInterrupt:
            self._hint(f"stopped; continue with: {self._resume_command}")
            raise SystemExit(130) from None
        except (ProtocolError, TransportError, LedgerError, ModelError, OSError) as error:
            if self._folder.checkpoints.exists() or not isinstance(error, LedgerError):
                self._hint(f"what is trained is kept; continue with: {self._resume_command}")
            if isinstance(error, OSError) and error.filename is None:  # a full-disk error names no file
                raise not_written(self._folder.path, error) from error
            raise

    @property
    def _resume_command(self) -> str:
        return f"pbmvfl train --resume {shlex.quote(str(self._folder.path))}"

    def _draw(self, result: Result) -> None:
        path = self._folder.curves
        try:
            draw_curves(result, path, delta=self._delta)
        except OSError as error:
            raise not_written(path, error) from error

    def _require_ledgers(self) -> None:
        """Refuse a missing folder of ledgers: a new one would lack this run's releases and the owners' limits."""
        if self._ledger is not None and not self._ledger.is_dir():
            raise LedgerError(
                f"{self._folder.path} is a run with ledgers, and their folder is not where it was: "
                f"ledger={str(self._ledger)!r}; put it back there, or start a new run"
            )

    def _train(self) -> Result:
        plan = self._plan
        rounds = len(plan.schedule)
        bar = Progress(
            BarColumn(bar_width=18),
            RoundsColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal or self._how.json_,
            transient=not self._how.verbose,
        )
        with bar:
            task = bar.add_task("training", total=rounds, shown="")
            watch = _Watch(bar, task, plan)
            paced = Paced(self._say)

            def on_epoch(line: EpochLine) -> None:
                watch.on_epoch(line)
                said = _describe_epoch(line, plan.num_epochs)
                if not self._how.verbose:
                    if bar.disable:
                        self._lines += paced(said)
                    return
                # One line per epoch, or per several if there are many; on a terminal the lines stay above the bar.
                few = -(-plan.num_epochs // _MOST_LINES)
                if line.epoch % few == 0 or line.epoch == plan.num_epochs:
                    self._say(said)

            return Federation(plan, parties=self._parties).fit(
                self._data,
                checkpoints=self._folder.checkpoints,
                sessions=self._folder.sessions,
                checkpoint_every=self._how.checkpoint_every,
                ledger=self._ledger,
                exact_metrics=self._how.exact_metrics,
                until_limit=self._how.until_limit,
                redraw_labels=self._how.redraw_labels,
                on_round=watch.on_round,
                on_epoch=on_epoch,
            )

    # --- Tables ---

    def _show_plan(self) -> None:
        plan, data = self._plan, self._data
        run = plan.training_run()
        released = self._released() if self._resumed else None
        if released is not None:  # releases of earlier sessions count too
            first_round, uses, public_start = released
            run = plan.training_run(uses, public_start=public_start)
        in_all = " in all" if released is not None else ""
        classes = class_figures(data.class_names, data.train_labels, data.test_labels)
        goes_on = "" if released is None else f"continues at round {first_round:,} of {len(plan.schedule):,}"
        if self._how.verbose:
            for line in self._run.ledger_lines:
                self._say(line)
            self._print_plan(classes)
            if goes_on:
                self._say(goes_on)
            title = f"epsilon that this will cost{in_all}"
            print_privacy_of_rows(self._console, run, delta=self._delta, title=title)
            print_notes(self._console, [*self._urgent_notes(), *self._other_notes()])
            print_notes(self._console, notes_on_classes(classes), kind="warning")
            return
        self._shown = run
        lines = print_start(self._console, plan, data)
        if goes_on:
            self._say(goes_on)
            lines += 1
        lines += print_cost(self._console, run, delta=self._delta, title=f"cost{in_all}, at most")
        notes = [("warning", note) for note in notes_on_classes(classes)]
        notes += [("note", note) for note in self._urgent_notes()] + [("", line) for line in self._run.ledger_lines]
        notes += [("note", note) for note in self._other_notes()]
        room = room_for_notes(self._console, lines, may_end_early=self._how.until_limit)
        self._lines = lines
        if room > 0 or not goes_on:  # a run that continues has shown its notes before
            self._lines += print_few_notes(self._console, notes, room=room, others="with --verbose")

    def _print_plan(self, classes: Sequence[ClassFigures]) -> None:
        plan, data = self._plan, self._data
        table = Table(show_header=False, box=None, padding=(0, 2))
        rows = f"{counted(data.num_samples, 'training row')} and {counted(data.num_test_samples, 'test row')}"
        table.add_row("data", escape(f"{data.name}: {rows}, {data.num_classes} classes"))
        table.add_row("classes", escape(describe_classes(classes)))
        table.add_row("parties", escape(_describe_parties(data)))
        for title, words in describe_plan(plan):
            table.add_row(title, escape(words))
        table.add_row("run folder", escape(str(self._folder.path)))
        self._console.print(table)

    def _released(self) -> tuple[int, tuple[RowUses, ...], bool] | None:
        """Return the state of a resumed run, or None if it released nothing.

        The state is the first round to run, the uses of rows by the end of the run, and whether the initial weights
        were public.
        """
        with contextlib.closing(ReleaseLog(self._folder.sessions, moved_from=self._folder.checkpoints)) as log:
            if not log.records:
                return None
            first_round = newest_common_round(self._plan, self._folder.checkpoints)
            return first_round, log.uses_after(self._plan, first_round=first_round), log.public_start

    def _say(self, text: str) -> None:
        """Print text without markup or line breaks, because it may name folders."""
        self._console.print(text, markup=False, soft_wrap=True)

    def _hint(self, text: str) -> None:
        """Print a hint, to stderr where only JSON goes to stdout."""
        Console(stderr=self._how.json_, highlight=False).print(text, markup=False, soft_wrap=True)

    def _urgent_notes(self) -> list[str]:
        """Return notes on an epsilon that protects nobody and on noise that leaves nothing to learn."""
        plan, notes = self._plan, learning_notes_for(self._plan, self._data)
        if all(mechanism.is_private for mechanism in plan.releases):
            notes = privacy_notes(plan.training_run(), num_samples=plan.num_samples, delta=self._delta) + notes
        return notes

    def _other_notes(self) -> list[str]:
        plan, notes = self._plan, [*self._run.notes, *self._data.notes]
        for mechanism in plan.releases if self._how.verbose else ():  # the table has what follows from them
            notes += mechanism.notes
        if plan.sends_labels and plan.label_epsilon is None:
            notes.append("the labels of the training rows go to every party; they are not protected by any epsilon")
        return [*notes, *coupling_notes(plan)]


def _describe_parties(data: VerticalDataset) -> str:
    shapes = ["x".join(map(str, part.shape[1:])) for part in data.train_features]
    if len(set(shapes)) == 1:
        return f"{data.num_parties}, each with {shapes[0]} {'column' if shapes[0] == '1' else 'columns'}"
    return ", ".join(f"{name} ({shape})" for name, shape in zip(data.party_names, shapes, strict=True))


def _describe_epoch(line: EpochLine, num_epochs: int) -> str:
    shown = ("train_loss", "train_accuracy", "train_auprc", "test_accuracy", "test_auprc")
    measured = line.metrics
    values = ", ".join(f"{name.replace('_', ' ')} {_figure(measured[name])}" for name in shown if name in measured)
    return f"epoch {line.epoch} of {num_epochs} after {line.seconds:.1f} s" + (f": {values}" if values else "")


def _figure(value: float) -> str:
    """Format a metric; a value of a diverged training in short form."""
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"


class RoundsColumn(ProgressColumn):
    """Rounds and figures; before the first round, what the wait is for."""

    def render(self, task: Task) -> Text:
        if not task.completed:
            return Text("warm-up: compiling loops" if is_compiling() else "warm-up")
        return Text(f"round {task.completed:.0f}/{task.total:.0f}  {task.fields['shown']}")


class _Watch:
    """Callbacks that update the progress bar."""

    def __init__(self, bar: Progress, task: Any, plan: Plan) -> None:
        self._bar, self._task, self._plan = bar, task, plan
        self._score = ""
        self._since: tuple[float, int] | None = None
        self._smooth: float | None = None
        self._shown_at = 0.0

    def on_round(self, completed: int, loss: float, traffic: Traffic) -> None:
        now = time.perf_counter()
        if self._since is None:
            self._since = (now, completed)
        self._smooth = loss if self._smooth is None else 0.95 * self._smooth + 0.05 * loss
        if now - self._shown_at < 0.1 and completed < len(self._plan.schedule):
            return
        self._shown_at = now
        started, first = self._since
        speed = (completed - first) / (now - started) if completed > first else 0.0
        moved = human_bytes(traffic.bytes_up + traffic.bytes_down)
        seen = "" if math.isnan(self._smooth) else f"loss {_figure(self._smooth)}"
        shown = f"{seen}{self._score}  {speed:.0f}/s  {moved}"
        self._bar.update(self._task, completed=completed, shown=shown)

    def on_epoch(self, line: EpochLine) -> None:
        for name, title in (("train_auprc", "AUPRC"), ("train_accuracy", "accuracy")):
            if name in line.metrics:
                self._score = f"  {title} {line.metrics[name]:.3f}"
                return
