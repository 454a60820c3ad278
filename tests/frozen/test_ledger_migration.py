"""Ledgers of format 1: what version 0.1.0 wrote is read to the same numbers, brought to format 2, and priced for ever.

Oracle: `data/ledger-format-1.json`, which is what version 0.1.0 itself said about `data/ledger-format-1.sqlite`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbmvfl.errors import BudgetExceeded, LedgerError
from pbmvfl.ledger.charging import Charging
from pbmvfl.ledger.database import Database
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit, epsilon_at
from pbmvfl.ledger.spending import fixed_plan_epsilon, spending
from pbmvfl.mechanisms import MECHANISMS
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy import events
from pbmvfl.privacy.renyi import cell_rdp
from support.ledger_books import charge, on_disk, opening

DATA = Path(__file__).parents[1] / "data"
SAID: dict[str, Any] = json.loads((DATA / "ledger-format-1.json").read_text())
#: The plan of the two sessions of run "aa..." in the book, by today's names.
DROPPED = "its runs before format 2 have no fingerprint any more: a change of values since is not seen"
SIZES: dict[str, Any] = {"num_parties": 4, "num_samples": 50, "num_test_samples": 9, "num_classes": 3}
SMALL = {**SIZES, "embedding_dim": 2, "num_trials": 2, "beta": 0.0625, "num_epochs": 3, "batch_size": 20}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A copy of the old book in a folder of its own."""
    (tmp_path / "books").mkdir()
    return shutil.copy(DATA / "ledger-format-1.sqlite", tmp_path / "books" / "old.sqlite")


def format_on_disk(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as file:
        number: int = file.execute("SELECT format FROM book").fetchone()[0]
        return number


def change(path: Path, statement: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as file:
        assert file.execute(statement, values).rowcount


def as_one_plan(book: Ledger, dataset: str, limit: Limit) -> float:
    return fixed_plan_epsilon(
        book,
        dataset,
        unit=limit.unit,
        accounting=limit.accounting,
        colluding_parties=limit.colluding_parties,
        delta=limit.delta,
    )


def assert_says_the_same(book: Ledger, *, whole: bool = True) -> None:
    """Every number of the old version, said by this one; those "as one plan", which take longer, only if `whole`."""
    compared = 0
    for dataset in book.datasets():
        for limit in book.limits(dataset):
            name = f"{dataset}, {limit}"
            spent, said = spending(book, dataset, limit), SAID["spent"][name]
            assert epsilon_at(spent.worst, limit.delta, limit.order) == pytest.approx(said["epsilon"], rel=1e-12)
            assert spent.everywhere == pytest.approx(said["everywhere"], rel=1e-12)
            assert np.allclose(spent.rows, said["rows"], rtol=1e-12, atol=0)
            assert len(spent.rows) == len(said["rows"])
            if whole:
                assert as_one_plan(book, dataset, limit) == pytest.approx(SAID["as one plan"][name], rel=1e-12)
            compared += 1
    assert compared == len(SAID["spent"]) == 25
    exported, said_exported = book.export()["datasets"], SAID["export"]["datasets"]
    assert exported.keys() == said_exported.keys()
    for dataset, said_of_it in said_exported.items():
        found = exported[dataset]
        assert found["notes"] == [DROPPED]
        assert len(found["limits"]) == len(said_of_it["limits"])
        for limit, said_limit in zip(found["limits"], said_of_it["limits"], strict=True):
            spent_epsilon = pytest.approx(said_limit["spent_epsilon"], rel=1e-12)
            assert limit == {**said_limit, "counting": "renyi", "spent_epsilon": spent_epsilon}
        assert [
            {name: value for name, value in session.items() if name != "terms"} for session in found["sessions"]
        ] == [{name: value for name, value in each.items() if name != "fingerprint"} for each in said_of_it["sessions"]]
        for entry in book.sessions(dataset):
            refused = [[number, reason] for number, reason, _ in book.refusals(entry.id)]
            assert refused == SAID["refusals"][entry.session]


# --- reading and migrating ---


@pytest.mark.parametrize("may_write", [True, False])
def test_a_reader_says_what_the_old_version_said_and_leaves_every_byte(may_write, path):
    assert format_on_disk(path) == 1
    path.chmod(0o600 if may_write else 0o400)
    path.parent.chmod(0o700 if may_write else 0o500)
    before = on_disk(path.parent)
    book = Ledger(path, read_only=True)
    assert_says_the_same(book)
    with pytest.raises(LedgerError, match="read_only=True"):
        book.open_session(opening(dataset="people", plan=Plan.of(**SMALL), run="r", session="s", exact_metrics=True))
    book.close()
    assert on_disk(path.parent) == before
    path.parent.chmod(0o700)


def test_the_first_writer_brings_the_book_to_the_present_format_and_says_the_same(path):
    book = Ledger(path)
    assert_says_the_same(book, whole=False)
    book.close()
    assert format_on_disk(path) == 2
    again = Ledger(path, read_only=True)
    assert_says_the_same(again)
    again.close()


class Killed(Exception):
    pass


def statements_of_a_migration(path: Path) -> list[str]:
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as watched:
        run = Database.run
        watched.setattr(Database, "run", lambda self, text, *values: (seen.append(text), run(self, text, *values))[1])
        Ledger(path).close()
    return seen


@pytest.mark.parametrize("how", ["a statement fails", "killed"])
def test_a_migration_that_does_not_end_leaves_the_old_book(how, path, tmp_path, monkeypatch):
    """Ended before each of its statements in turn, by an error and by a real kill."""
    spare = shutil.copy(path, tmp_path / "spare.sqlite")
    statements = statements_of_a_migration(spare)
    first = next(i for i, text in enumerate(statements) if text.startswith("ALTER"))
    last = next(i for i, text in enumerate(statements) if i > first and text == "COMMIT")
    assert last - first >= 7  # the column, a line for each of six plans or so, the format
    run = Database.run
    for stop in range(first, last + 1):
        counted = iter(range(1 << 30))

        def run_until(
            self: Database, text: str, *values: Any, stop: int = stop, counted: Iterator[int] = counted
        ) -> Any:
            if next(counted) == stop:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise Killed
            return run(self, text, *values)

        with monkeypatch.context() as ending:
            ending.setattr(Database, "run", run_until)
            if how == "killed":
                child = os.fork()
                if child == 0:
                    with contextlib.suppress(BaseException):
                        Ledger(path)
                    os._exit(1)
                assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
            else:
                with pytest.raises(Killed):
                    Ledger(path)
        assert format_on_disk(path) == 1
        reader = Ledger(path, read_only=True)
        assert epsilon_of(reader, "tight") == pytest.approx(
            SAID["export"]["datasets"]["tight"]["limits"][0]["spent_epsilon"]
        )
        reader.close()
    book = Ledger(path)  # the next one has the whole of it to do
    assert_says_the_same(book, whole=False)
    book.close()
    assert format_on_disk(path) == 2


def epsilon_of(book: Ledger, dataset: str) -> float:
    limit = book.limits(dataset)[0]
    return epsilon_at(spending(book, dataset, limit).worst, limit.delta, limit.order)


def test_two_writers_migrate_a_book_once(path):
    first, second = Ledger(path), Ledger(path)
    assert_says_the_same(second, whole=False)
    first.close()
    second.close()


# --- after it ---


def test_a_migrated_book_is_charged_further_and_keeps_what_was_spent(path):
    """Oracle: the old version's divergence of every row, and one release more for each use, counted by hand."""
    plan = Plan.of(**SMALL)
    limit = next(
        limit
        for limit in Ledger(path, read_only=True).limits("people")
        if (limit.unit, limit.accounting, limit.colluding_parties) == ("cell", "paper", 0)
    )
    expected = np.array(SAID["spent"][f"people, {limit}"]["rows"])
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (limit.order,))[0]
    for run, first in (("aa" * 8, 4), ("new", 0)):  # the book has rounds 0 to 9 of the first, and goes on with it
        opened = Ledger(path).open_session(
            opening(dataset="people", plan=plan, run=run, session=run, exact_metrics=True, first_round=first)
        )
        for number in range(first, first + 3):
            charge(opened, plan, number)
            expected[plan.schedule[number].rows] += rate
        opened.close()
    book = Ledger(path)
    assert np.allclose(spending(book, "people", limit).rows, expected, rtol=1e-12, atol=0)
    assert [entry.charged_until for entry in book.sessions("people")][-2:] == [7, 3]
    book.close()


def test_a_migrated_limit_still_refuses_the_round_that_would_cross_it(path):
    plan = Plan.of(**SMALL)
    opened = Ledger(path).open_session(opening(dataset="tight", plan=plan, run="new", session="s", exact_metrics=True))
    with pytest.raises(BudgetExceeded, match="its owner's limit is cell, paper"):
        _charge_all(opened, plan)
    opened.close()
    (_, entry) = Ledger(path).sessions("tight")
    assert entry.charged_until < len(plan.schedule)


def _charge_all(opened: Charging, plan: Plan) -> None:
    for number in range(len(plan.schedule)):
        charge(opened, plan, number)


def test_a_run_of_the_old_version_that_goes_on_elsewhere_is_refused(path):
    plan = Plan.of(**SMALL)
    with pytest.raises(LedgerError, match="goes on at round=5"):
        Ledger(path).open_session(
            opening(dataset="people", plan=plan, run="ff" * 8, session="s", exact_metrics=True, first_round=5)
        )


@pytest.mark.parametrize("read_only", [True, False])
def test_plans_that_mean_something_else_later_cannot_price_the_book_anew(read_only, path, monkeypatch):
    """Nothing that makes plans or releases is there any more, and every number is the same."""

    def gone(*_: object, **__: object) -> None:
        raise AssertionError("a ledger prices what it kept, not what a plan means today")

    for name in ("__init__", "of", "from_dict", "from_json", "events", "training_run"):
        monkeypatch.setattr(Plan, name, gone)
    for mechanism in MECHANISMS.values():
        monkeypatch.setattr(mechanism, "__init__", gone)
        monkeypatch.setattr(mechanism, "event", property(gone))
    monkeypatch.setattr(MECHANISMS, "_entries", {})
    monkeypatch.setattr(events, "local_gaussian_variance", gone)
    book = Ledger(path, read_only=read_only)
    assert_says_the_same(book, whole=read_only)
    book.close()


def test_the_same_plan_with_other_releases_later_is_kept_beside_the_old_one(path, monkeypatch):
    """As if a later version released more by the same plan: each session keeps the price of its own releases."""
    plan = Plan.of(**SMALL)
    stronger = plan.replace(beta=0.125)
    with contextlib.closing(Ledger(path)) as book:
        book.set_limit("new", Limit.choose(unit="cell", accounting="paper", epsilon=1000, delta=1e-5))
    opened = Ledger(path).open_session(opening(dataset="new", plan=plan, run="1", session="s", exact_metrics=True))
    charge(opened, plan, 0)
    opened.close()
    with monkeypatch.context() as later:
        later.setattr(Plan, "events", lambda *_: (stronger.release.event, stronger.update.event))
        opened = Ledger(path).open_session(opening(dataset="new", plan=plan, run="2", session="t", exact_metrics=True))
        charge(opened, plan, 0)
        opened.close()
    before, after = Ledger(path).sessions("new")
    assert before.plan == after.plan
    (kind,) = plan.schedule.kinds
    assert before.terms.release(kind) == plan.release.event
    assert after.terms.release(kind) == stronger.release.event


# --- what this version cannot read ---


def spoil_terms(path: Path, spoil: Callable[[dict[str, Any]], object]) -> None:
    """Change the terms of the one session of dataset `tight` in a migrated book."""
    Ledger(path).close()
    with contextlib.closing(sqlite3.connect(path)) as file:
        (key, text) = file.execute(
            "SELECT hash, terms FROM plans JOIN sessions ON hash = sessions.plan WHERE dataset = 'tight'"
        ).fetchone()
    terms = json.loads(text)
    spoiled = spoil(terms)
    change(
        path,
        "UPDATE plans SET terms = ? WHERE hash = ?",
        spoiled if isinstance(spoiled, str) else json.dumps(terms),
        key,
    )


def release_of(terms: dict[str, Any]) -> dict[str, Any]:
    event: dict[str, Any] = terms["events"]["joint"][0]
    return event


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda terms: release_of(terms).update(event="quantum"), "event='quantum'"),
        (lambda terms: terms["events"].update(gossip=[]), "round kind='gossip'"),
        (lambda terms: terms["schedule"]["phases"][0].update(kind="gossip"), "round kind='gossip'"),
        (lambda terms: terms["schedule"]["phases"][0].update(order="backwards"), "backwards"),
        (lambda terms: release_of(terms).update(shots=3), "shots"),
        (lambda terms: release_of(terms).pop("secure_sum"), "secure_sum"),
        (lambda terms: release_of(terms).update(beta="0.25"), "beta='0.25'"),
        (lambda terms: release_of(terms).update(beta=None), "beta=None"),
        (lambda terms: release_of(terms).update(beta=float("nan")), "beta=nan"),
        (lambda terms: release_of(terms).update(num_trials=2.5), "num_trials=2.5"),
        (lambda terms: release_of(terms).update(num_trials=True), "num_trials=True"),
        (lambda terms: release_of(terms).update(secure_sum=1), "secure_sum=1"),
        (lambda terms: terms["events"].pop("joint"), "joint rounds have 0 events"),
        (lambda terms: terms["events"]["joint"].pop(0), "joint rounds have 1 events"),
        (lambda terms: terms["events"]["joint"].append(release_of(terms)), "joint rounds have 3 events"),
        (lambda terms: terms["events"]["prediction"].clear(), "prediction rounds have 0 events"),
        (lambda terms: terms.update(events=[]), "cannot price"),
        (lambda terms: terms["events"].update(joint=["exact"]), "cannot price"),
        (lambda terms: terms["schedule"].update(batch_size=0), "batch_size=0"),
        (lambda terms: terms["schedule"].update(num_samples="50"), "num_samples='50'"),
        (lambda terms: terms["schedule"].update(rows=3), "rows"),
        (lambda terms: terms["schedule"].pop("seed"), "seed"),
        (lambda terms: terms.update(num_parties=0), "num_parties=0"),
        (lambda terms: terms.update(couples_rows="no"), "couples_rows='no'"),
        (lambda terms: terms.__delitem__("words"), "words"),
        (lambda _: "", "cannot price"),
        (lambda _: "[]", "cannot price"),
        (lambda _: '{"schedule": {"num_s', "cannot price"),
    ],
)
def test_terms_that_this_version_does_not_know_or_that_are_damaged_are_refused_by_name(spoil, named, path):
    spoil_terms(path, spoil)
    before = on_disk(path.parent)
    for read_only in (True, False):
        with contextlib.closing(Ledger(path, read_only=read_only)) as book:
            for ask in (book.sessions, lambda name: spending(book, name, book.limits(name)[0]), book.notes):
                with pytest.raises(LedgerError, match=r"old\.sqlite.*cannot price") as refused:
                    ask("tight")
                assert named in str(refused.value)
            assert len(book.sessions("animals")) == 2  # those with other plans are as they were
    assert {name: content for name, content in on_disk(path.parent).items() if name in before} == before


def test_a_session_whose_terms_are_unknown_cannot_be_followed_by_another(path):
    """Also if the owner takes the ledger as it is."""
    spoil_terms(path, lambda terms: release_of(terms).update(event="quantum"))
    for words in ("was changed by something else", "event='quantum'"):
        with pytest.raises(LedgerError, match=words):
            Ledger(path).open_session(
                opening(dataset="tight", plan=Plan.of(**SMALL), run="new", session="s", exact_metrics=True)
            )
        Ledger(path).accept()


def test_a_session_without_its_plan_is_refused(path):
    Ledger(path).close()
    change(path, "DELETE FROM plans WHERE hash = (SELECT plan FROM sessions WHERE dataset = 'tight')")
    with pytest.raises(LedgerError, match=r"old\.sqlite.*lacks the plan"):
        Ledger(path, read_only=True).sessions("tight")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"mechanism": "pbm"}'])
@pytest.mark.parametrize("read_only", [True, False])
def test_an_old_book_with_a_damaged_plan_is_refused_and_left_as_it_is(text, read_only, path):
    change(path, "UPDATE plans SET plan = ? WHERE rowid = (SELECT min(rowid) FROM plans)", text)
    with pytest.raises(LedgerError, match=r"old\.sqlite.*plan that version 0\.1 did not write"):
        Ledger(path, read_only=read_only)
    assert format_on_disk(path) == 1


def test_an_old_book_with_a_mechanism_that_its_version_did_not_have_is_refused_by_name(path):
    change(path, "UPDATE plans SET plan = replace(plan, '\"ldp\"', '\"skellam\"')")
    with pytest.raises(LedgerError, match="mechanism='skellam'"):
        Ledger(path)
    assert format_on_disk(path) == 1


@pytest.mark.parametrize("number", [0, 3, 99])
@pytest.mark.parametrize("read_only", [True, False])
def test_a_book_of_another_format_is_refused_and_left_as_it_is(number, read_only, path):
    change(path, "UPDATE book SET format = ?", number)
    before = on_disk(path.parent)
    with pytest.raises(LedgerError, match=rf"old\.sqlite.*has format {number}; this program reads formats 1 to 2"):
        Ledger(path, read_only=read_only)
    assert on_disk(path.parent) == before


# --- what format 1 did not have ---


def test_fingerprints_of_format_1_are_gone_to_the_last_byte_and_only_the_owner_may_read_the_book(path):
    path.chmod(0o644)
    dropped = b"values of people"
    assert dropped in path.read_bytes()
    Ledger(path).close()
    for file in path.parent.iterdir():
        assert dropped not in file.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    with contextlib.closing(Ledger(path, read_only=True)) as book:
        assert {entry.fingerprint for name in book.datasets() for entry in book.sessions(name)} == {""}


def test_migrated_sessions_keep_the_price_of_public_weights_and_new_ones_must_ask_for_it(path):
    plan = Plan.of(**SMALL)
    with contextlib.closing(Ledger(path)) as book:
        old = [entry for name in book.datasets() for entry in book.sessions(name)]
        assert all(entry.terms.public_start for entry in old)
        book.open_session(opening(dataset="people", plan=plan, run="new", session="s", exact_metrics=True)).close()
    (*_, new) = Ledger(path).sessions("people")
    assert not new.terms.public_start


def test_a_migrated_limit_that_is_removed_and_set_again_keeps_its_order(path):
    with contextlib.closing(Ledger(path)) as book:
        limit = book.limits("tight")[0]
        book.remove_limit("tight", limit.unit, limit.accounting, limit.colluding_parties)
        again = Limit.choose(
            unit=limit.unit,
            accounting=limit.accounting,
            colluding_parties=limit.colluding_parties,
            epsilon=limit.epsilon,
            delta=limit.delta,
            order=limit.order + 1,
        )
        assert book.set_limit("tight", again).order == limit.order


def test_a_book_of_format_1_put_back_over_a_migrated_one_is_refused(path):
    plan = Plan.of(**SMALL)
    opened = Ledger(path).open_session(opening(dataset="people", plan=plan, run="new", session="s", exact_metrics=True))
    charge(opened, plan, 0)
    opened.close()
    shutil.copy(DATA / "ledger-format-1.sqlite", path)
    with pytest.raises(LedgerError, match="pbmvfl ledger accept"):
        Ledger(path).open_session(opening(dataset="people", plan=plan, run="other", session="s", exact_metrics=True))
