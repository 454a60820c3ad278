"""What a check found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    #: Something may be missed, and everything works without it.
    NOTE = "note"
    TROUBLE = "trouble"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of `pbmvfl doctor`."""

    name: str
    status: Status
    found: str
    #: What to do about it; empty where nothing is to be done.
    way_out: str = ""

    def to_dict(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}


#: A check gives its line, or raises: then its name and the error are the line.
Check = Callable[[], Finding]


def ok(name: str, found: str) -> Finding:
    return Finding(name=name, status=Status.OK, found=found)


def note(name: str, found: str, way_out: str) -> Finding:
    return Finding(name=name, status=Status.NOTE, found=found, way_out=way_out)


def trouble(name: str, found: str, way_out: str) -> Finding:
    return Finding(name=name, status=Status.TROUBLE, found=found, way_out=way_out)


def run_check(name: str, check: Check) -> Finding:
    """A check that fails is a finding, whatever went wrong: the others are still to be made."""
    try:
        return check()
    except Exception as error:
        said = str(error) or type(error).__name__
        return trouble(name, f"the check itself failed: {said}", "install the package anew, or report this as a bug")
