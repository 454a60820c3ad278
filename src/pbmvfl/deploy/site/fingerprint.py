"""Fingerprint of all that a federation must agree on, short enough to compare by phone.

It covers federation.toml, the authority's certificate, and every organisation's identity by name. An attacker who gives
different identities to different organisations must find two sets with one fingerprint: 2**64 tries of a slow hash.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping

from pbmvfl.deploy.link.tls import Certificate
from pbmvfl.deploy.site.federation_file import FederationFile
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.errors import FederationError

_LABEL = b"pbmvfl federation fingerprint 1"
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
    digits = hashlib.scrypt(hashlib.sha256(text).digest(), salt=_LABEL, dklen=_BYTES, **_COST).hex()
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
