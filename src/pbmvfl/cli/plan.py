"""`pbmvfl plan`: from a budget to a plan."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pbmvfl.cli.ledger_forecast import plan_within
from pbmvfl.cli.options import check_picture, check_target
from pbmvfl.cli.plan_options import plan_options
from pbmvfl.cli.plan_words import describe_plan
from pbmvfl.errors import RunFolderError
from pbmvfl.files import write_atomically
from pbmvfl.plan import Plan
from pbmvfl.plan_groups import DATA, Training
from pbmvfl.planner import PlannedBudget, noise_deviation, plan_for_budget
from pbmvfl.privacy.table import PrivacyTable, format_epsilon, privacy_notes, usual_adversaries

if TYPE_CHECKING:
    from rich.console import Console

_BUDGET, _OUTPUT = "Budget", "Output"


@plan_options(
    *(
        "num_parties",
        "num_samples",
        "num_classes",
        "num_test_samples",
        "column_values",
        "mechanism",
        "embedding_dim",
        "num_epochs",
        "batch_size",
    ),
    *("training", "optimizer", "learning_rate", "gradient_codec", "noise_multiplier"),
    required=("num_parties", "num_samples", "num_classes"),
)
def plan(
    *,
    epsilon: Annotated[float, typer.Option(help="The budget.", rich_help_panel=_BUDGET)],
    delta: Annotated[float, typer.Option(help="Its delta; stay below 1/N.", rich_help_panel=_BUDGET)] = 1e-5,
    unit: Annotated[
        str, typer.Option(help="cell | record | party: what the epsilon protects.", rich_help_panel=_BUDGET)
    ] = "cell",
    accounting: Annotated[
        str,
        typer.Option(help="strict (a theorem) | paper (as the paper counts, not a proof).", rich_help_panel=_BUDGET),
    ] = "strict",
    prediction_epsilon: Annotated[
        float | None, typer.Option(help="What the prediction of a test row may cost.", rich_help_panel=_BUDGET)
    ] = None,
    columns: Annotated[
        int | None, typer.Option(help="The most columns that a party has.", min=1, rich_help_panel=DATA)
    ] = None,
    colluding_parties: Annotated[
        int, typer.Option(help="t: parties on the server's side.", rich_help_panel=_BUDGET)
    ] = 0,
    max_bytes: Annotated[
        int | None, typer.Option(help="Limit on the whole run's traffic.", rich_help_panel=_BUDGET)
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(
            help="Plan within what the limits of these books leave: a folder, or one book.", rich_help_panel=_BUDGET
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="The owners' name for the data in --ledger, if it has several.", rich_help_panel=_BUDGET),
    ] = None,
    choices: dict[str, Any],
    out: Annotated[
        Path | None, typer.Option(help="Write the plan here, for train --plan.", rich_help_panel=_OUTPUT)
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw epsilon against epochs and noise: .png, .pdf or .svg.", rich_help_panel=_OUTPUT),
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print JSON and nothing else.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """The plan with the least noise under a privacy budget, and a byte budget if you give one.

    [bold]Try[/]  pbmvfl plan --epsilon 8 --num-parties 5 --num-samples 7352 --num-classes 6 --columns 112
    --out plan.json  and then  pbmvfl train activity --plan plan.json

    What you give of the mechanism and of training is fixed; the rest is chosen for you.

    The search over settings is not charged: choose before you look at private results.
    """
    check_target("out", out)
    check_picture("picture", picture)
    if out is not None and picture is not None and out.resolve() == picture.resolve():
        raise RunFolderError(f"out={str(out)!r} and picture={str(picture)!r} are one file; name two")
    if prediction_epsilon is not None:  # how many rows are predicted changes nothing of what one costs
        choices = {"num_test_samples": 1, **choices}
    make = partial(
        plan_for_budget,
        Plan,
        delta=delta,
        unit=unit,
        accounting=accounting,
        colluding_parties=colluding_parties,
        largest_bytes=max_bytes,
        columns=columns,
        column_values=choices.pop("column_values", None),
        prediction_epsilon=prediction_epsilon,
        **choices,
    )
    if ledger is None:
        planned = make(epsilon=epsilon)
    else:
        planned = plan_within(ledger, dataset, lambda most: make(epsilon=most), epsilon)
    if picture is not None:  # first: if it fails, there is no plan that the command would refuse to write again
        from pbmvfl.report.budget import draw_budget

        draw_budget(planned, picture)
    if out is not None:
        write_atomically(out, planned.plan.to_json())
    if json_:
        print(json.dumps(_to_dict(planned), indent=2))
    else:
        _show(planned, out, picture)


def _notes(planned: PlannedBudget) -> list[str]:
    run = planned.plan.training_run()
    return [*planned.words, *privacy_notes(run, num_samples=planned.plan.num_samples, delta=planned.budget.delta)]


def _costs(planned: PlannedBudget) -> PrivacyTable:
    """Against the usual adversaries, and the one that the budget is for."""
    adversaries = (*usual_adversaries(planned.plan.num_parties), planned.budget.adversary)
    return planned.plan.privacy(delta=planned.budget.delta, adversaries=dict.fromkeys(adversaries))


def _to_dict(planned: PlannedBudget) -> dict[str, Any]:
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


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def _show(planned: PlannedBudget, out: Path | None, picture: Path | None) -> None:
    from rich.console import Console
    from rich.markup import escape

    from pbmvfl.cli.tables import plain_table, print_notes, print_privacy_of_rows

    console = Console(highlight=False)
    plan = planned.plan
    console.print(f"For {planned.budget}:")
    if plan.training is Training.LOCAL:
        lines = plain_table("", "", left=2)
        for title, said in describe_plan(plan):
            lines.add_row(title, escape(said))
        console.print(lines)
        print_privacy_of_rows(console, plan.training_run(), delta=planned.budget.delta, title="epsilon of the plan")
    else:
        _show_joint(console, planned)
    print_notes(console, _notes(planned))
    # Names of files are no markup, and are not broken into lines: they are there to be copied.
    if out is not None:
        command = f"pbmvfl train DATASET --plan {shlex.quote(str(out))}"
        console.print(f"written to {out}; train it with: {command}", markup=False, soft_wrap=True)
    if picture is not None:
        console.print(f"drawn in {picture}", markup=False, soft_wrap=True)


def _show_joint(console: Console, planned: PlannedBudget) -> None:
    from pbmvfl.cli.tables import plain_table, print_privacy
    from pbmvfl.wire.traffic import human_bytes

    plan, traffic = planned.plan, planned.plan.traffic()
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
    print_privacy(console, costs, title="epsilon of the chosen plan", explained=meant)
