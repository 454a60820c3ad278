"""A ledger's file, its name and its tables.

SQLite, where a reader changes nothing on disk and every error says which file and what to do.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pbmvfl.errors import LedgerError

FORMAT = 2
#: Read and brought to the present one: what each kept is in `migration`.
OLDER_FORMATS = (1,)
#: Seconds to wait for another process that writes, before giving up.
_PATIENCE = 10.0
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
#: What a reader without the right to write may get for a moment, while another process closes a ledger or puts a killed
#: one's log in order.
_PASSING = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)


def error_code(error: BaseException | None) -> int:
    """SQLite's extended code: the low byte is the kind of error, the rest is detail."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)


def _named(path: Path, error: sqlite3.Error) -> LedgerError:
    """Turn an error of SQLite into one that says which file, and what to do."""
    name = f"ledger={str(path)!r}"
    if isinstance(error, sqlite3.ProgrammingError):
        return LedgerError(f"{name} cannot be used any more: {error}; open it again")
    code = error_code(error)
    if code & 0xFF in _BUSY:
        return LedgerError(f"{name} is busy ({error}): another process is writing; try again")
    if code & 0xFF in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY):
        return LedgerError(f"{name} cannot be used: {error}; see that you may use the file and its folder")
    if code & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return LedgerError(f"{name} cannot be read or written: {error}; see to its disk and try again")
    return LedgerError(f"{name} cannot be read as a ledger: {error}; name a ledger's file, or put a copy of it back")


class Database:
    """A connection whose every error leaves as a LedgerError, for callers know nothing of SQLite."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self._connection = path, connection

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise _named(self.path, error) from error

    def run(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """For statements that change something; the cursor has their counts."""
        try:
            return self._connection.execute(statement, values)
        except sqlite3.Error as error:
            raise _named(self.path, error) from error

    @contextlib.contextmanager
    def transaction(self, kind: str) -> Iterator[None]:
        self.run(f"BEGIN {kind}")
        try:
            yield
            self.run("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite has ended it already after some errors
                self.run("ROLLBACK")
            raise

    def close(self) -> None:
        self._connection.close()

    def copy_in_memory(self) -> Database:
        """Return a copy whose changes reach no file, and close this connection."""
        copy = self._copy()
        self.close()
        return Database(self.path, copy)

    def to_bytes(self) -> bytes:
        """Return a consistent snapshot as the bytes of a database file; another process may be writing."""
        with contextlib.closing(self._copy()) as copy:
            return copy.serialize()

    def _copy(self) -> sqlite3.Connection:
        copy = sqlite3.connect(":memory:", isolation_level=None)
        try:
            self._connection.backup(copy)
        except sqlite3.Error as error:
            copy.close()
            raise _named(self.path, error) from error
        return copy


def has_log(path: Path) -> bool:
    """Return whether a database has a log or a journal beside it, which a writer may fold into it."""
    return any(path.with_name(path.name + ending).exists() for ending in ("-wal", "-journal"))


def open_for_writing(path: Path, *, create: bool = True) -> Database:
    """Open a database for any thread; without `create` only one that is there."""
    try:
        # By its URI: ":memory:" is a file's name like any other here. A party may charge its ledger
        # in any thread that holds its lock.
        name = f"{path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
        connection = sqlite3.connect(name, uri=True, isolation_level=None, timeout=_PATIENCE, check_same_thread=False)
        return Database(path, connection)
    except sqlite3.Error as error:
        raise _named(path, error) from error


def open_for_reading(path: Path) -> Database:
    """Open a database and leave its file and its folder as they are, also where both may only be read.

    SQLite's own read-only mode is not enough: for a ledger that no process has open it makes the log's two files, and
    leaves them behind as the reader's, in the owner's way.
    """
    log, index, journal = (path.with_name(path.name + ending) for ending in ("-wal", "-shm", "-journal"))
    try:
        for last_try in [False] * 10 + [True]:
            if (log.exists() and index.exists()) or journal.exists():
                try:
                    return Database(path, _connect(path, "mode=ro"))
                except sqlite3.OperationalError as error:
                    if last_try or journal.exists() or error_code(error) & 0xFF not in _PASSING:
                        raise
                    time.sleep(0.01)
                    continue
            if log.exists() and log.stat().st_size:  # rounds that the file has not yet, and no index to find them
                if os.access(path, os.W_OK):
                    return Database(path, _connect(path, "mode=ro"))  # its owner may make the index
                raise LedgerError(
                    f"ledger={str(path)!r} has rounds in {log.name!r} that cannot be read without writing beside it; "
                    "let its owner open it once, or copy it together with its -wal and -shm files"
                )
            if (copy := _copy_of_closed(path)) is not None:
                return Database(path, copy)
    except sqlite3.Error as error:
        raise _named(path, error) from error
    except OSError as error:
        raise LedgerError(f"ledger={str(path)!r} cannot be read: {error.strerror}; see that it is there") from error
    raise LedgerError(f"ledger={str(path)!r} changes while it is read: another process is writing; try again")


def _connect(path: Path, how: str) -> sqlite3.Connection:
    """Connect, and look into the file: SQLite itself would wait with that, and with its errors, until it is asked."""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, isolation_level=None, timeout=_PATIENCE)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _copy_of_closed(path: Path) -> sqlite3.Connection | None:
    """Copy a ledger that no process has open to memory; None if a process wrote to it meanwhile.

    `immutable` takes no locks, so what was read counts only if the file is the same afterwards.
    """

    def stamp() -> tuple[int, ...]:
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns

    before = stamp()
    copy = sqlite3.connect(":memory:", isolation_level=None)
    try:
        with contextlib.closing(_connect(path, "mode=ro&immutable=1")) as file:
            format_of(Database(path, file), path)  # not a copy of whatever other database that may be
            file.backup(copy)
    except (sqlite3.Error, LedgerError):
        copy.close()
        if stamp() == before:
            raise
        return None
    if stamp() == before:
        return copy
    copy.close()
    return None


def format_of(db: Database, path: Path) -> int | None:
    """Return the format of a ledger, None for an empty file; refuse anything else, which is not ours to change."""
    tables = {name for (name,) in db.rows("SELECT name FROM sqlite_master")}
    if not tables:
        return None
    found = db.rows("SELECT format FROM book") if "book" in tables else []
    if len(found) != 1:
        raise LedgerError(
            f"ledger={str(path)!r} is another program's database and was left as it is; name a ledger, or a new file"
        )
    ((number,),) = found
    if number != FORMAT and number not in OLDER_FORMATS:
        raise LedgerError(
            f"ledger={str(path)!r} has format {number}; this program reads formats {OLDER_FORMATS[0]} to {FORMAT}"
        )
    return int(number)


def is_begun(path: Path) -> bool:
    """Return whether a file has a ledger in it: a full disk leaves one that is empty, where nothing was written."""
    if not path.is_file():
        return False
    db = open_for_reading(path)
    try:
        return format_of(db, path) is not None
    finally:
        db.close()


def identity_of(file: Path | str | int) -> tuple[int, int] | None:
    """Return the device and inode of a file; None if there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino


# --- what is written beside the rows ---

#: What the lock file holds: the version of the limits, as a session's rounds compare it.
MARK_BYTES = 8


def mark(limits_version: int) -> bytes:
    """Return a version as the lock file holds it."""
    return limits_version.to_bytes(MARK_BYTES, "little")


def now() -> str:
    """Return the time as a ledger writes it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


# --- the name of the file ---

ENDING = ".sqlite"
#: Names that every file system takes as they are. The tilde is not among their letters: see `file_name`.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}")
_DIGEST_DIGITS = 12


def file_name(party: str) -> str:
    """Return a file name for a party's ledger, a different one for every party.

    A name with other letters than a file may have keeps those that it may have, and gets a digest after a tilde, which
    no plain name has in it.
    """
    if _PLAIN.fullmatch(party):
        return party + ENDING
    kept = re.sub(r"[^A-Za-z0-9_-]+", "_", party)[:40].strip("_-")
    return f"{kept or 'party'}~{hashlib.sha256(party.encode()).hexdigest()[:_DIGEST_DIGITS]}{ENDING}"


# --- tables, and the random name and key of a new ledger ---

_KEY_BYTES = 32

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
_NEW_IN_FORMAT_2 = """
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
# has the rows of one dataset as `row_identity.row_digests` wrote them, once for each different content.
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
    for statement in _NEW_IN_FORMAT_2.split(";"):
        db.run(statement)
    db.run("INSERT INTO identity VALUES (?, ?, 0)", (os.urandom(16).hex(), os.urandom(_KEY_BYTES)))
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
