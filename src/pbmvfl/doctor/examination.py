"""All checks, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Sequence

from pbmvfl.doctor import machine, self_tests
from pbmvfl.doctor.finding import Check, Finding, run_check

CHECKS: Sequence[tuple[str, Check]] = (
    ("Python", machine.python_version),
    ("packages", machine.packages),
    ("torch", machine.torch_threads),
    ("entropy", self_tests.entropy_source),
    ("masks", self_tests.masks_cancel),
    ("noise", self_tests.noise_has_its_law),
    ("account", self_tests.account_gives_known_answers),
    ("run folders", machine.working_folder),
    ("state folder", machine.state),
    ("free disk", machine.free_disk),
    ("data", machine.data_folders),
    ("browser", machine.browser),
)


def examine() -> list[Finding]:
    """Every check, whatever the others found."""
    return [run_check(name, check) for name, check in CHECKS]
