"""`pbmvfl train`: train a federation on this machine, or resume a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pbmvfl._files import read_object
from pbmvfl.cli.options import (
    TRAINING_SETTINGS,
    AskedBudget,
    BudgetOptions,
    TableOptions,
    absolute,
    budget_option,
    data_option,
    option_in,
    plan_options,
    refuse_on_resume,
)
from pbmvfl.errors import CheckpointError, DataError, PlanError, RunFolderError
from pbmvfl.federation.run_folder import NamedSource, RunFolder, RunSource, TableSource
from pbmvfl.plan.flat_names import algorithm_of, is_planned
from pbmvfl.plan.groups import Algorithm, Network, Training
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.search import PlannedBudget, plan_for_budget
from pbmvfl.privacy.conversion import check_delta, usual_delta

if TYPE_CHECKING:
    from pbmvfl.data.vertical import VerticalDataset
    from pbmvfl.federation.federation import Parties


# ---
# Presets per dataset, for `pbmvfl train DATASET --paper` and for settings that explicit numbers leave open.


#: Plan fields. Presets of the paper's datasets have the paper's sizes and mechanism settings from the middle of its
#: tables: they reproduce the paper's accuracy at the paper's (very large) epsilon. For privacy, plan with a budget.
_PRESETS: dict[str, dict[str, Any]] = {
    # from `pbmvfl plan --epsilon 8 --delta 1e-5 --unit cell --accounting paper` with its sizes
    "digits": {
        "embedding_dim": 10,
        "num_trials": 16,
        "beta": 0.046,
        "num_epochs": 2,
        "batch_size": 8,
        "optimizer": "adam",
        "learning_rate": 0.002,
        "gradient_codec": "int8",
    },
    "phishing": {"num_trials": 32, "num_epochs": 20},
    "activity": {"num_trials": 64, "num_epochs": 30},
    "cifar10": {"beta": 0.15, "num_epochs": 30},
    "modelnet10": {"embedding_dim": 4096, "batch_size": 64, "num_trials": 8, "beta": 0.15, "num_epochs": 20},
    "imagenet100": {
        "embedding_dim": 128,
        "batch_size": 256,
        "num_trials": 8,
        "beta": 0.1,
        "learning_rate": 0.03,
        "num_epochs": 30,
    },
}
_OWN_TABLE: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.003, "num_epochs": 20}


def preset(dataset: str | None) -> dict[str, Any]:
    """Return the preset plan fields of a named dataset, or of a user's table if None."""
    return dict(_PRESETS.get(dataset, {})) if dataset is not None else dict(_OWN_TABLE)


def uses_pictures(dataset: str | None) -> bool:
    """Return whether the dataset has pictures, whose networks benefit from several threads."""
    return dataset in ("cifar10", "modelnet10", "imagenet100")


# --- Command ---


_run_option = option_in("Run")
#: Plan fields that the data determines and the user does not.
_SIZES = frozenset({"num_parties", "num_samples", "num_test_samples", "num_classes", "encoder"})
#: Plan fields that must agree with the data; a plan may leave the number of test rows open.
_SHARED_SIZES = ("num_parties", "num_samples", "num_classes")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of how a run is charged, trained and shown."""

    ledger: Annotated[Path | None, _run_option(help="Folder where every party keeps its ledger and its limits.")] = None
    until_limit: Annotated[
        bool,
        _run_option(
            "--until-limit", help="Run although a ledger's limit will end it early; without this such a run is refused."
        ),
    ] = False
    redraw_labels: Annotated[
        bool,
        _run_option(
            "--redraw-labels",
            help="Draw labels a second time, which is charged, if --ledger knows draws of them that its store lost.",
        ),
    ] = False
    exact_metrics: Annotated[
        bool,
        _run_option("--exact-metrics", help="The owners permit exact metrics of rows with a limit; ledgers note it."),
    ] = False
    checkpoint_every: Annotated[int, _run_option(help="Epochs between checkpoints.", min=1)] = 1
    parties: Annotated[str, _run_option(help="in-process | processes: a process for each party.")] = "in-process"
    threads: Annotated[int | None, _run_option(help="torch threads. Default: 1, or all cores for pictures.", min=1)] = (
        None
    )
    verbose: Annotated[
        bool, _run_option("--verbose", "-v", help="Print the whole plan, every adversary, epochs and notes.")
    ] = False
    json_: Annotated[bool, _run_option("--json", help="Print result.json to stdout and nothing else.")] = False


@plan_options("num_parties", *TRAINING_SETTINGS)
def train(
    *,
    dataset: Annotated[
        str | None,
        typer.Argument(
            help="digits, phishing, activity, cifar10, modelnet10 or imagenet100; or a run folder, to train its "
            "plan again; or give --data.",
            show_default=False,
        ),
    ] = None,
    table: TableOptions,
    dataset_name: Annotated[
        str | None,
        data_option(help="Your name for the people in --data; ledgers count by it. Default: the file's name."),
    ] = None,
    root: Annotated[Path | None, data_option(help="Folder with local copies of the datasets.")] = None,
    budget: BudgetOptions,
    same_rows: Annotated[
        bool,
        budget_option(
            "--same-rows", help="Rows that are trained on are also predicted: --epsilon is for both together."
        ),
    ] = False,
    paper: Annotated[
        bool,
        budget_option(
            "--paper",
            help="Algorithm pbm with the paper's sizes for this dataset, instead of a budget: a very large epsilon.",
        ),
    ] = False,
    choices: dict[str, Any],
    out: Annotated[Path | None, _run_option(help="Run folder; must not exist. Default: a new one in runs/.")] = None,
    resume: Annotated[Path | None, _run_option(help="Continue the run in this folder from its checkpoint.")] = None,
    plan_file: Annotated[
        Path | None, _run_option("--plan", help="A plan made by `pbmvfl plan --out`; options given here win.")
    ] = None,
    how: RunOptions,
) -> None:
    """Train a federation: every party in its own state machine, every byte as between organisations.

    [bold]Try[/]  pbmvfl train phishing --epsilon 2

    A budget is all it needs, epsilon 8 if you give none: it is a theorem, and the rest is planned, with --algorithm
    staged. What reproduces the paper is opt-in: --algorithm pbm, --paper, --accounting paper, or numbers without a
    budget.

    [bold]Own data[/]  pbmvfl train --data people.csv --label churn --columns "bank=income,debt;shop=visits,basket"

    The run folder gets plan.json, history.csv, result.json, curves.png and checkpoints/.

    [bold]Ends with[/]  0 done; 2 bad input, or a disk that is full; 3 ended by a party's ledger; 4 the loss diverged;
    130 interrupted. After 2, 3 and 130 what is trained is kept: --resume goes on.
    """
    given = dict(choices)
    num_parties = given.pop("num_parties", None)
    rows = {**table.to_dict(), "dataset_name": dataset_name}
    delta = budget.delta
    from pbmvfl.cli.ledger_forecast import look_ahead, without_stub
    from pbmvfl.cli.train_view import TrainingRun
    from pbmvfl.federation.federation import Parties

    if delta is not None:
        check_delta(delta)
    where = Parties.named(how.parties)
    planned = {} if plan_file is None else read_plan(plan_file).flat()
    again = None if dataset is None or not (Path(dataset) / "plan.json").is_file() else Path(dataset)
    if resume is not None:
        if out is not None:
            raise RunFolderError(f"--out {out} and --resume {resume}: a resumed run stays in its folder")
        refuse_on_resume({**budget.given, "same_rows": same_rows or None, "paper": paper or None})
        asked = {"dataset": dataset, **rows, "root": absolute(root), "ledger": absolute(how.ledger)}
        if num_parties is not None:
            given["num_parties"] = num_parties
        run = _resumed(resume, asked, planned, given)
        run = replace(run, ledger_lines=look_ahead(run.plan, run.data, run.source, how, run.folder))
    else:
        wanted = num_parties if num_parties is not None else planned.get("num_parties")
        public_seed = given.get("seed", planned.get("seed", 0))
        if again is None:
            source = RunSource(rows=source_of(dataset, rows, wanted, root, public_seed), ledger=absolute(how.ledger))
        else:
            source, planned, delta = _again(again, rows, planned, how.ledger, delta)
        if paper and planned:
            raise PlanError("--paper and --plan both say how to train; give one of them")
        if paper and given.get("algorithm") == Algorithm.STAGED:
            raise PlanError("--paper and --algorithm staged contradict each other: the paper's algorithm is pbm")
        instead = "--plan" if planned else "--paper" if paper else None
        spent = budget.asked(same_rows=same_rows, instead=instead, by_hand=not is_planned(given))
        run = _new(source, planned, given, out, where, how, spent, delta)
    delta = run.source.delta if delta is None else delta
    training = TrainingRun(run, how, parties=where, resumed=resume is not None, delta=delta)
    with nullcontext() if resume is not None else without_stub(run.folder):
        training.go()


@dataclass(frozen=True)
class Prepared:
    """Validated run that is ready to train."""

    folder: RunFolder
    plan: Plan
    data: VerticalDataset
    source: RunSource
    notes: Sequence[str] = ()
    ledger_lines: Sequence[str] = ()


#: What an option says that a table cannot do without.
_NEEDED = {
    "label": "the column of classes",
    "id": "the column that names a row in every party's table",
    "columns": 'which party holds which columns, as in --columns "bank=age,income;shop=visits,basket"',
}


def source_of(
    dataset: str | None, table: dict[str, Any], num_parties: int | None, root: Path | None, seed: int
) -> NamedSource | TableSource:
    """Return the source of the rows: a named dataset or a table."""
    if (dataset is None) == (table["data"] is None):
        raise DataError("give either a DATASET (digits, phishing, activity, ...) or --data TABLE")
    if dataset is not None:
        for option in (name for name in table if name != "data"):
            if table[option] is not None:
                raise DataError(f"--{option.replace('_', '-')} goes with --data TABLE, not with DATASET={dataset}")
        return NamedSource(dataset=dataset, num_parties=num_parties, root=absolute(root))
    # Separate files per party determine the columns by themselves, and need an id to match their rows.
    for option in ("label", "id" if isinstance(table["data"], dict) else "columns"):
        if table[option] is None:
            raise DataError(f"--data needs --{option}: {_NEEDED[option]}")
    given = {name: value for name, value in table.items() if value is not None}
    return TableSource(**given, seed=seed, num_parties=num_parties)


def read_plan(path: Path) -> Plan:
    """Read a plan from the file of `pbmvfl plan --out` or the output of `pbmvfl plan --json`."""
    values = read_object(path, {}, PlanError)
    return Plan.from_dict(values["plan"] if isinstance(values.get("plan"), dict) else values)


def _new(
    source: RunSource,
    planned: dict[str, Any],
    given: dict[str, Any],
    out: Path | None,
    parties: Parties,
    how: RunOptions,
    budget: AskedBudget | None,
    delta: float | None,
) -> Prepared:
    from pbmvfl.cli.ledger_forecast import NOT_LOOKED_AT, has_limits, look_ahead
    from pbmvfl.federation.federation import Federation

    if out is not None and out.exists():
        RunFolder.create(out, name="")  # refuses an existing folder before any data is loaded
    settings = {name: value for name, value in planned.items() if name not in _sizes_of(planned)}
    chosen = {**(settings or ({} if budget else preset(source.rows.dataset))), **given}
    # Check every setting before a long load or a download; sizes are placeholders until the data is loaded. A budget
    # plans the rounds of its algorithm, so that only the name of that can be checked.
    algorithm_of(chosen)
    sizes = {"num_samples": 1, "num_test_samples": 1, "num_classes": 2}
    placeholders = {name: planned.get(name, size) for name, size in sizes.items()}
    unchecked = () if budget is None else ("algorithm", "num_fusion_samples")
    checked = {name: value for name, value in chosen.items() if name not in unchecked}
    Plan.from_dict({**placeholders, **checked, "num_parties": source.rows.num_parties or 2})
    data = source.rows.load()
    for name in _SHARED_SIZES:
        if name in planned and planned[name] != getattr(data, name):
            raise PlanError(f"the plan was made for {name}={planned[name]}, the data has {getattr(data, name)}")
    source = replace(source, delta=usual_delta(data.num_samples) if delta is None else delta)
    notes: tuple[str, ...] = ()
    is_open = budget is not None and "evaluation" not in chosen and budget.prediction_epsilon is None
    if is_open and not how.exact_metrics and has_limits(data, source):
        chosen["evaluation"] = "none"
        notes = (NOT_LOOKED_AT,)
    planned_budget = None if budget is None else _planned(data, budget, source.delta, chosen)
    plan = Plan.for_data(data, **chosen) if planned_budget is None else planned_budget.plan
    Federation(plan, parties=parties).check(data)  # refuse bad input before the folder is created
    ledger_lines = look_ahead(plan, data, source, how)
    folder = RunFolder.create(out, name=data.name)
    if isinstance(source.rows, TableSource):
        source = replace(source, rows=replace(source.rows, files=source.rows.file_facts()))
    folder.write_start(plan, source)
    notes = (*notes, *(planned_budget.words if planned_budget else ()))
    return Prepared(folder, plan, data, source, notes, ledger_lines)


def _sizes_of(planned: dict[str, Any]) -> frozenset[str]:
    """Return the fields taken from the data instead of the plan file; the encoder too, if it is the default one."""
    unsaid = planned.get("encoder") == Network().encoder and planned.get("training") != Training.LOCAL
    return _SIZES if unsaid else _SIZES - {"encoder"}


def _planned(data: VerticalDataset, budget: AskedBudget, delta: float, chosen: dict[str, Any]) -> PlannedBudget:
    return plan_for_budget(
        Plan,
        epsilon=budget.epsilon,
        delta=delta,
        unit=budget.unit,
        accounting=budget.accounting,
        prediction_epsilon=budget.prediction_epsilon,
        same_rows=budget.same_rows,
        data=data,
        **chosen,
    )


def _again(
    run: Path, table: dict[str, Any], planned: dict[str, Any], ledger: Path | None, delta: float | None
) -> tuple[RunSource, dict[str, Any], float]:
    """Return the rows, the plan and the delta of another run; a plan file, a ledger and a delta that are given win."""
    if said := [name for name, value in table.items() if value is not None]:
        raise DataError(f"--{said[0].replace('_', '-')}: {run} has its own rows; leave it out, or give no run folder")
    folder = RunFolder.existing(run)
    source = folder.read_source()
    source = source if ledger is None else replace(source, ledger=absolute(ledger))
    return source, planned or folder.read_plan().flat(), source.delta if delta is None else delta


def _resumed(path: Path, asked: dict[str, Any], planned: dict[str, Any], given: dict[str, Any]) -> Prepared:
    """Return the run of an existing folder; options that are given again must agree with it."""
    from pbmvfl.federation.federation import Federation

    folder = RunFolder.existing(path)
    plan, source = folder.read_plan(), folder.read_source()
    sizes = _sizes_of(planned)
    settings = {name: value for name, value in planned.items() if name not in sizes or name in _SHARED_SIZES}
    _check_same_plan(path, plan, {**settings, **given})
    _check_same_source(path, source, asked)
    notes = source.rows.changes(path)
    data = source.rows.load()
    Federation(plan).check(data)
    return Prepared(folder, plan, data, source, notes)


def _check_same_plan(path: Path, plan: Plan, given: dict[str, Any]) -> None:
    kept, wanted = ({**each.flat(), "algorithm": str(each.algorithm)} for each in (plan, plan.replace(**given)))
    for name in given:
        if wanted[name] != kept[name]:
            raise CheckpointError(
                f"{path} is a run of another plan: it has {name}={kept[name]!r}, you gave {name}={given[name]!r}; "
                "leave the option out to continue it, or start a new run"
            )


def _check_same_source(path: Path, source: RunSource, asked: dict[str, Any]) -> None:
    """Refuse other rows or ledgers on resume: other ledgers lack the earlier releases."""
    name = source.differs(asked)
    if name is not None:
        raise CheckpointError(
            f"{path} is a run with {name}={source.to_dict().get(name)!r}, you gave {name}={asked[name]!r}; "
            "leave the option out to continue it, or start a new run"
        )
