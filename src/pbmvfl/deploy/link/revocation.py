"""Revocation list of a federation: certificates and identities that its authority has withdrawn.

The list is an X.509 CRL that the authority signs, so that `openssl crl` shows it and TLS libraries understand it. Its
number only grows. An entry whose organisation lost its keys, or was removed, also has the organisation's identity, in
an extension of our own: other sites never see each other's certificates, but all of them pin identities.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from pbmvfl._files import PRIVATE_FILE, write_atomically
from pbmvfl.crypto.key_exchange import IDENTITY_BYTES
from pbmvfl.deploy.link.tls import Certificate
from pbmvfl.errors import FederationError

_log = logging.getLogger(__name__)
#: Seconds between two looks of a running connection at its site's list.
LOOK_SECONDS = 60.0
#: Largest list in bytes; an entry has about 100.
_LARGEST = 1_000_000
#: Entry extension with an identity, as a DER octet string; an object identifier made of a UUID needs no registration.
_IDENTITY = x509.ObjectIdentifier("2.25.219146488461841808972691225807911827647")
_OCTETS = bytes((4, IDENTITY_BYTES))


@dataclass(frozen=True, kw_only=True)
class Revoked:
    """Revoked certificate."""

    serial: int
    since: datetime.datetime
    #: Identity of its organisation; empty if the certificate alone was replaced by a newer one.
    identity: bytes = b""


@dataclass(frozen=True, kw_only=True)
class RevocationList:
    """Verified revocation list."""

    path: Path
    number: int
    until: datetime.datetime
    entries: Mapping[int, Revoked]
    pem: bytes

    @classmethod
    def read(cls, path: Path, authority: Path, pem: bytes | None = None) -> RevocationList:
        """Read a list, and verify its signature.

        Args:
            path: The file.
            authority: The authority's certificate.
            pem: The list, where the file has it among other things.

        Raises:
            FederationError: If it cannot be read, is not the authority's, or lacks a number or an end.
        """
        root = Certificate.read(authority).value
        try:
            if pem is None:
                with path.open("rb") as file:
                    pem = file.read(_LARGEST)
            found = x509.load_pem_x509_crl(pem)
            is_signed = found.issuer == root.subject and found.is_signature_valid(root.public_key())  # type: ignore[arg-type]
        except OSError as error:
            raise FederationError(f"{path} cannot be read: {error.strerror}; get it from the authority") from error
        except (ValueError, TypeError) as error:
            raise FederationError(f"{path} is no revocation list (PEM): {error}; get it from the authority") from error
        if not is_signed:
            raise FederationError(f"{path} is not signed by {authority}; get it from this federation's authority")
        try:
            number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        except x509.ExtensionNotFound:
            number = 0
        if number < 1 or found.next_update_utc is None:
            raise FederationError(f"{path} has number={number}; permitted: 1 and more, and an end of its validity")
        entries = {each.serial_number: _entry(each) for each in found}
        return cls(path=path, number=number, until=found.next_update_utc, entries=entries, pem=pem)

    @property
    def identities(self) -> frozenset[bytes]:
        """Identities that no site accepts any more."""
        return frozenset(each.identity for each in self.entries.values() if each.identity)

    def is_fresh(self, now: datetime.datetime | None = None) -> bool:
        """Return whether the list is still valid, by this machine's clock."""
        return (now or datetime.datetime.now(datetime.UTC)) <= self.until

    def check_fresh(self, now: datetime.datetime | None = None) -> None:
        """Refuse a list whose validity is over: a newer one may have been withheld.

        Raises:
            FederationError: If it is stale by this machine's clock.
        """
        now = now or datetime.datetime.now(datetime.UTC)
        if not self.is_fresh(now):
            raise FederationError(
                f"{self.path} number={self.number} is stale: it was valid until {self.until:%Y-%m-%d %H:%M} UTC, and "
                f"this machine's clock says {now:%Y-%m-%d %H:%M}; get a newer one from the authority"
            )


def sign_list(
    path: Path, authority: Path, key: Path, entries: Iterable[Revoked], *, number: int, days: int
) -> RevocationList:
    """Write a signed list that is valid for `days`, and return it."""
    now = datetime.datetime.now(datetime.UTC)
    root = Certificate.read(authority).value
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(root.subject)
        .last_update(now)
        .next_update(now + datetime.timedelta(days=days))
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key()), critical=False)  # type: ignore[arg-type]
    )
    for each in entries:
        entry = x509.RevokedCertificateBuilder().serial_number(each.serial).revocation_date(each.since)
        if each.identity:
            entry = entry.add_extension(x509.UnrecognizedExtension(_IDENTITY, _OCTETS + each.identity), critical=False)
        builder = builder.add_revoked_certificate(entry.build())
    private = load_pem_private_key(key.read_bytes(), password=None)
    signed = builder.sign(private, hashes.SHA256())  # type: ignore[arg-type]
    write_atomically(path, signed.public_bytes(Encoding.PEM).decode(), mode=PRIVATE_FILE)
    return RevocationList.read(path, authority)


def _entry(found: x509.RevokedCertificate) -> Revoked:
    try:
        value = found.extensions.get_extension_for_oid(_IDENTITY).value
        raw = value.value if isinstance(value, x509.UnrecognizedExtension) else b""
    except x509.ExtensionNotFound:
        raw = b""
    return Revoked(
        serial=found.serial_number, since=found.revocation_date_utc, identity=raw.removeprefix(_OCTETS)[:IDENTITY_BYTES]
    )


class RevocationWatch:
    """List of a site that runs: read again when its file changes. An older or damaged one does not replace it."""

    def __init__(self, path: Path, authority: Path, members: Iterable[bytes] = ()) -> None:
        """Store the parameters.

        Args:
            path: The site's list; it need not be there.
            authority: The authority's certificate.
            members: Identities of all organisations that take part in a job.
        """
        self._path, self._authority, self._members = path, authority, frozenset(members)
        self._seen: tuple[int, int] | None = None
        self._list: RevocationList | None = None

    def current(self) -> RevocationList | None:
        """Return the newest list that was seen; None before the first."""
        try:
            found = self._path.stat()
        except OSError:
            return self._list
        if (seen := (found.st_mtime_ns, found.st_ino)) != self._seen:
            self._seen = seen
            try:
                newer = RevocationList.read(self._path, self._authority)
                if self._list is not None and newer.number < self._list.number:
                    raise FederationError(f"{self._path} has number={newer.number}; permitted: {self._list.number}")
                self._list = newer
            except FederationError as error:
                _log.error("the revocation list was not replaced: %s", error)
        return self._list

    def revokes(self, serial: int) -> bool:
        """Return whether the certificate with this serial number was revoked."""
        current = self.current()
        return current is not None and serial in current.entries

    def revokes_member(self) -> bool:
        """Return whether an organisation that takes part was revoked, whoever let it in."""
        current = self.current()
        return current is not None and not self._members.isdisjoint(current.identities)
