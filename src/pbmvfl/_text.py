"""Counts in words, for messages that people read."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return `1 round`, `2 rounds`, `1,437 rows`; give the plural of a noun that has another one."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
