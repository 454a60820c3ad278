"""Guard of NVFlare's own processes: unpermitted requests are dropped before a byte of them is decoded.

NVFlare lets every registered site send requests to every process of every other site, and the requester decides whether
its rights are checked: a party could read any file of another by its remote shell. Here a process accepts requests of
its own site and of the server, on channels that jobs need, and a site keeps only those commands that a job needs. At
the server a name that is not in federation.toml is refused, whoever signed its certificate. The sender of a message is
authenticated by its connection (`install_origin_guard`); `install_deploy_guard` bounds what stays of a job's files.

Every process of a kit imports this before it has a connection: `local/resources.json` names classes that do.
"""

from __future__ import annotations

import io
import logging
import re
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import ReservedTopic
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.workspace import Workspace
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, MessageType, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, STREAM_DATA_TOPIC, StreamHeaderKey
from nvflare.fuel.utils.fobs import lobs
from nvflare.private.admin_defs import MsgHeader, error_reply
from nvflare.private.admin_defs import ReturnCode as AdminReturnCode
from nvflare.private.defs import CellMessageHeaderKeys, RequestHeader
from nvflare.private.fed.client.admin_commands import AdminCommands
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.client.training_cmds import DeployProcessor

# --- A job's files come once, under their own name, and whole; or nothing of them stays ---
# NVFlare unpacks them into the kit before they are validated. If that fails halfway they would stay there, and a job
# whose description names another one could be started with them.


#: Bounds of a job, whose files are a job spec and its signatures.
_MOST_FILES, _MOST_BYTES = 50, 32_000_000
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def is_job(name: object) -> bool:
    """Return whether a name is a job id of NVFlare. "startup" is none, and would be a folder of the kit."""
    return isinstance(name, str) and bool(_JOB.fullmatch(name))


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


def install_deploy_guard() -> None:
    deploy, _ = DeployProcessor.process, Workspace._check_job_id  # both must be there to be replaced
    # A job's folder is emptied before its files are validated, whatever its name.
    Workspace._check_job_id = staticmethod(_checked_job_id)
    begun: set[str] = set()
    lock = threading.Lock()

    def deploy_whole(processor: Any, request: Any, engine: Any) -> Any:
        job, described = request.get_header(RequestHeader.JOB_ID), request.get_header(RequestHeader.JOB_META)
        if not is_job(job):
            return error_reply("a job's id is not one that NVFlare gives")
        if not isinstance(described, dict) or described.get(JobMetaKey.JOB_ID.value) != job:
            return error_reply("a job's description names another job")
        if words := too_large(request.body):
            return error_reply(words)
        with lock:
            # A second delivery would lie there unvalidated while a process that was started for the first one reads.
            known = job in begun or Path(job).exists()
            begun.add(job)
        if known:
            return error_reply("this job's files came before")
        taken = False
        try:
            reply = deploy(processor, request, engine)
            taken = reply.get_header(MsgHeader.RETURN_CODE) == AdminReturnCode.OK
        finally:
            if not taken:
                shutil.rmtree(job, ignore_errors=True)
        return reply

    DeployProcessor.process = deploy_whole


def _checked_job_id(job_id: object) -> str:
    if not is_job(job_id):
        raise ValueError("a job's id is not one that NVFlare gives")
    return str(job_id)


# --- Authenticate the sender of a message by its connection, never by the message itself ---
# NVFlare binds the name of a connection to its certificate, but then trusts the origin that a message states if it
# carries a token signed by the server. The server's own token is in each of its replies, so every party has one and
# could speak as the server, as another party's own job or as the lead. Here the two names are compared at every process
# before any part of the message is used, and also before the server forwards it.


_log = logging.getLogger(__name__)
#: NVFlare's name of the server's cell, and the prefix of a submitter's cell.
SERVER, ADMIN = "server", "_admin_"
#: Messages marked as encrypted make their receiver request a certificate, and wait for an hour. Connections are
#: encrypted already, so such messages are not needed.
_ENCRYPTED = (MessageHeaderKey.SECURE, MessageHeaderKey.ENCRYPTED)
_BUNDLE = "bulk"


def site_of(cell: str) -> str:
    """Return the site of a cell's name, such as bank or bank.JOB."""
    return cell.partition(".")[0]


def is_known(endpoint: str, common_name: str, *, parties: Iterable[str], lead: str) -> bool:
    """Return whether a connected peer belongs to the federation.

    NVFlare compares every name with the certificate's but those of admins, which are random: there the certificate must
    be the lead's.
    """
    if endpoint.startswith(ADMIN):
        return "." not in endpoint and common_name == lead
    return site_of(endpoint) in {SERVER, *parties}


def is_true_origin(origin: str, endpoint: str, *, me: str) -> bool:
    """Return whether a message of this origin may come over a connection with this endpoint."""
    mine, theirs, said = site_of(me), site_of(endpoint), site_of(origin)
    if me == SERVER:
        return said == theirs
    if theirs == mine:  # a process of the same site, which has checked: a party's forwards the server's messages
        return mine == SERVER or said in (mine, SERVER)
    return theirs == said == SERVER


def may_pass_on(origin: str, destination: str) -> bool:
    """Return whether the server's process may forward a message: only between a party and the server's job."""
    ends = {site_of(origin), site_of(destination)}
    return SERVER in ends and not any(each.startswith(ADMIN) for each in ends)


def is_own_connection(channel: str, topic: str, origin: str, destination: str, endpoint: str, *, me: str) -> bool:
    """Return whether a message about a connection comes from one of its two ends.

    A forwarded "bye" would end another site's connection. Bundled messages are refused: none are used, and their
    content would not be checked.
    """
    return channel != CellChannel.CELLNET or (origin == endpoint and destination == me and topic != _BUNDLE)


def is_accepted(
    origin: str, destination: str, endpoint: str, common_name: str, *, me: str, parties: Iterable[str], lead: str
) -> bool:
    if me == SERVER:
        if not is_known(endpoint, common_name, parties=parties, lead=lead):
            return False
        if destination != SERVER and not may_pass_on(origin, destination):
            return False
    return is_true_origin(origin, endpoint, me=me)


def install_origin_guard(parties: tuple[str, ...], lead: str) -> None:
    receive = CoreCell._process_received_msg
    told: set[tuple[str, str]] = set()

    def receive_true(cell: Any, endpoint: Any, connection: Any, message: Any) -> Any:
        properties = connection.get_conn_properties() if connection else {}
        origin, destination = (
            str(message.get_header(key, "")) for key in (MessageHeaderKey.ORIGIN, MessageHeaderKey.DESTINATION)
        )
        by, name = str(endpoint.name), str(properties.get(DriverParams.PEER_CN.value, ""))
        channel, topic = (
            str(message.get_header(key, "")) for key in (MessageHeaderKey.CHANNEL, MessageHeaderKey.TOPIC)
        )
        me = cell.my_info.fqcn
        if (
            not any(message.get_header(key, False) for key in _ENCRYPTED)
            and is_own_connection(channel, topic, origin, destination, by, me=me)
            and is_accepted(origin, destination, by, name, me=me, parties=parties, lead=lead)
        ):
            return receive(cell, endpoint, connection, message)
        seen = (by[:60], origin[:60])
        if seen not in told and len(told) < 100:
            told.add(seen)
            _log.warning("a message by %r in the name of %r was dropped", *seen)
        return None

    CoreCell._process_received_msg = receive_true


# --- guard ---


log = logging.getLogger(__name__)

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

#: Commands of a party to the server's job, on the channel by which the server's own process ends and inspects it.
PARTYS_COMMANDS = frozenset({"get_task"})
#: How a server's and a party's job find each other and know that the other lives. Other topics have events fired.
JOB_TOPICS = frozenset(
    {ReservedTopic.SYNC_RUNNER, ReservedTopic.JOB_HEART_BEAT, ReservedTopic.TASK_CHECK, ReservedTopic.END_RUN}
)


class Who(Enum):
    """Origin of a request, as seen by the process that gets it."""

    OWN = auto()  #: another process of the same site
    SERVER = auto()
    PARTY = auto()
    LEAD = auto()
    STRANGER = auto()


_HOME = frozenset({Who.OWN, Who.SERVER})
_KNOWN = frozenset({Who.OWN, Who.SERVER, Who.PARTY, Who.LEAD})
#: Permitted origins by channel. Others are dropped: diagnosis, relays, downloads, exchange of certificates.
AT_A_PARTY: dict[str, frozenset[Who]] = {
    CellChannel.CLIENT_MAIN: _HOME,
    CellChannel.CLIENT_COMMAND: _HOME,
    CellChannel.AUX_COMMUNICATION: _HOME,
    CellChannel.RETURN_ONLY: _HOME,
    CellChannel.CELLNET: _HOME,
}
AT_THE_SERVER: dict[str, frozenset[Who]] = {
    CellChannel.SERVER_MAIN: frozenset({Who.PARTY, Who.LEAD}),
    CellChannel.SERVER_PARENT_LISTENER: frozenset({Who.OWN}),
    CellChannel.HCI: frozenset({Who.LEAD}),
    CellChannel.AUX_COMMUNICATION: frozenset({Who.OWN, Who.LEAD}),  # by which a job's files come
    CellChannel.RETURN_ONLY: _KNOWN,
    CellChannel.CELLNET: _KNOWN,
}
AT_THE_SERVERS_JOB: dict[str, frozenset[Who]] = {
    CellChannel.SERVER_COMMAND: frozenset({Who.OWN, Who.PARTY}),
    CellChannel.AUX_COMMUNICATION: frozenset({Who.OWN, Who.PARTY}),
    CellChannel.RETURN_ONLY: frozenset({Who.OWN, Who.PARTY}),
    CellChannel.CELLNET: frozenset({Who.OWN, Who.PARTY}),
}


def who(origin: str, *, me: str, parties: Iterable[str]) -> Who:
    """Classify the origin of a request; `me` is the cell that was asked."""
    site = site_of(origin)
    if site == site_of(me):
        return Who.OWN
    if site == SERVER:
        return Who.SERVER
    if site in parties:
        return Who.PARTY
    return Who.LEAD if origin.startswith(ADMIN) and "." not in origin else Who.STRANGER


def is_permitted(origin: str, channel: str, topic: str = "", *, me: str, parties: Iterable[str]) -> bool:
    """Return whether the cell `me` accepts a request."""
    site, _, job = me.partition(".")
    rules = AT_A_PARTY if site != SERVER else AT_THE_SERVERS_JOB if job else AT_THE_SERVER
    asks = who(origin, me=me, parties=parties)
    if channel == CellChannel.SERVER_COMMAND and asks is Who.PARTY and topic not in PARTYS_COMMANDS:
        return False
    if channel == CellChannel.AUX_COMMUNICATION and asks in (Who.PARTY, Who.SERVER) and topic not in JOB_TOPICS:
        return False
    return asks in rules.get(channel, frozenset())


def is_forged_return(origin: str, asked: str, *, me: str) -> bool:
    """Return whether an undelivered request was returned by a site that may not say so.

    A return is attributed to the request's target: only that site, the server or the own site may send it.
    """
    site = site_of(origin)
    return site not in (site_of(me), SERVER, site_of(asked))


def is_awaited(requests: object, target: str, waiters: Mapping[str, Any]) -> bool:
    """Return whether a reply of this target belongs to a pending request."""
    ids = [requests] if isinstance(requests, str) else requests
    if not isinstance(ids, list):
        return False
    found = [waiters.get(each) for each in ids if isinstance(each, str)]
    return any(each is not None and target in each.targets for each in found)


_installed: list[tuple[str, ...]] = []


def install(parties: Iterable[str], lead: str) -> None:
    """Guard this process from now on. Idempotent: the first call counts."""
    if _installed:
        return
    known = tuple(parties)
    _installed.append(known)
    install_origin_guard(known, lead)
    install_deploy_guard()
    ClientRequestProcessors.request_processors[:] = [
        each for each in ClientRequestProcessors.request_processors if type(each).__name__ in SITE_COMMANDS
    ]
    AdminCommands.commands[:] = [each for each in AdminCommands.commands if type(each).__name__ in JOB_COMMANDS]
    _guard_requests(known, lead)
    _guard_replies()
    # A message may name any address to dial back to: only the server is dialled.
    _replace(CoreCell, "_add_adhoc_connector", _do_not_dial)
    # A message could make its reader write files, in a folder that all users of a machine share.
    _replace(lobs, "get_datum_dir", _no_files)


def _replace(owner: Any, name: str, by: Callable[..., Any]) -> None:
    """Replace a name of NVFlare; one that no longer exists must not pass for guarded."""
    if not callable(getattr(owner, name, None)):
        raise RuntimeError(f"{name} is not there to be guarded; permitted: nvflare==2.9.0")
    setattr(owner, name, by)


def _do_not_dial(*_: object) -> None:
    return None


def _no_files() -> str:
    raise ValueError("a message brings a file; permitted: none")


def _guard_requests(parties: tuple[str, ...], lead: str) -> None:
    hear = CoreCell._process_request
    told: set[tuple[str, str]] = set()

    def handle_permitted(cell: Any, origin: str, message: Any) -> Any:
        channel, topic = _subject(message)
        me = cell.my_info.fqcn
        # The server lists its clients by the name in this header, and accepts it with any token that it signed.
        named = message.get_header(CellMessageHeaderKeys.CLIENT_NAME, None)
        is_listed = me == SERVER and channel == CellChannel.SERVER_MAIN
        site = site_of(str(origin))
        is_own_name = not is_listed or named in (None, "", lead if site.startswith(ADMIN) else site)
        if is_own_name and is_permitted(str(origin), channel, topic, me=me, parties=parties):
            return hear(cell, origin, message)
        seen = (str(origin)[:60], channel[:60])
        if seen not in told and len(told) < 100:
            told.add(seen)
            log.warning("a request of %r on channel %r was turned away", *seen)
        return make_reply(ReturnCode.UNAUTHENTICATED, error="this site does not hear such requests")

    CoreCell._process_request = handle_permitted


def _guard_replies() -> None:
    take = CoreCell._process_reply

    def take_true(cell: Any, origin: str, message: Any, msg_type: str) -> Any:
        if msg_type == MessageType.RETURN:
            headers = message.get_header(MessageHeaderKey.ORIGINAL_HEADERS, None)
            asked = str(headers.get(MessageHeaderKey.DESTINATION, "")) if isinstance(headers, dict) else ""
            if is_forged_return(str(origin), asked, me=cell.my_info.fqcn):
                log.warning("%r answered in the name of %r: dropped", str(origin)[:60], asked[:60])
                return None
        else:
            asked = str(origin)
        if not is_awaited(message.get_header(MessageHeaderKey.REQ_ID), asked, cell.waiters):
            return None  # NVFlare would decode it before checking whether it was requested
        return take(cell, origin, message, msg_type)

    CoreCell._process_reply = take_true


def _subject(message: Any) -> tuple[str, str]:
    """Return channel and topic of a request; of a stream, those of its data. Stream acknowledgements are replies."""
    channel, topic = message.get_header(MessageHeaderKey.CHANNEL, ""), message.get_header(MessageHeaderKey.TOPIC, "")
    if channel != STREAM_CHANNEL:
        return str(channel), str(topic)
    if topic != STREAM_DATA_TOPIC:
        return str(CellChannel.RETURN_ONLY), str(topic)
    return str(message.get_header(StreamHeaderKey.CHANNEL, "")), str(message.get_header(StreamHeaderKey.TOPIC, ""))
