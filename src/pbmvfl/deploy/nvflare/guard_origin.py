"""Whose word a message is: the connection that it came by says it, never the message itself.

NVFlare binds the name of a connection to its certificate, and then believes what a message says of its origin from
anybody who shows a token that the server signed. The server's own stands in every reply of its, so every party has one
and could speak as the server, as another party's own job or as the lead. Here the two names are compared at every
process before anything of the message is looked at, and also before the server passes it on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
from nvflare.fuel.f3.drivers.driver_params import DriverParams

_log = logging.getLogger(__name__)
#: What NVFlare calls the server's cell, and how the cell of somebody who submits begins.
SERVER, ADMIN = "server", "_admin_"
#: Messages that claim to be encrypted make the one who gets them ask for a certificate, and wait for an hour. The
#: connections are encrypted, and nobody needs them.
_ENCRYPTED = (MessageHeaderKey.SECURE, MessageHeaderKey.ENCRYPTED)
_BUNDLE = "bulk"


def site_of(cell: str) -> str:
    """Of a cell's name, such as bank or bank.JOB."""
    return cell.partition(".")[0]


def is_known(endpoint: str, common_name: str, *, parties: Iterable[str], lead: str) -> bool:
    """Whether who has connected is of the federation. NVFlare compares every name with the certificate's but those of
    admins, which are random: there the certificate must be the lead's."""
    if endpoint.startswith(ADMIN):
        return "." not in endpoint and common_name == lead
    return site_of(endpoint) in {SERVER, *parties}


def is_true_origin(origin: str, endpoint: str, *, me: str) -> bool:
    """Whether a message of this origin may come by a connection with this endpoint."""
    mine, theirs, said = site_of(me), site_of(endpoint), site_of(origin)
    if me == SERVER:
        return said == theirs
    if theirs == mine:  # another process of the same site, which has looked: a party's passes on what the server says
        return mine == SERVER or said in (mine, SERVER)
    return theirs == said == SERVER


def may_pass_on(origin: str, destination: str) -> bool:
    """Whether the server's process passes a message on: between a party and the server's job, and to nobody else."""
    ends = {site_of(origin), site_of(destination)}
    return SERVER in ends and not any(each.startswith(ADMIN) for each in ends)


def is_own_connection(channel: str, topic: str, origin: str, destination: str, endpoint: str, *, me: str) -> bool:
    """Words about a connection are for its two ends, and from one of them: a "bye" that was passed on would end one of
    somebody else. Nobody uses messages in bundles, and nobody would look at what is in them."""
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


def install(parties: tuple[str, ...], lead: str) -> None:
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
