"""`pbmvfl plan`: make a plan for a privacy budget."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pbmvfl._files import write_atomically
from pbmvfl._text import counted
from pbmvfl.cli.data_options import KnownData, PlanFile, PlannedTable, Source, known_data
from pbmvfl.cli.descriptions import (
    describe_algorithm,
    describe_plan,
    describe_widths,
)
from pbmvfl.cli.ledger_forecast import plan_within
from pbmvfl.cli.options import (
    TRAINING_SETTINGS,
    AskedBudget,
    BudgetOptions,
    budget_option,
    check_picture,
    check_target,
    option_in,
    plan_options,
    say,
)
from pbmvfl.errors import PlanError, RunFolderError
from pbmvfl.plan.groups import Algorithm
from pbmvfl.plan.learning_notes import learning_notes, learning_notes_for
from pbmvfl.plan.local_search import USUAL_COLUMNS
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.search import PlannedBudget, noise_deviation, plan_for_budget
from pbmvfl.privacy.table import UNITS_LEGEND, PrivacyTable, format_epsilon, privacy_notes, usual_adversaries

if TYPE_CHECKING:
    from rich.console import Console

_output_option = option_in("Output")
_NEEDED = ("num_parties", "num_samples", "num_classes")


@plan_options(
    *("num_parties", "num_samples", "num_classes", "num_test_samples", "column_values"),
    *TRAINING_SETTINGS,
)
def plan(
    *,
    source: Source = None,
    table: PlannedTable,
    plan_file: PlanFile = None,
    budget: BudgetOptions,
    colluding_parties: Annotated[int, budget_option(help="t: parties on the server's side.")] = 0,
    max_bytes: Annotated[int | None, budget_option(help="Limit on the whole run's traffic.")] = None,
    ledger: Annotated[
        Path | None, budget_option(help="Plan within what the limits of these ledgers leave: a folder, or one ledger.")
    ] = None,
    dataset: Annotated[
        str | None, budget_option(help="The owners' name for the data in --ledger, if it has several.")
    ] = None,
    choices: dict[str, Any],
    out: Annotated[Path | None, _output_option(help="Write the plan here, for train --plan.")] = None,
    picture: Annotated[
        Path | None, _output_option(help="Draw epsilon against epochs and noise: .png, .pdf or .svg.")
    ] = None,
    json_: Annotated[bool, _output_option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """The plan with the least noise under a privacy budget, and a byte budget if you give one.

    [bold]Try[/]  pbmvfl plan activity --epsilon 4 --out plan.json  and then  pbmvfl train activity --plan plan.json

    [bold]Own data[/]  pbmvfl plan --data people.csv --label churn --columns "bank=income,debt;shop=visits,basket"

    [bold]No data[/]  pbmvfl plan --num-parties 5 --num-samples 7352 --num-classes 6 --columns 112

    Only sizes are read of the data: rows, classes, parties and columns. What you give of the mechanism and of training
    is fixed; the rest is chosen for you.

    The search over settings is not charged: choose before you look at private results.
    """
    check_target("out", out)
    check_picture("picture", picture)
    if out is not None and picture is not None and out.resolve() == picture.resolve():
        raise RunFolderError(f"out={str(out)!r} and picture={str(picture)!r} are one file; name two")
    known = known_data(source=source, table=table, plan_file=plan_file, given=choices)
    if missing := [name for name in _NEEDED if name not in known.sizes]:
        options = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise PlanError(f"give a dataset, --data TABLE, --plan FILE or a run folder, or say {options}")
    asked = budget.asked()
    assert asked is not None
    planned = make_plan(
        known,
        asked,
        choices,
        delta=budget.delta,
        colluding_parties=colluding_parties,
        max_bytes=max_bytes,
        ledger=ledger,
        dataset=dataset,
    )
    if picture is not None:  # before the plan file, which a second attempt would refuse to replace
        from pbmvfl.report.plots import draw_budget

        draw_budget(planned, picture)
    if out is not None:
        write_atomically(out, planned.plan.to_json())
    if json_:
        print(json.dumps(plan_to_dict(planned), indent=2))
    else:
        # Training is to be charged where the plan was found to fit.
        named = "" if dataset is None or table.data is None else f" --dataset-name {shlex.quote(dataset)}"
        charged_to = "" if ledger is None or not ledger.is_dir() else f"{named} --ledger {shlex.quote(str(ledger))}"
        _show(planned, out, picture, known, charged_to)


def make_plan(
    known: KnownData,
    budget: AskedBudget,
    choices: dict[str, Any],
    *,
    delta: float | None = None,
    colluding_parties: int = 0,
    max_bytes: int | None = None,
    ledger: Path | None = None,
    dataset: str | None = None,
) -> PlannedBudget:
    """Return the plan of a budget, with notes on what can be learned; the arguments are options of `pbmvfl plan`."""
    sizes = dict(known.sizes)
    if budget.prediction_epsilon is not None and not sizes.get("num_test_samples"):
        sizes["num_test_samples"] = 1  # the number of predicted rows does not change the cost of one
    chosen = {name: value for name, value in choices.items() if name not in (*sizes, "column_values")}
    if ledger is not None and budget.prediction_epsilon is None:
        chosen.setdefault("evaluation", "none")  # as `train` does where rows have a limit: none counts exact metrics
    about: dict[str, Any] = {**sizes, "columns": known.columns, "column_values": choices.get("column_values")}
    if known.data is not None:
        about = {"data": known.data}
    make = partial(
        plan_for_budget,
        Plan,
        delta=delta,
        unit=budget.unit,
        accounting=budget.accounting,
        colluding_parties=colluding_parties,
        largest_bytes=max_bytes,
        prediction_epsilon=budget.prediction_epsilon,
        **about,
        **chosen,
    )
    if ledger is None:
        planned = make(epsilon=budget.epsilon)
    else:
        people = dataset if dataset is not None or known.data is None else known.data.name
        planned = plan_within(ledger, people, lambda most: make(epsilon=most), budget.epsilon)
    if known.data is None:
        learning = learning_notes(planned.plan, columns=known.columns)
        if known.columns is None and planned.plan.algorithm is Algorithm.STAGED:
            learning = [f"nobody said how many columns a party has: planned as for {USUAL_COLUMNS}; give --columns"]
    else:
        learning = learning_notes_for(planned.plan, known.data)
    return replace(planned, words=(*planned.words, *learning))


def _notes(planned: PlannedBudget) -> list[str]:
    run = planned.plan.training_run()
    return [*planned.words, *privacy_notes(run, num_samples=planned.plan.num_samples, delta=planned.budget.delta)]


def _costs(planned: PlannedBudget) -> PrivacyTable:
    """Return the plan's epsilons against the usual adversaries and the budget's own."""
    adversaries = (*usual_adversaries(planned.plan.num_parties), planned.budget.adversary)
    return planned.plan.privacy(delta=planned.budget.delta, adversaries=dict.fromkeys(adversaries))


def plan_to_dict(planned: PlannedBudget) -> dict[str, Any]:
    """Return what `pbmvfl plan --json` prints."""
    plan, traffic = planned.plan, planned.plan.traffic()
    return {
        "plan": plan.to_dict(),
        "epsilon": planned.epsilon,
        "budget": str(planned.budget),
        "bounds": _costs(planned).to_dicts(),
        "traffic": traffic.to_dict(),
        "bytes_per_round": traffic.total // traffic.rounds,
        "noise_deviation": planned.noise,
        "largest_sum": plan.num_parties * plan.bound,
        "notes": _notes(planned),
        "alternatives": [
            {
                **{name: getattr(other.release, name) for name in type(other.release).own_settings()},
                "epsilon": spent,
                "noise_deviation": noise_deviation(other),
                "bytes": other.traffic().total,
            }
            for other, spent in planned.alternatives
        ],
    }


def _sizes(plan: Plan, known: KnownData) -> str:
    """Describe the sizes of the plan's data."""
    widths = ""
    if known.data is not None:
        widths = f" of {describe_widths(known.data)}"
    elif known.columns is not None:
        widths = f" of at most {counted(known.columns, 'column')}"
    return f"{plan.num_samples:,} training rows, {plan.num_classes} classes, {plan.num_parties} parties{widths}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def _show(planned: PlannedBudget, out: Path | None, picture: Path | None, known: KnownData, charged_to: str) -> None:
    from rich.console import Console
    from rich.markup import escape

    from pbmvfl.cli.tables import plain_table, print_notes, print_privacy_of_rows

    console = Console(highlight=False)
    plan = planned.plan
    console.print(f"For {planned.budget}:")
    console.print(UNITS_LEGEND, style="dim")
    if plan.algorithm is Algorithm.STAGED:
        lines = plain_table("", "", left=2)
        lines.show_header = False
        lines.add_row("data", _sizes(plan, known))
        for title, said in describe_plan(plan):
            lines.add_row(title, escape(said))
        console.print(lines)
        run, delta = plan.training_run(), planned.budget.delta
        print_privacy_of_rows(console, run, delta=delta, title="epsilon of the plan", legend=False)
    else:
        _show_joint(console, planned)
    print_notes(console, _notes(planned))
    if out is not None:
        command = f"pbmvfl train {known.command} --plan {shlex.quote(str(out))}{charged_to}"
        say(f"written to {out}; train it with: {command}")
    if picture is not None:
        say(f"drawn in {picture}")


def _show_joint(console: Console, planned: PlannedBudget) -> None:
    from pbmvfl.cli.tables import plain_table, print_privacy
    from pbmvfl.wire.traffic import human_bytes

    plan, traffic = planned.plan, planned.plan.traffic()
    console.print(f"algorithm {describe_algorithm(plan)}")
    settings = type(plan.release).own_settings()
    table = plain_table("", *settings, "epsilon", "noise", "bytes")
    for name, other, spent in (
        ("chosen", plan, planned.epsilon),
        *(("or", other, spent) for other, spent in planned.alternatives),
    ):
        table.add_row(
            name,
            *(_number(getattr(other.release, setting)) for setting in settings),
            format_epsilon(spent),
            f"{noise_deviation(other):.3g}",
            human_bytes(other.traffic().total),
        )
    console.print(table)
    console.print(
        f"embedding_dim={plan.embedding_dim}, num_epochs={plan.num_epochs}, batch_size={plan.batch_size}, "
        f"{plan.optimizer} at {plan.learning_rate:g}, {plan.gradient_codec} gradient"
        + (
            f", noise_multiplier={plan.noise_multiplier:g}, clip_norm={plan.clip_norm:g}"
            if plan.noise_multiplier
            else ""
        )
    )
    console.print(
        f"noise: standard deviation {planned.noise:.3g} on sums within +-{plan.num_parties * plan.bound:g}; "
        f"{human_bytes(traffic.total / traffic.rounds)} a round, {human_bytes(traffic.total)} in all"
    )
    budget, costs = planned.budget, _costs(planned)
    meant = costs.bound(budget.unit, budget.accounting, budget.adversary)
    print_privacy(console, costs, title="epsilon of the chosen plan", explained=meant, legend=False)
