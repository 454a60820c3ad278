"""`pbmvfl privacy`: what given numbers cost."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from pbmvfl.cli.options import on_or_off
from pbmvfl.mechanisms import MECHANISMS
from pbmvfl.plan import Plan
from pbmvfl.privacy.table import privacy_notes
from pbmvfl.privacy.units import SERVER, Adversary


def privacy(
    num_parties: Annotated[int, typer.Option(help="M: parties.")],
    num_trials: Annotated[int, typer.Option(help="b: trials per coordinate.")],
    beta: Annotated[float, typer.Option(help="In [1/128, 1/4]; rounded down to 16 bits.")],
    embedding_dim: Annotated[int, typer.Option(help="P: length of an embedding.")],
    num_epochs: Annotated[int, typer.Option(help="E: uses of every row.")],
    num_samples: Annotated[int, typer.Option(help="N: training rows.")],
    batch_size: Annotated[int, typer.Option(help="B: rows per round.")] = 100,
    delta: Annotated[float, typer.Option(help="Of every epsilon; stay below 1/N.")] = 1e-5,
    colluding_parties: Annotated[
        int | None,
        typer.Option(
            help="t: parties on the adversary's side. Default: a table of three adversaries.", show_default=False
        ),
    ] = None,
    noise_multiplier: Annotated[
        float, typer.Option(help="Noise on weight updates, as a multiple of the clip norm; 0 for none.")
    ] = 0.0,
    mechanism: Annotated[str, typer.Option(help=" | ".join(MECHANISMS))] = "pbm",
    secure_aggregation: Annotated[
        bool, typer.Option("--secure-aggregation", help="Only sums can be read; the default of pbm.")
    ] = False,
    no_secure_aggregation: Annotated[
        bool, typer.Option("--no-secure-aggregation", help="The server reads every party's integers.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """The exact epsilon of a plan, for every unit, adversary and way of counting.

    [bold]paper[/] counts a unit's own releases only, as the paper does, and is not a proof.
    [bold]strict[/] counts every release that can depend on the unit; a theorem under the conditions in --json.
    """
    plan = Plan.from_dict(
        {
            "num_parties": num_parties,
            "num_samples": num_samples,
            "num_classes": 2,
            "num_trials": num_trials,
            "beta": beta,
            "embedding_dim": embedding_dim,
            "num_epochs": num_epochs,
            "batch_size": batch_size,
            "noise_multiplier": noise_multiplier,
            "mechanism": mechanism,
            "secure_aggregation": on_or_off("secure-aggregation", on=secure_aggregation, off=no_secure_aggregation),
        }
    )
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
