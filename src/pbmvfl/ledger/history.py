"""A ledger's own history: what its owner and its sessions did, each line hashed together with the one before.

It shows that lines were changed or taken out by something else than this program, and which copy of a ledger
diverged. An owner who has the file also has the key, so it does not stop an owner's own deceit.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import Any

from pbmvfl.ledger.database import Database, has_owner, now

#: Events that begin anew: what the ledger holds then is taken as it is.
_SNAPSHOTS = ("migrated", "accepted")
_SESSION = "id, dataset, fingerprint, run, session, plan, train_ids, test_ids, first_round, opened"
_LIMIT = ("dataset", "unit", "accounting", "colluding_parties", "epsilon", "delta", "order")


@dataclass(frozen=True)
class Event:
    """One line of the history, as people read it."""

    what: str
    at: str
    values: dict[str, Any]
    hash: str


def events(db: Database) -> list[Event]:
    found = db.rows("SELECT event, at, hash FROM history ORDER BY id")
    read = [(json.loads(text), at, digest) for text, at, digest in found]
    return [Event(values.pop("what"), at, values, digest) for values, at, digest in read]


def head(db: Database) -> str:
    """The last hash; none before the first event."""
    found = db.rows("SELECT hash FROM history ORDER BY id DESC LIMIT 1")
    return found[0][0] if found else ""


def append(db: Database, what: str, **values: Any) -> None:
    """Add an event, inside the caller's transaction."""
    if what in _SNAPSHOTS:
        values |= {
            "limits": _limits(db),
            "plans": {key: plan_digest(*texts) for key, *texts in db.rows("SELECT hash, plan, terms FROM plans")},
            "sessions": [row[0] for row in db.rows("SELECT id FROM sessions ORDER BY id")],
        }
    text = json.dumps({"what": what, **values}, sort_keys=True)
    key = db.rows("SELECT key FROM identity")[0][0]
    digest = _hash(key, head(db), text, _covered(db, what, values))
    db.run("INSERT INTO history (event, at, hash) VALUES (?, ?, ?)", (text, now(), digest))


def close_left_sessions(db: Database, sessions: list[int] | None = None) -> None:
    """Write down where sessions ended: those named, or all whose processes ended without saying so."""
    known = _closed(db)
    for number, until in db.rows("SELECT session, charged_until FROM charged ORDER BY session"):
        if number not in known and (sessions is None or number in sessions):
            append(db, "closed", session=number, charged_until=until)


def difference(db: Database) -> str | None:
    """Describe how the ledger differs from its history; None if they agree."""
    key = db.rows("SELECT key FROM identity")[0][0]
    lines = db.rows("SELECT event, hash FROM history ORDER BY id")
    read = [json.loads(text) for text, _ in lines]
    first = max((i for i, event in enumerate(read) if event["what"] in _SNAPSHOTS), default=0)
    limits: dict[tuple[Any, ...], list[Any]] = {}
    opened: set[int] = set()
    for i, event in enumerate(read):
        text, digest = lines[i]
        what = event["what"]
        if i >= first and digest != _hash(key, lines[i - 1][1] if i else "", text, _covered(db, what, event)):
            named = f"session {event['session']}" if "session" in event else what
            return f"line {i + 1} of its history ({named}) is not what was written"
        if what in _SNAPSHOTS:
            limits = {tuple(each[:4]): each for each in event["limits"]}
            opened = set(event["sessions"])
        elif what == "opened":
            opened.add(event["session"])
        elif what == "limit":
            each = [event[name] for name in _LIMIT]
            limits[tuple(each[:4])] = each
        elif what == "removed":
            limits.pop(tuple(event[name] for name in _LIMIT[:4]), None)
    owners = [event["owner"] for event in read if event["what"] == "owned"]
    if has_owner(db) and db.rows("SELECT owner FROM identity")[0][0] != (owners[-1] if owners else ""):
        return "it has another owner than it was made for"
    if opened != {number for (number,) in db.rows("SELECT id FROM sessions")}:
        return "it has other sessions than were opened"
    if sorted(limits.values()) != _limits(db):
        return "it has other limits than its owner set"
    return None


def taken_plans(db: Database) -> dict[str, str]:
    """Return digests of the plans that the last snapshot took as they were, by key; earlier versions noted none."""
    snapshots = [event.values for event in events(db) if event.what in _SNAPSHOTS]
    return dict(snapshots[-1].get("plans", {})) if snapshots else {}


def plan_digest(plan: str, terms: str) -> str:
    """Return a digest of the texts of a plan and its terms."""
    return hashlib.sha256(json.dumps([plan, terms]).encode()).hexdigest()


def _limits(db: Database) -> list[list[Any]]:
    columns = ", ".join(f'"{name}"' for name in _LIMIT)
    return sorted(list(row) for row in db.rows(f"SELECT {columns} FROM limits"))


def _closed(db: Database) -> set[int]:
    """Sessions whose end is in the history."""
    found: set[int] = set()
    for event in events(db):
        if event.what in _SNAPSHOTS:
            found = set(event.values["sessions"])
        elif event.what == "closed":
            found.add(event.values["session"])
    return found


def _covered(db: Database, what: str, values: dict[str, Any]) -> str:
    """Return the rows that an event is about, as the ledger has them now."""
    if what == "opened":
        rows = db.rows(f"SELECT {_SESSION} FROM sessions WHERE id = ?", (values["session"],))
    elif what == "closed":
        rows = db.rows("SELECT session, charged_until FROM charged WHERE session = ?", (values["session"],))
    elif what in _SNAPSHOTS:
        last = max(values["sessions"], default=0)
        rows = db.rows(f"SELECT {_SESSION} FROM sessions WHERE id <= ? ORDER BY id", (last,))
        rows += db.rows("SELECT session, charged_until FROM charged WHERE session <= ? ORDER BY session", (last,))
    else:
        rows = []
    return json.dumps(rows)


def _hash(key: bytes, before: str, text: str, covered: str) -> str:
    return hmac.new(key, "\n".join((before, text, covered)).encode(), "sha256").hexdigest()
