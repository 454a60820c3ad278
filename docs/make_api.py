"""Write docs/reference/api.md from docstrings and signatures: `python docs/make_api.py`.

With `--check` nothing is written, and the exit code says whether the page is up to date.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import pbmvfl
from pbmvfl import errors

PAGE = Path(__file__).parent / "reference" / "api.md"
HOW = "python docs/make_api.py"
#: Parts of the page: exported names, and names of other modules after their module. An exported name that is in none
#: of them is in the last one.
PARTS = (
    ("Train", ("Plan", "Federation", "Result", "VerticalClassifier")),
    ("Predict", ("FederatedModel", "load", "Predictions")),
    ("Data", ("VerticalDataset", "load_dataset", "load_table")),
    ("Privacy", ("Policy", "Ledger", "Limit")),
    (
        "Values in other modules",
        (
            "pbmvfl.privacy.table.PrivacyTable",
            "pbmvfl.privacy.units.Unit",
            "pbmvfl.privacy.units.Accounting",
            "pbmvfl.privacy.units.Adversary",
            "pbmvfl.federation.federation.Parties",
            "pbmvfl.plan.groups.Activation",
            "pbmvfl.plan.groups.Evaluation",
            "pbmvfl.plan.groups.OptimizerName",
            "pbmvfl.wire.gradient_codecs.GradientCodecName",
            "pbmvfl.training.encoders.Bounded",
        ),
    ),
)
_OTHERS = "More"


def page() -> str:
    """Return the whole of docs/reference/api.md."""
    blocks = [
        "# API",
        f"Made from docstrings and signatures by `{HOW}`; do not edit it by hand. A name is `pbmvfl.NAME` unless its "
        "import is given. What is not here may change from one version to the next.",
        *_commands(),
    ]
    for title, names in _parts():
        blocks.append(f"## {title}")
        for name in names:
            module, _, own = name.rpartition(".")
            value = getattr(import_module(module or "pbmvfl"), own)
            first, *rest = _name(own, value)
            blocks += [first, *([f"`from {module} import {own}`"] if module else []), *rest]
    blocks += ["## Errors", _error_tree()]
    return "\n\n".join(blocks) + "\n"


def _parts() -> Iterator[tuple[str, tuple[str, ...]]]:
    listed = {name for _, names in PARTS for name in names}
    yield from PARTS
    if left := sorted(set(pbmvfl.__all__) - listed - {"PbmvflError"}):
        yield _OTHERS, tuple(left)


# --- one name ---


def _name(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}"
    if isinstance(value, type) and issubclass(value, Enum):
        yield _prose(value)
        words = _words_in_source(value)
        yield "\n".join(f"- `{member.value}`{words.get(member.name, '')}" for member in value)
        return
    yield _code(_typed(name, value))
    yield _prose(value)
    if not isinstance(value, type):
        return
    members = [f"- `{member}`{kind}{_first_lines(value, member.split('(')[0])}" for member, kind in _members(value)]
    if is_dataclass(value) and (words := _words_in_source(value)):
        made = [f"- `{each.name}`{words[each.name]}" for each in fields(value) if each.name in words]
        members = made + members
    if members:
        yield "Fields and methods:"
        yield "\n".join(members)


def _members(value: type) -> Iterator[tuple[str, str]]:
    """Yield (name with its parameters, sort) of what a class itself defines, apart from its fields."""
    own = {each.name for each in fields(value)} if is_dataclass(value) else set()
    for member, found in vars(value).items():
        if member.startswith("_") or member in own:
            continue
        if isinstance(found, classmethod):
            yield f"{member}{_short(getattr(value, member))}", " (class method)"
        elif inspect.isfunction(found) or isinstance(found, staticmethod):
            yield f"{member}{_short(getattr(value, member))}", ""
        elif isinstance(found, property) or found.__class__.__name__ == "cached_property":
            yield member, " (property)"


def _first_lines(value: type, member: str) -> str:
    found = inspect.getattr_static(value, member)
    found = getattr(found, "__func__", getattr(found, "fget", getattr(found, "func", found)))
    text = _own_doc(found)
    return ": " + _one_line(text.split("\n\n")[0]) if text else ""


def _words_in_source(value: type) -> dict[str, str]:
    """Return the comments of a class's fields: `#:` above or behind one, or a string below it."""
    found: dict[str, str] = {}
    above: list[str] = []
    lines = [line.strip() for line in inspect.getsource(value).splitlines()]
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        field = re.match(r"([A-Za-z_]\w*)\s*(?::[^=]+)?(?:=.*)?$", line.split("#:")[0].strip())
        if line.startswith("#:"):
            above.append(line.removeprefix("#:").strip())
            continue
        if field and ("=" in line or ":" in line):
            below = re.match(r'"""(.+)"""$', after)
            behind = line.partition("#:")[2].strip()
            words = behind or " ".join(above) or (below[1] if below else "")
            if words:
                found.setdefault(field[1], f": {words}")
        above = []
    return found


def _parameters(value: Any) -> list[inspect.Parameter]:
    try:
        signature = inspect.signature(value)
    except ValueError:
        return []
    return [each for each in signature.parameters.values() if each.name not in ("self", "cls")]


def _typed(name: str, value: Any) -> str:
    """Return the signature with types, one parameter a line."""
    shown = [f"    {words}," for words in _spelled(_parameters(value), typed=True)]
    returned = "" if isinstance(value, type) else f" -> {_type(inspect.signature(value).return_annotation)}"
    return "\n".join([f"{name}(", *shown, f"){returned}"]) if shown else f"{name}(){returned}"


def _short(value: Any) -> str:
    """Return the signature with names and defaults alone."""
    return f"({', '.join(_spelled(_parameters(value), typed=False))})"


def _spelled(parameters: list[inspect.Parameter], *, typed: bool) -> Iterator[str]:
    starred = False
    for each in parameters:
        if each.kind is each.VAR_POSITIONAL:
            starred = True
        if each.kind is each.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        typed_as = f": {_type(each.annotation)}" if typed and each.annotation is not each.empty else ""
        space = " " if typed_as else ""
        default = "" if each.default is each.empty else f"{space}={space}{_default(each.default)}"
        yield f"{stars}{each.name}{typed_as}{default}"


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return re.sub(r"\b(?:pbmvfl|torch|collections|typing|pathlib)\.[a-z_.]*", "", text)


def _default(value: Any) -> str:
    """Return a default as source has it; a whole object is `...`."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, str):
        return f'"{value}"'
    if value is None or isinstance(value, int | float | bool) or value in ((), []):
        return repr(value)
    return "..."


# --- text ---


def _own_doc(value: Any) -> str:
    """Return an object's own docstring: an inherited one of another library changes with it."""
    return inspect.cleandoc(getattr(value, "__doc__", None) or "")


def _prose(value: Any) -> str:
    """Return a docstring in paragraphs; sections, and blocks whose lines name something, become lists."""
    blocks = []
    for block in _own_doc(value).split("\n\n"):
        lines = block.splitlines()
        if lines[0] in ("Args:", "Returns:", "Raises:"):
            blocks += _section(lines)
            continue
        named = [bool(re.match(r"\s*\w+( = \S+)?: ", line)) for line in lines]
        if len(lines) > 4 and named[0] and sum(named) > len(lines) / 3:
            blocks.append(_listing(lines, named))
        else:
            blocks.append(_one_line(block))
    return "\n\n".join(blocks)


def _section(lines: list[str]) -> list[str]:
    """Return a Google-style section as Markdown: a list of what it names, or a paragraph."""
    rest = inspect.cleandoc("\n".join(lines[1:])).splitlines()
    if lines[0] == "Returns:":
        return [f"Returns: {_one_line(' '.join(rest))}"]
    return [lines[0], _listing(rest, [not line.startswith(" ") for line in rest])]


def _listing(lines: list[str], named: list[bool]) -> str:
    entries: list[str] = []
    for line, begins in zip(lines, named, strict=True):
        if begins:
            name, _, words = line.strip().partition(": ")
            entries.append(f"- `{name}`: {words}")
        else:
            entries[-1] += f" {line.strip()}"
    return "\n".join(entries)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


# --- errors and commands ---


def _error_tree() -> str:
    text = inspect.getdoc(errors) or ""
    tree = "\n".join(line.removeprefix("    ") for line in text.splitlines() if re.match(r"\s+\S*(Pbmvfl|[│├└])", line))
    return f"Every error that is raised on purpose is in this tree, in `pbmvfl.errors`.\n\n```text\n{tree}\n```"


def _commands() -> Iterator[str]:
    """Yield the command line as a table of the first sentence of every `--help`."""
    from pbmvfl.cli import app

    yield "## Commands"
    yield (
        "`pbmvfl COMMAND --help` teaches each; most take `--json`. `python -m pbmvfl` is the same program. "
        "`pbmvfl --install-completion` teaches your shell to complete commands and options (bash, zsh, fish, "
        "PowerShell); `pbmvfl --show-completion` prints the script instead."
    )
    lines = ["| command | what it does |", "| --- | --- |"]
    for name, words in _listed(app):
        lines.append(f"| `pbmvfl {name}` | {words} |")
    yield "\n".join(lines)


def _listed(app: Any) -> Iterator[tuple[str, str]]:
    for command in app.registered_commands:
        name = command.name or command.callback.__name__.rstrip("_").replace("_", "-")
        text = command.help or inspect.getdoc(command.callback) or ""
        yield name, _one_line(re.sub(r"\[/?[a-z]*\]", "", text.split("\n\n")[0])).replace("|", "\\|")
    for group in app.registered_groups:
        for name, words in _listed(group.typer_instance):
            yield f"{group.name} {name}", words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="say whether the page is up to date; write nothing")
    asked = parser.parse_args()
    text = page()
    if asked.check:
        if PAGE.exists() and PAGE.read_text() == text:
            return 0
        print(f"docs/reference/api.md is not up to date; make it anew: {HOW}", file=sys.stderr)
        return 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
