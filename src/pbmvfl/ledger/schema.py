"""Tables of a ledger, the random name and key of a new one, and what later versions added to format 2."""

from __future__ import annotations

import os

from pbmvfl.ledger.database import FORMAT, Database

KEY_BYTES = 32

_AS_IN_FORMAT_1 = """
CREATE TABLE plans (hash TEXT PRIMARY KEY, plan TEXT NOT NULL, terms TEXT NOT NULL) STRICT;
CREATE TABLE row_ids (hash TEXT PRIMARY KEY, ids BLOB NOT NULL) STRICT;
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, dataset TEXT NOT NULL, fingerprint TEXT NOT NULL, run TEXT NOT NULL,
    session TEXT NOT NULL, plan TEXT NOT NULL REFERENCES plans, train_ids TEXT NOT NULL, test_ids TEXT NOT NULL,
    first_round INTEGER NOT NULL, opened TEXT NOT NULL
) STRICT;
CREATE TABLE charged (
    session INTEGER PRIMARY KEY REFERENCES sessions, charged_until INTEGER NOT NULL, writes INTEGER NOT NULL DEFAULT 1
) STRICT;
CREATE TABLE limits (
    dataset TEXT NOT NULL, unit TEXT NOT NULL, accounting TEXT NOT NULL, colluding_parties INTEGER NOT NULL,
    epsilon REAL NOT NULL, delta REAL NOT NULL, "order" REAL NOT NULL, set_at TEXT NOT NULL,
    PRIMARY KEY (dataset, unit, accounting, colluding_parties)
) STRICT;
CREATE TABLE refusals (session INTEGER NOT NULL, round INTEGER NOT NULL, reason TEXT NOT NULL, at TEXT NOT NULL) STRICT;
"""
# `identity` is one line: a random name for the state folder, the key of the digests of values, and the number of
# changes that are not counted with a session's charges. `orders` keeps the order of limits that were removed.
NEW_IN_FORMAT_2 = """
CREATE TABLE identity (id TEXT NOT NULL, key BLOB NOT NULL, changes INTEGER NOT NULL) STRICT;
CREATE TABLE seen_values (digest TEXT NOT NULL, dataset TEXT NOT NULL, PRIMARY KEY (digest, dataset)) STRICT;
CREATE TABLE allowed (dataset TEXT PRIMARY KEY, at TEXT NOT NULL) STRICT;
CREATE TABLE orders (
    dataset TEXT NOT NULL, unit TEXT NOT NULL, accounting TEXT NOT NULL, colluding_parties INTEGER NOT NULL,
    "order" REAL NOT NULL, PRIMARY KEY (dataset, unit, accounting, colluding_parties)
) STRICT;
CREATE TABLE holder (process INTEGER NOT NULL, started TEXT NOT NULL, boot TEXT NOT NULL, token TEXT NOT NULL) STRICT;
CREATE TABLE history (id INTEGER PRIMARY KEY, event TEXT NOT NULL, at TEXT NOT NULL, hash TEXT NOT NULL) STRICT;
"""


# What format 2 got later. A program that does not know of it can use the ledger and leaves it as it is. `row_values`
# has the rows of one dataset as `values.row_digests` wrote them, once for each different content.
_ROW_VALUES = """
CREATE TABLE row_values (
    hash TEXT NOT NULL, dataset TEXT NOT NULL, digests BLOB NOT NULL, PRIMARY KEY (hash, dataset)
) STRICT
"""


def make_tables(db: Database) -> None:
    """Make the tables of a new ledger, inside the caller's transaction."""
    db.run("CREATE TABLE book (format INTEGER NOT NULL, limits_version INTEGER NOT NULL) STRICT")
    for statement in _AS_IN_FORMAT_1.split(";"):
        db.run(statement)
    db.run("INSERT INTO book VALUES (?, 0)", (FORMAT,))
    add_new_tables(db)


def add_new_tables(db: Database) -> None:
    """Add the tables that format 1 did not have, with a random name and key."""
    for statement in NEW_IN_FORMAT_2.split(";"):
        db.run(statement)
    db.run("INSERT INTO identity VALUES (?, ?, 0)", (os.urandom(16).hex(), os.urandom(KEY_BYTES)))
    add_what_came_later(db)


def add_what_came_later(db: Database) -> None:
    """Bring a ledger of format 2 up to date, inside the caller's transaction."""
    if not has_owner(db):
        db.run("ALTER TABLE identity ADD COLUMN owner TEXT NOT NULL DEFAULT ''")
    if not has_row_values(db):
        db.run(_ROW_VALUES)


def has_owner(db: Database) -> bool:
    """Return whether the ledger has a column for its owner; a reader may find one that has not."""
    return any(name == "owner" for _, name, *_ in db.rows("PRAGMA table_info(identity)"))


def has_row_values(db: Database) -> bool:
    return bool(db.rows("SELECT 1 FROM sqlite_master WHERE name = 'row_values'"))
