"""Build steps of the documentation site that Markdown alone cannot express."""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
#: Pictures beside the docs that pages show; they are copied into the site.
PICTURES = "reproduce/results"
_LINK = re.compile(r"(?<=\]\()(\.\./[^()\s#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the reproduction's pictures to the site."""
    for path in sorted((ROOT / PICTURES).glob("*.png")):
        files.append(File.generated(config, f"images/reproduction/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave the docs folder at the repository, and write the command line's reference."""
    here = posixpath.dirname(f"docs/{page.file.src_uri}")

    def outside(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, link[1]))
        if path.startswith("docs/"):
            return link[1]
        if posixpath.dirname(path) == PICTURES and path.endswith(".png"):
            return posixpath.relpath(f"docs/images/reproduction/{posixpath.basename(path)}", here)
        return f"{SOURCE}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"

    if page.file.src_uri == "reference/cli.md":
        markdown += "\n\n" + "\n\n".join(commands())
    return _LINK.sub(outside, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Name the search dialog, which the theme leaves without a name."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')


def commands() -> Iterator[str]:
    """Yield the sections of the command line's reference, one for each command."""
    import typer

    from pbmvfl.cli import app

    yield from _section(typer.main.get_command(app), "pbmvfl")


def _section(command: Any, name: str) -> Iterator[str]:
    yield f"## {name}"
    for paragraph in (command.help or "").split("\n\n"):
        title, _, rest = paragraph.removeprefix("[bold]").partition("[/]")
        if not paragraph.startswith("[bold]"):
            yield _text(paragraph)
        elif rest.strip().startswith("pbmvfl "):
            yield f"```text\n{_text(rest)}\n```"
        else:
            yield f"**{title}**: {_text(rest)}"
    positional = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    children = getattr(command, "commands", {})
    usage = " ".join([name, *(f"[{(each.metavar or each.name).upper()}]" for each in positional)])
    yield f"```text\n{usage} {'COMMAND' if children else '[OPTIONS]'}\n```"
    if options:
        yield "| option | meaning | default |\n|---|---|---|\n" + "\n".join(map(_row, options))
    for child in sorted(children):
        if not children[child].hidden:
            yield from _section(children[child], f"{name} {child}")


def _row(option: Any) -> str:
    names = ", ".join(f"`{each}`" for each in [*option.opts, *option.secondary_opts])
    default = option.default
    shown = "" if default in (None, False, (), []) or callable(default) or option.is_flag else f"`{default}`"
    return f"| {names} | {_text(option.help or '').replace('|', chr(92) + '|')} | {shown} |"


def _text(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\[bold\]|\[/\]", "", text).replace("<", "&lt;")).strip()
