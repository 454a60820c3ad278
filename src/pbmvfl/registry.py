"""A closed set of named things that one module each may add to: mechanisms, events, kinds of rounds.

A name that nobody registered is an error wherever it is looked up, never a default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from pbmvfl.errors import PbmvflError

_Entry = TypeVar("_Entry")


class Registry(Generic[_Entry]):
    """Entries by name, in the order in which they were added."""

    def __init__(self, what: str, error: type[PbmvflError]) -> None:
        self._what, self._error = what, error
        self._entries: dict[str, _Entry] = {}

    def add(self, name: str, entry: _Entry) -> _Entry:
        """Register an entry. A name stands for one thing for ever."""
        if name in self._entries:
            raise self._error(f"{self._what}={name!r} is registered already; choose another name")
        self._entries[name] = entry
        return entry

    def forget(self, name: str) -> None:
        """Take an entry out again: for tests that add one."""
        del self._entries[name]

    def __getitem__(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except (KeyError, TypeError):
            raise self._error(f"{self._what}={name!r} is not one of {', '.join(self._entries)}") from None

    def check(self, name: str) -> None:
        """Refuse a name that nobody registered."""
        self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def values(self) -> list[_Entry]:
        return list(self._entries.values())
