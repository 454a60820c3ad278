"""Every rule that closes a weakness of NVFlare 2.9.0, in one table: the rule, its attack, and the test that shows it.

No message of a job travels over NVFlare's cells; what still does is registration, the delivery and start of jobs, and
signs of life. NVFlare lets every registered site send requests to every process of every other one, trusts the origin
that a message states, and has a remote shell. Here every message that a cell receives passes the rules on messages
before any part of it is used or decoded; a site keeps only those commands that a job needs; and the files of a kit
(`hardening`) grant nothing else.

Every process of a kit installs this before it has a connection: `local/resources.json` names a component that does.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import shutil
import socket
import ssl
import threading
import zipfile
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import ReservedTopic
from nvflare.apis.job_def import JobMetaKey
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, CellChannelTopic, MessageHeaderKey, MessageType
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.drivers.tcp_driver import TcpStreamServer
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, STREAM_DATA_TOPIC, StreamHeaderKey
from nvflare.fuel.utils.fobs import lobs
from nvflare.private.admin_defs import MsgHeader, error_reply
from nvflare.private.admin_defs import ReturnCode as AdminReturnCode
from nvflare.private.defs import CellMessageHeaderKeys, RequestHeader
from nvflare.private.fed.client.admin_commands import AdminCommands
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.client.training_cmds import DeployProcessor

log = logging.getLogger(__name__)
#: NVFlare's name of the server's cell, and the prefix of a submitter's cell.
SERVER, ADMIN = "server", "_admin_"
#: Headers that no message of ours has. Encrypted messages make their receiver request a certificate, and wait for an
#: hour; an address makes it dial there.
_UNUSED = (MessageHeaderKey.SECURE, MessageHeaderKey.ENCRYPTED, MessageHeaderKey.CONN_URL)


# --- what a message says, and who sent it ---


class Who(Enum):
    """Sender of a message, as seen by the process that gets it."""

    OWN = auto()  #: another process of the same site
    SERVER = auto()
    PARTY = auto()
    LEAD = auto()
    STRANGER = auto()


@dataclass(frozen=True, kw_only=True)
class Members:
    """Names in federation.toml."""

    parties: tuple[str, ...]
    lead: str


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Message at the cell `me`, before any part of it is used."""

    me: str
    #: Name of the connection's other end. NVFlare binds it to the certificate, except for submitters.
    endpoint: str
    common_name: str
    origin: str
    destination: str
    kind: str = MessageType.REQ
    channel: str = ""
    topic: str = ""
    #: Name by which the server lists the sender.
    named: str = ""
    has_unused: bool = False

    @classmethod
    def of(cls, cell: Any, endpoint: Any, connection: Any, message: Any) -> Arrival:
        def said(key: str) -> str:
            return str(message.get_header(key, ""))

        properties = connection.get_conn_properties() if connection else {}
        channel, topic = said(MessageHeaderKey.CHANNEL), said(MessageHeaderKey.TOPIC)
        if channel == STREAM_CHANNEL:  # of a stream, those of its data; acknowledgements are replies
            is_data = topic == STREAM_DATA_TOPIC
            channel = said(StreamHeaderKey.CHANNEL) if is_data else str(CellChannel.RETURN_ONLY)
            topic = said(StreamHeaderKey.TOPIC) if is_data else topic
        return cls(
            me=str(cell.my_info.fqcn),
            endpoint=str(endpoint.name),
            common_name=str(properties.get(DriverParams.PEER_CN.value, "")),
            origin=said(MessageHeaderKey.ORIGIN),
            destination=said(MessageHeaderKey.DESTINATION),
            kind=said(MessageHeaderKey.MSG_TYPE),
            channel=channel,
            topic=topic,
            named=said(CellMessageHeaderKeys.CLIENT_NAME),
            has_unused=any(message.get_header(key, None) for key in _UNUSED),
        )

    def sender(self, members: Members) -> Who:
        """Classify the origin; it is true where `forged_origin` refuses what is not."""
        site = site_of(self.origin)
        if site == site_of(self.me):
            return Who.OWN
        if site == SERVER:
            return Who.SERVER
        if site in members.parties:
            return Who.PARTY
        # The name of a submitter's cell is random: the certificate must be the lead's.
        is_lead = self.origin.startswith(ADMIN) and "." not in self.origin and self.common_name == members.lead
        return Who.LEAD if is_lead else Who.STRANGER


def site_of(cell: str) -> str:
    """Return the site of a cell's name, such as bank or bank.JOB."""
    return cell.partition(".")[0]


# --- rules on messages: whether one is refused ---


def forged_origin(arrival: Arrival, members: Members) -> bool:  # noqa: ARG001
    """Refuse a sender that the connection does not bear out."""
    mine, theirs, said = (site_of(each) for each in (arrival.me, arrival.endpoint, arrival.origin))
    if arrival.me == SERVER:
        return said != theirs
    if theirs == mine:  # a process of the same site, which has checked: a party's forwards the server's messages
        return mine != SERVER and said not in (mine, SERVER)
    return not theirs == said == SERVER


def unused_header(arrival: Arrival, members: Members) -> bool:  # noqa: ARG001
    """Refuse a message that makes its reader wait for a certificate or dial an address."""
    return arrival.has_unused


def foreign_return(arrival: Arrival, members: Members) -> bool:
    """Refuse a returned request, which is attributed to whom it was for, of anyone but the server and the own site."""
    return arrival.kind == MessageType.RETURN and arrival.sender(members) not in (Who.OWN, Who.SERVER)


def foreign_name(arrival: Arrival, members: Members) -> bool:
    """Refuse a request to be listed at the server under another name."""
    own = members.lead if arrival.origin.startswith(ADMIN) else site_of(arrival.origin)
    is_listed = arrival.me == SERVER and arrival.channel == CellChannel.SERVER_MAIN
    return is_listed and arrival.named not in ("", own)


#: How a server's and a party's job find each other and know that the other lives. Other topics have events fired.
JOB_TOPICS = frozenset(
    {ReservedTopic.SYNC_RUNNER, ReservedTopic.JOB_HEART_BEAT, ReservedTopic.TASK_CHECK, ReservedTopic.END_RUN}
)
#: Commands of a party to the server's job, on the channel by which the server's own process ends and inspects it.
PARTYS_COMMANDS = frozenset({"get_task"})
_REPLY, _CONNECTION, _AUX = CellChannel.RETURN_ONLY, CellChannel.CELLNET, CellChannel.AUX_COMMUNICATION
_AT_HOME = frozenset({CellChannel.CLIENT_MAIN, CellChannel.CLIENT_COMMAND, _AUX, _REPLY, _CONNECTION})
#: Channels of each sender. All others are closed: diagnosis, relays, downloads, exchange of certificates.
AT_A_PARTY: dict[Who, frozenset[str]] = {Who.OWN: _AT_HOME, Who.SERVER: _AT_HOME}
AT_THE_SERVER: dict[Who, frozenset[str]] = {
    Who.OWN: frozenset({CellChannel.SERVER_PARENT_LISTENER, _AUX, _REPLY, _CONNECTION}),
    Who.PARTY: frozenset({CellChannel.SERVER_MAIN, _REPLY, _CONNECTION}),
    # A job's files come by the auxiliary channel.
    Who.LEAD: frozenset({CellChannel.SERVER_MAIN, CellChannel.HCI, _AUX, _REPLY, _CONNECTION}),
}
AT_THE_SERVERS_JOB: dict[Who, frozenset[str]] = {
    Who.OWN: frozenset({CellChannel.SERVER_COMMAND, _AUX, _REPLY, _CONNECTION}),
    Who.PARTY: frozenset({CellChannel.SERVER_COMMAND, _AUX, _REPLY}),
}


def closed_channel(arrival: Arrival, members: Members) -> bool:
    """Refuse a request that no job needs of this sender."""
    if arrival.kind != MessageType.REQ or arrival.destination != arrival.me:
        return False
    site, _, job = arrival.me.partition(".")
    table = AT_A_PARTY if site != SERVER else AT_THE_SERVERS_JOB if job else AT_THE_SERVER
    sender, channel, topic = arrival.sender(members), arrival.channel, arrival.topic
    if channel not in table.get(sender, frozenset()):
        return True
    if channel == _CONNECTION:  # a bundle of messages would not be checked one by one, and none is used
        return topic != str(CellChannelTopic.Bye)
    if channel == CellChannel.SERVER_COMMAND:
        return sender is Who.PARTY and topic not in PARTYS_COMMANDS
    return channel == _AUX and sender in (Who.PARTY, Who.SERVER) and topic not in JOB_TOPICS


def _install_message_rules(members: Members) -> None:
    receive = CoreCell._process_received_msg
    told: set[tuple[str, str, str]] = set()

    def receive_permitted(cell: Any, endpoint: Any, connection: Any, message: Any) -> Any:
        arrival = Arrival.of(cell, endpoint, connection, message)
        broken = next((rule for rule in RULES if rule.refuses and rule.refuses(arrival, members)), None)
        if broken is None:
            return receive(cell, endpoint, connection, message)
        seen = (arrival.endpoint[:60], arrival.origin[:60], broken.name)
        if seen not in told and len(told) < 100:
            told.add(seen)
            log.warning("a message by %r in the name of %r was dropped (%s)", *seen)
        return None

    CoreCell._process_received_msg = receive_permitted


# --- rules on commands, and on what a command leaves behind ---

#: Commands of the server to a site: accept a job, start it, end it, report whether it lives.
SITE_COMMANDS = frozenset(
    {
        "CheckResourceProcessor",
        "CancelResourceProcessor",
        "DeployProcessor",
        "StartJobProcessor",
        "AbortAppProcessor",
        "NotifyJobStatusProcessor",
        "ClientStatusProcessor",
    }
)
#: Commands of a site to its own job's process.
JOB_COMMANDS = frozenset({"CheckStatusCommand", "AbortCommand", "AbortTaskCommand", "ByeCommand"})
#: Bounds of a job, whose files are a job spec and its signatures.
_MOST_FILES, _MOST_BYTES = 50, 32_000_000
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def keep_needed_commands() -> None:
    """Remove all commands that no job needs, such as the remote shell."""
    site, job = ClientRequestProcessors.request_processors, AdminCommands.commands
    site[:] = [each for each in site if type(each).__name__ in SITE_COMMANDS]
    job[:] = [each for each in job if type(each).__name__ in JOB_COMMANDS]


def too_large(packed: object) -> str:
    """Describe what is wrong with the size of a job's files, before any is unpacked, or return ""."""
    try:
        with zipfile.ZipFile(io.BytesIO(packed if isinstance(packed, bytes | bytearray) else b"")) as files:
            sizes = [each.file_size for each in files.infolist()]
    except (zipfile.BadZipFile, OSError, ValueError):
        return "a job's files are not a zip file"
    if len(sizes) > _MOST_FILES or sum(sizes) > _MOST_BYTES:
        return f"{len(sizes):,} files of {sum(sizes):,} bytes; permitted: {_MOST_FILES} of {_MOST_BYTES:,} in all"
    return ""


class WholeDeployment(DeployProcessor):
    """Delivery of a job's files: once, under the job's own id, bounded, and whole, or nothing of them stays.

    NVFlare empties the folder of the job's name, whatever that is, and unpacks into it before the files are validated.
    Files of a delivery that failed halfway would stay, and a job could be started with them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._begun: set[str] = set()
        self._lock = threading.Lock()

    def process(self, request: Any, engine: Any) -> Any:
        job, described = request.get_header(RequestHeader.JOB_ID), request.get_header(RequestHeader.JOB_META)
        if not isinstance(job, str) or not _JOB.fullmatch(job):  # "startup" would be a folder of the kit
            return error_reply("a job's id is not one that NVFlare gives")
        if not isinstance(described, dict) or described.get(JobMetaKey.JOB_ID.value) != job:
            return error_reply("a job's description names another job")
        if words := too_large(request.body):
            return error_reply(words)
        with self._lock:
            # A second delivery would lie there unvalidated while a process that was started for the first one reads.
            known = job in self._begun or Path(job).exists()
            self._begun.add(job)
        if known:
            return error_reply("this job's files came before")
        taken = False
        try:
            reply = super().process(request, engine)
            taken = reply.get_header(MsgHeader.RETURN_CODE) == AdminReturnCode.OK
        finally:
            if not taken:
                shutil.rmtree(job, ignore_errors=True)
        return reply


def deploy_whole() -> None:
    """Let jobs be delivered by `WholeDeployment`."""
    commands = ClientRequestProcessors.request_processors
    commands[:] = [WholeDeployment() if type(each) is DeployProcessor else each for each in commands]


def refuse_files() -> None:
    """Let no message write a file, in a folder that all users of a machine share."""
    lobs.get_datum_dir = _no_files


def _no_files() -> str:
    raise ValueError("a message brings a file; permitted: none")


# --- rule on connections ---

#: Seconds that a connection has for its TLS handshake, and how many may be in one at a time.
_HANDSHAKE, _MOST_HANDSHAKES = 10.0, 100


def shake_hands_apart() -> None:
    """Let each connection's TLS handshake be in a thread of its own, for a bounded time.

    NVFlare's is in the thread that accepts connections, and has no end.
    """
    accept, serve = TcpStreamServer.get_request, TcpStreamServer.finish_request
    pending: deque[ssl.SSLSocket] = deque()

    def accept_only(server: Any) -> Any:
        listener: Any = server.socket
        if not isinstance(listener, ssl.SSLSocket):
            raise OSError("a port without TLS; permitted: none")
        listener.do_handshake_on_connect = False  # type: ignore[attr-defined]
        accepted = accept(server)
        pending.append(accepted[0])
        if len(pending) > _MOST_HANDSHAKES:
            with contextlib.suppress(IndexError, OSError):
                # Its own thread closes it: a descriptor that is closed here could be another file's there.
                socket.socket.shutdown(pending.popleft(), socket.SHUT_RDWR)
        return accepted

    def shake_hands(server: Any, request: Any, address: Any) -> None:
        try:
            request.settimeout(_HANDSHAKE)
            request.do_handshake()
            request.settimeout(None)
        except OSError:
            return  # whoever it was has shown no certificate
        finally:
            with contextlib.suppress(ValueError, IndexError):
                pending.remove(request)
        serve(server, request, address)

    TcpStreamServer.get_request, TcpStreamServer.finish_request = accept_only, shake_hands


# --- the table ---


@dataclass(frozen=True)
class Rule:
    """One rule: on messages (`refuses`), on a process (`install`), in a file of a kit (`file`), or in a `module`."""

    name: str
    attack: str
    _: KW_ONLY
    #: Name of the test that tries the attack.
    test: str = "test_each_rule_alone_stops_its_attack"
    refuses: Callable[[Arrival, Members], bool] | None = None
    install: Callable[[], None] | None = None
    file: str = ""
    module: str = ""


RULES = (
    Rule(
        "forged origin",
        "a party speaks as the server, its job, another party's job or the lead: each reply has the server's token, "
        "and a bearer may state any origin",
        refuses=forged_origin,
    ),
    Rule(
        "unused header",
        "a message holds a thread for an hour, or makes its reader dial any address",
        refuses=unused_header,
    ),
    Rule(
        "foreign return",
        "a party answers for another: a returned request is attributed to whom it was for",
        refuses=foreign_return,
    ),
    Rule(
        "foreign name",
        "a party is listed at the server, and kept alive or logged out there, under another name",
        refuses=foreign_name,
    ),
    Rule(
        "closed channel",
        "any certificate of the authority registers as a site or acts as an admin; a party gives orders to the "
        "server's job; the server stops, inspects or reconfigures a party's processes",
        refuses=closed_channel,
    ),
    Rule(
        "files in messages",
        "a message writes files into a folder of the machine that all users share",
        install=refuse_files,
    ),
    Rule(
        "handshakes",
        "anyone who reaches a port, without a certificate, keeps all others out by one silent connection",
        install=shake_hands_apart,
    ),
    Rule(
        "revoked certificates",
        "a removed party, or a thief of its key, goes on with a certificate that has not expired",
        test="test_nvflares_port_refuses_a_revoked_certificate_by_name_and_no_other",
        module="revocation",
    ),
    Rule(
        "commands",
        "the server reads any file of a party by the remote shell, deletes runs, changes log settings",
        test="test_the_server_cannot_make_a_party_show_a_file",
        install=keep_needed_commands,
    ),
    Rule(
        "whole deployment",
        "the server runs code at a party by a half-unpacked job or a second delivery, empties its startup folder by a "
        "job of that name, or fills its disk by a zip file",
        test="test_what_cannot_be_unpacked_wholly_or_names_another_job_leaves_nothing",
        install=deploy_whole,
    ),
    Rule(
        "validator",
        "a job brings code, settings or other classes: NVFlare has many ways to take them",
        test="test_no_job_but_ours_is_taken_and_nothing_of_it_runs_or_stays",
        file="local/resources.json",
    ),
    Rule(
        "settings first",
        "comm_config.json in a job's folder names code to load, also for the next start of the site",
        test="test_settings_in_a_jobs_folder_are_a_live_attack_that_the_kits_own_file_ends",
        file="comm_config.json",
    ),
    Rule(
        "signed jobs",
        "a job of somebody who is not the lead, or changed after the lead signed it",
        test="test_a_job_without_the_leads_signature_or_changed_after_it_is_refused",
        file="startup/fed_client.json",
    ),
    Rule(
        "rights",
        "an admin reads files and logs of sites, restarts them, downloads results",
        test="test_the_lead_has_no_shell_no_logs_no_files_and_still_watches",
        file="local/authorization.json",
    ),
)

_installed: list[Members] = []


def install(parties: Iterable[str], lead: str) -> None:
    """Guard this process from now on. Idempotent: the first call counts."""
    if _installed:
        return
    members = Members(parties=tuple(parties), lead=lead)
    # What no longer exists must not pass for guarded.
    replaced = ((CoreCell, "_process_received_msg"), (lobs, "get_datum_dir"), (DeployProcessor, "process"))
    for owner, name in replaced:
        if not callable(getattr(owner, name, None)):
            raise RuntimeError(f"{name} is not there to be guarded; permitted: nvflare==2.9.0")
    _installed.append(members)
    _install_message_rules(members)
    for rule in RULES:
        if rule.install is not None:
            rule.install()
