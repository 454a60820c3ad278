"""One handshake with the server before anything is started: a site that the server refuses would else try for ever."""

from __future__ import annotations

import socket
import ssl
import time

from pbmvfl.deploy.home import Home
from pbmvfl.deploy.tls import Credentials, common_name, party_context, wrap
from pbmvfl.errors import FederationError, LinkError

_TIMEOUT = 10.0
_AGAIN = 0.5
#: OpenSSL's numbers for what may be wrong with a certificate (x509_vfy.h).
_NOT_YET, _EXPIRED = 9, 10


def reach_server(home: Home, *, wait: float = 0.0) -> None:
    """Shake hands with the server, and say what is wrong if that fails.

    `wait` is for how many seconds a server that is not there yet is tried again; one that refuses is not.
    """
    federation = home.federation
    context = party_context(
        Credentials(certificate=home.certificate, private_key=home.private_key, authority=home.authority)
    )
    until = time.monotonic() + wait
    while True:
        try:
            with socket.create_connection((federation.host, federation.port), timeout=_TIMEOUT) as plain:
                _shake_hands(context, plain, home)
            return
        except OSError as error:
            if time.monotonic() >= until:
                raise LinkError(_unreached(federation.host, federation.port, error)) from error
        time.sleep(_AGAIN)


def _shake_hands(context: ssl.SSLContext, plain: socket.socket, home: Home) -> None:
    where = f"{home.federation.host}:{home.federation.port}"
    try:
        connection = wrap(context, plain, server_side=False)
        connection.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise FederationError(f"{where}: {_refused(error)}") from error
    except ssl.SSLEOFError as error:  # as when it goes down just now
        raise ConnectionResetError("it hung up during the handshake") from error
    except ssl.SSLError as error:
        raise FederationError(f"{where} speaks no TLS 1.3 that this kit understands: {error.reason}") from error
    with connection:
        name = common_name(connection)
        if name != home.federation.server:
            raise FederationError(
                f"{where} is {name!r}, not the server {home.federation.server!r}; it is another organisation's machine"
            )
        try:
            # With TLS 1.3 a server looks at our certificate after the handshake looks done here. It answers our good
            # bye with its own, or with what it did not like.
            connection.unwrap()
        except ssl.SSLEOFError:
            pass
        except ssl.SSLError as error:
            if "ALERT" in (error.reason or ""):
                raise FederationError(
                    f"{where} refused this kit's certificate ({(error.reason or '').lower().replace('_', ' ')}): it is "
                    "of another federation, or expired by the server's clock; ask its organisation"
                ) from error
        except OSError:
            pass  # it hung up without a word, as servers do


def _refused(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == _EXPIRED:
        return "the server's certificate expired, by this machine's clock; tell its organisation, or set the clock"
    if error.verify_code == _NOT_YET:
        return "the server's certificate is not valid yet, by this machine's clock; is the clock right?"
    return (
        f"the server's certificate was not signed by this federation's authority ({error.verify_message}); it is "
        "another federation's server, or somebody poses as it"
    )


def _unreached(host: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"host={host!r} has no address: {error.strerror}; check [server] host in federation.toml, and DNS"
    if isinstance(error, ConnectionRefusedError):
        return f"nobody listens at {host}:{port}; the label holder starts it with `pbmvfl server start`"
    if isinstance(error, TimeoutError):
        return f"{host}:{port} does not answer; is a firewall in between, or the address wrong?"
    return f"{host}:{port} cannot be reached: {error.strerror or error}; check the network"
