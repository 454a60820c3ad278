"""Two networks of their own with one cable between them, which can be cut. Needs root and `ip`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator

from pbmvfl.deploy.link.grpc_stream import run

_CLONE_NEWNET = 0x40000000


def why_not() -> str:
    """Why there can be no networks here; nothing if there can."""
    if os.geteuid() != 0:
        return "only root makes networks"
    if shutil.which("ip") is None:
        return "there is no `ip`"
    name = f"pbmvfl-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return "" if made.returncode == 0 else "this machine makes no networks"


class Networks:
    """The server's network and a party's, and nothing else in them."""

    def __init__(self) -> None:
        number = os.getpid()
        self.server, self.party = f"pbmvfl-s-{number}", f"pbmvfl-p-{number}"
        self.host = "10.231.77.1"
        self._made: list[str] = []
        try:
            for name in (self.server, self.party):
                _ip("netns", "add", name)
                self._made.append(name)
                _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", self.server, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", self.party)
            _ip("-n", self.server, "addr", "add", f"{self.host}/30", "dev", "cable")
            _ip("-n", self.party, "addr", "add", "10.231.77.2/30", "dev", "cable")
            self.mend()
            _ip("-n", self.party, "link", "set", "cable", "up")
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        _ip("-n", self.server, "link", "set", "cable", "down")

    def mend(self) -> None:
        _ip("-n", self.server, "link", "set", "cable", "up")

    def close(self) -> None:
        made, self._made = self._made, []
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    @contextlib.contextmanager
    def at_the_server(self) -> Iterator[None]:
        """Sockets that the thread of all streams makes here belong to the server's network, and stay there."""
        before = run(_enter(os.open(f"/run/netns/{self.server}", os.O_RDONLY)))
        try:
            yield
        finally:
            os.close(run(_enter(before)))


async def _enter(network: int) -> int:
    """Enter a network by its descriptor, which is closed, and return the descriptor of the one that was left."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(network, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "the network cannot be entered")
    os.close(network)
    return before


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
