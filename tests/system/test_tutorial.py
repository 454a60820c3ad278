"""The tutorial's commands run in order and end as it says; what it shows is what they print, apart from the figures."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIAL, EXAMPLES = ROOT / "docs" / "start" / "tutorial.md", ROOT / "examples"
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_ENDS_WITH = re.compile(r"# ends with code (\d+)")

pytestmark = pytest.mark.skipif(not TUTORIAL.exists(), reason="the docs are not beside these tests")


def steps() -> list[tuple[str, str]]:
    """Every block of shell commands, with the output that is shown below it."""
    blocks = _FENCED.findall(TUTORIAL.read_text())
    return [
        (text, blocks[i + 1][1] if i + 1 < len(blocks) and blocks[i + 1][0] == "text" else "")
        for i, (kind, text) in enumerate(blocks)
        if kind == "sh"
    ]


def wordings(text: str) -> str:
    """What stays the same in every run: no figures, no names of runs, no blanks that fill a line up."""
    text = re.sub(r"run [0-9a-f]{16}", "run #", text)
    text = re.sub(r"[\d.,:+T-]*\d[\de+.-]*", "#", text)
    return re.sub(r"\s+", " ", text)


def with_a_command(folder: Path) -> dict[str, str]:
    """The environment of somebody who has this very source installed."""
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
def test_every_command_of_the_tutorial_does_what_is_shown(run_main, monkeypatch, tmp_path):
    environment, folder = with_a_command(tmp_path), tmp_path / "examples"
    shutil.copytree(EXAMPLES, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    assert len(steps()) >= 10
    commanded = 0
    for commands, shown in steps():
        ends_with = int(found[1]) if (found := _ENDS_WITH.search(commands)) else 0
        if words := words_of(commands):
            commanded += 1
            code, *printed = run_main(*words[1:])
        else:
            done = subprocess.run(
                ["sh", "-e", "-c", commands], env=environment, capture_output=True, text=True, timeout=300, check=False
            )
            code, *printed = done.returncode, done.stdout, done.stderr
        assert code == ends_with, f"{commands}\n{printed}"
        really = wordings("".join(printed))
        for line in filter(str.strip, shown.replace("...\n", "\n").splitlines()):
            wanted = wordings(line).strip()
            assert wanted in really, f"the tutorial shows {line!r} below\n{commands}\nwhich printed\n{printed}"
    assert commanded >= 10
    assert (folder / "predictions.parquet").is_file()
    assert (folder / "runs" / "first" / "report.html").is_file()


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
