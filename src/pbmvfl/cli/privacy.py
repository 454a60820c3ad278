"""`pbmvfl privacy`: the epsilon of given settings, and the epsilon that a run has spent."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pbmvfl._text import for_json
from pbmvfl.cli.data_options import PlanFile, Source, known_data
from pbmvfl.cli.options import AsJson, TableOptions, plan_options, say
from pbmvfl.cli.train import read_plan
from pbmvfl.errors import PlanError, RunFolderError
from pbmvfl.federation.run_folder import RunFolder, RunSource
from pbmvfl.ledger.spending import epsilon_of_run
from pbmvfl.mechanisms import MECHANISMS
from pbmvfl.plan.flat_names import algorithm_of, plan_settings
from pbmvfl.plan.groups import Algorithm
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.conversion import check_delta, usual_delta
from pbmvfl.privacy.table import format_epsilon, privacy_notes, privacy_table
from pbmvfl.privacy.units import SERVER, Accounting, Adversary, Unit

if TYPE_CHECKING:
    from pbmvfl.federation.results import Result


# --- `pbmvfl privacy`: the epsilon of given settings ---


_SIZES = ("num_parties", "num_samples")
_NEEDED = (*_SIZES, "embedding_dim", "num_epochs")
#: Options with defaults, which are present even if the user gave none.
_USUAL = ("mechanism", "batch_size", "noise_multiplier")
#: Options with which a dataset is still planned within the usual budget.
_PLANNED = ("algorithm", "label_epsilon")


@plan_options(
    *("num_parties", "num_samples", "algorithm", "mechanism", "label_epsilon", "embedding_dim", "secure_aggregation"),
    *("num_epochs", "batch_size", "noise_multiplier"),
    defaults=_USUAL,
)
def privacy(
    *,
    source: Source = None,
    table: TableOptions,
    plan_file: PlanFile = None,
    choices: dict[str, Any],
    delta: Annotated[
        float | None,
        typer.Option(help="Of every epsilon. Default: the run's own, or a tenth of 1/N, at most 1e-5."),
    ] = None,
    colluding_parties: Annotated[
        int | None,
        typer.Option(
            help="t: parties on the adversary's side. Default: a table of three adversaries.", show_default=False
        ),
    ] = None,
    json_: AsJson = False,
) -> None:
    """The exact epsilon of a plan, for every unit, adversary and way of counting.

    [bold]paper[/] counts a unit's own releases only, as the paper does, and is not a proof.
    [bold]strict[/] counts every release that can depend on the unit; a theorem under the conditions in --json.

    [bold]Try[/]  pbmvfl privacy runs/phishing-001

    For a dataset or --data alone it is that of the plan that `pbmvfl train` would make, with --algorithm or without;
    with numbers, that of those, in joint rounds.
    """
    if delta is not None:
        check_delta(delta)
    known = known_data(source=source, table=table, plan_file=plan_file, given=choices, load=False)
    by_hand = any(name not in (*_USUAL, *_SIZES, *_PLANNED) for name in choices)
    if (known.folder or known.plan_file or known.data) is not None and not by_hand:
        if known.data is not None:
            planned = {name: choices[name] for name in _PLANNED if name in choices}
            subject = _Subject(plan=Plan.for_data(known.data, **planned))
        else:
            path = known.folder or known.plan_file
            assert path is not None
            subject = _Subject.read(path)
            if algorithm_of({"algorithm": choices.get("algorithm")}) not in (None, subject.plan.algorithm):
                raise PlanError(
                    f"algorithm={choices['algorithm']}, but {path} has algorithm={subject.plan.algorithm}; leave "
                    "--algorithm out"
                )
        _show(subject, delta=delta, as_json=json_)
        return
    if algorithm_of(choices) is Algorithm.STAGED:
        raise PlanError(
            "--algorithm staged has no epsilon by numbers: they are of joint rounds; give a dataset, --data TABLE or "
            "the file of `pbmvfl plan --out`"
        )
    choices = {**choices, **{name: known.sizes[name] for name in _SIZES if name in known.sizes}}
    if missing := [name for name in _NEEDED if name not in choices]:
        options = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise PlanError(f"give a dataset, --data TABLE, a run folder or a plan's file, or say {options}")
    delta = usual_delta(choices["num_samples"]) if delta is None else delta
    # The user could mistake an epsilon of default settings for the epsilon of their own.
    settings = plan_settings()
    numbers = MECHANISMS[choices["mechanism"]].own_settings()
    unsaid = [name for name in numbers if name not in choices and settings[name].kind is not bool]
    if unsaid:
        options = ", ".join("--" + name.replace("_", "-") for name in unsaid)
        raise PlanError(f"mechanism={choices['mechanism']} has numbers that were not given; say {options}")
    plan = Plan.of(**choices, num_classes=2)
    adversaries = None
    if colluding_parties is not None:
        chosen = Adversary(colluding_parties=colluding_parties)
        alone = (Adversary(server=False, colluding_parties=colluding_parties),) if colluding_parties else ()
        adversaries = tuple(dict.fromkeys((SERVER, chosen, *alone)))
    bounds = plan.privacy(delta=delta, adversaries=adversaries)
    notes = privacy_notes(plan.training_run(), num_samples=plan.num_samples, delta=delta)
    if json_:
        shown = {"bounds": bounds.to_dicts(), **_rounded_beta(plan), "plan": plan.to_dict(), "notes": notes}
        print(json.dumps(shown, indent=2))
        return
    from rich.console import Console

    from pbmvfl.cli.tables import print_notes, print_privacy

    console = Console(highlight=False)
    print_privacy(console, bounds, title="epsilon")
    print_notes(console, notes)


def _rounded_beta(plan: Plan) -> dict[str, float]:
    """Return the beta in use after rounding, for mechanisms that have one."""
    return {"beta": plan.beta_16 / 65536} if "beta" in plan.release.own_settings() else {}


# --- `pbmvfl privacy RUN`: the epsilon of a run or a plan, and of the parties' ledgers ---


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """A plan, or a run with its result and the folder of its ledgers."""

    plan: Plan
    result: Result | None = None
    source: RunSource | None = None

    @classmethod
    def read(cls, path: Path) -> _Subject:
        """Read a run folder or a plan file."""
        if path.is_dir():
            folder = RunFolder.existing(path)
            return cls(plan=folder.read_plan(), result=folder.read_result(), source=folder.read_source())
        if not path.is_file():
            raise RunFolderError(f"run={str(path)!r} is neither a run folder nor a plan's file; give one that exists")
        return cls(plan=read_plan(path))


def _show(subject: _Subject, *, delta: float | None, as_json: bool) -> None:
    """Print the privacy tables of a plan or a run."""
    plan, result, source = subject.plan, subject.result, subject.source
    if delta is None:
        delta = usual_delta(plan.num_samples) if source is None else source.delta
    run = plan.training_run() if result is None else result.training_run
    known = result is not None and result.noise_is_seeded
    by_ledger = [] if source is None or source.ledger is None else _spent_by_ledgers(source, delta)
    counted = {str(unit): epsilon_of_run(run, unit, delta=delta) for unit in (Unit.CELL, Unit.RECORD)}
    splits = run.splits if run.charges_by_split else ()
    if as_json:
        shown: dict[str, Any] = {
            "bounds": privacy_table(run, delta=delta, noise_is_known=known).to_dicts(),
            "bounds_by_split": {
                split: privacy_table(run.of_split(split), delta=delta, noise_is_known=known).to_dicts()
                for split in splits
            },
            "strict_as_ledgers_count": for_json(counted),
            "ledgers": for_json(by_ledger),
            "plan": plan.to_dict(),
        }
        print(json.dumps(shown, indent=2))
        return
    from rich.console import Console

    from pbmvfl.cli.tables import print_notes, print_privacy_of_rows

    console = Console(highlight=False)
    title = "epsilon that was spent" if result is not None else "epsilon that this will cost"
    print_privacy_of_rows(console, run, delta=delta, title=title, noise_is_known=known)
    said = ", ".join(f"{format_epsilon(value)} for a {unit}" for unit, value in counted.items())
    console.print(f"as ledgers count (which holds also for what is not planned yet): {said}")
    for each in by_ledger:
        spent = ", ".join(f"{format_epsilon(value)} for a {unit}" for unit, value in each.items() if unit != "ledger")
        assert source is not None
        say(f"{each['ledger']}: {spent}, all runs of {source.rows.name!r} in it together")
    print_notes(console, privacy_notes(run, num_samples=plan.num_samples, delta=delta))


def _spent_by_ledgers(source: RunSource, delta: float) -> list[dict[str, Any]]:
    from pbmvfl.ledger.database import ENDING, file_name
    from pbmvfl.ledger.ledger import Ledger
    from pbmvfl.ledger.ledger_folder import LABEL_HOLDER
    from pbmvfl.ledger.spending import fixed_plan_epsilon

    assert source.ledger is not None
    found, dataset = [], source.rows.name
    for path in sorted(Path(source.ledger).glob(f"*{ENDING}")):
        with contextlib.closing(Ledger(path, read_only=True)) as ledger:
            if dataset not in ledger.datasets():
                continue
            units = (Unit.LABEL,) if path.name == file_name(LABEL_HOLDER) else (Unit.CELL, Unit.RECORD)
            spent = {
                str(unit): fixed_plan_epsilon(
                    ledger, dataset, unit=unit, accounting=Accounting.STRICT, colluding_parties=0, delta=delta
                )
                for unit in units
            }
        found.append({"ledger": str(path), **spent})
    return found
