"""HTML that no name can break: everything not made in this module is text, and text is escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

#: Elements without an end tag.
_VOID = frozenset({"meta", "br"})
#: Characters that could end a script element or begin another one, as JSON spells them.
_IN_SCRIPTS = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class Markup(str):
    """Text that is already HTML; only this module creates it."""

    __slots__ = ()


Child = str | Markup | None


def el(name: str, /, *children: Child, **attributes: str | float | int | None) -> Markup:
    """Return an element. `class_` is `class`, `data_x` is `data-x`; None children and attributes are omitted."""
    written = "".join(
        f' {_attribute(key)}="{html.escape(_text(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Markup:
    """Return several pieces in sequence."""
    return Markup("".join(_piece(child) for child in children))


def embedded_json(identity: str, value: Any) -> Markup:
    """Return JSON data for programs that read the page; browsers do not run it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character, spelled in _IN_SCRIPTS.items():
        text = text.replace(character, spelled)
    return Markup(f'<script type="application/json" id="{html.escape(identity, quote=True)}">{text}</script>')


def style(text: str) -> Markup:
    """Return a style element for one of the package's own style sheets."""
    return Markup(f"<style>{text}</style>")


def document(language: str, head: Markup, body: Markup) -> str:
    return f'<!doctype html>\n<html lang="{language}">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _piece(child: Child) -> str:
    if child is None:
        return ""
    return child if isinstance(child, Markup) else html.escape(child, quote=True)


def _attribute(name: str) -> str:
    return name.rstrip("_").replace("_", "-") if name not in ("viewBox", "preserveAspectRatio") else name


def _text(value: str | float | int) -> str:
    return value if isinstance(value, str) else repr(value)


# --- Small pieces shared by the sections of a page ---


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def items(lines: Iterable[str]) -> Markup:
    return el("ul", *(el("li", line) for line in lines), class_="plain")


def facts_table(rows: Sequence[tuple[str, Child]]) -> Markup:
    body = (el("tr", el("th", title, scope="row"), el("td", words)) for title, words in rows)
    return el("div", el("table", el("tbody", *body), class_="facts"), class_="scroll")
