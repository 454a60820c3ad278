"""`pbmvfl party` and `pbmvfl server`: start, stop and inspect the process of an organisation's kit."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pbmvfl.cli.federation import HomeFolder, need_nvflare
from pbmvfl.cli.help_text import App
from pbmvfl.cli.options import AsJson, OutFile, print_or_write, say
from pbmvfl.errors import FederationError

if TYPE_CHECKING:
    from pbmvfl.deploy.nvflare.processes import KitStatus
    from pbmvfl.deploy.site.folder import SiteFolder

party = App(no_args_is_help=True, help="A party's site: it dials the server, and takes part in what it accepts.")
server = App(no_args_is_help=True, help="The label holder's site: parties dial it.")

Foreground = Annotated[
    bool, typer.Option("--foreground", help="Stay here until it ends, as systemd wants it; else it goes on alone.")
]


@party.command(name="start")
def party_start(
    home: HomeFolder = Path(),
    wait: Annotated[float, typer.Option(help="Seconds to wait for a server that is not there yet.", min=0)] = 0.0,
    foreground: Foreground = False,
    json_: AsJson = False,
) -> None:
    """Check the kit, the certificate and one handshake with the server, then start; done when the server took it."""
    _start(home, wait=wait, foreground=foreground, json_=json_, server_wanted=False)


@server.command(name="start")
def server_start(home: HomeFolder = Path(), foreground: Foreground = False, json_: AsJson = False) -> None:
    """Check the kit, the certificate and the port, then start; done when parties can dial it."""
    _start(home, wait=0.0, foreground=foreground, json_=json_, server_wanted=True)


@party.command(name="stop")
def party_stop(home: HomeFolder = Path()) -> None:
    """End the site and its jobs. What was released is in the ledger; a run can be resumed."""
    _stop(home, server_wanted=False)


@server.command(name="stop")
def server_stop(home: HomeFolder = Path()) -> None:
    """End the site and its jobs. A run can be resumed from its last checkpoint."""
    _stop(home, server_wanted=True)


@party.command(name="status")
def party_status(home: HomeFolder = Path(), json_: AsJson = False) -> None:
    """Show whether it runs, since when, and how long its certificate is valid. Exit code 1 if it does not run."""
    _status(home, json_=json_, server_wanted=False)


@server.command(name="status")
def server_status(home: HomeFolder = Path(), json_: AsJson = False) -> None:
    """Show whether it runs, since when, and how long its certificate is valid. Exit code 1 if it does not run."""
    _status(home, json_=json_, server_wanted=True)


Account = Annotated[str, typer.Option("--user", help="The account that runs it and owns the folder; not root.")]


@party.command(name="unit")
def party_unit(home: HomeFolder = Path(), user: Account = "pbmvfl", out: OutFile = None) -> None:
    """Write a hardened systemd unit that keeps this site running.

    [bold]Try[/]  pbmvfl party unit --home /srv/bank --out /etc/systemd/system/pbmvfl-bank.service
    """
    _unit(home, user, out, server_wanted=False)


@server.command(name="unit")
def server_unit(home: HomeFolder = Path(), user: Account = "pbmvfl", out: OutFile = None) -> None:
    """Write a hardened systemd unit that keeps this site running.

    [bold]Try[/]  pbmvfl server unit --home /srv/clinic --out /etc/systemd/system/pbmvfl-clinic.service
    """
    _unit(home, user, out, server_wanted=True)


def _unit(path: Path, user: str, out: Path | None, *, server_wanted: bool) -> None:
    from pbmvfl.deploy.site.supervision import systemd_unit

    print_or_write(systemd_unit(_home(path, server_wanted=server_wanted), user=user), out)


def _home(path: Path, *, server_wanted: bool) -> SiteFolder:
    from pbmvfl.deploy.site.folder import SiteFolder

    home = SiteFolder.at(path)
    if home.is_server != server_wanted:
        role = "server" if home.is_server else "party"
        raise FederationError(f"{home.path} is the folder of {home.name}, a {role}; `pbmvfl {role} ...` is for it")
    return home


def _start(path: Path, *, wait: float, foreground: bool, json_: bool, server_wanted: bool) -> None:
    home = _home(path, server_wanted=server_wanted)
    need_nvflare()
    from pbmvfl.deploy.nvflare import processes

    if foreground:
        print(f"{home.name} starts, and ends with Ctrl-C", flush=True)
        raise typer.Exit(processes.run(home, wait=wait))
    _show(processes.start(home, wait=wait), json_=json_)


def _stop(path: Path, *, server_wanted: bool) -> None:
    home = _home(path, server_wanted=server_wanted)
    need_nvflare()
    from pbmvfl.deploy.nvflare import processes

    print(f"{home.name} is stopped" if processes.stop(home) else f"{home.name} was not running")


def _status(path: Path, *, json_: bool, server_wanted: bool) -> None:
    home = _home(path, server_wanted=server_wanted)
    need_nvflare()
    from pbmvfl.deploy.nvflare import processes

    found = processes.status(home)
    _show(found, json_=json_)
    if not found.running:
        raise typer.Exit(1)


def _show(status: KitStatus, *, json_: bool) -> None:
    if json_:
        print(json.dumps(asdict(status)))
        return
    from pbmvfl.deploy.link.tls import SOON

    if status.running:
        state = "is ready" if status.ready else "is starting, or the server has not taken it yet"
        say(f"{status.name} {state}: process {status.pid} since {status.since}")
    else:
        say(f"{status.name} does not run")
    days = status.certificate_days
    if days is not None:
        note = "; the authority makes new ones with `pbmvfl federation approve`" if days < SOON else ""
        words = f"expired {-days} days ago" if days < 0 else f"valid for {days} more days"
        say(f"certificate {words}{note}", style="yellow" if days < SOON else None)
    if status.last_error is not None:
        say(f"last error: {status.last_error}", style="yellow")
