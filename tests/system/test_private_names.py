"""Tests speak to the package by its public names; what is left of private ones does not grow."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
#: Attributes with an underscore that are nobody's secret: of the standard library and of other packages.
FOREIGN = {
    "_C",  # torch
    "_add_auth_headers",  # NVFlare, as the rest up to `_validate_auth_headers`
    "_config_loaded",
    "_do_command",
    "_process_received_msg",
    "_process_request",
    "_send_to_endpoint",
    "_validate_auth_headers",
    "_current_frames",
    "_exit",
    "_functorch",
    "_name",  # cryptography
    "_replace",  # named tuples
    "_sslobj",
}
#: Uses of the package's private attributes. Lower it when there are fewer.
MOST = 60


def private_attributes(text: str) -> list[str]:
    """Attributes with an underscore of anything but the object or class itself, its parents included."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not (node.attr.startswith("__") and node.attr.endswith("__"))
        and ast.unparse(node.value) not in ("self", "cls", "super()")
        and node.attr not in FOREIGN
    ]


def test_private_attributes_of_the_package_are_used_no_more_than_they_were() -> None:
    found = [
        f"{path.relative_to(TESTS)}: {use}"
        for path in sorted(TESTS.rglob("*.py"))
        for use in private_attributes(path.read_text())
    ]
    assert len(found) <= MOST, "\n".join(found)


def test_private_attributes_are_noticed_in_every_form() -> None:
    text = """
party._rows
module.Kind._made(1)._state = 2
self._own, cls._own, super()._own, self.party._next, os._exit(0), x.__class__, x.public
"""
    found = ["module.Kind._made", "module.Kind._made(1)._state", "party._rows", "self.party._next"]
    assert sorted(private_attributes(text)) == found
