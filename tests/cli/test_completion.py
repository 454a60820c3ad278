"""Shell completion: `pbmvfl --install-completion`, and what a shell then asks."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def complete(run_main, monkeypatch):
    """What bash is told for a line of words, the last of which is being written."""

    def ask(*words: str) -> list[str]:
        monkeypatch.setenv("_PBMVFL_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(("pbmvfl", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        code, out, err = run_main()
        assert (code, err) == (0, "")
        return out.split()

    return ask


def test_commands_are_completed(complete):
    assert sorted(complete("re")) == ["report", "reproduce", "resume"]
    assert {"train", "plan", "privacy", "ledger", "doctor"} <= set(complete(""))


def test_options_of_a_command_and_commands_of_a_group_are_completed(complete):
    assert "--epsilon" in complete("train", "--eps")
    assert {"show", "limit"} <= set(complete("ledger", ""))


def test_the_script_that_a_shell_gets_is_for_the_command_s_own_name(run_main, tmp_path, monkeypatch):
    """Whatever the program was started as: `python -m pbmvfl` too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    shell = pytest.importorskip("shellingham")
    monkeypatch.setattr(shell, "detect_shell", lambda *_, **__: ("bash", "/bin/bash"))
    code, out, _ = run_main("--show-completion")
    assert code == 0
    assert out.rstrip().endswith("complete -o default -F _pbmvfl_completion pbmvfl")
    code, _, _ = run_main("--install-completion")
    assert code == 0
    scripts = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert Path(".bash_completions/pbmvfl.sh") in scripts
