"""Copies of a ledger: whole while it is charged, and no way to forget a charge."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pbmvfl.cli import app
from pbmvfl.errors import LedgerError
from pbmvfl.ledger.backup import REPLACED, back_up, restore
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.spending import spending
from support.ledger_books import NAME, charge, charge_all, opening, paper_limit, small_plan

PLAN, LIMIT = small_plan(), paper_limit()


def make_ledger(path: Path) -> None:
    with contextlib.closing(Ledger(path)) as ledger:
        ledger.set_limit(NAME, LIMIT)
        charge_all(ledger, PLAN, run="first", rounds=2)


def spent(path: Path) -> float:
    with contextlib.closing(Ledger(path, read_only=True)) as ledger:
        return spending(ledger, NAME, LIMIT).epsilon


def releases(path: Path) -> int:
    with contextlib.closing(Ledger(path, read_only=True)) as ledger:
        return sum(entry.row_releases for entry in ledger.sessions(NAME))


def trouble(path: Path) -> str | None:
    with contextlib.closing(Ledger(path, read_only=True)) as ledger:
        return ledger.trouble()


def run(ledger: Path, name: str) -> None:
    with contextlib.closing(Ledger(ledger)) as opened:
        charge_all(opened, PLAN, run=name, rounds=1)


def test_a_copy_taken_between_two_rounds_of_a_session_has_the_rounds_so_far(tmp_path: Path) -> None:
    path = tmp_path / "bank.sqlite"
    make_ledger(path)
    before = releases(path)
    with contextlib.closing(Ledger(path)) as ledger:
        opened = ledger.open_session(
            opening(dataset=NAME, plan=PLAN, run="second", session="s", public_start=True, exact_metrics=True)
        )
        charge(opened, PLAN, 0)
        made = back_up(path, tmp_path / "copies.sqlite")
        charge(opened, PLAN, 1)
        opened.close()
    first, second = (PLAN.schedule[number].num_rows for number in (0, 1))
    assert releases(made.path) == before + first
    assert releases(path) == before + first + second
    assert made.path.stat().st_mode & 0o777 == 0o600


def test_a_lost_ledger_comes_back_with_every_charge(tmp_path: Path) -> None:
    path, copy = tmp_path / "bank.sqlite", tmp_path / "copy.sqlite"
    make_ledger(path)
    before = spent(path)
    back_up(path, copy)
    path.unlink()
    restore(copy, path)
    assert spent(path) == before
    assert trouble(path) is None
    run(path, "second")
    assert spent(path) > before


def test_an_older_copy_is_refused_by_runs_until_its_owner_accepts_it(tmp_path: Path) -> None:
    path, copy = tmp_path / "bank.sqlite", tmp_path / "copy.sqlite"
    make_ledger(path)
    back_up(path, copy)
    run(path, "second")
    path.unlink()
    restored = CliRunner().invoke(app, ["ledger", "restore", str(copy), str(path)])
    assert restored.exit_code == 0, restored.output
    assert "older copy" in restored.output
    assert "ledger accept" in restored.output
    with pytest.raises(LedgerError, match="older copy"):
        run(path, "third")
    assert CliRunner().invoke(app, ["ledger", "accept", str(path)]).exit_code == 0
    run(path, "third")


def test_a_damaged_ledger_is_replaced_and_kept_beside(tmp_path: Path) -> None:
    path, copy = tmp_path / "bank.sqlite", tmp_path / "copy.sqlite"
    make_ledger(path)
    back_up(path, copy)
    damaged = b"no database at all" * 100
    path.write_bytes(damaged)
    restore(copy, path)
    assert trouble(path) is None
    assert path.with_name(path.name + REPLACED).read_bytes() == damaged


@pytest.mark.parametrize("behind", [False, True], ids=["the same", "more charges"])
def test_a_ledger_with_as_many_changes_as_the_copy_is_left_as_it_is(tmp_path: Path, behind: bool) -> None:
    path, copy = tmp_path / "bank.sqlite", tmp_path / "copy.sqlite"
    make_ledger(path)
    back_up(path, copy)
    if behind:
        run(path, "second")
    before = spent(path)
    with pytest.raises(LedgerError, match="charges would be lost"):
        restore(copy, path)
    assert spent(path) == before


def test_a_ledger_that_is_being_charged_is_not_replaced(tmp_path: Path) -> None:
    path, copy = tmp_path / "bank.sqlite", tmp_path / "copy.sqlite"
    make_ledger(path)
    run(path, "second")
    back_up(path, copy)
    with contextlib.closing(Ledger(path)) as ledger:
        opened = ledger.open_session(
            opening(dataset=NAME, plan=PLAN, run="third", session="s", public_start=True, exact_metrics=True)
        )
        with pytest.raises(LedgerError, match="another session"):
            restore(copy, path)
        opened.close()


@pytest.mark.parametrize("content", [b"", b"garbage" * 1000])
def test_a_damaged_copy_is_refused_before_anything_is_replaced(tmp_path: Path, content: bytes) -> None:
    path, copy = tmp_path / "bank.sqlite", tmp_path / "copy.sqlite"
    make_ledger(path)
    before = path.read_bytes()
    copy.write_bytes(content)
    with pytest.raises(LedgerError, match=r"copy\.sqlite"):
        restore(copy, path)
    assert path.read_bytes() == before


def test_a_missing_copy_and_a_copy_onto_itself_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bank.sqlite"
    make_ledger(path)
    with pytest.raises(LedgerError, match="does not exist"):
        restore(tmp_path / "none.sqlite", path)
    with pytest.raises(LedgerError, match="the ledger itself"):
        back_up(path, path)


def test_the_command_copies_every_ledger_of_a_folder(tmp_path: Path) -> None:
    for name in ("bank", "shop"):
        make_ledger(tmp_path / "ledgers" / f"{name}.sqlite")
    done = CliRunner().invoke(app, ["ledger", "backup", str(tmp_path / "ledgers"), "--out", str(tmp_path / "copies")])
    assert done.exit_code == 0, done.output
    assert sorted(each.name for each in (tmp_path / "copies").iterdir()) == ["bank.sqlite", "shop.sqlite"]


@settings(max_examples=15)
@given(steps=st.lists(st.sampled_from(["run", "back up", "lose", "restore"]), max_size=7))
def test_no_sequence_of_copies_lets_a_run_spend_what_was_spent(steps: list[str]) -> None:
    """The ledger that a run is charged to has every run before it, or the run is refused."""
    with tempfile.TemporaryDirectory() as folder:
        path, copy = Path(folder) / "bank.sqlite", Path(folder) / "copy.sqlite"
        make_ledger(path)
        runs = {"first"}
        for number, step in enumerate(steps):
            if step == "run" and path.exists():
                with contextlib.closing(Ledger(path, read_only=True)) as ledger:
                    has_all = {entry.run for entry in ledger.sessions(NAME)} == runs
                if has_all:
                    run(path, str(number))
                    runs.add(str(number))
                else:
                    with pytest.raises(LedgerError, match="older copy"):
                        run(path, str(number))
            elif step == "back up" and path.exists():
                back_up(path, copy)
            elif step == "lose":
                path.unlink(missing_ok=True)
            elif step == "restore" and copy.exists():
                with contextlib.suppress(LedgerError):
                    restore(copy, path)
