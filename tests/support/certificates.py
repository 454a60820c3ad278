"""A federation's own authority and certificates as kits have them, made here."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pbmvfl.deploy.link.tls import Credentials

_DAY = datetime.timedelta(days=1)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


@dataclass
class Authority:
    """Signs certificates, and writes them where a test wants them."""

    folder: Path
    name: str = "people"

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._write("rootCA.pem", self._signed(self.name, self._key.public_key(), is_authority=True))

    def issue(self, common_name: str, *, first_day: int = -1, last_day: int = 30, alternative: str = "") -> Credentials:
        """A certificate of this name and its key; days are counted from now. NVFlare's have an alternative name."""
        key = ec.generate_private_key(ec.SECP256R1())
        stem = f"{common_name}-{x509.random_serial_number():x}"  # two of one name are two
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        signed = self._signed(
            common_name,
            key.public_key(),
            first_day=first_day,
            last_day=last_day,
            alternative=alternative,
        )
        return Credentials(
            certificate=self._write(f"{stem}.crt", signed),
            private_key=self._write(f"{stem}.key", private),
            authority=self.folder / "rootCA.pem",
        )

    def key_file(self) -> Path:
        """The authority's private key, for what it signs besides certificates."""
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return self._write("rootCA.key", self._key.private_bytes(*form))

    def _write(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path

    def _signed(
        self,
        common_name: str,
        public: ec.EllipticCurvePublicKey,
        *,
        first_day: int = -1,
        last_day: int = 30,
        is_authority: bool = False,
        alternative: str = "",
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        own = x509.SubjectKeyIdentifier.from_public_key(public)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(common_name))
            .issuer_name(_name(self.name))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + first_day * _DAY)
            .not_valid_after(now + last_day * _DAY)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(alternative or common_name)]), critical=False)
            .add_extension(own, critical=False)
            .add_extension(issuer, critical=False)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=is_authority)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)
