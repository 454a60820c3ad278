"""Settings of a plan, declared once with their help and checks, and registries of named things."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import StrEnum
from typing import Any, Generic, TypeVar, get_type_hints

from pbmvfl.errors import PbmvflError, PlanError

# --- Public numbers of a plan: fields with their own help, checked alike, and read back exactly ---
# A field is declared once, with its help; the command line, `help(Plan)` and the error messages all take it from there.


_Name = TypeVar("_Name", bound=StrEnum)


def setting(default: Any = MISSING, *, help: str, panel: str, later: bool = False) -> Any:
    """Declare a field with its help on the command line, and the panel of `--help` where it stands.

    `later` marks a number that plans have not always had: it is written only where it is not its default, so that
    plans from before it keep their hash.
    """
    return field(default=default, metadata={"help": help, "panel": panel, "later": later})


def vars_of(group: Any) -> dict[str, Any]:
    """Return the numbers of a group as plain values."""
    found = {each.name: getattr(group, each.name) for each in fields(group)}
    return {name: str(value) if isinstance(value, StrEnum) else value for name, value in found.items()}


def written(group: Any) -> dict[str, Any]:
    """Return the numbers of a group as plans write them: later ones only where they are not their default."""
    later = {each.name: each.default for each in fields(group) if each.metadata.get("later")}
    return {name: value for name, value in vars_of(group).items() if name not in later or value != later[name]}


@dataclass(frozen=True)
class Setting:
    """One public number: its name, type, default and help."""

    name: str
    kind: Any
    default: Any
    help: str
    panel: str
    #: Help of turning it off, for a setting that is on or off.
    help_off: str = ""

    @property
    def is_required(self) -> bool:
        return self.default is MISSING


@functools.cache
def settings_of(group: type) -> tuple[Setting, ...]:
    """Return the fields of a group that were declared with `setting`.

    Every plan that is made reads them about forty times, and evaluating type hints takes most of a plan's time.
    """
    hints = get_type_hints(group)
    declared: tuple[Field[Any], ...] = fields(group)
    return tuple(
        Setting(each.name, hints[each.name], each.default, each.metadata["help"], each.metadata["panel"])
        for each in declared
        if "help" in each.metadata
    )


# --- checks, in one dialect: name=value, what is permitted, why ---


def check_whole(name: str, value: object, *, least: int, most: int | None = None, why: str = "") -> None:
    """Refuse a value that is no whole number in the range."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(f"{name}={value!r} must be a whole number of at least {least}{why}")
    if most is not None and value > most:
        raise PlanError(f"{name}={value} must be at most {most}{why}")


def finite(name: str, value: object) -> float:
    """Return a finite number as a float; refuse any other value."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise PlanError(f"{name}={value!r} must be a finite number")
    return number + 0.0  # minus zero equals zero and must hash alike


def one_of(name: str, value: object, kind: type[_Name], why: str = "") -> _Name:
    """Return a member of an enum, given as it is or as it is spelled."""
    try:
        return kind(value)  # type: ignore[arg-type]  # whatever it is, the enum says whether it has it
    except ValueError:
        raise PlanError(f"{name}={value!r} is not one of {', '.join(kind)}{why}") from None


# --- A closed set of named things that one module each may add to: mechanisms, events, kinds of rounds ---
# A name that is not registered is an error wherever it is looked up, never a default.


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
        """Refuse a name that is not registered."""
        self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def values(self) -> list[_Entry]:
        return list(self._entries.values())
