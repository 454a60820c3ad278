"""Command-line interface. Every command reads options, calls the library and prints the result.

Commands import the training code only when they run, so that `--help` and completion stay fast.
May import everything. Begin with the list of commands below; each module defines one command or one group of commands.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated, NoReturn

import typer

from pbmvfl.cli import federation, ledger, policy, sites
from pbmvfl.cli.attack import attack
from pbmvfl.cli.audit import audit
from pbmvfl.cli.doctor import doctor
from pbmvfl.cli.help_text import ALL, App
from pbmvfl.cli.jobs import align, resume, submit
from pbmvfl.cli.plan import plan
from pbmvfl.cli.predict import evaluate, predict
from pbmvfl.cli.privacy import privacy
from pbmvfl.cli.report import report
from pbmvfl.cli.reproduce import reproduce
from pbmvfl.cli.schema import schema
from pbmvfl.cli.studio import studio
from pbmvfl.cli.train import train
from pbmvfl.cli.watch import logs, watch
from pbmvfl.errors import PbmvflError

#: Panel of `--help` for organisations that run a federation together.
_FEDERATION = "Between organisations"
app = App(
    name="pbmvfl",
    help="Vertical federated learning: columns of several organisations, one model, an epsilon that is a theorem.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help", ALL]},
    rich_markup_mode="rich",
)


def _show_version(asked: bool) -> None:
    if asked:
        from pbmvfl import __version__

        print(f"pbmvfl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and leave.")
    ] = False,
) -> None:
    """Vertical federated learning: columns of several organisations, one model, an epsilon that is a theorem."""


app.command()(train)
app.command()(predict)
app.command()(evaluate)
app.command()(reproduce)
app.command()(plan)
app.command()(studio)
app.command()(privacy)
app.command()(schema)
app.command()(report)
app.command()(attack)
app.command()(audit)
app.command()(doctor)
app.add_typer(ledger.app, name="ledger")
app.add_typer(federation.app, name="federation", rich_help_panel=_FEDERATION)
app.add_typer(policy.app, name="policy", rich_help_panel=_FEDERATION)
app.add_typer(sites.server, name="server", rich_help_panel=_FEDERATION)
app.add_typer(sites.party, name="party", rich_help_panel=_FEDERATION)
app.command(rich_help_panel=_FEDERATION)(align)
app.command(rich_help_panel=_FEDERATION)(submit)
app.command(rich_help_panel=_FEDERATION)(resume)
app.command(rich_help_panel=_FEDERATION)(watch)
app.command(rich_help_panel=_FEDERATION)(logs)


def main() -> None:
    """Run the command line. Bad input ends with code 2 and a message; a bug ends with its traceback."""
    # Commands print errors and notes themselves; a second copy from the logger would be noise.
    logging.getLogger("pbmvfl").addHandler(logging.NullHandler())
    try:
        app(prog_name="pbmvfl")  # completion and examples use this name, however the program was started
    except PbmvflError as error:
        _fail(str(error))
    except OSError as error:  # for example an unwritable folder or a full disk
        if error.filename is None and error.strerror is None:
            raise
        _fail(": ".join(str(part) for part in (error.filename, error.strerror) if part))


def _fail(message: str) -> NoReturn:
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    console.print("[bold red]error:[/]", end=" ")
    # Soft wrap keeps messages and paths searchable in a file or a pipe, and commands whole when they are copied from a
    # terminal. A list of faults has no commands: on a terminal its lines break between words.
    console.print(message, markup=False, soft_wrap="\n" not in message or not console.is_terminal)
    sys.exit(2)
