"""NVFlare's cells on loopback, and links over them: the server's parent, its job, and each party's job, in one process.

Cells of one process hand messages to each other as objects. Here none knows of the others, so that they use sockets.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.stats_pool import StatsPoolManager

from pbmvfl.deploy.link.interface import Channel, Handler
from pbmvfl.deploy.link.message_auth import PartyMessageAuth, ServerMessageAuth
from pbmvfl.deploy.nvflare.cell_channel import CHANNEL, TOPIC, Kind
from pbmvfl.deploy.nvflare.cell_party import PartyCell
from pbmvfl.deploy.nvflare.cell_server import ServerCell
from pbmvfl.errors import LinkError
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.protocol.transport import Answers
from support import nvflare_settings  # noqa: F401
from support.federation_texts import free_ports
from support.line_parties import CONTEXT, SERVER, identity_of

NAMES = ("bank", "hospital", "insurer")
#: Seconds after which what is missing is asked for again.
AGAIN_AFTER = 0.25
_jobs = itertools.count(1)


def _open(name: str, **choices: Any) -> Any:
    for pool in [each for each in StatsPoolManager.pools if each.endswith(f"@{name}")]:
        del StatsPoolManager.pools[pool]  # of a cell of this name that was stopped
    cell = CoreCell(name, secure=False, credentials={}, **choices)
    CoreCell.ALL_CELLS.pop(name)
    cell.ALL_CELLS = {}
    cell.start()
    return cell


@dataclass(frozen=True)
class Passing:
    """A message on its way through the server's parent process."""

    origin: str
    target: str
    kind: Kind
    payload: bytes


def _loses_nothing(passing: Passing) -> bool:
    del passing
    return False


class Backbone:
    """The server's parent process: every message goes through it, and it may lose some."""

    def __init__(self) -> None:
        self._url = f"tcp://127.0.0.1:{free_ports(1)[0]}"
        self.root = _open("server", root_url=self._url, create_internal_listener=True)
        self.root.add_incoming_filter(CHANNEL, TOPIC, self._forward)
        #: Which messages are lost here; asked once for each.
        self.loses: Callable[[Passing], bool] = _loses_nothing
        self.passed: list[Passing] = []

    def _forward(self, message: Message) -> Message | None:
        payload = bytes(message.payload or b"")
        origin, target = (message.get_header(key) for key in (MessageHeaderKey.ORIGIN, MessageHeaderKey.DESTINATION))
        try:
            passing = Passing(origin, target, Kind(payload[:1]), payload)
        except ValueError:
            return None
        if self.loses(passing):
            return make_reply("lost")
        self.passed.append(passing)
        return None

    def reset(self) -> None:
        self.loses = _loses_nothing
        self.passed = []

    def job(self, site: str, job: str) -> Any:
        """A job's cell at a site, connected."""
        parent = {"parent_url": self.root.get_internal_listener_url()} if site == "server" else {}
        cell = _open(f"{site}.{job}", root_url=self._url, **parent)
        deadline = time.monotonic() + 60
        while f"{site}.{job}" not in self.root.agents or "server" not in cell.agents:
            assert time.monotonic() < deadline, f"{site} has no connection"
            time.sleep(0.005)
        return cell

    def close(self) -> None:
        drivers = [each.driver for each in self.root.communicator.conn_manager.connectors.values()]
        self.root.stop()
        for driver in drivers:  # NVFlare leaves them open for the end of the process
            driver.server.server_close()


class CellFederation:
    """One job: cells of its own, the server's link, and parties that can be added."""

    def __init__(
        self, backbone: Backbone, names: Sequence[str] = NAMES, *, patience: float = 60.0, **choices: Any
    ) -> None:
        backbone.reset()
        self.backbone, self.names, self.patience, self.choices = backbone, names, patience, choices
        self.job = f"job-{next(_jobs)}"
        self.server_cell = backbone.job("server", self.job)
        self.cells: dict[str, Any] = {}
        self.ends: list[PartyCell] = []
        self._threads: list[threading.Thread] = []
        self.errors: dict[str, str] = {}
        pins = {name: identity_of(name).public for name in names}
        self.link = ServerCell(
            core_cell=self.server_cell,
            auth=ServerMessageAuth(identity_of(SERVER), pins, CONTEXT),
            cells={name: self.address(name) for name in names},
            patience=patience,
            again_after=AGAIN_AFTER,
            **choices,
        )

    def address(self, name: str) -> str:
        return f"{name}.{self.job}"

    def cell(self, name: str) -> Any:
        """A site's cell, whoever it belongs to."""
        self.cells[name] = self.backbone.job(name, self.job)
        return self.cells[name]

    def add(self, name: str, handle: Handler, *, identity: str = "", context: bytes = CONTEXT) -> PartyCell:
        auth = PartyMessageAuth(identity_of(identity or name), identity_of(SERVER).public, name, context)
        end = PartyCell(
            core_cell=self.cell(name),
            auth=auth,
            server=f"server.{self.job}",
            patience=self.patience,
            again_after=AGAIN_AFTER,
            linger=20.0,
            **self.choices,
        )

        def serve() -> None:
            try:
                end.serve(handle)
            except LinkError as error:
                self.errors[name] = str(error)
            finally:
                end.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        self._threads.append(thread)
        self.ends.append(end)
        return end

    def count(self, kind: Kind, *, target: str) -> int:
        """How many of these have gone to a cell."""
        return sum(each.kind is kind and each.target == target for each in self.backbone.passed)

    def wait(self) -> None:
        """Until every party has left."""
        for thread in self._threads:
            thread.join(timeout=60)
            assert not thread.is_alive()

    def close(self) -> None:
        self.link.close()
        for end in self.ends:
            end.close()
        for thread in self._threads:
            thread.join(timeout=30)
        for cell in (*self.cells.values(), self.server_cell):
            cell.stop()

    def __enter__(self) -> CellFederation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Recorder:
    """A party that writes down what it is asked, and answers with its name and the question."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[tuple[Channel, bytes]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, channel: Channel, body: bytes) -> bytes:
        self.seen.append((channel, body))
        assert self.may_go_on.wait(60)
        return self.name.encode() + b" heard " + body


def recorders(federation: CellFederation) -> dict[str, Recorder]:
    """A party of each name, joined."""
    found = {name: Recorder(name) for name in federation.names}
    for name, recorder in found.items():
        federation.add(name, recorder)
    federation.link.join(timeout=60)
    return found


def expected(body: bytes) -> dict[int, bytes]:
    return {index: name.encode() + b" heard " + body for index, name in enumerate(NAMES)}


def eventually(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


class CellThreads:
    """A transport of its own for the conformance suite: a thread and a cell for each party."""

    def __init__(self, backbone: Backbone, setups: Sequence[PartySetup], *, patience: float = 60.0) -> None:
        names = [f"party-{index}" for index in range(len(setups))]
        self.federation = CellFederation(backbone, names, patience=patience)
        self._parties = [setup.build() for setup in setups]
        self._may_go_on = [threading.Event() for _ in setups]
        self._lost: set[int] = set()
        try:
            for index, name in enumerate(names):
                self._may_go_on[index].set()
                self.federation.add(name, self._handler(index))
            self.federation.link.join(timeout=60)
        except BaseException:
            self.close()
            raise

    def _handler(self, index: int) -> Handler:
        def handle(channel: Channel, body: bytes) -> bytes:
            self._may_go_on[index].wait(timeout=60)
            return self._parties[index].receive(body) if channel is Channel.PROTOCOL else b""

        return handle

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        return self.federation.link.exchange(message, timeout=timeout)

    def lose(self, party: int) -> None:
        self._lost.add(party)
        self.federation.cells[f"party-{party}"].stop()

    def hold(self, party: int, *, still: bool) -> None:
        (self._may_go_on[party].clear if still else self._may_go_on[party].set)()

    def close(self) -> None:
        for event in self._may_go_on:
            event.set()
        asked: Mapping[int, bytes] = {i: b"" for i in range(len(self._parties)) if i not in self._lost}
        with contextlib.suppress(LinkError):
            self.federation.link.ask(asked, channel=Channel.END, timeout=30)
        self.federation.close()
        for party in self._parties:
            party.close()
