"""`pbmvfl attack`: what an attacker gets from what leaves, beside what the account permits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pbmvfl._files import PRIVATE_FILE, write_atomically
from pbmvfl.cli.options import AsJson
from pbmvfl.errors import PlanError, RunFolderError

if TYPE_CHECKING:
    from rich.console import Console

    from pbmvfl.attacks.hole import HoleResult
    from pbmvfl.attacks.scores import Score
    from pbmvfl.attacks.suite import AttackReport


def attack(
    *,
    source: Annotated[
        str | None,
        typer.Argument(help="A run folder, or a named dataset: phishing, digits, activity.", show_default=False),
    ] = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Attack this plan's training, on the rows of DATASET.")
    ] = None,
    show_hole: Annotated[
        bool,
        typer.Option("--show-hole", help="Play the game that the paper's count of releases does not survive."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for attack.json and pictures. Default: none, or the run folder.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the attacker's own choices and made-up noise.")] = 0,
    json_: AsJson = False,
) -> None:
    """Attack a run, a plan or a dataset's usual plans, and show what is got beside what the account permits.

    [bold]Try[/]  pbmvfl attack digits --out attack-digits

    [bold]Try[/]  pbmvfl attack phishing --show-hole

    Every line has three numbers: the attack, the same attacker who saw nothing (the baseline), and the account's bound.
    Each attack meets exact sums (nothing private), the plan's own settings, and a stronger setting.
    Noise is made up on your own rows: nothing is released and no ledger is charged.
    A score that is surely above its bound ends with code 5: the program does not do what its account says.
    """
    import torch
    from rich.console import Console

    from pbmvfl.attacks.scores import ALARM_EXIT

    torch.set_num_threads(1)
    if out is not None and out.exists() and not out.is_dir():
        raise RunFolderError(f"out={str(out)!r} is a file; name a folder")
    console = Console(stderr=json_, quiet=json_, highlight=False)
    data, plan, folder = _subject(source, plan_file)
    # In the run folder results are readable by their owner alone, like its other files; --out means to share them.
    mode = PRIVATE_FILE if out is None else None
    out = folder if out is None else out

    def say(text: str) -> None:
        console.print(f"[dim]{text} ...[/]")

    if show_hole:
        from pbmvfl.attacks.hole import show_hole as play

        found = play(data, seed=seed, say=say)  # by a plan of its own, on these rows
        shown: dict[str, Any] = {"format": 1, "seed": seed, "dataset": data.name, "hole": found.to_dict()}
        _write(out, "hole.json", shown, mode)
        if json_:
            print(json.dumps(shown, indent=2))
        else:
            _print_hole(console, found)
        alarmed = found.is_alarm
    else:
        from pbmvfl.attacks.suite import attack_data

        report = attack_data(data, plan=plan, seed=seed, say=say)
        shown = {"format": 1, "seed": seed, "dataset": data.name, **report.to_dict()}
        if out is not None:
            from pbmvfl.report.facts import ATTACK_FILE
            from pbmvfl.report.plots import draw_attack

            _write(out, ATTACK_FILE, shown, mode)
            for picture in draw_attack(report, out):
                if mode is not None:
                    picture.chmod(mode)
        if json_:
            print(json.dumps(shown, indent=2))
        else:
            _print_scores(console, report)
        alarmed = report.is_alarm
    if not json_ and out is not None:
        console.print(f"results and pictures: {out}", markup=False, soft_wrap=True)
    if alarmed:
        raise typer.Exit(ALARM_EXIT)


def _subject(source: str | None, plan_file: Path | None) -> tuple[Any, Any, Path | None]:
    """Return the rows, the plan if one is given, and the run folder if there is one."""
    from pbmvfl._text import did_you_mean
    from pbmvfl.cli.train import read_plan
    from pbmvfl.data.datasets import DATASETS
    from pbmvfl.federation.run_folder import NamedSource, RunFolder

    if source is None:
        raise PlanError(f"SOURCE is missing; give a run folder, or a dataset ({', '.join(DATASETS)})")
    plan = None if plan_file is None else read_plan(plan_file)
    if Path(source).is_dir():
        folder = RunFolder.existing(Path(source))
        return folder.read_source().rows.load(), plan or folder.read_plan(), Path(source)
    if source not in DATASETS:
        raise RunFolderError(
            f"source={source!r} is neither a run folder nor a dataset; permitted: {', '.join(DATASETS)}."
            + did_you_mean(source, DATASETS)
        )
    parties = None if plan is None else plan.num_parties
    return NamedSource(dataset=source, num_parties=parties).load(), plan, None


def _write(out: Path | None, name: str, values: dict[str, Any], mode: int | None) -> None:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / name, json.dumps(values, indent=2) + "\n", mode=mode)


def _print_hole(console: Console, found: HoleResult) -> None:
    from rich.table import Table

    from pbmvfl.privacy.table import format_epsilon

    table = Table(title="One cell, two values: which one was it?", title_justify="left")
    for title in ("what the attacker uses", "right", "advantage", "epsilon", "the account says"):
        table.add_column(title, justify="left" if title.startswith("what") else "right")
    for game, account in ((found.own, "paper"), (found.all, "paper"), (found.staged, "staged")):
        table.add_row(
            game.name,
            f"{game.right} of {game.games}",
            f"{game.advantage:.2f}, at least {game.advantage_at_least:.2f}",
            f"at least {game.epsilon_at_least:.2f}",
            f"{account}: epsilon {format_epsilon(game.epsilon_bound)}, advantage {game.advantage_bound:.2f}",
        )
    console.print(table)
    if found.is_shown:
        console.print(
            "The paper counts a row's own releases. Weights trained on the cell carry it into the releases of other "
            "rows, and the measured advantage is above what that count permits (95% confidence)."
        )
    else:
        console.print("Not shown on this data: the measured advantage is not above the paper's count.")
    said = "ABOVE its bound: an alarm" if found.is_alarm else "below its bound"
    console.print(f"Staged training with the same epsilon, every noisy sum given to the attacker: {said}.")


def _print_scores(console: Console, report: AttackReport) -> None:
    from rich.table import Table

    for title in dict.fromkeys(score.setting for score in report.scores):
        table = Table(title=title, title_justify="left")
        for name in ("attack", "attacker", "measure", "baseline", "attack gets", "account permits"):
            table.add_column(name, justify="left" if name in ("attack", "attacker", "measure") else "right")
        for score in (each for each in report.scores if each.setting == title):
            table.add_row(*_row(score))
        console.print(table)
    for note in report.notes:
        console.print(note, markup=False, soft_wrap=True)
    if not report.is_alarm:
        console.print("no score is surely above its bound")


def _row(score: Score) -> tuple[str, ...]:
    permitted = score.bound_words if score.bound is None else f"{score.bound:.3f} ({score.bound_words})"
    low, high = score.gain.low, score.gain.high
    return (
        score.attack,
        score.attacker,
        score.measure,
        f"{score.baseline:.3f}",
        f"{score.value:.3f} (gain {low:+.3f} to {high:+.3f}){' ALARM' if score.is_alarm else ''}",
        permitted,
    )
