"""Keys of the plans in a ledger. Each is a hash of the texts that it stands for, so that a changed text shows.

A session names its plan and its terms by their key, and the ledger's history covers what a session names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from pbmvfl.ledger.database import Database
from pbmvfl.ledger.history import plan_digest
from pbmvfl.ledger.migration import terms_of

#: Versions of the protocol, which is in every plan's hash, that a ledger may have been written under.
_VERSIONS = range(256)


def key_of(plan_hash: bytes, terms: str) -> str:
    """Return the key of a plan and its terms.

    By the terms as well: if a later version made other releases of the same plan, both would be kept.
    """
    return hashlib.sha256(plan_hash + terms.encode()).hexdigest()


def difference(db: Database, taken: Mapping[str, str]) -> str | None:
    """Return which session's plan or terms are missing or not what was written; None if all are as they were.

    Args:
        db: The ledger.
        taken: Digests, by key, of texts that the history's last snapshot took as they were.
    """
    kept = {key: (plan, terms) for key, plan, terms in db.rows("SELECT hash, plan, terms FROM plans")}
    for number, key in db.rows("SELECT min(id), plan FROM sessions GROUP BY plan ORDER BY 1"):
        if key not in kept:
            return f"the plan of session {number} is missing"
        if taken.get(key) != plan_digest(*kept[key]) and not _is_key_of(key, *kept[key]):
            return f"the plan or the terms of session {number} are not what was written"
    return None


def _is_key_of(key: str, plan: str, terms: str) -> bool:
    """Return whether a key is the hash of a plan and its terms, or of a plan of version 0.1 that has those terms."""
    try:
        values = json.loads(plan)
        for version in _VERSIONS:
            text = json.dumps({"protocol": version, **values}, sort_keys=True, separators=(",", ":"))
            plan_hash = hashlib.sha256(text.encode())
            if key == key_of(plan_hash.digest(), terms):
                return True
            if key == plan_hash.hexdigest():
                return bool(json.loads(terms) == terms_of(values))
    except (KeyError, TypeError, ValueError):
        pass  # no plan, or none that a version wrote
    return False
