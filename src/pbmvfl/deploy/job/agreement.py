"""Agreement of server and party before a session: version, federation, identities, plan, order of rows.

Every fact is public, and a disagreement ends the job with both values. The order of rows is proved: the server sends a
challenge, and the party answers with a digest of challenge, name and order under the alignment's key, which only the
members of the alignment have.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pbmvfl
from pbmvfl.crypto.protocol_version import PROTOCOL_VERSION
from pbmvfl.deploy.site.folder import SiteFolder
from pbmvfl.deploy.site.job_spec import JobSpec
from pbmvfl.errors import AlignmentError, FederationError

CHALLENGE_BYTES = 32
#: Longest message in bytes; facts have a few hundred.
_LONGEST = 10_000
#: Name of each fact in messages.
_WORDS = {
    "version": "pbmvfl version",
    "protocol": "protocol version",
    "federation": "digest of federation.toml",
    "identities": "digest of all pinned identities",
    "revoked": "number of the revocation list",
    "plan": "plan hash",
    "rows": "number of aligned rows",
}


def facts(site_folder: SiteFolder, spec: JobSpec, *, rows: int) -> dict[str, str]:
    """Return one side's public facts as texts.

    Args:
        site_folder: The site's folder.
        spec: The job spec.
        rows: Number of aligned rows.
    """
    pins, revoked = site_folder.pins(), site_folder.revocations()
    identities = hashlib.sha256(b"".join((pins.server, *pins.parties))).hexdigest()
    return {
        "version": pbmvfl.__version__,
        "protocol": str(PROTOCOL_VERSION),
        "federation": site_folder.federation.digest[:16],
        "identities": identities[:16],
        "revoked": "0" if revoked is None else str(revoked.number),
        "plan": "" if spec.plan is None else spec.plan.hash.hex()[:16],
        "rows": str(rows),
    }


def disagreement(mine: Mapping[str, str], theirs: Mapping[str, str], *, me: str, them: str) -> str | None:
    """Describe the first fact that differs, with both values, or return None."""
    for name, words in _WORDS.items():
        if mine.get(name) != theirs.get(name):
            return f"{words}: {me} has {mine.get(name)!r}, {them} has {theirs.get(name)!r}"
    return None


@dataclass(frozen=True, kw_only=True)
class Question:
    """The server's set-up question."""

    facts: Mapping[str, str]
    challenge: bytes

    def to_bytes(self) -> bytes:
        return json.dumps({**vars(self), "challenge": self.challenge.hex()}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Question:
        said = _object(data, {"facts", "challenge"})
        challenge = _hexadecimal(said["challenge"], CHALLENGE_BYTES)
        return cls(facts=_texts(said["facts"]), challenge=challenge)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A party's set-up answer: its facts and proof, or a public refusal."""

    facts: Mapping[str, str]
    proof: bytes
    #: The party's declaration that all its weights know of rows was charged. The label holder's account of the run
    #: relies on it; the party's ledger does not.
    public_start: bool = False
    refused: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps({**vars(self), "proof": self.proof.hex()}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Answer:
        said = _object(data, {"facts", "proof", "public_start", "refused"})
        refused, public = said["refused"], said["public_start"]
        if not isinstance(refused, str) or len(refused) > 1000 or not isinstance(public, bool):
            raise FederationError("a set-up answer is not of the form that this version writes")
        words = "".join(letter if letter.isprintable() else "?" for letter in refused)
        proof = _hexadecimal(said["proof"], None)
        return cls(facts=_texts(said["facts"]), proof=proof, public_start=public, refused=words)


def check_answer(answer: Answer, *, mine: Mapping[str, str], server: str, party: str, proof: bytes) -> None:
    """Refuse a party that refused, disagrees, or has its rows in another order.

    Raises:
        FederationError: If the party refused, or a fact differs.
        AlignmentError: If the proof of the row order is wrong.
    """
    if answer.refused:
        raise FederationError(f"{party} refused: {answer.refused}")
    differs = disagreement(mine, answer.facts, me=server, them=party)
    if differs is not None:
        raise FederationError(f"{party} does not agree. {differs}; put the same files at both, and try again")
    if not hmac.compare_digest(answer.proof, proof):
        raise AlignmentError(
            f"{party} has its rows in another order than {server} (proof {answer.proof.hex()[:8]}, expected "
            f"{proof.hex()[:8]}); align again: `pbmvfl align`"
        )


def _object(data: bytes, names: set[str]) -> dict[str, Any]:
    try:
        said = json.loads(data) if len(data) <= _LONGEST else None
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or set(said) != names:
        raise FederationError("a set-up message is not of the form that this version writes")
    return said


def _texts(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) and len(each) <= 100 for each in value.values()):
        raise FederationError("a set-up message has facts that are no short texts")
    return {str(name)[:100]: each if each.isprintable() else "?" for name, each in value.items()}


def _hexadecimal(value: object, length: int | None) -> bytes:
    try:
        found = bytes.fromhex(value) if isinstance(value, str) else None
    except ValueError:
        found = None
    if found is None or len(found) > 64 or (length is not None and len(found) != length):
        raise FederationError("a set-up message has a value that is not hexadecimal, or of another length")
    return found
