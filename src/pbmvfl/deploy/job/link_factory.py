"""TLS links of an organisation's folder: its certificates, its identity, and the job that they are for."""

from __future__ import annotations

from pbmvfl.deploy.link.message_auth import PartyMessageAuth, ServerMessageAuth
from pbmvfl.deploy.link.tls import Credentials, party_context, server_context
from pbmvfl.deploy.link.tls_client import TlsPartyLink
from pbmvfl.deploy.link.tls_server import TlsServerLink
from pbmvfl.deploy.site.folder import SiteFolder


def link_context(site_folder: SiteFolder, job: str) -> bytes:
    """Return the bytes that bind messages to one job of one federation.

    Whether both sides have the same federation.toml is checked at set-up, where both digests can be reported.
    """
    return f"{site_folder.federation.name}\0{job}".encode()


def server_message_auth(site_folder: SiteFolder, job: str) -> ServerMessageAuth:
    """Return the server's message authentication for a job."""
    pins = dict(zip(site_folder.federation.parties, site_folder.pins().parties, strict=True))
    return ServerMessageAuth(site_folder.identity(), pins, link_context(site_folder, job))


def party_message_auth(site_folder: SiteFolder, job: str) -> PartyMessageAuth:
    """Return a party's message authentication for a job."""
    return PartyMessageAuth(
        site_folder.identity(), site_folder.pins().server, site_folder.name, link_context(site_folder, job)
    )


def server_tls_link(site_folder: SiteFolder, job: str) -> TlsServerLink:
    """Return the label holder's TLS link, listening."""
    federation = site_folder.federation
    return TlsServerLink(
        listen=("", federation.line_port),
        tls=server_context(_credentials(site_folder)),
        auth=server_message_auth(site_folder, job),
        parties=federation.parties,
        patience=federation.patience,
    )


def party_tls_link(site_folder: SiteFolder, job: str) -> TlsPartyLink:
    """Return a party's TLS link; it dials in `serve`."""
    federation = site_folder.federation
    return TlsPartyLink(
        address=(federation.host, federation.line_port),
        tls=party_context(_credentials(site_folder)),
        auth=party_message_auth(site_folder, job),
        server_name=federation.server,
        patience=federation.patience,
    )


def _credentials(site_folder: SiteFolder) -> Credentials:
    return Credentials(
        certificate=site_folder.certificate, private_key=site_folder.private_key, authority=site_folder.authority
    )
