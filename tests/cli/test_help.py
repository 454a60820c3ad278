"""Help of every command: short by default, whole by `--help-all`, and readable in 80 columns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import typer

from pbmvfl.cli import app

#: More options than this are not read.
MOST = 15


def commands(group: Any, *above: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *above, name)
        else:
            yield (*above, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def options_in(text: str) -> set[str]:
    """The first words of the lines in the boxes."""
    return set(re.findall(r"^│ +\*? *(--[a-z-]+)", text, re.MULTILINE))


@pytest.fixture
def shown(run_main, monkeypatch):
    def ask(*words: str, columns: int = 80) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        code, out, err = run_main(*words)
        assert (code, err) == (0, "")
        return out

    return ask


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_shows_few_options_and_help_all_every_one(words, shown):
    short, whole = options_in(shown(*words, "--help")), options_in(shown(*words, "--help-all"))
    declared = {name for param in COMMANDS[words].params for name in param.opts if name.startswith("--")}
    assert whole >= declared
    assert whole - declared == {"--help"}
    assert short <= whole
    assert len(short) <= MOST
    assert short == whole or len(whole) > MOST


@pytest.mark.parametrize(("words", "most"), [(("train",), 15), (("plan",), 13), (("privacy",), 9)], ids=str)
def test_what_people_use_most_is_about_a_dozen_options(words, most, shown):
    short = options_in(shown(*words, "--help"))
    assert len(short) <= most
    assert {"--data", "--label", "--columns", "--algorithm", "--json", "--help"} <= short


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_fits_its_terminal_and_has_no_ragged_paragraph(words, columns, shown):
    text = shown(*words, "--help-all", columns=columns)
    assert max(map(len, text.splitlines())) <= columns
    assert "<bool>" not in text
    prose = [line.strip() for line in text.partition("╭")[0].splitlines()]
    for line, following in pairwise(prose):
        in_a_list = re.match(r"(paper|strict) ", following)
        if line and following and not in_a_list:  # the next word had no room
            assert len(line) + 1 + len(following.split()[0]) > columns - 2, line


@pytest.mark.parametrize("words", [(), ("federation",), ("ledger",)], ids=str)
def test_groups_show_their_commands_by_either_name(words, shown):
    text = shown(*words, "--help")
    assert "<bool>" not in text
    assert text == shown(*words, "--help-all")


def test_completion_knows_the_options_that_help_hides(shown):
    shown("train", "--help")
    assert not any(param.hidden for param in COMMANDS["train",].params)
