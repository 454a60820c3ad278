"""The page about deployments says what the program does: its file is read, and its commands are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from pbmvfl.cli import app
from pbmvfl.deploy.site.federation_file import FederationFile
from pbmvfl.deploy.site.policy_file import PolicyFile
from pbmvfl.plan.plan import Plan

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "operate.md").read_text()
EXAMPLE = (ROOT / "examples" / "four_organisations.py").read_text()


def commands(text: str) -> list[str]:
    """Whatever is written as a command, in a line of its own or inside a sentence."""
    return sorted(set(re.findall(r"(?:`|\$ +|: +|/bin/)pbmvfl ([a-z][^`\n|]*)", text)))


def known(words: list[str]) -> bool:
    """Whether the words begin with a command of the program, and every option after it is one of that command's."""
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    if hasattr(command, "commands"):
        return not words  # such as `pbmvfl federation`, by itself
    options = {each for parameter in command.params for each in parameter.opts}
    return all(word in options for word in words if word.startswith("--"))


@pytest.mark.parametrize("line", commands(PAGE))
def test_every_command_on_the_page_is_one_of_the_program(line):
    assert known(line.split())


def test_the_control_finds_what_is_no_command():
    assert not known(["federation", "begin", "federation.toml"])
    assert not known(["submit", "run-001", "--for-ever"])


def test_the_page_has_commands_for_everybody():
    first = {line.split()[0] for line in commands(PAGE)}
    assert {
        "federation",
        "policy",
        "server",
        "party",
        "align",
        "submit",
        "resume",
        "watch",
        "logs",
        "evaluate",
    } <= first


#: The files on the page.
TOML = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.S)


def test_the_label_holder_s_rules_on_the_page_are_what_is_taken_where_a_policy_has_none():
    data, (_, text) = '[data]\nfile = "a.csv"\nid = "id"\nlabel = "sick"\n', TOML
    unsaid, said = (PolicyFile.parse(data + each, path=Path("policy.toml"), is_server=True) for each in ("", text))
    assert said.plan == unsaid.plan
    assert [(limit.unit, limit.epsilon) for limit in said.limits] == [("label", 8.0)]


def test_the_federation_file_on_the_page_is_one():
    text, _ = TOML
    federation = FederationFile.parse(text)
    assert federation.parties == ("bank", "hospital", "insurer")
    Plan.for_budget(num_parties=3, num_samples=5000, num_classes=2, columns=4, evaluation="none", **federation.plan)


def test_the_example_runs_commands_of_the_program():
    # Of one organisation, `run(CLINIC, "...")`, or of several at the same time, `run_each({name: "...", ...})`.
    calls = re.findall(r"\.run(?:_each)?\((.*)\)\n", EXAMPLE)
    lines = [line for call in calls for line in re.findall(r'"([a-z]+ [^"]+)"', call)]
    assert {"federation", "server", "party", "align", "submit", "evaluate", "ledger"} <= {
        each.split()[0] for each in lines
    }
    assert all(known(re.sub(r"{.*?}", "x", line).split()) for line in lines)
