"""A small federation's files, as tests of a deployment want them."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from certificates import Authority
from pbmvfl.deploy.federation_file import FILE
from pbmvfl.deploy.home import Home
from pbmvfl.secagg.keys import Identity

SERVER, PARTIES, LEAD = "clinic", ("bank", "hospital"), "lead@clinic.example"
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
    parties = "".join(f'[[party]]\nname = "{name}"\n' for name in PARTIES)
    server = f'[server]\nname = "{SERVER}"\nhost = "{host}"\nport = {port}\nline_port = {line_port}\nlead = "{LEAD}"\n'
    return f'[federation]\nname = "people"\n{server}{parties}[plan]\nepsilon = 8\n'


def free_ports(number: int = 2) -> list[int]:
    """Ports that nobody listens at just now."""
    taken = [socket.socket() for _ in range(number)]
    try:
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in taken]
    finally:
        for each in taken:
            each.close()


def plain_home(folder: Path, name: str, authority: Authority, *, port: int = 8002, **days: int) -> Home:
    """An organisation's folder with a certificate of `authority` and its own identity; nothing of NVFlare."""
    folder.mkdir(parents=True)
    (folder / FILE).write_text(federation_text(port=port))
    home = Home(folder)
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


def write_pins(home: Home) -> dict[str, bytes]:
    """Made-up identities of everybody else, and the home's own."""
    everybody = {name: Identity.generate().public for name in (SERVER, *PARTIES)}
    everybody[home.name] = home.identity().public
    home.write_pins(everybody[SERVER], {name: everybody[name] for name in PARTIES})
    return everybody
