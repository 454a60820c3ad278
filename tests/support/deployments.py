"""A small federation's files, as tests of a deployment want them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.deploy.site.federation_file import FILE
from pbmvfl.deploy.site.folder import SiteFolder
from support import federation_texts
from support.certificates import Authority
from support.federation_texts import LEAD, SERVER, free_ports

__all__ = ["LEAD", "PARTIES", "POLICY", "SERVER", "federation_text", "free_ports", "plain_home", "write_pins"]

PARTIES = ("bank", "hospital")
POLICY = """
[data]
file = "rows.csv"
id = "id"
dataset = "people"
[[limit]]
epsilon = 8
delta = 1e-6
"""


def federation_text(*, port: int = 8002, line_port: int = 8003, host: str = "127.0.0.1") -> str:
    return federation_texts.federation_text(PARTIES, host=host, port=port, line_port=line_port, plan="epsilon = 8")


def plain_home(folder: Path, name: str, authority: Authority, *, port: int = 8002, **days: Any) -> SiteFolder:
    """An organisation's folder with a certificate of `authority` and its own identity; nothing of NVFlare."""
    folder.mkdir(parents=True)
    (folder / FILE).write_text(federation_text(port=port))
    home = SiteFolder(folder)
    home.write_name(name)
    home.make_identity()
    home.certificate.parent.mkdir(parents=True)
    kit = authority.issue(name, **days)
    for source, target in (
        (kit.certificate, home.certificate),
        (kit.private_key, home.private_key),
        (kit.authority, home.authority),
    ):
        shutil.copyfile(source, target)
        target.chmod(0o600)
    return home


def write_pins(home: SiteFolder) -> dict[str, bytes]:
    """Made-up identities of everybody else, and the home's own."""
    everybody = {name: Identity.generate().public for name in (SERVER, *PARTIES)}
    everybody[home.name] = home.identity().public
    home.write_pins(everybody[SERVER], {name: everybody[name] for name in PARTIES})
    return everybody
