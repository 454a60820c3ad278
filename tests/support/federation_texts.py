"""A federation.toml in one place, for tests that need one and not what is in it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

SERVER, LEAD = "clinic", "lead@clinic.example"
PARTIES = ("bank", "shop")


def free_ports(count: int = 2) -> list[int]:
    """Ports that nobody listens at just now."""
    with contextlib.ExitStack() as opened:
        probes = [opened.enter_context(contextlib.closing(socket.socket())) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def federation_text(
    parties: Sequence[str] = PARTIES,
    *,
    host: str = "localhost",
    port: int = 8002,
    line_port: int = 8003,
    plan: str = "",
    patience: float | None = None,
) -> str:
    """Under the name `people`, with the server `clinic`; `plan` are lines of its table."""
    names = "".join(f'\n[[party]]\nname = "{name}"\n' for name in parties)
    more = f"\n[plan]\n{plan}\n" if plan else ""
    more += "" if patience is None else f"\n[line]\npatience = {patience}\n"
    return (
        f'[federation]\nname = "people"\n\n[server]\nname = "{SERVER}"\nhost = "{host}"\nport = {port}\n'
        f'line_port = {line_port}\nlead = "{LEAD}"\n{names}{more}'
    )
