"""Faults of a schema or a table, collected into one error: the owner who fixes a file wants the whole list.

A fault never shows a value of a column: messages are kept in logs, pasted into questions and printed by notebooks.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.errors import DataError

#: Faults that an error lists, and row numbers and names that one fault does.
_SHOWN_FAULTS, _SHOWN_ROWS, _SHOWN_NAMES = 20, 5, 20
#: Letters that a slip changes in both names together: one that is wrong is one of each.
_SLIP = 2

Rows = npt.NDArray[np.int64]


class Faults:
    """List of faults that becomes one error."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, fault: str) -> None:
        if fault not in self._found:  # a train and a test file may share one
            self._found.append(fault)

    def has(self, words: str) -> bool:
        """Return True if a fault already contains these words: a reason is given once."""
        return any(words in fault for fault in self._found)

    def raise_any(self) -> None:
        """Raise one DataError for all faults: a single one as it is, several as a list with the first ones in full."""
        if not self._found:
            return
        shown, more = self._found[:_SHOWN_FAULTS], len(self._found) - _SHOWN_FAULTS
        text = shown[0]
        if len(self._found) > 1:
            lines = [f"  {number}. {fault}" for number, fault in enumerate(shown, start=1)]
            lines += [f"  and {more:,} more"] if more > 0 else []
            text = "\n".join([f"{len(self._found):,} faults were found:", *lines])
        error = DataError(text)
        error.faults = tuple(self._found)
        raise error


@dataclass(frozen=True, kw_only=True)
class Place:
    """File of some rows and, where rows were selected or reordered, their numbers in it."""

    file: str
    numbers: Rows | None = None

    def rows(self, positions: Any) -> str:
        """Name rows by number: "row=7 (counted from 0)", or the first few of many."""
        found = np.sort(np.asarray(positions if self.numbers is None else self.numbers[positions])).tolist()
        if len(found) == 1:
            return f"row={found[0]} (counted from 0)"
        more = f" and {len(found) - _SHOWN_ROWS:,} more" if len(found) > _SHOWN_ROWS else ""
        return f"rows={', '.join(map(str, found[:_SHOWN_ROWS]))}{more} (counted from 0)"


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest a name that is probably meant, " (did you mean 'age'?)", or return an empty string.

    A slip is one wrong, missing, added or exchanged letter, or another use of capitals, blanks, hyphens or underscores.
    Another number is another column.
    """
    apart, found = min(((_apart(name, each), each) for each in known), default=(_SLIP + 1, ""))
    return f" (did you mean {found!r}?)" if apart <= _SLIP else ""


def _apart(name: str, other: str) -> int:
    """Return how many letters have to go from both names until they are the same; too many if their digits differ."""
    one, two = (re.sub(r"[\s_.-]", "", text.casefold()) for text in (name, other))
    same = sum(block.size for block in difflib.SequenceMatcher(None, one, two, autojunk=False).get_matching_blocks())
    if re.findall(r"\d+", one) != re.findall(r"\d+", two) or 2 * same <= min(len(one), len(two)):
        return _SLIP + 1
    return len(one) + len(two) - 2 * same


def listed(names: Sequence[str]) -> str:
    """Join names, the first few of many."""
    return ", ".join(map(repr, names[:_SHOWN_NAMES])) + (", ..." if len(names) > _SHOWN_NAMES else "")
