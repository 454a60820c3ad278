"""Docstrings of the public names: every parameter is explained, and what is returned."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest

import pbmvfl


def functions_of(name: str, value: Any) -> Iterator[tuple[str, FunctionType]]:
    """Yield a public function, or the constructor and the public methods of a class, by their names."""
    if inspect.isfunction(value):
        yield name, value
    for member in dir(value) if inspect.isclass(value) else ():
        found = inspect.getattr_static(value, member)
        found = getattr(found, "__func__", found)  # of a class method or a static one
        if not inspect.isfunction(found) or not found.__module__.startswith("pbmvfl."):
            continue
        written = found.__code__.co_filename.endswith(".py")  # no constructor that a dataclass made
        if not member.startswith("_") or (member == "__init__" and written):
            yield f"{name}.{member}", found


FUNCTIONS = dict(pair for name in pbmvfl.__all__ for pair in functions_of(name, getattr(pbmvfl, name)))


def text_of(name: str) -> str:
    """Return the docstring of a public function; of a constructor that of its class, too."""
    owner, _, member = name.partition(".")
    whole = [FUNCTIONS[name], getattr(pbmvfl, owner)] if member == "__init__" else [FUNCTIONS[name]]
    return "\n".join(inspect.getdoc(each) or "" for each in whole)


def missing(function: FunctionType, text: str) -> list[str]:
    """Return what a docstring does not explain."""
    sections = re.split(r"^(Args|Returns|Raises|Yields):$", text, flags=re.MULTILINE)
    arguments = sections[sections.index("Args") + 1] if "Args" in sections else ""
    signature = inspect.signature(function)
    names = [name for name in signature.parameters if name not in ("self", "cls")]
    found = [name for name in names if not re.search(rf"^    \*{{0,2}}{name}: \S", arguments, flags=re.MULTILINE)]
    returns = signature.return_annotation not in (None, "None", inspect.Signature.empty)
    told = "Returns" in sections or re.search(r"\b([Rr]eturn|Make)\b", sections[0])
    return [*found, *(["what is returned"] if returns and not told else [])]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_explains_its_parameters_and_what_it_returns(name: str) -> None:
    assert missing(FUNCTIONS[name], text_of(name)) == []


def test_what_is_not_explained_is_named() -> None:
    def silent(first: int, *, second: int = 2, **rest: int) -> int:
        """Add.

        Args:
            second: A number.
        """
        return first + second + sum(rest.values())

    assert missing(silent, inspect.getdoc(silent)) == ["first", "rest", "what is returned"]
    assert {"Plan.of", "Federation.fit", "Federation.__init__", "Ledger.open_session", "load"} <= set(FUNCTIONS)
    assert len(FUNCTIONS) > 80
