"""Preflight checks: one handshake with the server before a site is started, and free ports.

NVFlare would retry for ever, silently, with a server that refuses the site.
"""

from __future__ import annotations

import socket
import time

from pbmvfl.deploy.link.tls import REFUSED_SILENTLY, REVOKED, CertificateRefused, HungUp, shake_hands
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.errors import FederationError, LinkError

_AGAIN = 0.2
#: Attempts with a server that closes the connection.
_TRIES = 5


def check_server(site_folder: SiteFolder, *, wait: float = 0.0) -> None:
    """Complete one TLS handshake with the server.

    Args:
        site_folder: The party's folder.
        wait: Seconds to retry while the server is unreachable. A refusal is not retried.

    Raises:
        LinkError: If the server cannot be reached.
        FederationError: If one side refuses the other, with the reason and what to do.
    """
    federation = site_folder.federation
    address = federation.host, federation.port
    until = time.monotonic() + wait
    revocations = site_folder.revocation_watch()
    hung_up = 0
    while True:
        try:
            shown = shake_hands(
                address, site_folder.credentials, server_name=federation.server, server_speaks_first=False
            )
            if revocations.revokes(shown.value.serial_number):
                raise CertificateRefused(REVOKED)
            return
        except CertificateRefused as error:
            raise FederationError(f"{federation.host}:{federation.port}: {error}") from error
        except OSError as error:
            # A server that refuses may close so fast that its alert is lost; the next attempt may receive it.
            hung_up += isinstance(error, HungUp)
            if time.monotonic() >= until and not 0 < hung_up < _TRIES:
                raise LinkError(_unreached(*address, error)) from error
        time.sleep(_AGAIN)


def check_port(port: int, name: str, *, wait: float = 0.0) -> None:
    """Refuse a port of this machine that cannot be listened on.

    Args:
        port: The port.
        name: Its name in federation.toml.
        wait: Seconds that a process which is ending may take to release it.

    Raises:
        FederationError: If it cannot be used.
    """
    until = time.monotonic() + wait
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                return
            except OSError as error:
                if time.monotonic() >= until:
                    raise FederationError(
                        f"{name}={port} cannot be used here: {error.strerror}; end what has it"
                    ) from error
        time.sleep(_AGAIN)


def _unreached(host: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"host={host!r} has no address: {error.strerror}; check [server] host in federation.toml, and DNS"
    if isinstance(error, ConnectionRefusedError):
        return f"no process listens at {host}:{port}; the label holder starts it with `pbmvfl server start`"
    if isinstance(error, TimeoutError):
        return f"{host}:{port} does not answer; is a firewall in between, or the address wrong?"
    if isinstance(error, HungUp):
        return f"{host}:{port}: {REFUSED_SILENTLY}; or it is just going down; ask its organisation"
    return f"{host}:{port} cannot be reached: {error.strerror or error}; check the network"
