"""`pbmvfl privacy`: what given numbers cost."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from pbmvfl.cli.data_options import PlanFile, Source, known_data
from pbmvfl.cli.options import (
    TableColumns,
    TableFile,
    TableId,
    TableLabel,
    TableLabelData,
    TableSchema,
    TableTestData,
    TestFraction,
)
from pbmvfl.cli.plan_options import plan_options
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import MECHANISMS
from pbmvfl.plan.flat_names import plan_settings
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.conversion import check_delta, usual_delta
from pbmvfl.privacy.table import privacy_notes
from pbmvfl.privacy.units import SERVER, Adversary

_SIZES = ("num_parties", "num_samples")
_NEEDED = (*_SIZES, "embedding_dim", "num_epochs")
#: They are there whether or not somebody gave them.
_USUAL = ("mechanism", "batch_size", "noise_multiplier")


@plan_options(
    *("num_parties", "num_samples", "mechanism", "embedding_dim", "secure_aggregation"),
    *("num_epochs", "batch_size", "noise_multiplier"),
    defaults=_USUAL,
)
def privacy(
    *,
    source: Source = None,
    data: TableFile = None,
    label: TableLabel = None,
    columns: TableColumns = None,
    id_: TableId = None,
    label_data: TableLabelData = None,
    schema: TableSchema = None,
    test_data: TableTestData = None,
    test_fraction: TestFraction = None,
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
    json_: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """The exact epsilon of a plan, for every unit, adversary and way of counting.

    [bold]paper[/] counts a unit's own releases only, as the paper does, and is not a proof.
    [bold]strict[/] counts every release that can depend on the unit; a theorem under the conditions in --json.

    [bold]Try[/]  pbmvfl privacy runs/phishing-001

    For a dataset or --data alone it is that of the plan that `pbmvfl train` would make; with numbers, that of those.
    """
    if delta is not None:
        check_delta(delta)
    own: dict[str, Any] = {"data": data, "label": label, "columns": columns, "id": id_, "label_data": label_data}
    own |= {"schema": schema, "test_data": test_data, "test_fraction": test_fraction}
    known = known_data(source=source, table=own, plan_file=plan_file, given=choices, load=False)
    by_hand = any(name not in (*_USUAL, *_SIZES) for name in choices)
    if (known.folder or known.plan_file or known.data) is not None and not by_hand:
        from pbmvfl.cli.run_privacy import show_plan, show_run

        if known.data is not None:
            show_plan(Plan.for_data(known.data), delta=delta, as_json=json_)
        else:
            path = known.folder or known.plan_file
            assert path is not None
            show_run(path, delta=delta, as_json=json_)
        return
    choices = {**choices, **{name: known.sizes[name] for name in _SIZES if name in known.sizes}}
    if missing := [name for name in _NEEDED if name not in choices]:
        options = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise PlanError(f"give a dataset, --data TABLE, a run folder or a plan's file, or say {options}")
    delta = usual_delta(choices["num_samples"]) if delta is None else delta
    # An epsilon of numbers that nobody gave would be taken for that of somebody's own.
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
    table = plan.privacy(delta=delta, adversaries=adversaries)
    notes = privacy_notes(plan.training_run(), num_samples=plan.num_samples, delta=delta)
    if json_:
        shown = {"bounds": table.to_dicts(), **_rounded_beta(plan), "plan": plan.to_dict(), "notes": notes}
        print(json.dumps(shown, indent=2))
        return
    from rich.console import Console

    from pbmvfl.cli.tables import print_notes, print_privacy

    console = Console(highlight=False)
    print_privacy(console, table, title="epsilon")
    print_notes(console, notes)


def _rounded_beta(plan: Plan) -> dict[str, float]:
    """The beta that is really used, for mechanisms that have one."""
    return {"beta": plan.beta_16 / 65536} if "beta" in plan.release.own_settings() else {}
