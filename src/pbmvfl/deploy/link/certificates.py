"""Certificates of a kit: whose they are, from when to when, who signed them, and words for what is wrong with them."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from pbmvfl.errors import FederationError

#: Days before the end from which on an operator is told.
SOON = 30


@dataclass(frozen=True)
class Certificate:
    """One certificate, read from a file."""

    path: Path
    value: x509.Certificate

    @classmethod
    def read(cls, path: Path) -> Certificate:
        try:
            return cls.parse(path.read_bytes(), path)
        except OSError as error:
            raise FederationError(f"{path} cannot be read: {error.strerror}; package the kit again") from error

    @classmethod
    def parse(cls, pem: bytes, path: Path) -> Certificate:
        try:
            found = x509.load_pem_x509_certificates(pem)
        except ValueError as error:
            raise FederationError(f"{path} is no certificate (PEM): {error}; package the kit again") from error
        if len(found) != 1:
            raise FederationError(f"{path} has {len(found)} certificates; permitted: 1")
        return cls(path, found[0])

    @property
    def name(self) -> str:
        """Whose it is: the common name, which must be there once."""
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
        """SHA-256 of the certificate itself."""
        return hashlib.sha256(self.value.public_bytes(Encoding.DER)).digest()

    def days_left(self, now: datetime.datetime) -> int:
        """Whole days until it ends; negative afterwards."""
        return (self.not_after - now).days

    def is_signed_by(self, authority: Certificate) -> bool:
        try:
            self.value.verify_directly_issued_by(authority.value)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True


def fault(
    certificate: Certificate, *, name: str, authority: Certificate | None, now: datetime.datetime | None = None
) -> str | None:
    """What is wrong with a certificate that should be `name`'s, in words; None if nothing is."""
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
    """Refuse a kit's certificates in words; the days that are left, of its own and of the authority's."""
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
    """Refuse a private key that others may read, or that is not the certificate's."""
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
