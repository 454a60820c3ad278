"""Preflight check: one handshake with the server before a site is started.

NVFlare would retry for ever, silently, with a server that refuses the site.
"""

from __future__ import annotations

import socket
import ssl
import time

from pbmvfl.deploy.link.tls import Credentials, common_name, party_context, wrap
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.errors import FederationError, LinkError

_TIMEOUT = 10.0
_AGAIN = 0.2
#: Attempts with a server that closes the connection.
_TRIES = 5
#: TLS alerts for a refused certificate, besides all that begin with "certificate".
_REFUSALS = ("UNKNOWN_CA", "BAD_CERTIFICATE", "UNSUPPORTED_CERTIFICATE", "ACCESS_DENIED", "HANDSHAKE_FAILURE")
#: OpenSSL's numbers for what may be wrong with a certificate (x509_vfy.h).
_NOT_YET, _EXPIRED = 9, 10


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
    context = party_context(
        Credentials(
            certificate=site_folder.certificate, private_key=site_folder.private_key, authority=site_folder.authority
        )
    )
    until = time.monotonic() + wait
    hung_up = 0
    while True:
        try:
            with socket.create_connection((federation.host, federation.port), timeout=_TIMEOUT) as plain:
                _handshake(context, plain, site_folder)
            return
        except OSError as error:
            # A server that refuses may close so fast that its alert is lost; the next attempt may receive it.
            hung_up += isinstance(error, _HungUp)
            if time.monotonic() >= until and not 0 < hung_up < _TRIES:
                raise LinkError(_unreached(federation.host, federation.port, error)) from error
        time.sleep(_AGAIN)


class _HungUp(ConnectionResetError):
    """The server closed the connection on receiving this kit's certificate, and its reason was lost."""


def _handshake(context: ssl.SSLContext, plain: socket.socket, site_folder: SiteFolder) -> None:
    where = f"{site_folder.federation.host}:{site_folder.federation.port}"
    with wrap(context, plain, server_side=False) as connection:
        try:
            connection.do_handshake()
        except ssl.SSLCertVerificationError as error:
            raise FederationError(f"{where}: {_refused(error)}") from error
        except ssl.SSLEOFError as error:  # for example, a server that is shutting down
            raise ConnectionResetError("it hung up during the handshake") from error
        except ssl.SSLError as error:
            raise FederationError(f"{where} speaks no TLS 1.3 that this kit understands: {error.reason}") from error
        name = common_name(connection)
        if name != site_folder.federation.server:
            raise FederationError(
                f"{where} is {name!r}, not the server {site_folder.federation.server!r}; it is another organisation's "
                "machine"
            )
        try:
            # With TLS 1.3 a server checks our certificate after the handshake is complete at this side. After our FIN
            # it closes, or sends an alert. The TLS socket's own shutdown would drop the TLS state, so it is not used.
            socket.socket.shutdown(connection, socket.SHUT_WR)
            connection.recv(1)
        except ssl.SSLError as error:
            reason = (error.reason or "").partition("ALERT_")[2]
            if reason in _REFUSALS or reason.startswith("CERTIFICATE"):
                raise FederationError(
                    f"{where} refused this kit's certificate ({reason.lower().replace('_', ' ')}): it is of another "
                    "federation, or expired by the server's clock; ask its organisation"
                ) from error
        except TimeoutError:
            pass  # it waits for data: the certificate was accepted
        except OSError as error:
            raise _HungUp(str(error)) from error


def _refused(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == _EXPIRED:
        return "the server's certificate expired, by this machine's clock; tell its organisation, or set the clock"
    if error.verify_code == _NOT_YET:
        return "the server's certificate is not valid yet, by this machine's clock; is the clock right?"
    return (
        f"the server's certificate was not signed by this federation's authority ({error.verify_message}); it is "
        "another federation's server, or an impostor"
    )


def _unreached(host: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"host={host!r} has no address: {error.strerror}; check [server] host in federation.toml, and DNS"
    if isinstance(error, ConnectionRefusedError):
        return f"no process listens at {host}:{port}; the label holder starts it with `pbmvfl server start`"
    if isinstance(error, TimeoutError):
        return f"{host}:{port} does not answer; is a firewall in between, or the address wrong?"
    if isinstance(error, _HungUp):
        return (
            f"{host}:{port} hung up when it had this kit's certificate: it refuses it, as of another federation or "
            "expired by the server's clock, or it is just going down; ask its organisation"
        )
    return f"{host}:{port} cannot be reached: {error.strerror or error}; check the network"
