"""Links of an organisation's folder: its certificates, its identity, and the job that they are for."""

from __future__ import annotations

from pbmvfl.deploy.link.grpc_party import GrpcPartyLink
from pbmvfl.deploy.link.grpc_server import GrpcServerLink
from pbmvfl.deploy.link.message_auth import PartyMessageAuth, ServerMessageAuth
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


def server_link(site_folder: SiteFolder, job: str) -> GrpcServerLink:
    """Return the label holder's link, listening."""
    federation = site_folder.federation
    return GrpcServerLink(
        listen=("", federation.line_port),
        credentials=site_folder.credentials,
        auth=server_message_auth(site_folder, job),
        parties=federation.parties,
        patience=federation.patience,
        revocations=site_folder.revocation_watch(),
    )


def party_link(site_folder: SiteFolder, job: str) -> GrpcPartyLink:
    """Return a party's link; it dials in `serve`."""
    federation = site_folder.federation
    return GrpcPartyLink(
        address=(federation.host, federation.line_port),
        credentials=site_folder.credentials,
        auth=party_message_auth(site_folder, job),
        server_name=federation.server,
        patience=federation.patience,
        revocations=site_folder.revocation_watch(site_folder.pins().parties),
    )
