"""What `make test-fast` leaves out: files that are there, and never all tests of a package."""

from __future__ import annotations

from pathlib import Path

import pytest

import pbmvfl
from support.slow_files import SLOW_FILES, WAITING, in_turn, place

TESTS = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in Path(pbmvfl.__file__).parent.glob("*/__init__.py"))


@pytest.mark.parametrize("pattern", SLOW_FILES)
def test_a_pattern_names_files_that_are_there(pattern: str) -> None:
    assert list(TESTS.glob(pattern))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_quick_tests(package: str) -> None:
    files = list((TESTS / package).rglob("test_*.py"))
    assert [path for path in files if place(path) == len(SLOW_FILES)]


def test_slow_and_quick_files_are_told_apart() -> None:
    assert place(TESTS / SLOW_FILES[-1]) == len(SLOW_FILES) - 1
    assert place(TESTS / "wire" / "test_messages.py") == len(SLOW_FILES)


def test_two_files_that_work_follow_each_that_waits() -> None:
    waiting = [TESTS / "system/test_deployment_runs.py", TESTS / "federation/test_party_processes.py"]
    working = [TESTS / path for path in ("cli/test_privacy.py", "cli/test_train.py", "wire/test_messages.py")]
    assert [place(path) < len(WAITING) for path in (*waiting, *working)] == [True, True, False, False, False]
    first, second = waiting
    a, b, c = working
    assert list(in_turn([c, b, second, a, first])) == [first, a, b, second, c]
    assert list(in_turn([*working, first])) == [first, *working]
    assert list(in_turn(waiting)) == waiting
