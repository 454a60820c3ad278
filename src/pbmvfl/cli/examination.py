"""All checks, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Sequence

from pbmvfl.cli import doctor_checks, self_tests
from pbmvfl.cli.finding import Check, Finding, run_check

CHECKS: Sequence[tuple[str, Check]] = (
    ("Python", doctor_checks.python_version),
    ("packages", doctor_checks.packages),
    ("torch", doctor_checks.torch_threads),
    ("entropy", self_tests.entropy_source),
    ("masks", self_tests.masks_cancel),
    ("noise", self_tests.noise_has_its_law),
    ("account", self_tests.account_gives_known_answers),
    ("run folders", doctor_checks.working_folder),
    ("state folder", doctor_checks.state),
    ("free disk", doctor_checks.free_disk),
    ("data", doctor_checks.data_folders),
    ("browser", doctor_checks.browser),
)


def examine() -> list[Finding]:
    """Every check, whatever the others found."""
    return [run_check(name, check) for name, check in CHECKS]
