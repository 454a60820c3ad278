"""Whether a ledger is the newest one that this machine knows of, and nobody but this program wrote to it."""

from __future__ import annotations

from collections.abc import Sequence

from pbmvfl.ledger import history, plan_keys
from pbmvfl.ledger.counter import Known
from pbmvfl.ledger.database import Database

_COUNTER = "SELECT changes + (SELECT coalesce(sum(writes), 0) FROM charged) FROM identity"


def known(db: Database) -> Known:
    """How many changes there were, and where the history stands."""
    return Known(db.rows(_COUNTER)[0][0], history.head(db))


def trouble(db: Database, outside: Sequence[Known]) -> str | None:
    """What is wrong with a ledger, as the end of a sentence about it; None if nothing is."""
    if (found := history.difference(db) or plan_keys.difference(db, history.taken_plans(db))) is not None:
        return f"was changed by something else than this program: {found}"
    counter, made = known(db).counter, max((each.counter for each in outside), default=0)
    if counter < made:
        return f"is an older copy: it has {counter} changes, and {made} were made"
    hashes = {"", *(event.hash for event in history.events(db))}
    if any(each.head not in hashes for each in outside):
        return "is a copy that went its own way: what was written on this machine is not in it"
    return None
