"""Provisioning of all organisations' folders at once, for trials on one machine: its user has seen every key.

Between organisations each generates its own keys instead: `deploy.nvflare.authority`.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from pathlib import Path

from nvflare.lighter.constants import CtxKey
from nvflare.lighter.entity import Participant, Project
from nvflare.lighter.impl.cert import CertBuilder
from nvflare.lighter.impl.static_file import StaticFileBuilder
from nvflare.lighter.impl.workspace import WorkspaceBuilder
from nvflare.lighter.provisioner import Provisioner

from pbmvfl._files import make_private_folder, write_atomically
from pbmvfl.deploy.nvflare.hardening import harden
from pbmvfl.deploy.site.federation_file import FILE, FederationFile
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.errors import FederationError

#: Validity of certificates for trials, in days.
VALID_DAYS = 360
_TEMPLATE = "master_template.yml"


def provision(federation_toml: Path, out: Path) -> dict[str, SiteFolder]:
    """Create a folder under `out` for every organisation of a federation, ready to start. For trials only."""
    federation = FederationFile.read(federation_toml)
    text = (federation_toml / FILE if federation_toml.is_dir() else federation_toml).read_text()
    names = (federation.server, *federation.parties)
    for name in names:
        if (out / name).exists():
            raise FederationError(f"{out / name} exists already and was not touched; choose another folder")
    make_private_folder(out)
    with tempfile.TemporaryDirectory(prefix=".provision-", dir=out) as scratch:
        # NVFlare keeps every private key there, the authority's too; it is gone when this ends.
        kits = _kits(federation, Path(scratch))
        homes = {name: make_home(out / name, name, text) for name in names}
        for name, site_folder in homes.items():
            shutil.copytree(kits / name, site_folder.kit)
        shutil.copytree(kits / federation.lead, homes[federation.server].lead_kit)
    public = {name: site_folder.make_identity().public for name, site_folder in homes.items()}
    for site_folder in homes.values():
        site_folder.write_pins(public[federation.server], {name: public[name] for name in federation.parties})
        harden(site_folder)
    return homes


def make_home(path: Path, name: str, federation_toml: str) -> SiteFolder:
    """Create an organisation's folder with its public files; nothing of another organisation is read."""
    make_private_folder(path)
    write_atomically(path / FILE, federation_toml)
    site_folder = SiteFolder(path.resolve())
    site_folder.write_name(name)
    return SiteFolder.at(path)


def organisation(name: str) -> str:
    """Return a name as NVFlare's organisations are written, without hyphens."""
    return name.replace("-", "_")


def _kits(federation: FederationFile, scratch: Path) -> Path:
    """Return the folder with NVFlare's kits by name."""
    ports = {"fed_learn_port": federation.port, "admin_port": federation.port}
    hosts = {"default_host": federation.host, "host_names": [federation.host, federation.server]}
    owner = organisation(federation.server)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            participants = [
                Participant("server", federation.server, owner, props={**ports, **hosts}),
                *(Participant("client", name, organisation(name)) for name in federation.parties),
                Participant("admin", federation.lead, owner, props={"role": "lead"}),
            ]
            builders = [
                WorkspaceBuilder([_TEMPLATE]),
                StaticFileBuilder(config_folder="config", scheme="tcp"),
                CertBuilder(root_valid_days=VALID_DAYS),
            ]
            ctx = Provisioner(str(scratch), builders).provision(Project(federation.name, "", participants=participants))
        except ValueError as error:
            raise FederationError(f"NVFlare does not take this federation: {error}") from error
    if ctx.get(CtxKey.BUILD_ERROR):
        raise FederationError(f"NVFlare could not make the kits: {said.getvalue().strip()[-500:]}")
    return Path(ctx[CtxKey.CURRENT_PROD_DIR])
