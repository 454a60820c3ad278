"""`python forging_party.py FOLDER`: one party's cell, with its own certificate, and what it tries.

Server, bank and hospital are NVFlare's own cells in this process, over mutual TLS; the server checks and signs tokens
by NVFlare's own methods. Each attack is tried under all rules of the guard, and again with one of them taken away: the
control. What came of it is printed as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import sys
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from socketserver import TCPServer
from typing import Any

import msgpack
from nvflare.apis.client import Client
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, Encoding, MessageType
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey as Key
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.drivers.tcp_driver import TcpStreamServer
from nvflare.fuel.f3.message import Message
from nvflare.fuel.sec.authn import set_add_auth_headers_filters
from nvflare.fuel.utils.config_service import ConfigService
from nvflare.fuel.utils.fobs import lobs
from nvflare.private.defs import CellMessageHeaderKeys
from nvflare.private.fed.server.client_manager import ClientManager
from nvflare.private.fed.server.fed_server import FederatedServer
from nvflare.private.fed.utils.fed_utils import fobs_initialize
from nvflare.private.fed.utils.identity_utils import IdentityAsserter

from pbmvfl.deploy.link.tls import Credentials, party_context
from pbmvfl.deploy.nvflare import guard
from pbmvfl.deploy.nvflare.authority import provision
from pbmvfl.deploy.site.folder import SiteFolder
from support.deployments import PARTIES, SERVER, federation_text, free_ports

FOLDER = Path(sys.argv[1])
WAIT = 20.0
_TOKEN = (CellMessageHeaderKeys.CLIENT_NAME, CellMessageHeaderKeys.TOKEN, CellMessageHeaderKeys.TOKEN_SIGNATURE)
heard: list[str] = []
refused: Counter[str] = Counter()


class Tokens:
    """As much of NVFlare's server as looks at tokens, and puts its own into whatever it says."""

    my_own_auth_client_name = my_own_token = "server"
    my_own_token_signature = None
    logger = logging.getLogger("server")

    def __init__(self, home: SiteFolder) -> None:
        self._asserter = IdentityAsserter(str(home.private_key), str(home.certificate))
        self.client_manager = ClientManager("people")
        self.cell: Any = None

    def _get_id_asserter(self) -> Any:
        return self._asserter


for name in (
    "_validate_auth_headers",
    "_add_auth_headers",
    "_resolve_client_fqcn_for_auth",
    "sign_auth_token",
    "_strip_peer_transit_headers",
):
    setattr(Tokens, name, getattr(FederatedServer, name))


def credentials(home: SiteFolder, role: str) -> dict[str, str]:
    names = (DriverParams.SERVER_CERT, DriverParams.SERVER_KEY)
    if role != "server":
        names = (DriverParams.CLIENT_CERT, DriverParams.CLIENT_KEY)
    return {
        DriverParams.CA_CERT.value: str(home.authority),
        DriverParams.CONNECTION_SECURITY.value: "mtls",
        names[0].value: str(home.certificate),
        names[1].value: str(home.private_key),
    }


def opened(name: str, home: SiteFolder, url: str) -> Cell:
    role = "server" if name == "server" else "client"
    more = {} if role == "server" else {"auth_identity_map": {"server": SERVER}}
    cell = Cell(name, url, True, credentials(home, role), create_internal_listener=False, **more)
    CoreCell.ALL_CELLS.clear()  # so that everything goes over TLS
    cell.start()
    return cell


def until(condition: Any) -> bool:
    end = time.monotonic() + WAIT
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def note(who: str) -> Any:
    def hear(message: Message) -> Message:
        heard.append(f"{who} heard {message.get_header(Key.TOPIC)} of {message.get_header(Key.ORIGIN)}")
        return make_reply("ok")

    return hear


def held_threads() -> int:
    """Those that wait for somebody's certificate."""
    stacks = (traceback.extract_stack(frame) for frame in sys._current_frames().values())
    return sum(any(call.name == "get_certificate" for call in stack) for stack in stacks)


def accept_as_nvflare(server: Any) -> Any:
    server.socket.do_handshake_on_connect = True
    return TCPServer.get_request(server)


def watched(rule: guard.Rule) -> guard.Rule:
    """The same rule, which counts what it refuses."""
    refuses = rule.refuses
    if refuses is None:
        return rule

    def count(arrival: guard.Arrival, members: guard.Members) -> bool:
        found = refuses(arrival, members)
        refused[rule.name] += found
        return found

    return dataclasses.replace(rule, refuses=count)


def main() -> None:
    port, line_port = free_ports()
    (FOLDER / "federation.toml").write_text(federation_text(port=port, line_port=line_port))
    homes = provision(FOLDER / "federation.toml", FOLDER / "homes")
    ConfigService.initialize(section_files={}, config_path=[str(homes["bank"].kit)])
    guard.RULES = tuple(watched(rule) for rule in guard.RULES)
    guard.install(PARTIES, homes[SERVER].federation.lead)
    with contextlib.suppress(Exception):
        fobs_initialize()
    datums = FOLDER / "datums"
    datums.mkdir()
    no_files = lobs.get_datum_dir

    def refuse_file() -> str:
        refused["files in messages"] += 1
        return str(no_files())

    lobs.get_datum_dir = refuse_file

    server: Any = Tokens(homes[SERVER])
    server.cell = opened("server", homes[SERVER], f"tcp://127.0.0.1:{port}?admin_listener=true")
    core = server.cell.core_cell
    core.add_incoming_filter("*", "*", cb=server._validate_auth_headers)
    core.add_outgoing_reply_filter("*", "*", cb=server._add_auth_headers)
    core.add_outgoing_request_filter("*", "*", cb=server._add_auth_headers)
    for channel in (CellChannel.SERVER_MAIN, CellChannel.SERVER_PARENT_LISTENER, CellChannel.HCI):
        server.cell.register_request_cb(channel, "*", note("server"))
    cells = {}
    for party in PARTIES:
        cells[party] = opened(party, homes[party], f"tcp://127.0.0.1:{port}")
        token = f"token-{party}"
        server.client_manager.clients[token] = Client(party, token)
        set_add_auth_headers_filters(cells[party], party, token, server.sign_auth_token(party, token), "session")
    assert until(lambda: all(each in core.agents for each in PARTIES))
    bank = cells["bank"].core_cell
    answer = bank.send_request(CellChannel.SERVER_MAIN, "honest", "server", Message({}, "x"), timeout=WAIT)
    # The server's own token stands in every answer of its.
    stolen = {key: answer.headers[key] for key in _TOKEN}
    assert stolen[CellMessageHeaderKeys.TOKEN] == "server"

    def send(origin: str, to: str, channel: str, topic: str, payload: bytes = b"x", **more: Any) -> None:
        """As it is, past everything of NVFlare's that would write the true name."""
        headers = {
            Key.ORIGIN: origin,
            Key.DESTINATION: to,
            Key.FROM_CELL: "bank",
            Key.TO_CELL: "server",
            Key.CHANNEL: channel,
            Key.TOPIC: topic,
            Key.MSG_TYPE: MessageType.REQ,
            Key.REQ_ID: "r",
            Key.REPLY_EXPECTED: False,
            Key.ROUTE: [("bank", time.time())],
        }
        bank._send_to_endpoint(bank.agents["server"].endpoint, Message({**headers, **stolen, **more}, payload))

    # A reply that nobody asked for, with a file in it.
    main_part, content = msgpack.packb("x"), b"written by another site's process"
    with_file = (
        lobs.HEADER_STRUCT.pack(lobs.MARKER_MAIN, 0, len(main_part))
        + main_part
        + lobs.HEADER_STRUCT.pack(lobs.MARKER_DATUM_FILE, 0, 16 + len(content))
        + uuid.uuid4().bytes
        + content
    )
    reply = {Key.MSG_TYPE: MessageType.REPLY}
    bank.add_incoming_filter("credential_manager", "*", cb=lambda _: make_reply("ok"))  # it never answers
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)

    def is_dialled() -> bool:
        with contextlib.suppress(BlockingIOError):
            listener.accept()[0].close()
            return True
        return False

    # The bank's certificate, and a name as only leads have.
    admin = opened(f"_admin_{uuid.uuid4()}", homes["bank"], f"tcp://127.0.0.1:{port}")
    set_add_auth_headers_filters(admin, "server", "server", stolen[CellMessageHeaderKeys.TOKEN_SIGNATURE], "session")
    assert until(lambda: admin.get_fqcn() in core.agents)

    # A connection that says nothing, and a party that comes after it.
    silent: list[socket.socket] = []
    bank_home = homes["bank"]
    own = Credentials(
        certificate=bank_home.certificate, private_key=bank_home.private_key, authority=bank_home.authority
    )

    def is_kept_out() -> bool:
        with socket.create_connection(("127.0.0.1", port), timeout=3) as raw:
            try:
                with party_context(own).wrap_socket(raw):
                    refused["handshakes"] += 1
                    return False
            except TimeoutError:
                return True

    # The server asks both; the bank answers for the hospital, which waits until that was dealt with.
    replies: dict[str, Message] = {}

    def answer_for_another(message: Message) -> Message:
        headers = {Key.DESTINATION: "hospital", Key.CHANNEL: CellChannel.CLIENT_MAIN, Key.TOPIC: "both"}
        more = {Key.MSG_TYPE: MessageType.RETURN, Key.REQ_ID: message.get_header(Key.REQ_ID)}
        send("bank", "server", "", "both", b"forged", **{Key.ORIGINAL_HEADERS: headers, **more})
        return make_reply("ok")

    def answer_late(message: Message) -> Message:
        before = refused["foreign return"]
        waiter = core.waiters.get(message.get_header(Key.REQ_ID))
        until(lambda: refused["foreign return"] > before or (waiter is not None and waiter.is_set()))
        return make_reply("ok")

    cells["bank"].register_request_cb(CellChannel.CLIENT_MAIN, "both", answer_for_another)
    cells["hospital"].register_request_cb(CellChannel.CLIENT_MAIN, "both", answer_late)
    for channel in (CellChannel.CLIENT_MAIN, CellChannel.CLIENT_COMMAND):
        cells["hospital"].register_request_cb(channel, "*", note("hospital"))

    def ask_both() -> None:
        asked = Message({}, "x")
        replies.update(core.broadcast_request(CellChannel.CLIENT_MAIN, "both", list(PARTIES), asked, timeout=WAIT))

    def is_heard(words: str) -> Callable[[], bool]:
        return lambda: any(words in each for each in heard)

    Attack = tuple[str, str, Callable[[], object], Callable[[], bool]]
    attacks: list[Attack] = [
        (
            "forged origin",
            "the server",
            lambda: send("server", "hospital", CellChannel.CLIENT_MAIN, "as the server"),
            is_heard("hospital heard as the server of server"),
        ),
        (
            "forged origin",
            "another's job",
            lambda: send("hospital.job", "hospital", CellChannel.CLIENT_COMMAND, "as its own job"),
            is_heard("hospital heard as its own job of hospital.job"),
        ),
        (
            "forged origin",
            "the server's job",
            lambda: send("server.job", "server", CellChannel.SERVER_PARENT_LISTENER, "as the server's job"),
            is_heard("server heard as the server's job of server.job"),
        ),
        (
            "closed channel",
            "an order",
            lambda: send("bank", "server", CellChannel.SERVER_PARENT_LISTENER, "an order"),
            is_heard("server heard an order of bank"),
        ),
        (
            "closed channel",
            "an admin",
            lambda: admin.core_cell.fire_and_forget(CellChannel.HCI, "as an admin", "server", Message({}, "x")),
            is_heard("server heard as an admin of _admin_"),
        ),
        (
            "foreign name",
            "listed",
            lambda: send("bank", "server", CellChannel.SERVER_MAIN, "listed as the server"),
            is_heard("server heard listed as the server of bank"),
        ),
        (
            "files in messages",
            "a file",
            lambda: send("bank", "server", "x", "x", with_file, **reply, **{Key.PAYLOAD_ENCODING: Encoding.FOBS}),
            lambda: any(datums.iterdir()),
        ),
        (
            "unused header",
            "an address",
            lambda: send(
                "bank",
                "server",
                "x",
                "x",
                **{**reply, Key.FROM_CELL: "x", Key.CONN_URL: f"tcp://127.0.0.1:{listener.getsockname()[1]}"},
            ),
            is_dialled,
        ),
        (
            "unused header",
            "encrypted",
            lambda: send("bank", "server", "x", "x", **reply, **{Key.SECURE: True, Key.ENCRYPTED: True}),
            lambda: held_threads() > 0,
        ),
        (
            "handshakes",
            "a silent connection",
            lambda: (silent.append(socket.create_connection(("127.0.0.1", port))), is_kept_out()),
            is_kept_out,
        ),
        (
            "foreign return",
            "for another",
            ask_both,
            lambda: "hospital" in replies and replies["hospital"].payload == b"forged",
        ),
    ]
    all_rules, guarded_server = guard.RULES, (TcpStreamServer.get_request, TcpStreamServer.finish_request)
    found = []
    for rule, what, attack, has_effect in attacks:
        before = refused[rule]
        attack()
        is_refused = until(lambda rule=rule, before=before: refused[rule] > before)
        guarded = has_effect()
        guard.RULES = tuple(each for each in all_rules if each.name != rule)
        if rule == "files in messages":
            lobs.get_datum_dir = lambda: str(datums)
        elif rule == "handshakes":
            TcpStreamServer.get_request, TcpStreamServer.finish_request = accept_as_nvflare, TCPServer.finish_request
        attack()
        control = until(has_effect)
        guard.RULES, lobs.get_datum_dir = all_rules, refuse_file
        TcpStreamServer.get_request, TcpStreamServer.finish_request = guarded_server
        for each in silent:
            each.close()
        said = {"rule": rule, "attack": what, "refused": is_refused, "guarded": guarded, "control": control}
        found.append(said)
    print(json.dumps(found), flush=True)
    os._exit(0)  # cells have threads that would wait


main()
