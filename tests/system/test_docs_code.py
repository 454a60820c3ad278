"""Code on the pages runs: every shell and Python block, page by page, in a copy of the examples.

A block that cannot run has a line `<!-- not run: REASON -->` before it. Output that is shown directly below a shell
block is what its commands print, apart from figures.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_FENCED = re.compile(
    r"^(?P<marker><!-- not run: (?P<reason>.+?) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    flags=re.DOTALL | re.MULTILINE,
)
_ENDS_WITH = re.compile(r"# ends with code (\d+)")
_COMMANDS = {"sh", "console", "python", "bash", "shell", ""}

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the docs are not beside these tests")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    kind: str
    text: str
    reason: str
    """Why it is not run, or an empty string."""
    shown: str
    """The output that the page shows directly below, or an empty string."""


def blocks(page: str) -> list[Block]:
    found = list(_FENCED.finditer(page))
    result = []
    for here, following in zip_longest(found, found[1:]):
        adjacent = following and following["kind"] == "text" and not page[here.end() : following.start()].strip()
        shown = following["text"] if following and adjacent else ""
        result.append(Block(here["kind"], here["text"], here["reason"] or "", shown))
    return result


def runnable(path: Path) -> list[Block]:
    return [each for each in blocks(path.read_text()) if each.kind in {"sh", "python"} and not each.reason]


def wordings(text: str) -> str:
    """What stays the same in every run: no figures, no names of runs, no blanks that fill a line up."""
    text = re.sub(r"run [0-9a-f]{16}", "run #", text)
    text = re.sub(r"[\d.,:+T-]*\d[\de+.-]*", "#", text)
    return re.sub(r"\s+", " ", text)


def with_a_command(folder: Path) -> dict[str, str]:
    """An environment in which this very source is installed."""
    command = folder / "bin" / "pbmvfl"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pbmvfl "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return {
        **os.environ,
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }


def words_of(commands: str) -> list[str]:
    """The words of a block that is one `pbmvfl` command, as a shell takes them; none for any other block."""
    lexer = shlex.shlex(commands.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    simple = not any(set(word) <= set("();<>|&") or set(word) & set("$`*?~") for word in words)
    return words if words[0] == "pbmvfl" and words.count("pbmvfl") == 1 and simple else []


@pytest.mark.slow
@pytest.mark.parametrize("page", [each for each in PAGES if runnable(each)], ids=lambda page: page.stem)
def test_every_block_runs_and_prints_what_is_shown(page, run_main, monkeypatch, tmp_path, capsys):
    environment, folder = with_a_command(tmp_path), tmp_path / "examples"
    shutil.copytree(EXAMPLES, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    for variable in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):  # a page sets them for its process
        monkeypatch.setenv(variable, "true")
    names: dict[str, object] = {"__name__": "__main__"}
    for block in runnable(page):
        if block.kind == "python":
            exec(compile(block.text, str(page), "exec"), names)
            continue
        ends_with = int(found[1]) if (found := _ENDS_WITH.search(block.text)) else 0
        capsys.readouterr()
        if words := words_of(block.text):
            code, *printed = run_main(*words[1:])
        else:
            done = subprocess.run(
                ["sh", "-e", "-c", block.text],
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            code, *printed = done.returncode, done.stdout, done.stderr
        assert code == ends_with, f"{block.text}\n{printed}"
        really = wordings("".join(printed))
        for line in filter(str.strip, block.shown.replace("...\n", "\n").splitlines()):
            wanted = wordings(line).strip()
            assert wanted in really, f"{page.name} shows {line!r} below\n{block.text}\nwhich printed\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_stand_in_blocks_that_run_or_say_why_not(page):
    text = page.read_text()
    silent = [each.text for each in blocks(text) if each.kind in _COMMANDS - {"sh", "python"} and not each.reason]
    assert silent == []
    indented = re.findall(r"^ {4,}(?:\$ )?(?:pbmvfl|python|make|pip) .*$", _FENCED.sub("", text), flags=re.MULTILINE)
    assert indented == []


def test_the_tutorial_is_run():
    assert len(runnable(ROOT / "docs" / "start" / "tutorial.md")) >= 10


def test_a_block_has_its_reason_and_the_output_below_it():
    page = "```sh\nls\n```\n\n```text\na\n```\n\n<!-- not run: slow -->\n```sh\nrm\n```\n\nwords\n\n```text\nb\n```\n"
    first, _, second, _ = blocks(page)
    assert (first.reason, first.shown) == ("", "a\n")
    assert (second.reason, second.shown) == ("slow", "")


def test_the_words_of_a_command_are_those_of_a_shell():
    assert words_of('pbmvfl plan --columns "a=b;c=d" \\\n  --epsilon 8    # ends with code 2\n') == [
        *("pbmvfl", "plan", "--columns", "a=b;c=d", "--epsilon", "8")
    ]
    for more in (
        "head -3 people.csv",
        "pbmvfl plan | head",
        "pbmvfl plan; ls",
        "pbmvfl plan\npbmvfl train",
        "pbmvfl x*",
    ):
        assert words_of(more + "\n") == []


def test_wordings_differ_by_words_and_not_by_figures():
    assert wordings("epsilon 8.00 of 16  is spent") == wordings("epsilon 12.3 of 20 is spent")
    assert wordings("epsilon 8.00 of 16 is spent") != wordings("epsilon 8.00 of 16 is left")
    assert wordings("2026-11-16T00:52:27+00:00  run 5600a69ea8ac2152") == wordings(
        "2027-01-01T10:00:00+00:00 run " + "ab" * 8
    )
