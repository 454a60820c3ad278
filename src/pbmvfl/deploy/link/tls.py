"""TLS 1.3 between sites, and the certificates of their kits."""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from pbmvfl.errors import FederationError, LinkError

# --- TLS 1.3 between sites, with the certificates of their kits and no others ---
# Both ends present a certificate of the federation's own authority; the system's authorities are not trusted. A site's
# name is exactly its certificate's common name.


#: Milliseconds after which unacknowledged bytes end a connection.
_USER_TIMEOUT = 3000
#: Keepalive of an idle connection: first probe and interval in seconds, and number of probes.
_KEEPALIVE_IDLE, _KEEPALIVE_INTERVAL, _KEEPALIVE_COUNT = 2, 1, 3


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Paths of a kit's certificate, its private key, and the authority's certificate."""

    certificate: Path
    private_key: Path
    authority: Path


class _Socket(ssl.SSLSocket):
    """TLS socket that is closed if its peer left before TLS began.

    The standard library asks for the peer's name while it constructs the socket. If the peer is gone, that may raise
    without closing the half-made socket.
    """

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError as error:
            self.close()
            raise ConnectionAbortedError(errno.ECONNABORTED, "the other end left before TLS began") from error


def server_context(credentials: Credentials) -> ssl.SSLContext:
    """Return the server's TLS context.

    Raises:
        LinkError: If the files cannot be used.
    """
    return _context(ssl.PROTOCOL_TLS_SERVER, credentials)


def party_context(credentials: Credentials) -> ssl.SSLContext:
    """Return a party's TLS context.

    Raises:
        LinkError: If the files cannot be used.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, credentials)


def _context(protocol: int, credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    # The name that a certificate must have is compared here, exactly: kits have it as the common name.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.sslsocket_class = _Socket
    # Sessions are never resumed: every connection presents its certificate.
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    try:
        context.load_verify_locations(cafile=str(credentials.authority))
        # A key with a passphrase would prompt for it at an unattended terminal.
        context.load_cert_chain(str(credentials.certificate), str(credentials.private_key), password="")
    except (OSError, ValueError) as error:
        files = f"{credentials.certificate}, {credentials.private_key}, {credentials.authority}"
        raise LinkError(
            f"certificates cannot be used: {error} ({files}); get a new kit, or restore these files"
        ) from error
    return context


def wrap(context: ssl.SSLContext, connection: socket.socket, *, server_side: bool) -> ssl.SSLSocket:
    """Return a TLS socket whose `do_handshake` is still to be called.

    An end without close_notify raises, so that it cannot be taken for an orderly one.
    """
    return context.wrap_socket(
        connection, server_side=server_side, do_handshake_on_connect=False, suppress_ragged_eofs=False
    )


def prepare(connection: socket.socket) -> None:
    """Set TCP options: no delay for small messages, and detection of a dead peer within seconds, also when idle."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_IDLE),
        ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL),
        ("TCP_KEEPCNT", _KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", _USER_TIMEOUT),
    ):
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def common_name(connection: ssl.SSLSocket) -> str:
    """Return the common name in the peer's verified certificate.

    Raises:
        LinkError: If it has not exactly one.
    """
    certificate = connection.getpeercert(binary_form=True)
    if certificate is None:
        raise LinkError("no certificate was shown")
    try:
        names = x509.load_der_x509_certificate(certificate).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except ValueError:
        raise LinkError("a certificate that cannot be read") from None
    if len(names) != 1 or not isinstance(names[0].value, str):
        raise LinkError(f"a certificate with {len(names)} common names; permitted: 1")
    return names[0].value


def hang_up(connection: socket.socket | None) -> None:
    """Shut down a connection that another thread uses: that thread wakes with an error, and closes it.

    Only the thread that uses a connection may close it. OpenSSL keeps the number of the descriptor, which may belong to
    a file by then: it would read from that file, or write an alert into it.
    """
    if connection is not None:
        with contextlib.suppress(OSError):
            # Not the TLS socket's own: that one forgets its cipher first, and another thread could send in clear.
            socket.socket.shutdown(connection, socket.SHUT_RDWR)


def drop(connection: socket.socket) -> None:
    """Close a connection in any state, in the thread that uses it."""
    hang_up(connection)
    with contextlib.suppress(OSError):
        connection.close()


# --- Certificates of a kit: their names, dates and issuer, and descriptions of what is wrong with them ---


#: Days before expiry at which operators are warned.
SOON = 30


@dataclass(frozen=True)
class Certificate:
    """Certificate that was read from a file."""

    path: Path
    value: x509.Certificate

    @classmethod
    def read(cls, path: Path) -> Certificate:
        """Read a PEM file with one certificate.

        Raises:
            FederationError: If the file cannot be read or parsed.
        """
        try:
            return cls.parse(path.read_bytes(), path)
        except OSError as error:
            raise FederationError(f"{path} cannot be read: {error.strerror}; package the kit again") from error

    @classmethod
    def parse(cls, pem: bytes, path: Path) -> Certificate:
        """Parse one certificate; `path` is for error messages.

        Raises:
            FederationError: If the text is not exactly one certificate.
        """
        try:
            found = x509.load_pem_x509_certificates(pem)
        except ValueError as error:
            raise FederationError(f"{path} is no certificate (PEM): {error}; package the kit again") from error
        if len(found) != 1:
            raise FederationError(f"{path} has {len(found)} certificates; permitted: 1")
        return cls(path, found[0])

    @property
    def name(self) -> str:
        """Common name, of which there must be one."""
        found = self.value.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        if len(found) != 1:
            raise FederationError(f"{self.path} has {len(found)} common names; permitted: 1")
        return str(found[0].value)

    @property
    def not_before(self) -> datetime.datetime:
        return self.value.not_valid_before_utc

    @property
    def not_after(self) -> datetime.datetime:
        return self.value.not_valid_after_utc

    @property
    def digest(self) -> bytes:
        """SHA-256 of the certificate."""
        return hashlib.sha256(self.value.public_bytes(Encoding.DER)).digest()

    def days_left(self, now: datetime.datetime) -> int:
        """Return whole days until it expires; negative afterwards."""
        return (self.not_after - now).days

    def is_signed_by(self, authority: Certificate) -> bool:
        """Return whether the authority issued it directly."""
        try:
            self.value.verify_directly_issued_by(authority.value)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True


def fault(
    certificate: Certificate, *, name: str, authority: Certificate | None, now: datetime.datetime | None = None
) -> str | None:
    """Describe what is wrong with a certificate that should be `name`'s, or return None.

    Args:
        certificate: The certificate.
        name: Expected common name.
        authority: Expected issuer; None to skip that check.
        now: Moment of the check; by default this machine's clock.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    path = certificate.path
    if certificate.name != name:
        return f"{path} is of {certificate.name!r}, not of {name!r}; it belongs to another kit"
    if authority is not None and not certificate.is_signed_by(authority):
        return f"{path} was not signed by {authority.path}: it is another federation's; package the kit again"
    if now < certificate.not_before:
        return (
            f"{path} is not valid yet: it begins on {_day(certificate.not_before)}, and this machine's clock says "
            f"{_day(now)}; is the clock right?"
        )
    if now > certificate.not_after:
        return (
            f"{path} expired on {_day(certificate.not_after)}, and this machine's clock says {_day(now)}; ask for a "
            "new one with `pbmvfl federation request`, or set the clock"
        )
    return None


def check(certificate: Path, key: Path, authority: Path, *, name: str, now: datetime.datetime | None = None) -> int:
    """Check a kit's certificates and private key.

    Returns:
        Days until the first of the two certificates expires.

    Raises:
        FederationError: If one of them cannot be used, with what to do.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    root, own = Certificate.read(authority), Certificate.read(certificate)
    for words in (
        fault(own, name=name, authority=root, now=now),
        fault(root, name=root.name, authority=None, now=now),
    ):
        if words is not None:
            raise FederationError(words)
    check_key(key, own)
    return min(own.days_left(now), root.days_left(now))


def check_key(path: Path, certificate: Certificate) -> None:
    """Refuse a private key that others may read, or that does not belong to the certificate.

    Raises:
        FederationError: With what to do.
    """
    try:
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise FederationError(f"{path} may be read by others (mode {mode:o}); chmod 600 it")
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise FederationError(f"{path} cannot be read: {error.strerror}; package the kit again") from error
    except (ValueError, TypeError) as error:
        raise FederationError(f"{path} is no private key without a password; package the kit again") from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != certificate.value.public_key().public_bytes(*form):
        raise FederationError(f"{path} is not the key of {certificate.path}; package the kit again")


def _day(moment: datetime.datetime) -> str:
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
