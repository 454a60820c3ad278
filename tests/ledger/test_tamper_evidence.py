"""What sessions are priced by is covered: plans, terms and lists of rows that something else changed are noticed."""

from __future__ import annotations

import contextlib
import hmac
import json
import shutil
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import pbmvfl.plan.plan
from pbmvfl.cli import app
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import LedgerError
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.spending import spending
from pbmvfl.plan.plan import Plan
from support.ledger_books import NAME, charge_all, opening, paper_limit, small_plan
from support.local_plans import voting_plan

DATA = Path(__file__).parents[1] / "data"
NOISY = small_plan(noise_multiplier=2.0)
STRICT = paper_limit(accounting="strict")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with two sessions of one plan and one of another."""
    path = tmp_path / "ledgers" / "a.sqlite"
    Ledger(path).set_limit(NAME, STRICT)
    for run in "12":
        charge_all(Ledger(path), NOISY, run=run, rounds=2)
    charge_all(Ledger(path), small_plan(), run="3", rounds=2)
    return path


def change(path: Path, statement: str, *values: object) -> None:
    """As another program would, without a trace elsewhere."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as file:
        assert file.execute(statement, values).rowcount == 1


def of_session(path: Path, number: int = 1) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The key, the plan and the terms of a session."""
    with contextlib.closing(sqlite3.connect(path)) as file:
        key, plan, terms = file.execute(
            "SELECT hash, plans.plan, terms FROM plans JOIN sessions ON hash = sessions.plan WHERE id = ?", (number,)
        ).fetchone()
    return key, json.loads(plan), json.loads(terms)


def trouble(path: Path) -> str | None:
    with contextlib.closing(Ledger(path, read_only=True)) as ledger:
        return ledger.trouble()


def spent(path: Path) -> float:
    with contextlib.closing(Ledger(path, read_only=True)) as ledger:
        return spending(ledger, NAME, STRICT).epsilon


def more_noise(path: Path) -> None:
    key, _, terms = of_session(path)
    for events in terms["events"].values():
        for event in events:
            if "noise_multiplier" in event:
                event["noise_multiplier"] *= 100
    change(path, "UPDATE plans SET terms = ? WHERE hash = ?", json.dumps(terms), key)


def another_start(path: Path) -> None:
    key, _, terms = of_session(path)
    change(path, "UPDATE plans SET terms = ? WHERE hash = ?", json.dumps({**terms, "public_start": False}), key)


def another_plan(path: Path) -> None:
    key, plan, _ = of_session(path)
    change(path, "UPDATE plans SET plan = ? WHERE hash = ?", json.dumps({**plan, "seed": 99}), key)


def terms_of_another(path: Path) -> None:
    key, _, _ = of_session(path)
    _, _, terms = of_session(path, 3)
    change(path, "UPDATE plans SET terms = ? WHERE hash = ?", json.dumps(terms), key)


def no_plan(path: Path) -> None:
    change(path, "UPDATE plans SET plan = '[' WHERE hash = ?", of_session(path)[0])


EDITS = [more_noise, another_start, another_plan, terms_of_another, no_plan]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_plan_or_its_terms_are_noticed(edit: Callable[[Path], None], path: Path) -> None:
    assert trouble(path) is None
    before = spent(path)
    edit(path)
    found = trouble(path)
    assert found is not None
    assert "the plan or the terms of session 1 are not what was written" in found
    with pytest.raises(LedgerError, match="was changed by something else than this program"):
        charge_all(Ledger(path), NOISY, run="4")
    with pytest.raises(LedgerError, match="was changed by something else"):
        Ledger(path, read_only=True).forecast(opening(dataset=NAME, plan=NOISY, exact_metrics=True))
    with pytest.raises(LedgerError, match="was changed by something else"):
        Ledger(path).set_limit(NAME, STRICT)
    if edit is not no_plan:
        assert "are not what was written" in " ".join(
            CliRunner().invoke(app, ["ledger", "show", str(path)]).output.split()
        )
    # put back as it was, it is as it was
    copy = path.with_name("copy.sqlite")
    Ledger(copy).set_limit(NAME, STRICT)
    charge_all(Ledger(copy), NOISY, run="1", rounds=2)
    with contextlib.closing(sqlite3.connect(copy)) as file:
        row = file.execute("SELECT plan, terms, hash FROM plans").fetchone()
    change(path, "UPDATE plans SET plan = ?, terms = ? WHERE hash = ?", *row)
    assert trouble(path) is None
    assert spent(path) == before


@pytest.mark.parametrize("edit", [*EDITS[:4]])
def test_an_owner_may_take_it_as_it_is_and_later_edits_are_noticed_again(
    edit: Callable[[Path], None], path: Path
) -> None:
    edit(path)
    with contextlib.closing(Ledger(path)) as ledger:
        assert ledger.accept() is not None
        assert ledger.trouble() is None
    key, _, terms = of_session(path)
    change(path, "UPDATE plans SET terms = ? WHERE hash = ?", json.dumps({**terms, "num_parties": 9}), key)
    assert trouble(path) is not None


def test_a_session_after_that_is_priced_by_its_own_terms(path: Path) -> None:
    """Those of the key: the accepted ones go with it, and earlier sessions have their price again."""
    before = spent(path)
    more_noise(path)
    Ledger(path).accept()
    assert spent(path) < before
    charge_all(Ledger(path), NOISY, run="4", rounds=0)
    assert trouble(path) is None
    assert spent(path) == before


def test_a_plan_that_is_missing_is_noticed_and_cannot_be_accepted_away(path: Path) -> None:
    change(path, "DELETE FROM plans WHERE hash = ?", of_session(path, 3)[0])
    found = trouble(path)
    assert found is not None
    assert "the plan of session 3 is missing" in found
    Ledger(path).accept()
    assert trouble(path) is not None


@settings(max_examples=60, deadline=None)
@given(where=st.integers(0, 10**6), letter=st.characters(codec="ascii"))
def test_any_other_letter_of_the_terms_is_noticed(
    where: int, letter: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "a.sqlite"
    charge_all(Ledger(path), NOISY, rounds=1)
    with contextlib.closing(sqlite3.connect(path)) as file:
        ((key, text),) = file.execute("SELECT hash, terms FROM plans").fetchall()
    where %= len(text)
    change(path, "UPDATE plans SET terms = ? WHERE hash = ?", text[:where] + letter + text[where + 1 :], key)
    assert (trouble(path) is None) == (letter == text[where])


# --- whatever plan, whatever version ---


def test_every_kind_of_plan_has_a_key_that_is_its_hash(path: Path, data: VerticalDataset) -> None:
    plans = [
        *(Plan.from_dict(values) for values in json.loads((DATA / "frozen-plans.json").read_text()).values()),
        voting_plan(data),
        small_plan(first_weights=["ab" * 32] * 3),
    ]
    for number, plan in enumerate(plans):
        charge_all(Ledger(path), plan, run=f"run-{number}", rounds=0)
    assert trouble(path) is None
    with contextlib.closing(Ledger(path, read_only=True)) as ledger:
        assert len(ledger.sessions(NAME)) == 3 + len(plans)


def test_plans_of_another_version_of_the_protocol_are_known_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pbmvfl.plan.plan, "PROTOCOL_VERSION", 7)
    charge_all(Ledger(path), small_plan(noise_multiplier=2.0, seed=5), run="7", rounds=1)
    monkeypatch.undo()
    assert trouble(path) is None
    key, _, terms = of_session(path, 4)
    change(path, "UPDATE plans SET terms = ? WHERE hash = ?", json.dumps({**terms, "num_parties": 9}), key)
    assert trouble(path) is not None


# --- ledgers of format 1 ---


def as_earlier_versions_migrated(path: Path) -> None:
    """Take the digests of plans out of the first line of the history, and hash it as it was hashed before them."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as file:
        ((line, text),) = file.execute("SELECT id, event FROM history").fetchall()
        (key,) = file.execute("SELECT key FROM identity").fetchone()
        columns = "id, dataset, fingerprint, run, session, plan, train_ids, test_ids, first_round, opened"
        rows = file.execute(f"SELECT {columns} FROM sessions ORDER BY id").fetchall()
        rows += file.execute("SELECT session, charged_until FROM charged ORDER BY session").fetchall()
        event = json.loads(text)
        assert event.pop("plans")
        text = json.dumps(event, sort_keys=True)
        digest = hmac.new(key, "\n".join(("", text, json.dumps(rows))).encode(), "sha256").hexdigest()
        file.execute("UPDATE history SET event = ?, hash = ? WHERE id = ?", (text, digest, line))


@pytest.mark.parametrize("by", ["this version", "an earlier version"])
@pytest.mark.parametrize("what", ["terms", "plan", "row"])
def test_migrated_plans_and_their_terms_are_covered(by: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    shutil.copy(DATA / "ledger-format-1.sqlite", path)
    Ledger(path).close()
    if by == "an earlier version":
        as_earlier_versions_migrated(path)
    assert trouble(path) is None
    key, plan, terms = of_session(path)
    if what == "row":
        change(path, "DELETE FROM plans WHERE hash = ?", key)
    elif what == "terms":
        terms["events"]["joint"][0]["beta"] /= 100
        change(path, "UPDATE plans SET terms = ? WHERE hash = ?", json.dumps(terms), key)
    else:
        change(path, "UPDATE plans SET plan = ? WHERE hash = ?", json.dumps({**plan, "seed": 99}), key)
    found = trouble(path)
    assert found is not None
    assert "session 1" in found


# --- lists of rows ---


@pytest.mark.parametrize("damage", [zlib.compress(b'["x", "y"]'), b"no list", b""])
def test_an_edited_list_of_rows_is_refused(damage: bytes, tmp_path: Path) -> None:
    """Other names for the rows that were charged would leave those with their whole budget."""
    path = tmp_path / "a.sqlite"
    ids = [f"person-{number}" for number in range(23)]
    charge_all(Ledger(path), NOISY, rounds=2, train_ids=ids)
    change(path, "UPDATE row_ids SET ids = ?", damage)
    with pytest.raises(LedgerError, match=r"a\.sqlite.*the row ids .* are not what was written"):
        spent(path)
    with pytest.raises(LedgerError, match="are not what was written"):
        charge_all(Ledger(path), NOISY, run="2", train_ids=ids)
