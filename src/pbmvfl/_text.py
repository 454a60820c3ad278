"""Counts in words, nearby names, numbers for JSON, and short descriptions of objects for notebooks."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

#: Longest `repr` of a public object.
_LONGEST = 300


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return `1 round`, `2 rounds`, `1,437 rows`; give the plural of a noun that has another one."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the known name that is nearest to `name`, or "" if none is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def for_json(value: Any) -> Any:
    """Replace numbers that are not finite by "inf", "-inf" or "nan" at any depth, because JSON has none."""
    if isinstance(value, dict):
        return {name: for_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def short_repr(name: str, *parts: str) -> str:
    """Return `Name(part, part)` in at most 300 characters."""
    text = f"{name}({', '.join(part for part in parts if part)})"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]}...)"


def html_table(title: str, rows: Iterable[Sequence[object]], *, header: Sequence[str] = ()) -> str:
    """Return an HTML table for a notebook; every text is escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<table><caption>{escape(title)}</caption>"
        + (f"<thead><tr>{head}</tr></thead>" if header else "")
        + f"<tbody>{body}</tbody></table>"
    )
