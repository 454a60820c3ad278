"""`pbmvfl policy`: write and check the rules by which this organisation accepts jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pbmvfl._files import PRIVATE_FILE, write_atomically
from pbmvfl.cli.help_text import App
from pbmvfl.cli.options import AsJson, say
from pbmvfl.errors import FederationError, PolicyError, PolicyFileError

if TYPE_CHECKING:
    from pbmvfl.deploy.site.folder import SiteFolder
    from pbmvfl.deploy.site.policy_file import PolicyFile

app = App(
    no_args_is_help=True,
    help="What this organisation accepts: its rows, what they may spend, and which plans it takes part in. Private.",
)
_HOME = typer.Option(help="The organisation's folder.")


@app.command()
def template(
    home: Annotated[Path, _HOME] = Path("."),
    file: Annotated[str | None, typer.Option(help="The data file, .csv or .parquet, seen from --home.")] = None,
    id_: Annotated[str, typer.Option("--id", help="Its column of ids.")] = "id",
    dataset: Annotated[str, typer.Option(help="The name that the ledger counts under; of parties.")] = "people",
    label: Annotated[str, typer.Option(help="Its column of labels; of the label holder.")] = "label",
    show: Annotated[bool, typer.Option("--show", help="Print it, and write nothing.")] = False,
) -> None:
    """Write a commented policy.toml to start from, for its owner alone to read.

    [bold]Try[/]  pbmvfl policy template --home bank --file rows.csv --id person

    [bold]Then[/]  pbmvfl policy check --home bank
    """
    from pbmvfl.deploy.site.folder import SiteFolder
    from pbmvfl.deploy.site.policy_text import policy_template

    place = SiteFolder.at(home)
    text = policy_template(
        is_server=place.is_server,
        name=place.name,
        home=str(home),
        num_parties=len(place.federation.parties),
        file=file or ("labels.csv" if place.is_server else "rows.csv"),
        id=id_,
        dataset=dataset,
        label=label,
    )
    if show:
        print(text, end="")
        return
    if place.policy.exists():
        raise FederationError(f"{place.policy} is there already; change it, or look at a new one with --show")
    write_atomically(place.policy, text, mode=PRIVATE_FILE)
    say(f"{place.policy} is written. Fill it in, then: pbmvfl policy check --home {home}")


@app.command()
def check(
    home: Annotated[Path, _HOME] = Path("."),
    plan: Annotated[Path | None, typer.Option(help="A plan's file: would it be accepted?")] = None,
    json_: AsJson = False,
) -> None:
    """Read policy.toml and the data file's header, and say in words what is accepted. Nothing is written or sent.

    [bold]Try[/]  pbmvfl policy check --home bank --plan plan.json
    """
    from pbmvfl.deploy.site.folder import SiteFolder
    from pbmvfl.deploy.site.policy_file import PolicyFile
    from pbmvfl.deploy.site.policy_text import faults_of

    place = SiteFolder.at(home)
    policy = PolicyFile.read(place)
    faults = faults_of(policy.data)
    refusal = None if plan is None else _refusal(place, policy, plan)
    said = _said(place, policy, faults)
    if plan is not None:
        said |= {"plan_accepted": refusal is None, "refusal": refusal}
    if json_:
        print(json.dumps({"fine": not faults and refusal is None, **said}, indent=2))
    else:
        _show(said)
    if faults:
        if not json_:
            raise PolicyFileError(f"{policy.data.file}: {'; '.join(faults)}")
        raise typer.Exit(2)
    if refusal is not None:
        raise typer.Exit(1)


def _refusal(home: SiteFolder, policy: PolicyFile, file: Path) -> str | None:
    """Return the reason for which the policy refuses a plan, or None if it accepts the plan."""
    from pbmvfl._files import read_object
    from pbmvfl.deploy.job.admission import begins_publicly
    from pbmvfl.errors import PlanError
    from pbmvfl.plan.plan import Plan

    plan = Plan.from_dict(read_object(file, {}, PlanError))
    there = len(home.federation.parties)
    if plan.num_parties != there:
        return f"num_parties={plan.num_parties}: federation {home.federation.name} has {there} parties"
    try:
        policy.policy().check(plan, public_start=begins_publicly(policy, plan))
    except PolicyError as error:
        return str(error)
    return None


def _said(home: SiteFolder, policy: PolicyFile, faults: list[str]) -> dict[str, Any]:
    from pbmvfl.deploy.site import policy_text

    columns = () if faults else policy_text.columns_in_use(policy.data)
    said: dict[str, Any] = {
        "organisation": home.name,
        "role": "label holder" if home.is_server else "party",
        "data": f"{policy.data.file.name}: see below" if faults else policy_text.describe_data(policy.data, columns),
        "faults": faults,
    }
    said["dataset"] = policy.dataset
    said["limits"] = policy_text.describe_limits(home, policy)
    if home.is_server:
        said["plans"] = policy_text.describe_label_rules(policy.policy())
    else:
        said["encoder"] = policy.encoder or "the plan's"
        said["plans"] = policy_text.describe_plan_rules(policy.policy())
    said["runs"] = policy_text.describe_run_rules(policy, is_server=home.is_server)
    said["metrics_port"] = policy.metrics_port
    said["notes"] = policy_text.notes(policy)
    return said


_TITLES = {
    "data": "rows",
    "dataset": "counted as",
    "limits": "may spend",
    "encoder": "network",
    "plans": "takes plans with",
    "runs": "takes orders",
    "metrics_port": "metrics",
}


def _show(said: dict[str, Any]) -> None:
    from rich.console import Console

    from pbmvfl.cli.tables import print_notes

    console = Console(highlight=False)
    console.print(f"{said['organisation']}, {said['role']}", style="bold", markup=False)
    for name, title in _TITLES.items():
        value = said.get(name)
        if value is None:
            continue
        if name == "metrics_port":
            value = f"http://127.0.0.1:{value}"
        for number, line in enumerate(value if isinstance(value, list) else [value]):
            console.print(f"  {title if not number else '':18}{line}", markup=False, soft_wrap=True)
    print_notes(console, said["notes"])
    if "plan_accepted" in said:
        verdict = "accepted" if said["plan_accepted"] else f"refused: {said['refusal']}"
        console.print(f"this plan would be {verdict}", markup=False, soft_wrap=True)
