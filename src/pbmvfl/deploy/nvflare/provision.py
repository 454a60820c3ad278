"""Provisioning of all organisations' folders at once, for trials on one machine: its user has seen every key.

Between organisations each takes its own step of `deploy.nvflare.authority`; here one process takes all of them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from pbmvfl._files import make_private_folder
from pbmvfl.deploy.nvflare import authority
from pbmvfl.deploy.site.federation_file import FederationFile
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.errors import FederationError


def provision(federation_toml: Path, out: Path) -> dict[str, SiteFolder]:
    """Create a folder under `out` for every organisation of a federation, ready to start. For trials only."""
    federation = FederationFile.read(federation_toml)
    names = (federation.server, *federation.parties)
    for name in names:
        if (out / name).exists():
            raise FederationError(f"{out / name} exists already and was not touched; choose another folder")
    make_private_folder(out)
    try:
        with tempfile.TemporaryDirectory(prefix=".provision-", dir=out) as scratch:
            # The authority's key is gone when this ends: nobody can be added later.
            folder = Path(scratch) / "authority"
            authority.init(federation_toml, folder)
            requests = [authority.request(federation_toml, name, out / name) for name in names]
            bundles = authority.approve(folder, requests).bundles
            for name in names:
                authority.package(SiteFolder.at(out / name), bundles[name])
                shutil.rmtree(out / name / "request")  # it is for asking again
    except BaseException:
        for name in names:
            shutil.rmtree(out / name, ignore_errors=True)
        raise
    return {name: SiteFolder.at(out / name) for name in names}
