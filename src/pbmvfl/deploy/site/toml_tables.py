"""Settings of a TOML file, declared table by table; whatever is wrong is named with what is permitted."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

from pbmvfl.errors import PbmvflError


@dataclass(frozen=True)
class Kind:
    """Kind of a setting: permitted values in words, their check, and what is made of one."""

    permitted: str
    accepts: Callable[[Any], bool]
    make: Callable[[Any], Any] = lambda value: value
    is_text: bool = False


def number(permitted: str, *, least: float, most: float, kind: Any = int | float) -> Kind:
    """Return the kind of numbers in a range."""
    return Kind(permitted, lambda value: _is_number(value, kind) and least <= value <= most)


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def whole(least: int, most: int) -> Kind:
    return number(f"a whole number in {least}..{most}", least=least, most=most, kind=int)


def text(form: re.Pattern[str]) -> Kind:
    """Return the kind of texts of a form."""
    return Kind(
        f"a text of the form {form.pattern}",
        lambda value: isinstance(value, str) and form.fullmatch(value) is not None,
        is_text=True,
    )


TEXT = Kind("a text that is not empty", lambda value: isinstance(value, str) and value != "", is_text=True)
NUMBER = Kind("a number", lambda value: _is_number(value, int | float))
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
NAMES = Kind(
    'a list of names, such as ["age", "job"]',
    lambda value: isinstance(value, list) and bool(value) and all(isinstance(each, str) and each for each in value),
    tuple,
)
#: For values that are checked by what they are for.
ANY = Kind("", lambda value: True)  # noqa: ARG005


class TomlTables:
    """Reader of a file's tables. The two files differ in how they put a fault into words."""

    error: ClassVar[type[PbmvflError]]
    #: Whether similar names, and the names of a missing table, are part of the words.
    suggests: ClassVar[bool]

    def __init__(self, where: object) -> None:
        self._where = where

    def fault(self, words: str) -> PbmvflError:
        return self.error(f"{self._where}: {words}")

    def wrong(self, setting: str, value: object, kind: Kind) -> str:
        """Describe a value that is not permitted."""
        return f"{setting}={value!r} must be {kind.permitted}"

    def check_names(self, section: str, table: Mapping[str, Any], known: Collection[str]) -> None:
        """Refuse a name that is not known."""
        for name in table:
            if name not in known:
                near = get_close_matches(name, list(known), n=1) if self.suggests else []
                hint = f"did you mean {near[0]}? " if near else ""
                called = f"[{section}] {name}" if section else f"[{name}]"
                raise self.fault(f"{called} is not known; {hint}permitted: {', '.join(known)}")

    def check(self, section: str, name: str, value: object, kind: Kind) -> Any:
        """Return what is made of a value."""
        if not kind.accepts(value):
            raise self.fault(self.wrong(f"[{section}] {name}", value, kind))
        return kind.make(value)

    def read(
        self, values: Mapping[str, Any], section: str, kinds: Mapping[str, Kind], needed: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return the settings of a table that are there, checked; those that are `needed` must be."""
        table = values.get(section, None if needed else {})
        if not isinstance(table, dict):
            raise self.fault(f"it needs a table [{section}]" + (f" with {', '.join(kinds)}" if self.suggests else ""))
        self.check_names(section, table, kinds)
        return {
            name: self.check(section, name, table.get(name), kind)
            for name, kind in kinds.items()
            if name in table or name in needed
        }
