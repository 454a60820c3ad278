"""Small pieces that the sections of a page share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pbmvfl.report.markup import Child, Markup, el


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def items(lines: Iterable[str]) -> Markup:
    return el("ul", *(el("li", line) for line in lines), class_="plain")


def facts_table(rows: Sequence[tuple[str, Child]]) -> Markup:
    body = (el("tr", el("th", title, scope="row"), el("td", words)) for title, words in rows)
    return el("div", el("table", el("tbody", *body), class_="facts"), class_="scroll")
