"""`pbmvfl federation`: membership, with keys that never leave their organisation."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from pbmvfl.cli.help_text import App
from pbmvfl.cli.options import AsJson, OutFile, print_or_write, say
from pbmvfl.errors import FederationError

# --- Shared by the deployment commands ---


HomeFolder = Annotated[Path, typer.Option("--home", help="The organisation's folder.", show_default="this folder")]


def need_nvflare() -> None:
    """Refuse to run without the optional NVFlare packages, and name the extra to install."""
    if find_spec("nvflare") is None:
        raise FederationError('NVFlare is not installed; pip install "pbmvfl[deploy]"')


# --- federation ---


app = App(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Set up a federation between organisations: everybody makes their own keys, and nobody sees another's.

    [bold]1[/]  all agree on federation.toml: names, the server's address, the budget
    [bold]2[/]  one:  pbmvfl federation init federation.toml
    [bold]3[/]  all:  pbmvfl federation request federation.toml --name bank
    [bold]4[/]  one:  pbmvfl federation approve authority *.request.json
    [bold]5[/]  all:  pbmvfl federation package bank.signed.json
    [bold]6[/]  all read the fingerprint to each other over the phone
    [bold]7[/]  then `pbmvfl server start`, and `pbmvfl party start` at every party
    """,
)
_FILE = typer.Argument(help="The federation.toml that all agreed on.", metavar="FEDERATION.toml", show_default=False)


@app.command()
def init(
    federation: Annotated[Path, _FILE],
    authority: Annotated[Path, typer.Option(help="A new folder for the authority's key.")] = Path("authority"),
    update: Annotated[
        bool, typer.Option("--update", help="Keep the authority's key, and take a changed federation.toml.")
    ] = False,
) -> None:
    """The authority: a key that signs everybody's certificates. One of you runs this, once.

    Whoever has the folder can let anybody in: keep it off line, and where few can read it. Who is who does not rest on
    it alone: identities are compared by phone.
    """
    need_nvflare()
    from pbmvfl.deploy.nvflare import authority as nvflare_authority

    made = nvflare_authority.init(federation, authority, update=update)
    say(f"authority of {made.name} in {authority}: keep it where few can read it")
    say(
        f"next: {', '.join((made.server, *made.parties))} each run `pbmvfl federation request {federation.name} --name "
        "NAME --home FOLDER` and send you NAME.request.json",
    )


@app.command()
def request(
    federation: Annotated[Path, _FILE],
    name: Annotated[str, typer.Option(help="Your organisation, as federation.toml has it.", show_default=False)],
    home: HomeFolder = Path(),
    new_keys: Annotated[
        bool, typer.Option("--new-keys", help="Replace the keys, as after a theft, when the old ones were revoked.")
    ] = False,
    json_: AsJson = False,
) -> None:
    """Your organisation's keys, made here, and a file for the authority that has no secret in it.

    Asking again keeps the keys, unless --new-keys replaces them.
    """
    need_nvflare()
    from pbmvfl.deploy.nvflare import authority as nvflare_authority

    parcel = nvflare_authority.request(federation, name, home, new_keys=new_keys)
    if json_:
        print(json.dumps({"name": name, "home": str(home.resolve()), "request": str(parcel)}))
        return
    say(f"keys of {name} in {home.resolve()}: they stay here; make a copy in a safe place")
    say(f"next: send {parcel} to the authority; it holds public keys only")


@app.command()
def approve(
    authority: Annotated[Path, typer.Argument(help="The authority's folder.", show_default=False)],
    requests: Annotated[list[Path] | None, typer.Argument(help="Files that organisations sent.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Take a new key of somebody who asked before.")] = False,
    days: Annotated[int, typer.Option(help="How long certificates are valid.", min=1, max=3650)] = 365,
    json_: AsJson = False,
) -> None:
    """Sign the requests of a federation: a file to send back to each organisation, once all have asked.

    Without requests it makes new certificates for the same keys, as before the old ones end.
    """
    need_nvflare()
    from pbmvfl.deploy.nvflare import authority as nvflare_authority

    made = nvflare_authority.approve(authority, requests or (), replace=replace, days=days)
    if json_:
        parcels = {name: str(path) for name, path in made.bundles.items()}
        print(json.dumps({"parcels": parcels, "missing": made.missing, "fingerprint": made.fingerprint}))
        return
    if made.missing:
        say(f"kept; still to ask: {', '.join(made.missing)}")
        return
    for name, path in made.bundles.items():
        say(f"for {name}: {path}")
    _show_fingerprint(made.fingerprint)
    say("next: send each its file; each runs `pbmvfl federation package FILE --home FOLDER`")


@app.command()
def revoke(
    name: Annotated[
        str | None, typer.Argument(help="The organisation. Without one the same list is issued for longer.")
    ] = None,
    authority: Annotated[Path, typer.Option(help="The authority's folder.")] = Path("authority"),
    old: Annotated[
        bool, typer.Option("--old", help="Revoke all its certificates but the newest, as after a renewal.")
    ] = False,
    days: Annotated[int, typer.Option(help="How long the list is valid.", min=1, max=3650)] = 365,
    json_: AsJson = False,
) -> None:
    """The authority: write a list of certificates that no site accepts any more, to send to every organisation.

    [bold]Try[/]  pbmvfl federation revoke bank --authority authority

    Without --old the organisation's identity is revoked too: no site takes part in a job with it, until it has new keys
    or is no longer in federation.toml.
    """
    need_nvflare()
    from pbmvfl.deploy.nvflare import authority as nvflare_authority

    made = nvflare_authority.revoke(authority, name, old=old, days=days)
    if json_:
        print(json.dumps({"list": str(made.path), "number": made.number, "revoked": len(made.entries)}))
        return
    say(f"revocation list {made.number}, {len(made.entries)} certificates: {made.path}")
    say(
        "next: send it to every organisation; each runs `pbmvfl federation install-list FILE --home FOLDER`",
    )


@app.command()
def install_list(
    file: Annotated[Path, typer.Argument(help="The authority's revocation list.", show_default=False)],
    home: HomeFolder = Path(),
    json_: AsJson = False,
) -> None:
    """Use a revocation list of the authority from now on. A running site notices it within a minute.

    A list that the authority did not sign, that is stale, or older than the one here is refused.
    """
    from pbmvfl.deploy.site.folder import SiteFolder

    here = SiteFolder.at(home)
    found = here.install_revocations(file)
    if json_:
        print(json.dumps({"name": here.name, "number": found.number, "revoked": len(found.entries)}))
    else:
        print(f"{here.name} uses revocation list {found.number}, valid until {found.until:%Y-%m-%d}")


@app.command()
def package(
    signed: Annotated[Path, typer.Argument(help="What the authority sent back.", show_default=False)],
    home: HomeFolder = Path(),
    fingerprint: Annotated[
        str | None, typer.Option(help="What the others read to you: nothing is written unless it is the same.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Take new identities of others than before.")] = False,
    json_: AsJson = False,
) -> None:
    """A kit to start from your own keys and what came back; and the fingerprint to compare by phone."""
    need_nvflare()
    from pbmvfl.deploy.nvflare import authority as nvflare_authority
    from pbmvfl.deploy.nvflare import processes
    from pbmvfl.deploy.site.folder import SiteFolder

    here = SiteFolder.at(home)
    found = nvflare_authority.package(here, signed, fingerprint_said=fingerprint, replace=replace)
    if json_:
        print(json.dumps({"name": here.name, "home": str(here.path), "fingerprint": found}))
        return
    say(f"kit of {here.name} in {here.path}")
    _show_fingerprint(found)
    if processes.status(here).running:
        role = "server" if here.is_server else "party"
        say(f"it still runs with the old kit: `pbmvfl {role} stop`, then start it again")
    if fingerprint is None:
        say(
            "next: read it to the others over the phone. If theirs differs, somebody is in between: do not start",
        )


@app.command(name="fingerprint")
def fingerprint_(home: HomeFolder = Path(), json_: AsJson = False) -> None:
    """The federation's fingerprint as this organisation has it: the same at everybody, or do not start."""
    from pbmvfl.deploy.site.enrolment import fingerprint_of
    from pbmvfl.deploy.site.folder import SiteFolder

    here = SiteFolder.at(home)
    found = fingerprint_of(here)
    if json_:
        print(json.dumps({"name": here.name, "fingerprint": found}))
    else:
        _show_fingerprint(found)


@app.command()
def provision(
    federation: Annotated[Path, _FILE],
    out: Annotated[Path, typer.Argument(help="A folder for all organisations' folders.", show_default=False)],
    json_: AsJson = False,
) -> None:
    """All organisations' folders at once, for a [bold]trial[/]: whoever runs this has seen every key."""
    need_nvflare()
    from pbmvfl.deploy.nvflare.authority import provision as make

    homes = make(federation, out)
    if json_:
        print(json.dumps({"trial": True, "homes": {name: str(home.path) for name, home in homes.items()}}))
        return
    for name, home in homes.items():
        say(f"{name}: {home.path}")
    say(
        "this is a trial: every key was made here, by you. Between organisations use `pbmvfl federation init`, "
        "`request`, `approve` and `package`",
        style="yellow",
    )


@app.command()
def compose(
    federation: Annotated[Path, _FILE],
    name: Annotated[
        str | None, typer.Option(help="One organisation's service alone, as on its own machine. Default: all.")
    ] = None,
    image: Annotated[str, typer.Option(help="What the Dockerfile was built as.")] = "pbmvfl:0.2.0",
    out: OutFile = None,
) -> None:
    """Write a compose file: a service for each organisation, whose folder is beside the file under its name.

    [bold]Try[/]  pbmvfl federation compose federation.toml --name bank --out compose.yaml
    """
    need_nvflare()
    import yaml

    from pbmvfl.deploy.site.federation_file import FederationFile
    from pbmvfl.deploy.site.supervision import compose_file

    values = compose_file(FederationFile.read(federation), only=name, image=image)
    print_or_write(yaml.safe_dump(values, sort_keys=False), out)


@app.command()
def dashboard(out: OutFile = None) -> None:
    """Write a Grafana dashboard of a site's metrics, to import there."""
    from pbmvfl.deploy.site.supervision import grafana_dashboard

    print_or_write(json.dumps(grafana_dashboard(), indent=2) + "\n", out)


def _show_fingerprint(found: str) -> None:
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(f"fingerprint  [bold]{found}[/]")
