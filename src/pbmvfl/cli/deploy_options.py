"""What the commands of a deployment share."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from pbmvfl.errors import FederationError

HomeFolder = Annotated[Path, typer.Option("--home", help="The organisation's folder.", show_default="this folder")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def need_nvflare() -> None:
    """Before imports that need the extra: whoever lacks it is told how to get it."""
    if find_spec("nvflare") is None:
        raise FederationError('NVFlare is not installed; pip install "pbmvfl[deploy]"')
