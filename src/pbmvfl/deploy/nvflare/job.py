"""Canonical form of a job: two apps, of parameters only, each with one parameter, the job spec.

`JobValidator` refuses whatever was not written here, byte by byte. NVFlare replaces words in braces, by its own
settings or by variables of a site's environment, in every text of a job; so the job spec travels in letters without
any.
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from pbmvfl.deploy.site.federation_file import FederationFile
from pbmvfl.deploy.site.job_spec import LONGEST, JobSpec
from pbmvfl.errors import OrderError

SERVER_APP, PARTY_APP = "server", "party"
#: NVFlare's fixed name of the server's site.
SERVER_SITE = "server"
#: The only classes that a job can name.
SERVER_CLASS = "pbmvfl.deploy.nvflare.controller.ServerController"
PARTY_CLASS = "pbmvfl.deploy.nvflare.executor.PartyExecutor"
CONFIG_FOLDER = "config"
SERVER_CONFIG, PARTY_CONFIG = "config_fed_server.json", "config_fed_client.json"
#: Longest argument in characters: a job spec, which is ASCII, in base64.
LONGEST_ARGUMENT = 4 * ((LONGEST + 2) // 3)


def write_argument(spec: JobSpec) -> str:
    """Encode a job spec in letters, digits, hyphens and underscores."""
    return base64.urlsafe_b64encode(spec.to_text().encode()).decode()


def read_argument(argument: str) -> JobSpec:
    """Decode the result of `write_argument`.

    Raises:
        OrderError: If it is anything else. The message is public.
    """
    if not isinstance(argument, str) or len(argument) > LONGEST_ARGUMENT:
        raise OrderError(f"an order's argument is a text of at most {LONGEST_ARGUMENT} characters")
    try:
        text = base64.b64decode(argument.encode("ascii"), altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):  # letters that are none of base64's, bytes that are no text
        raise OrderError("the order's argument is not written as this version writes it") from None
    spec = JobSpec.from_text(text)
    if write_argument(spec) != argument:  # base64 has several spellings of its last letter
        raise OrderError("the order's argument is not written as this version writes it")
    return spec


def config(argument: str, *, is_server: bool) -> dict[str, Any]:
    """Return the configuration of the server's or a party's app."""
    args = {"order": argument}
    work: dict[str, Any] = (
        {"workflows": [{"id": "pbmvfl", "path": SERVER_CLASS, "args": args}]}
        if is_server
        else {"executors": [{"tasks": ["*"], "executor": {"path": PARTY_CLASS, "args": args}}]}
    )
    return {"format_version": 2, **work, "components": [], "task_data_filters": [], "task_result_filters": []}


def meta(spec: JobSpec, federation: FederationFile) -> dict[str, Any]:
    """Return the job's metadata: every site is named with its app, and none may be missing."""
    return {
        "name": f"{federation.name}-{spec.work}-{spec.run or spec.alignment}",
        "resource_spec": {},
        "deploy_map": {SERVER_APP: [SERVER_SITE], PARTY_APP: list(federation.parties)},
        "min_clients": len(federation.parties),
        "mandatory_clients": list(federation.parties),
    }


def to_bytes(content: dict[str, Any]) -> bytes:
    """Return the canonical bytes of a file."""
    return (json.dumps(content, indent=2) + "\n").encode()


def write_job(folder: Path, spec: JobSpec, federation: FederationFile) -> None:
    """Write a job's folder, as NVFlare's `submit_job` takes it."""
    argument = write_argument(spec)
    files = {
        Path("meta.json"): meta(spec, federation),
        Path(SERVER_APP, CONFIG_FOLDER, SERVER_CONFIG): config(argument, is_server=True),
        Path(PARTY_APP, CONFIG_FOLDER, PARTY_CONFIG): config(argument, is_server=False),
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_bytes(content))
