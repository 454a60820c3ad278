"""`pbmvfl reproduce`: reproduce the paper's tables and figures beside the printed values."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from pbmvfl.research.reproduction.studies import Study
    from pbmvfl.research.reproduction.study_runner import OnProgress, Run, StudyRunner


class StudyName(StrEnum):
    """Name of a study that can be reproduced."""

    TABLE1 = "table1"
    TABLE4 = "table4"
    TABLE6 = "table6"
    FIGURE_ACTIVITY = "figure-activity"
    FIGURE_PHISHING = "figure-phishing"
    FIGURE_CIFAR = "figure-cifar"
    FIGURE_MODELNET = "figure-modelnet"
    FIGURE_IMAGENET = "figure-imagenet"
    ALL = "all"


class DeviceName(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


def reproduce(
    study: Annotated[StudyName, typer.Argument(help="A table or figure of the paper, or all of them.")],
    quick: Annotated[bool, typer.Option("--quick", help="A smoke run of seconds on few rows, for CI.")] = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Public seeds 0, 1, ...")] = 3,
    device: Annotated[DeviceName, typer.Option("--device", help="Where to simulate.")] = DeviceName.CPU,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Run nothing: write tables and figures of the runs that are there.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Runs, tables and figures go here; what is there already is not run.")
    ] = None,
    limit_epochs: Annotated[
        int | None, typer.Option("--limit-epochs", min=1, help="Stop every run here; a larger limit continues.")
    ] = None,
    root: Annotated[Path | None, typer.Option("--root", help="Folder of local copies of the data.")] = None,
    studies: Annotated[
        Path | None, typer.Option("--studies", help="Folder of own configs, NAME.json; default: those of the package.")
    ] = None,
) -> None:
    """Run what is missing of a table or figure and write our numbers beside the printed ones.

    Noise is simulated: an epsilon in these results is that of the same plan in a deployment.
    """
    from rich.console import Console

    from pbmvfl.research.reproduction.studies import STUDIES, read_study

    console = Console(highlight=False)
    _check_device(device)
    out = out or Path("runs") / ("reproduce-quick" if quick else "reproduce")
    wanted = STUDIES if study is StudyName.ALL else (study.value,)
    for name in wanted:
        _reproduce(
            console,
            read_study(name, studies),
            quick=quick,
            no_run=no_run,
            seeds=1 if quick else seeds,
            device=device.value,
            out=out,
            limit_epochs=limit_epochs,
            root=root,
        )


def _check_device(device: DeviceName) -> None:
    import torch

    from pbmvfl.errors import PlanError

    if device is DeviceName.CUDA and not torch.cuda.is_available():
        raise PlanError("device=cuda: torch finds no CUDA device here; use --device cpu")


def _reproduce(
    console: Console,
    study: Study,
    *,
    quick: bool,
    no_run: bool,
    seeds: int,
    device: str,
    out: Path,
    limit_epochs: int | None,
    root: Path | None,
) -> None:
    import torch

    from pbmvfl.errors import DataError
    from pbmvfl.research.reproduction.publish import Publisher
    from pbmvfl.research.reproduction.study_runner import NO_DATA, StudyRunner

    if quick:
        study = study.quickened()
    if study.dataset in ("activity", "phishing"):
        torch.set_num_threads(1)  # small dense networks run slower with several threads
    runner = StudyRunner(study, out=out, seeds=seeds, device=device, data_folder=root, limit_epochs=limit_epochs)
    console.print(f"[bold]{study.name}[/]  {study.title}")
    try:
        missing = runner.missing()
    except DataError as error:
        if study.dataset == "imagenet100":
            console.print(f"  {NO_DATA}")
            return
        raise error
    if runner.uses_stand_in:
        console.print("  made-up rows stand in for the data: there is no copy of it here")
    total = len(list(runner.runs()))
    if no_run:
        console.print(f"  {len(missing)} of {total} runs are missing or short; showing what is there")
    else:
        console.print(f"  {total - len(missing)} of {total} runs are there, {len(missing)} to go")
        _run_missing(console, runner, len(missing))
    for written in Publisher(runner, out).publish():
        console.print(f"  {written}", markup=False, soft_wrap=True)


def _run_missing(console: Console, runner: StudyRunner, num_runs: int) -> None:
    with _progress(console, runner, num_runs) as on_progress:
        try:
            runner.run_missing(on_progress)
        except KeyboardInterrupt:
            console.print("  stopped; finished runs are kept, and the same command goes on with the others")
            raise SystemExit(130) from None


@contextmanager
def _progress(console: Console, runner: StudyRunner, num_runs: int) -> Iterator[OnProgress]:
    """Show a progress bar over the epochs of all missing runs, with the time left.

    A run that stops early counts as complete. In a file or a pipe, print one line per run instead.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("  {task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]} of {task.fields[runs]} runs"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    started = time.perf_counter()
    with Progress(
        *columns, console=console, transient=True, disable=not (num_runs and console.is_terminal)
    ) as progress:
        task = progress.add_task("", total=num_runs * runner.limit_epochs, done=0, runs=num_runs)
        done = 0

        def on_progress(run: Run, epochs: int, line: dict[str, Any] | None) -> None:
            nonlocal done
            if line is None:
                done += 1
                progress.update(task, advance=runner.limit_epochs - epochs, done=done)
                if not console.is_terminal:
                    spent = time.perf_counter() - started
                    console.print(f"  {done} of {num_runs} runs after {spent:.0f} s: {run.label}, {epochs} epochs")
                return
            metric = runner.study.metric
            value = f", {metric} {line[metric]:.3f}" if metric in line else ""
            progress.update(task, advance=1, description=f"{run.label}, epoch {epochs}{value}")

        yield on_progress
