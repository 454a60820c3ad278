"""Counts in words and nearby names, for messages that people read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return `1 round`, `2 rounds`, `1,437 rows`; give the plural of a noun that has another one."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the known name that is nearest to `name`, or "" if none is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""
