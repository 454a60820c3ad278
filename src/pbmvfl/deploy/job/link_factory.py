"""The lines of an organisation's folder: its certificates, its identity, and the job that they are for."""

from __future__ import annotations

from pbmvfl.deploy.link.message_auth import PartySeal, ServerSeal
from pbmvfl.deploy.link.tls import Credentials, party_context, server_context
from pbmvfl.deploy.link.tls_client import PartyLine
from pbmvfl.deploy.link.tls_server import Line
from pbmvfl.deploy.site.folder import Home
from pbmvfl.errors import FederationError


def link_context(home: Home, job: str) -> bytes:
    """What a link is for: nothing that is sealed for one job of one federation is anything in another. Whether both
    sides have the same federation.toml is asked at set-up, where both digests can be named."""
    return f"{home.federation.name}\0{job}".encode()


def server_seal(home: Home, job: str) -> ServerSeal:
    pins = dict(zip(home.federation.parties, home.pins().parties, strict=True))
    return ServerSeal(home.identity(), pins, link_context(home, job))


def party_seal(home: Home, job: str) -> PartySeal:
    return PartySeal(home.identity(), home.pins().server, home.name, link_context(home, job))


def server_line(home: Home, job: str) -> Line:
    """The label holder's line, listening."""
    federation = home.federation
    return Line(
        listen=("", _line_port(home)),
        tls=server_context(_credentials(home)),
        seal=server_seal(home, job),
        parties=federation.parties,
        patience=federation.patience,
    )


def party_line(home: Home, job: str) -> PartyLine:
    """A party's line; it dials when it is asked to serve."""
    federation = home.federation
    return PartyLine(
        address=(federation.host, _line_port(home)),
        tls=party_context(_credentials(home)),
        seal=party_seal(home, job),
        server_name=federation.server,
        patience=federation.patience,
    )


def _credentials(home: Home) -> Credentials:
    return Credentials(certificate=home.certificate, private_key=home.private_key, authority=home.authority)


def _line_port(home: Home) -> int:
    port = home.federation.line_port
    if port is None:
        raise FederationError('carrier="cell" in federation.toml: there is no line; this is a fault of the program')
    return port
