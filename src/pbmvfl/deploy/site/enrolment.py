"""Enrolment: requests to the authority and its replies, JSON files with public keys only, checked before use.

A request is signed by the identity that it names, so that no organisation can use another's identity. The reply holds
all identities; the fingerprint proves that they are the true ones.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from pbmvfl._files import write_atomically
from pbmvfl.crypto.key_exchange import IDENTITY_BYTES, Identity
from pbmvfl.deploy.link.tls import Certificate
from pbmvfl.deploy.site.federation_file import FILE, FederationFile
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.errors import FederationError

#: Largest file in bytes; certificates and keys have about 2,000 each.
LARGEST = 1_000_000
FORMAT = 1
_LABEL = b"pbmvfl request for a certificate\0"
_SMALLEST_RSA = 2048
_OTHER_FORM = "is not of the form that this version reads; ask for it again"


@dataclass(frozen=True, kw_only=True)
class Request:
    """An organisation's request for certificates. All of it is public."""

    federation: str  #: federation.toml's digest
    name: str
    identity: bytes
    #: The site's request for a certificate (PEM), and at the label holder the lead's.
    site: str
    lead: str = ""

    def write(self, path: Path, identity: Identity) -> None:
        """Write the request, signed by the organisation's identity."""
        said = {"format": FORMAT, **asdict(self), "identity": self.identity.hex()}
        _write(path, {**said, "signature": identity.sign(_statement(said)).hex()})

    @classmethod
    def read(cls, path: Path, federation: FederationFile) -> Request:
        """Read a received request, and check all of it against federation.toml.

        Raises:
            FederationError: If it is damaged, not signed by its own identity, or for another federation.
        """
        said = _read(path, dict.fromkeys(("federation", "name", "identity", "site", "lead", "signature"), str))
        name, identity, signature = said["name"], _hex(said["identity"], path), said.pop("signature")
        try:
            Ed25519PublicKey.from_public_bytes(identity).verify(bytes.fromhex(signature), _statement(said))
        except (ValueError, InvalidSignature) as error:
            raise FederationError(f"{path} is not signed by the identity in it; ask for it again") from error
        if said["federation"] != federation.digest:
            raise FederationError(
                f"{path} was made for another {FILE} than the authority has; send that file to its organisation, and "
                "let them ask again"
            )
        if name != federation.server and name not in federation.parties:
            raise FederationError(f"{path}: name={name[:40]!r} is not in {FILE}")
        if bool(said["lead"]) != (name == federation.server):
            raise FederationError(f"{path}: the label holder asks for the lead's certificate too, and nobody else")
        request = cls(federation=federation.digest, name=name, identity=identity, site=said["site"], lead=said["lead"])
        request.keys(federation, path)
        return request

    def keys(self, federation: FederationFile, path: Path) -> list[bytes]:
        """Return the public keys of its certificate requests.

        Raises:
            FederationError: If one of them is for another name.
        """
        wanted = [(self.site, self.name)] + ([(self.lead, federation.lead)] if self.lead else [])
        return [_public_key(text, name, path) for text, name in wanted]


@dataclass(frozen=True, kw_only=True)
class Signed:
    """The authority's reply to an organisation. All of it is public."""

    federation: str
    name: str
    authority: str  #: the authority's certificate (PEM)
    site: str  #: the site's certificate (PEM)
    lead: str
    identities: Mapping[str, bytes]
    #: The newest revocation list (PEM); empty if there is none.
    revoked: str = ""

    def write(self, path: Path) -> None:
        """Write the reply."""
        identities = {name: key.hex() for name, key in self.identities.items()}
        _write(path, {"format": FORMAT, **asdict(self), "identities": identities})

    @classmethod
    def read(cls, path: Path, federation: FederationFile) -> Signed:
        """Read the authority's reply, and check its form; certificates are checked with the own keys later.

        Raises:
            FederationError: If it has another form, or is for another federation.
        """
        names = ("federation", "name", "authority", "site", "lead", "revoked")
        said = _read(path, {**dict.fromkeys(names, str), "identities": dict})
        if said["federation"] != federation.digest:
            raise FederationError(f"{path} was made for another {FILE} than the one here; compare the files")
        if set(said["identities"]) != {federation.server, *federation.parties}:
            raise FederationError(f"{path} does not have exactly the identities of all organisations; ask for it again")
        identities = {name: _hex(key, path) for name, key in said["identities"].items()}
        check_distinct(identities, path)
        return cls(**{name: said[name] for name in names}, identities=identities)


def check_distinct(identities: Mapping[str, bytes], where: Path | str) -> None:
    """Refuse two organisations with the same key: one could answer for the other.

    Raises:
        FederationError: If two names have the same key.
    """
    holders: dict[bytes, str] = {}
    for name, key in identities.items():
        if (other := holders.setdefault(key, name)) != name:
            raise FederationError(f"{where}: {other} and {name} have the same key; each organisation makes its own")


def _write(path: Path, said: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(said, sort_keys=True, indent=1) + "\n")


def _statement(said: Mapping[str, Any]) -> bytes:
    """Return what the signature of a request is about."""
    return _LABEL + json.dumps(said, sort_keys=True).encode()


def _read(path: Path, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Read a received object with exactly these names, of bounded size."""
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
    except OSError as error:
        raise FederationError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(raw) > LARGEST:
        raise FederationError(f"{path} has more than {LARGEST:,} bytes, and is of no federation; ask for it again")
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or set(said) != {"format", *kinds}:
        raise FederationError(f"{path} {_OTHER_FORM}")
    if said["format"] != FORMAT or isinstance(said["format"], bool):
        raise FederationError(f"{path}: format={str(said['format'])[:20]!r}; this version reads format {FORMAT}")
    if not all(isinstance(said[name], kind) for name, kind in kinds.items()):
        raise FederationError(f"{path} {_OTHER_FORM}")
    return said


def _hex(text: object, path: Path) -> bytes:
    try:
        key = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        key = b""
    if len(key) != IDENTITY_BYTES:
        raise FederationError(f"{path}: an identity has {IDENTITY_BYTES} bytes in hexadecimal; ask for it again")
    return key


def _public_key(text: str, name: str, path: Path) -> bytes:
    """Return the key of a certificate request, which must be for `name` and signed by that key."""
    try:
        csr = x509.load_pem_x509_csr(text.encode())
        valid = csr.is_signature_valid
        key = csr.public_key()
    except (ValueError, TypeError) as error:
        raise FederationError(f"{path} has no request for a certificate (PEM) of {name}; ask for it again") from error
    names = [str(each.value) for each in csr.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if not valid or names != [name]:
        raise FederationError(f"{path}: the request for a certificate is not {name}'s own; ask for it again")
    if isinstance(key, RSAPublicKey) and key.key_size < _SMALLEST_RSA:
        raise FederationError(f"{path}: key of {key.key_size} bits; permitted: {_SMALLEST_RSA} and more")
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


# --- Fingerprint of all that a federation must agree on, short enough to compare by phone ---
# It covers federation.toml, the authority's certificate, and every organisation's identity by name. An attacker who
# gives different identities to different organisations must find two sets with one fingerprint: 2**64 tries of a slow
# hash.


_FINGERPRINT = b"pbmvfl federation fingerprint 1"
_BYTES, _GROUP = 16, 4
#: 16 MB and some 50 ms a try.
_COST = {"n": 2**14, "r": 8, "p": 1}


def fingerprint(federation: FederationFile, authority: Certificate, identities: Mapping[str, bytes]) -> str:
    """Return eight groups of four hexadecimal digits."""
    said = {
        "federation": federation.digest,
        "authority": authority.digest.hex(),
        "identities": {name: key.hex() for name, key in identities.items()},
    }
    text = json.dumps(said, sort_keys=True, separators=(",", ":")).encode()
    digits = hashlib.scrypt(hashlib.sha256(text).digest(), salt=_FINGERPRINT, dklen=_BYTES, **_COST).hex()
    return " ".join(digits[start : start + _GROUP] for start in range(0, len(digits), _GROUP))


def fingerprint_of(site_folder: SiteFolder) -> str:
    """Return the fingerprint of the current content of an organisation's folder."""
    pins = site_folder.pins()
    identities = {
        site_folder.federation.server: pins.server,
        **dict(zip(site_folder.federation.parties, pins.parties, strict=True)),
    }
    return fingerprint(site_folder.federation, Certificate.read(site_folder.authority), identities)


def check_fingerprint(given: str, found: str) -> None:
    """Refuse a fingerprint that differs from the expected one, however its groups are written."""
    digits = re.sub(r"[\s:-]", "", given).lower()
    if not re.fullmatch(r"[0-9a-f]{32}", digits):
        raise FederationError(f"fingerprint={given!r} must be {2 * _BYTES} hexadecimal digits, in groups or not")
    if not hmac.compare_digest(digits, found.replace(" ", "")):
        raise FederationError(
            f"the fingerprint is {found}, not {given}: what came is not what the others have; do not go on with it, "
            "and call them"
        )
