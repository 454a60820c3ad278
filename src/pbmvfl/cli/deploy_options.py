"""What the commands of a deployment share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from pbmvfl.errors import FederationError

INSTALL = 'NVFlare is not installed; pip install "pbmvfl[deploy]"'

HomeFolder = Annotated[Path, typer.Option("--home", help="The organisation's folder.", show_default="this folder")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@contextlib.contextmanager
def nvflare_installed() -> Iterator[None]:
    """Around imports that need the extra: whoever lacks it is told how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("nvflare", "psutil"):
            raise FederationError(INSTALL) from error
        raise
