"""The tables of a ledger, and what makes a new one a book of its own."""

from __future__ import annotations

import os

from pbmvfl.ledger.file import FORMAT, Database

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


def make_tables(db: Database) -> None:
    """A new book, inside the caller's transaction."""
    db.run("CREATE TABLE book (format INTEGER NOT NULL, limits_version INTEGER NOT NULL) STRICT")
    for statement in _AS_IN_FORMAT_1.split(";"):
        db.run(statement)
    db.run("INSERT INTO book VALUES (?, 0)", (FORMAT,))
    add_new_tables(db)


def add_new_tables(db: Database) -> None:
    """What format 1 did not have, with a random name and key."""
    for statement in NEW_IN_FORMAT_2.split(";"):
        db.run(statement)
    db.run("INSERT INTO identity VALUES (?, ?, 0)", (os.urandom(16).hex(), os.urandom(KEY_BYTES)))
