"""Checks of options that several commands have, before any long work."""

from __future__ import annotations

from pathlib import Path

from pbmvfl.errors import PlanError, RunFolderError


def on_or_off(name: str, *, on: bool, off: bool) -> bool | None:
    """A setting with a flag for either way; None if neither was given.

    Two flags and not one with two names: typer prints both names of one flag side by side, and on 80 columns cuts them.
    """
    if on and off:
        raise PlanError(f"--{name} and --no-{name} contradict each other; give one of them, or neither for the default")
    return on if on or off else None


def check_target(option: str, path: Path | None, *, may_exist: bool = False) -> None:
    """Refuse a file that could not be written, or would replace somebody's, before its content is computed."""
    if path is None:
        return
    if path.is_dir() or (path.exists() and not may_exist):
        raise RunFolderError(f"{option}={str(path)!r} exists already and was not touched; choose another name")
    if not path.parent.is_dir():
        raise RunFolderError(
            f"{option}={str(path)!r} cannot be written: {str(path.parent)!r} is not a folder; make it, or name another"
        )
