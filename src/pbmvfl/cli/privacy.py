"""`pbmvfl privacy`: what given numbers cost."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from pbmvfl.cli.plan_options import plan_options
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import MECHANISMS
from pbmvfl.plan import Plan
from pbmvfl.plan_names import plan_settings
from pbmvfl.privacy.table import privacy_notes
from pbmvfl.privacy.units import SERVER, Adversary


@plan_options(
    *("num_parties", "num_samples", "mechanism", "embedding_dim", "secure_aggregation"),
    *("num_epochs", "batch_size", "noise_multiplier"),
    required=("num_parties", "num_samples", "embedding_dim", "num_epochs"),
    defaults=("mechanism", "batch_size", "noise_multiplier"),
)
def privacy(
    *,
    choices: dict[str, Any],
    delta: Annotated[float, typer.Option(help="Of every epsilon; stay below 1/N.")] = 1e-5,
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
    """
    # An epsilon of numbers that nobody gave would be taken for that of somebody's own.
    known = plan_settings()
    own = MECHANISMS[choices["mechanism"]].own_settings()
    unsaid = [name for name in own if name not in choices and known[name].kind is not bool]
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
