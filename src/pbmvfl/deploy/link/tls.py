"""TLS 1.3 between sites, and the certificates of their kits."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from pbmvfl.errors import FederationError, LinkError

# --- TLS 1.3 between sites, with the certificates of their kits and no others ---
# Both ends present a certificate of the federation's own authority; the system's authorities are not trusted. A site's
# name is exactly its certificate's common name.


_TIMEOUT = 10.0
#: TLS alerts for a refused certificate, besides all that begin with "certificate".
_REFUSALS = ("UNKNOWN_CA", "BAD_CERTIFICATE", "UNSUPPORTED_CERTIFICATE", "ACCESS_DENIED", "HANDSHAKE_FAILURE")
#: OpenSSL's numbers for what may be wrong with a certificate (x509_vfy.h).
_NOT_YET, _EXPIRED = 9, 10


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Paths of a kit's certificate, its private key, and the authority's certificate."""

    certificate: Path
    private_key: Path
    authority: Path

    def contents(self) -> tuple[bytes, bytes, bytes]:
        """Return private key, certificate and authority's certificate.

        Raises:
            LinkError: If the files cannot be used.
        """
        party_context(self)
        return self.private_key.read_bytes(), self.certificate.read_bytes(), self.authority.read_bytes()


class CertificateRefused(LinkError):
    """One of two sites does not accept the other's certificate."""


class HungUp(ConnectionResetError):
    """The server closed the connection on receiving this site's certificate, without a reason."""


def party_context(credentials: Credentials) -> ssl.SSLContext:
    """Return a party's TLS context.

    Raises:
        LinkError: If the files cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    # The name that a certificate must have is compared here, exactly: kits have it as the common name.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
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


def shake_hands(
    address: tuple[str, int], credentials: Credentials, *, server_name: str, server_speaks_first: bool = True
) -> Certificate:
    """Complete one TLS handshake with a server, to find out what is wrong, and return its certificate.

    Args:
        address: Host and port of the server.
        credentials: The party's certificate and key, and the authority's certificate.
        server_name: Common name that the server's certificate must have.
        server_speaks_first: Whether the server sends something as soon as it accepted this site's certificate.

    Raises:
        CertificateRefused: If one side refuses the other.
        HungUp: If the server closed the connection on receiving this site's certificate.
        OSError: If the server cannot be reached.
    """
    context = party_context(credentials)
    context.set_alpn_protocols(["h2"] if server_speaks_first else [])
    with (
        socket.create_connection(address, timeout=_TIMEOUT) as plain,
        context.wrap_socket(plain, do_handshake_on_connect=False, suppress_ragged_eofs=False) as connection,
    ):
        try:
            connection.do_handshake()
        except ssl.SSLCertVerificationError as error:
            raise CertificateRefused(_refused(error)) from error
        except ssl.SSLEOFError as error:  # for example, a server that is shutting down
            raise ConnectionResetError("it hung up during the handshake") from error
        except ssl.SSLError as error:
            raise CertificateRefused(f"it speaks no TLS 1.3 that this kit understands: {error.reason}") from error
        shown = _check_name(connection.getpeercert(binary_form=True) or b"", server_name)
        # With TLS 1.3 a server checks our certificate after the handshake is complete at this side.
        try:
            if not server_speaks_first:
                # After our FIN it closes, or sends an alert. The TLS socket's own shutdown would drop the TLS state.
                socket.socket.shutdown(connection, socket.SHUT_WR)
            if not connection.recv(1) and server_speaks_first:
                raise HungUp("it hung up")
        except ssl.SSLError as error:
            reason = (error.reason or "").partition("ALERT_")[2]
            if reason in _REFUSALS or reason.startswith("CERTIFICATE"):
                raise CertificateRefused(_REFUSED.format(reason.lower().replace("_", " "))) from error
            if server_speaks_first:
                raise HungUp("it hung up") from error
        except TimeoutError:
            pass  # it waits for data: the certificate was accepted
        except OSError as error:
            raise HungUp(str(error)) from error
        return shown


#: What a refused site is told; the reason is the server's alert.
_REFUSED = "it does not accept this site's certificate ({}); check its dates, and that it is of this federation"
#: The same, of a server that closes the connection without one.
REFUSED_SILENTLY = _REFUSED.format("it hung up when it had it")


def _refused(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == _EXPIRED:
        why = "it expired, by this machine's clock; tell its organisation, or set the clock"
    elif error.verify_code == _NOT_YET:
        why = "it is not valid yet, by this machine's clock; is the clock right?"
    else:
        why = (
            f"it was not signed by this federation's authority ({error.verify_message}); it is of another federation's "
            "server, of an impostor, or of a proxy in between that inspects HTTPS: exempt this address there"
        )
    return f"its certificate is not accepted here: {why}"


#: What a server with a revoked certificate is refused for.
REVOKED = "its certificate was revoked by the federation's authority; call its organisation before you go on"


def _check_name(certificate: bytes, server_name: str) -> Certificate:
    """Refuse a certificate that is not the server's, or that lacks its name where gRPC looks for it."""
    found = x509.load_der_x509_certificate(certificate)
    shown = Certificate(Path("its certificate"), found)
    if shown.name != server_name:
        raise CertificateRefused(f"it has the certificate of {shown.name}; permitted: {server_name}")
    with contextlib.suppress(x509.ExtensionNotFound):
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        if server_name not in names.get_values_for_type(x509.DNSName):
            raise CertificateRefused(
                f"its certificate lacks the alternative name {server_name}: it was made by an older version; approve "
                "and package it again"
            )
    return shown


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


def check(
    certificate: Certificate, key: Path, authority: Certificate, *, name: str, now: datetime.datetime | None = None
) -> int:
    """Check a kit's certificates and private key.

    Returns:
        Days until the first of the two certificates expires.

    Raises:
        FederationError: If one of them cannot be used, with what to do.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    for words in (
        fault(certificate, name=name, authority=authority, now=now),
        fault(authority, name=authority.name, authority=None, now=now),
    ):
        if words is not None:
            raise FederationError(words)
    check_key(key, certificate)
    return min(certificate.days_left(now), authority.days_left(now))


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
