"""Who may ask NVFlare's own processes for what: everybody else is turned away before a byte of the request is decoded.

NVFlare lets every registered site send requests to every process of every other site, and the one who asks decides
whether its rights are looked at: a party could read any file of another by its remote shell. Here a process hears
requests of its own site and of the server, on channels that jobs need, and a site keeps only those commands that a job
needs. At the server a name that is not in federation.toml is nobody, whoever signed its certificate. Whose word a
message is, the connection says (`guard_origin`); what stays of a job's files, `guard_deploy`.

Every process of a kit imports this before it has a connection: `local/resources.json` names classes that do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Any

from nvflare.apis.fl_constant import ReservedTopic
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, MessageType, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, STREAM_DATA_TOPIC, StreamHeaderKey
from nvflare.fuel.utils.fobs import lobs
from nvflare.private.defs import CellMessageHeaderKeys
from nvflare.private.fed.client.admin_commands import AdminCommands
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from pbmvfl.deploy.nvflare import guard_deploy, guard_origin
from pbmvfl.deploy.nvflare.guard_origin import ADMIN, SERVER, site_of

log = logging.getLogger(__name__)

#: The link of a federation whose carrier is the cell; it has a guard of its own besides.
LINK_CHANNEL = "pbmvfl"
#: What the server may have a site do: take a job, start it, end it, say whether it lives.
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
#: What a site may have its own job's process do.
JOB_COMMANDS = frozenset({"CheckStatusCommand", "AbortCommand", "AbortTaskCommand", "ByeCommand"})

#: What a party may ask the server's job for on the channel by which the server's own process ends it and looks into it.
PARTYS_COMMANDS = frozenset({"get_task"})
#: How a server's and a party's job find each other and know that the other lives. Other topics have events fired.
JOB_TOPICS = frozenset(
    {ReservedTopic.SYNC_RUNNER, ReservedTopic.JOB_HEART_BEAT, ReservedTopic.TASK_CHECK, ReservedTopic.END_RUN}
)


class Who(Enum):
    """Where a request comes from, as seen by the process that gets it."""

    OWN = auto()  #: another process of the same site
    SERVER = auto()
    PARTY = auto()
    LEAD = auto()
    STRANGER = auto()


_HOME = frozenset({Who.OWN, Who.SERVER})
_KNOWN = frozenset({Who.OWN, Who.SERVER, Who.PARTY, Who.LEAD})
#: By channel. What is not here is not heard: diagnosis, relays, downloads, exchange of certificates.
AT_A_PARTY: dict[str, frozenset[Who]] = {
    CellChannel.CLIENT_MAIN: _HOME,
    CellChannel.CLIENT_COMMAND: _HOME,
    CellChannel.AUX_COMMUNICATION: _HOME,
    CellChannel.RETURN_ONLY: _HOME,
    CellChannel.CELLNET: _HOME,
    LINK_CHANNEL: frozenset({Who.SERVER}),
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
    LINK_CHANNEL: frozenset({Who.PARTY}),
}


def who(origin: str, *, me: str, parties: Iterable[str]) -> Who:
    """Of a cell's name, such as bank or bank.JOB; `me` is the cell that was asked."""
    site = site_of(origin)
    if site == site_of(me):
        return Who.OWN
    if site == SERVER:
        return Who.SERVER
    if site in parties:
        return Who.PARTY
    return Who.LEAD if origin.startswith(ADMIN) and "." not in origin else Who.STRANGER


def is_permitted(origin: str, channel: str, topic: str = "", *, me: str, parties: Iterable[str]) -> bool:
    """Whether the cell `me` hears a request."""
    site, _, job = me.partition(".")
    rules = AT_A_PARTY if site != SERVER else AT_THE_SERVERS_JOB if job else AT_THE_SERVER
    asks = who(origin, me=me, parties=parties)
    if channel == CellChannel.SERVER_COMMAND and asks is Who.PARTY and topic not in PARTYS_COMMANDS:
        return False
    if channel == CellChannel.AUX_COMMUNICATION and asks in (Who.PARTY, Who.SERVER) and topic not in JOB_TOPICS:
        return False
    return asks in rules.get(channel, frozenset())


def is_forged_return(origin: str, asked: str, *, me: str) -> bool:
    """A request that comes back undelivered is credited to whom it was for: only that site, the server or one's own
    may say so."""
    site = site_of(origin)
    return site not in (site_of(me), SERVER, site_of(asked))


def is_awaited(requests: object, target: str, waiters: Mapping[str, Any]) -> bool:
    """Whether a reply of this target belongs to a request that waits for it."""
    ids = [requests] if isinstance(requests, str) else requests
    if not isinstance(ids, list):
        return False
    found = [waiters.get(each) for each in ids if isinstance(each, str)]
    return any(each is not None and target in each.targets for each in found)


_installed: list[tuple[str, ...]] = []


def install(parties: Iterable[str], lead: str) -> None:
    """From now on, in this process. Once is enough, and the first word counts."""
    if _installed:
        return
    known = tuple(parties)
    _installed.append(known)
    guard_origin.install(known, lead)
    guard_deploy.install()
    ClientRequestProcessors.request_processors[:] = [
        each for each in ClientRequestProcessors.request_processors if type(each).__name__ in SITE_COMMANDS
    ]
    AdminCommands.commands[:] = [each for each in AdminCommands.commands if type(each).__name__ in JOB_COMMANDS]
    _guard_requests(known, lead)
    _guard_replies()
    # A message may name an address to dial back to, wherever that is: nobody is dialled but the server.
    _replace(CoreCell, "_add_adhoc_connector", _dial_nobody)
    # A message could have its reader write files, in a folder that all users of a machine share.
    _replace(lobs, "get_datum_dir", _no_files)


def _replace(owner: Any, name: str, by: Callable[..., Any]) -> None:
    """A name that NVFlare does not have any more must not pass for one that is guarded."""
    if not callable(getattr(owner, name, None)):
        raise RuntimeError(f"{name} is not there to be guarded; permitted: nvflare==2.9.0")
    setattr(owner, name, by)


def _dial_nobody(*_: object) -> None:
    return None


def _no_files() -> str:
    raise ValueError("a message brings a file; permitted: none")


def _guard_requests(parties: tuple[str, ...], lead: str) -> None:
    hear = CoreCell._process_request
    told: set[tuple[str, str]] = set()

    def hear_permitted(cell: Any, origin: str, message: Any) -> Any:
        channel, topic = _subject(message)
        me = cell.my_info.fqcn
        # The server lists its clients by the name in this header, whoever shows a token that it signed.
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

    CoreCell._process_request = hear_permitted


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
            return None  # it would be decoded before anybody looks whether it was asked for
        return take(cell, origin, message, msg_type)

    CoreCell._process_reply = take_true


def _subject(message: Any) -> tuple[str, str]:
    """Channel and topic of a request; of a stream, those of its data. Word on how a stream goes is like a reply."""
    channel, topic = message.get_header(MessageHeaderKey.CHANNEL, ""), message.get_header(MessageHeaderKey.TOPIC, "")
    if channel != STREAM_CHANNEL:
        return str(channel), str(topic)
    if topic != STREAM_DATA_TOPIC:
        return str(CellChannel.RETURN_ONLY), str(topic)
    return str(message.get_header(StreamHeaderKey.CHANNEL, "")), str(message.get_header(StreamHeaderKey.TOPIC, ""))
