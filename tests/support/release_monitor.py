"""Release monitor: watches all parties and ledgers, and fails a test in which one charge paid for two draws.

It wraps `Party`, `PartyNetwork`, `StoredAnswers` and the ledger's `Charging` where bytes leave and charges are made. Of
each party in its session it demands:

1. Two different payloads never leave for one round.
2. A round's own learning step, and the step by a gradient, is taken at most once.
3. Where the party has a ledger, a payload leaves, and a step is taken, only for a round that the ledger has charged.
   Of a payload of stored answers, as many rows are charged in its round as are new in it: all others left before,
   charged or from a party without a ledger.

What it finds is written to a folder, because most violations happen in another thread or process, or inside code that
turns exceptions into refusals. Importing it installs it where that folder is named: `conftest` does so in its process,
`monitored/sitecustomize.py` in every Python process that a test starts. It imports the standard library alone, and
wraps a class when its module is imported: some tests are about what is not imported.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import threading
import uuid
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "PBMVFL_TEST_VIOLATIONS"
#: Classes that are watched, by the modules that define them.
_WATCHED = {
    "pbmvfl.protocol.party": "Party",
    "pbmvfl.protocol.party_network": "PartyNetwork",
    "pbmvfl.protocol.stored_answers": "StoredAnswers",
    "pbmvfl.ledger.charging": "Charging",
}
_HEADER, _EMBEDDING, _KIND_AT, _ROUND_AT = 44, 6, 5, slice(32, 36)
_Answer = tuple[int, ...]


class _Observed:
    """What one party has done in its session."""

    def __init__(self) -> None:
        #: By round: eight bytes of its payload's digest, 0 before it has left. Small, as some tests measure memory.
        self.payloads = array("Q")
        self.released = 0
        self.learned: Counter[int] = Counter()
        self.steps = 0
        self.has_ledger = False
        #: By round: how many of its rows were charged.
        self.charged: dict[int, int] = {}


class _Call(threading.local):
    """The party whose message is handled in this thread, and what it did so far for it."""

    party: _Observed | None = None
    settled: tuple[object, dict[bytes, _Answer]] | None = None


_observed: weakref.WeakKeyDictionary[object, _Observed] = weakref.WeakKeyDictionary()
#: By store: answers that were charged when they left, left without a ledger, or were on disk when the store was opened.
_paid: dict[object, dict[bytes, _Answer]] = {}
_call = _Call()


def report(violation: str) -> None:
    """Write a violation where `violations` finds it, whatever becomes of this process."""
    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / uuid.uuid4().hex).write_text(violation)


def violations() -> list[str]:
    """Return the violations since the last call, of this process and of those that it started."""
    folder = Path(os.environ[FOLDER])
    found = []
    for path in sorted(folder.glob("*")) if folder.is_dir() else ():
        found.append(path.read_text())
        path.unlink()
    return found


class _Finder:
    """Wraps a watched class as soon as its module was executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _WATCHED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _watch(getattr(module, _WATCHED[name]))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _watch(cls: type[Any]) -> None:
    for name, wrapper in _WRAPPERS[cls.__name__].items():
        setattr(cls, name, wrapper(getattr(cls, name)))


# --- Party ---


def _message(method: Callable[..., bytes]) -> Callable[..., bytes]:
    @functools.wraps(method)
    def handle(self: Any, data: bytes) -> bytes:
        party = _observed.setdefault(self, _Observed())
        before = (_call.party, _call.settled)
        _call.party, _call.settled = party, None
        try:
            reply = method(self, data)
            if len(reply) >= _HEADER and reply[_KIND_AT] == _EMBEDDING:
                _check_reply(party, bytes(reply))
            return reply
        finally:
            _call.party, _call.settled = before

    return handle


def _check_reply(party: _Observed, reply: bytes) -> None:
    number = int.from_bytes(reply[_ROUND_AT], "little")
    digest = int.from_bytes(hashlib.sha256(reply[_HEADER:]).digest()[:8], "little") | 1
    party.payloads.extend(0 for _ in range(number + 1 - len(party.payloads)))
    if not party.payloads[number]:
        party.payloads[number] = digest
        party.released += 1
    if party.payloads[number] != digest:
        report(f"round {number}: two different payloads left a party in one session")
    if _call.settled is None:
        # Without stored answers; or a retry, which sends the bytes that left before.
        if party.has_ledger and number not in party.charged:
            report(f"round {number}: a payload left a party and its ledger has no charge for it")
        return
    store, answers = _call.settled
    paid = _paid.setdefault(store, {})
    new = sum(paid.get(key) != value for key, value in answers.items())
    if party.has_ledger and new > party.charged.setdefault(number, 0):
        report(f"round {number}: {new - party.charged[number]} answers left a party that no charge has paid for")
    else:
        paid.update(answers)


# --- PartyNetwork ---


def _learns(method: Callable[..., bytes]) -> Callable[..., bytes]:
    @functools.wraps(method)
    def learn_alone(self: Any, current: Any, *arguments: Any) -> bytes:
        party = _call.party
        if party is not None:
            party.learned[current.number] += 1
            if party.learned[current.number] > 1:
                report(f"round {current.number}: a party took its own step twice in one session")
            if party.has_ledger and current.number not in party.charged:
                report(f"round {current.number}: a party took its own step and its ledger has no charge for it")
        return method(self, current, *arguments)

    return learn_alone


def _steps(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def apply(self: Any, *arguments: Any) -> None:
        party = _call.party
        if party is not None:
            party.steps += 1
            if party.steps > party.released:
                report(f"a party took {party.steps} steps by gradients of {party.released} released rounds")
        return method(self, *arguments)

    return apply


# --- StoredAnswers ---


def _opens_store(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def initialise(self: Any, *arguments: Any, **named: Any) -> None:
        method(self, *arguments, **named)
        # Those that another process has stored are that process's to watch.
        _paid.setdefault(_store(self), {}).update({key: tuple(map(int, row)) for key, row in self._known.items()})

    return initialise


def _settles(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def settle(self: Any, keys: Sequence[bytes], fresh: Any) -> Any:
        sent = method(self, keys, fresh)
        _call.settled = (_store(self), {key: tuple(map(int, row)) for key, row in zip(keys, sent, strict=True)})
        return sent

    return settle


def _store(answers: Any) -> object:
    """Name a store by its file, which may have several names, and its secret; one without a file by itself."""
    path = getattr(answers, "_path", None)
    if path is None:
        return id(answers)
    found = path.stat()
    return found.st_dev, found.st_ino, answers._secret


# --- Charging ---


def _opens_ledger(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def initialise(self: Any, *arguments: Any, **named: Any) -> None:
        method(self, *arguments, **named)
        if _call.party is not None:
            _call.party.has_ledger = True

    return initialise


def _charges(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def charge(self: Any, current: Any, events: Any) -> None:
        method(self, current, events)
        if _call.party is not None:
            _call.party.charged[current.number] = current.num_rows

    return charge


_WRAPPERS: dict[str, dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "Party": {"receive": _message, "answer": _message},
    "PartyNetwork": {"learn_alone": _learns, "apply": _steps},
    "StoredAnswers": {"__init__": _opens_store, "settle": _settles},
    "Charging": {"__init__": _opens_ledger, "charge": _charges},
}

if FOLDER in os.environ:
    assert not _WATCHED.keys() & sys.modules.keys(), "from support import release_monitor before the product"
    sys.meta_path.insert(0, _Finder())
