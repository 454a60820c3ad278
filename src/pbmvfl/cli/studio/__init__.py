"""`pbmvfl studio`: a page on this machine that plans as its controls move.

`app` answers from the code of `pbmvfl plan`; `assets` has the page, its script, its style and benchmark records.
May import everything but `deploy`. Begin with the command below, then `app`.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import Annotated

import typer

from pbmvfl.errors import PbmvflError, RunFolderError

_LOOPBACK = "127.0.0.1"


def studio(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")] = 0,
    runs: Annotated[Path, typer.Option(help="Folder of runs, shown as points.")] = Path("runs"),
    ledger: Annotated[
        Path | None, typer.Option(help="Folder of ledgers, shown as bars of what is left.", show_default=False)
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address and open no browser.")] = False,
) -> None:
    """Plan in a browser: move epsilon, rows and parties, and see what is protected, what it costs and what it learns.

    [bold]Try[/]  pbmvfl studio --runs runs --ledger ledgers

    The page is served to this machine alone, at an address with a random token. It reads run folders and ledgers,
    writes nothing, releases nothing and charges nothing. Ctrl+C ends it.
    """
    try:
        from pbmvfl.cli.studio.app import serve, studio_app
    except ModuleNotFoundError as error:
        raise PbmvflError(f"{error.name} is not installed; install it with: pip install 'pbmvfl[studio]'") from error
    if ledger is not None and not ledger.is_dir():
        raise RunFolderError(f"ledger={str(ledger)!r} is not a folder; give the folder of some ledgers")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_LOOPBACK, port))
            listener.listen()
        except OSError as error:
            raise PbmvflError(f"port={port} cannot be used: {error.strerror}; give another, or 0 for any") from error
        token, bound = secrets.token_urlsafe(24), listener.getsockname()[1]
        address = f"http://{_LOOPBACK}:{bound}/{token}/"
        print(f"{address}\nOnly this machine can open it. Ctrl+C ends it.", flush=True)
        if not no_browser:
            import webbrowser

            webbrowser.open(address)
        serve(studio_app(token, port=bound, runs=runs, ledger=ledger), listener)
