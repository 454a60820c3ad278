"""Revoked certificates on NVFlare's own port, which knows no revocation list.

A new connection is refused by TLS itself, so that its site is told why. A connection that was open before is closed at
its next message; sites send one every two seconds.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
from typing import Any

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.drivers import tcp_driver

from pbmvfl.deploy.link.revocation import RevocationWatch

_log = logging.getLogger(__name__)
_installed: list[RevocationWatch] = []


def install(watch: RevocationWatch) -> None:
    """Check certificates of all connections of this process. Idempotent: the first call counts."""
    if _installed:
        return
    _installed.append(watch)
    make, receive = tcp_driver.get_ssl_context, CoreCell._process_received_msg
    #: TLS contexts of this process's listeners, each with the number of its list.
    listening: dict[ssl.SSLContext, int] = {}

    def make_checking(params: dict[str, Any], ssl_server: bool) -> ssl.SSLContext | None:
        context: ssl.SSLContext | None = make(params, ssl_server)
        if context is not None and ssl_server:
            listening[context] = 0
            _load(listening, watch)
        return context

    def receive_valid(cell: Any, endpoint: Any, connection: Any, message: Any) -> Any:
        _load(listening, watch)
        if watch.revokes(_serial(connection)):
            _log.warning("a connection of %r was closed: its certificate was revoked", str(endpoint.name)[:60])
            connection.close()
            return None
        return receive(cell, endpoint, connection, message)

    tcp_driver.get_ssl_context = make_checking
    CoreCell._process_received_msg = receive_valid


def _load(listening: dict[ssl.SSLContext, int], watch: RevocationWatch) -> None:
    """Give listeners the newest list. Of two lists OpenSSL uses the later one."""
    current = watch.current()
    for context, number in list(listening.items()):
        if current is None:
            return
        if number != current.number:
            context.load_verify_locations(cafile=str(current.path))
            listening[context] = current.number
        # With a stale list OpenSSL would refuse everybody, and say that their certificates expired. Revoked ones are
        # refused at their first message, and jobs with the true reason.
        checks = ssl.VERIFY_CRL_CHECK_LEAF if current.is_fresh() else ssl.VerifyFlags(0)
        context.verify_flags = (context.verify_flags & ~ssl.VERIFY_CRL_CHECK_LEAF) | checks


def _serial(connection: Any) -> int:
    """Return the serial number of a peer's certificate; -1 if it has none, as inside this process."""
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError, OSError):
        return int(connection.sock.getpeercert()["serialNumber"], 16)
    return -1
