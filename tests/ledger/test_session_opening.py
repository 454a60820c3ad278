"""What a ledger refuses unless its owner says otherwise: names, values, exact metrics, second sessions, old copies."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.errors import LedgerError
from pbmvfl.federation.federation import Federation
from pbmvfl.ledger import tamper_evidence
from pbmvfl.ledger.charging import Charging
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import epsilon_at
from pbmvfl.ledger.row_identity import keyed_digests
from pbmvfl.ledger.session_lock import Holder
from pbmvfl.ledger.spending import spending
from pbmvfl.ledger.tamper_evidence import Known
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.renyi import cell_rdp
from pbmvfl.privacy.units import Accounting, Unit
from support.federation_runs import make_ledgers
from support.ledger_books import (
    DELTA,
    NAME,
    charge,
    charge_all,
    kill_after,
    opening,
    paper_limit,
    release_until_killed,
    small_plan,
    store_of,
)

PLAN = small_plan()
VALUES = np.random.default_rng(1).normal(size=(PLAN.num_samples, 3)).astype(np.float32)
TEST_VALUES = np.random.default_rng(2).normal(size=(PLAN.num_test_samples, 3)).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.sqlite"


@pytest.fixture(params=["state folder", "no state folder", "state folder that cannot be written"])
def state(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Where the outside counter goes: both places, or the one beside the ledger alone."""
    if request.param == "no state folder":
        monkeypatch.setattr(tamper_evidence, "state_folder", lambda: None)
    elif request.param == "state folder that cannot be written":
        (tmp_path / "a file").touch()
        monkeypatch.setenv("PBMVFL_STATE", str(tmp_path / "a file" / "state"))
    return str(request.param)


def opened(path: Path, **choices: Any) -> Charging:
    usual: dict[str, Any] = {"dataset": NAME, "plan": PLAN, "run": "r", "session": "s", "exact_metrics": True}
    return Ledger(path).open_session(opening(**{**usual, **choices}))


# --- one session at a time ---


@pytest.mark.usefixtures("state")
def test_deleting_the_lock_file_lets_no_second_session_in(path):
    session = opened(path)
    charge(session, PLAN, 0)
    Path(f"{path}.lock").unlink()
    with pytest.raises(LedgerError, match="being charged by another session"):
        opened(path, session="t")
    session.close()
    charge_all(Ledger(path), PLAN, run="2")


@pytest.mark.usefixtures("state")
def test_a_session_in_another_process_is_seen_without_its_lock_file(path):
    reading, writing = os.pipe()
    ends, end = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            session = opened(path)
            charge(session, PLAN, 0)
            os.write(writing, b"open")
            os.read(ends, 1)
        os._exit(0)
    assert os.read(reading, 4) == b"open"
    Path(f"{path}.lock").unlink()
    with pytest.raises(LedgerError, match="being charged by another session"):
        opened(path, session="t")
    os.write(end, b".")
    os.waitpid(child, 0)
    charge_all(Ledger(path), PLAN, run="2")  # whoever ended without saying so keeps nobody out
    assert [entry.charged_until for entry in Ledger(path).sessions(NAME)] == [1, len(PLAN.schedule)]


@pytest.mark.parametrize("gone", ["lock file", "lock file, made anew", "ledger", "ledger, replaced by a copy"])
@pytest.mark.parametrize("rounds_ahead", [1, 8])
def test_a_session_notices_that_its_files_were_removed_or_replaced(gone, rounds_ahead, path, tmp_path):
    session = opened(path, rounds_ahead=rounds_ahead)
    charge(session, PLAN, 0)
    target = Path(f"{path}.lock") if "lock" in gone else path
    shutil.copy(target, tmp_path / "copy")
    target.unlink()
    if "," in gone:
        shutil.copy(tmp_path / "copy", target)
    paid_ahead = gone.startswith("ledger") and rounds_ahead == 8
    for number in (8, 9) if paid_ahead else (1, 9):
        with pytest.raises(LedgerError, match=rf"round={number}: .*was removed or replaced .*nothing was sent"):
            charge(session, PLAN, number)
    session.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_book_that_was_replaced_before_its_session_is_not_charged(replaced, path, tmp_path):
    charge_all(Ledger(path), PLAN, rounds=1)
    book = Ledger(path)
    shutil.copy(path, tmp_path / "copy")
    path.unlink()
    if replaced:
        shutil.copy(tmp_path / "copy", path)
    with pytest.raises(LedgerError, match="was removed or replaced"):
        charge_all(book, PLAN, run="2")


def test_a_holder_is_alive_only_as_the_process_that_it_was():
    me = Holder.new()
    assert not me.is_alive  # this process has no such session open
    parent = Holder(os.getppid(), "1", me.boot, "t")
    assert not parent.is_alive  # another process had that number
    assert not Holder(me.process, me.started, "another boot", me.token).is_alive
    assert not Holder(2**22 + 1, me.started, me.boot, "t").is_alive


# --- old copies ---


def copy_of(path: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in path.parent.glob(f"{path.name}*"):
        shutil.copy(file, folder / file.name)
    return folder


def put_back(copy: Path, path: Path, *, with_lock: bool) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        if with_lock or not file.name.endswith(".lock"):
            file.unlink()
    for file in copy.iterdir():
        if with_lock or not file.name.endswith(".lock"):
            shutil.copy(file, path.parent / file.name)


@pytest.mark.parametrize("change", ["a round", "a limit", "a limit removed"])
def test_an_older_copy_that_is_put_back_is_refused_and_can_be_accepted(change, state, path, tmp_path):
    Ledger(path).set_limit(NAME, paper_limit())
    charge_all(Ledger(path), PLAN, run="1", rounds=2)
    copy = copy_of(path, tmp_path / "copy")
    if change == "a round":
        charge_all(Ledger(path), PLAN, run="2", rounds=1)
    elif change == "a limit":
        Ledger(path).set_limit(NAME, paper_limit(5.0))
    else:
        Ledger(path).remove_limit(NAME, Unit.CELL, Accounting.PAPER, 0)
    put_back(copy, path, with_lock=state == "state folder")
    for attempt in (
        lambda: charge_all(Ledger(path), PLAN, run="3"),
        lambda: Ledger(path).set_limit(NAME, paper_limit(5000.0)),
        lambda: Ledger(path).allow("others"),
    ):
        with pytest.raises(LedgerError, match=r"(?s)is an older copy: .* changes.*pbmvfl ledger accept"):
            attempt()
    assert "is an older copy" in str(Ledger(path, read_only=True).trouble())
    with contextlib.closing(Ledger(path)) as book:
        assert "is an older copy" in str(book.accept())
        assert book.accept() is None
        assert any("accepted the ledger" in note for note in book.notes(NAME))
    charge_all(Ledger(path), PLAN, run="3", rounds=1)
    assert Ledger(path).trouble() is None


def test_a_copy_that_went_its_own_way_is_refused_although_it_has_more_changes(path, tmp_path, monkeypatch):
    charge_all(Ledger(path), PLAN, run="1", rounds=1)
    copy = copy_of(path, tmp_path / "copy")
    charge_all(Ledger(path), PLAN, run="2", rounds=1)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("PBMVFL_STATE", str(tmp_path / "another machine"))
        for run in "345":
            charge_all(Ledger(copy / path.name), PLAN, run=run)
    put_back(copy, path, with_lock=True)
    with pytest.raises(LedgerError, match="is a copy that went its own way"):
        charge_all(Ledger(path), PLAN, run="6")


def test_two_copies_of_one_ledger_cannot_be_charged_in_turn(path, tmp_path):
    charge_all(Ledger(path), PLAN, run="1", rounds=1)
    copy = copy_of(path, tmp_path / "copy")
    session = opened(copy / path.name, run="2")
    charge(session, PLAN, 0)
    with pytest.raises(LedgerError, match="a copy of it is being charged by another session"):
        opened(path, run="3")
    session.close()
    with pytest.raises(LedgerError, match="is an older copy"):
        opened(path, run="3")


def test_a_book_is_not_behind_after_its_process_was_killed(state, path):
    """Charged, told outside, killed in between: at whatever point, the book itself is never the one that is behind."""
    plan = small_plan(num_epochs=4000)
    for i, reports in enumerate((1, 2, 7)):
        kill_after(reports, lambda pipe, i=i: release_until_killed(plan, path, 0, str(i), pipe))
        assert Ledger(path).trouble() is None
    charge_all(Ledger(path), plan, run="after", rounds=1)
    del state


@pytest.mark.parametrize("rounds_ahead", [1, 8])
def test_the_outside_knows_of_a_block_before_its_first_round_leaves(rounds_ahead, path):
    session = opened(path, rounds_ahead=rounds_ahead)
    seen = []
    for number in range(9):
        charge(session, PLAN, number)
        book = Ledger(path, read_only=True)
        store = store_of(book)
        known = store.known()
        assert tamper_evidence.known_outside(store.identity, store.lock_file) == [known, known]
        seen.append(known.counter)
        book.close()
    assert len(set(seen)) == (9 if rounds_ahead == 1 else 2)
    session.close()


@given(st.integers(0, 10**20 - 1), st.sampled_from(["", "ab" * 32]), st.binary(max_size=90))
def test_what_is_kept_outside_is_read_back_and_anything_else_is_nothing(number: int, head: str, other: bytes) -> None:
    known = Known(number, head)
    assert Known.from_bytes(known.to_bytes()) == known
    assert Known.from_bytes(known.to_bytes()[:-1]) is None
    assert Known.from_bytes(other) is None


# --- the history ---


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE charged SET charged_until = 0 WHERE session = 1",
        "UPDATE sessions SET dataset = 'others' WHERE id = 1",
        "UPDATE sessions SET fingerprint = 'x' WHERE id = 1",
        "DELETE FROM sessions WHERE id = 1",
        "UPDATE limits SET epsilon = 1e9",
        "DELETE FROM limits",
        "DELETE FROM history WHERE id = 2",
        "UPDATE history SET event = replace(event, '1000', '2000')",
    ],
)
def test_lines_that_something_else_changed_are_noticed(statement, path):
    Ledger(path).set_limit(NAME, paper_limit())
    for run in "12":
        charge_all(Ledger(path), PLAN, run=run, rounds=2)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as file:
        assert file.execute(statement).rowcount
    with pytest.raises(LedgerError, match="was changed by something else than this program"):
        charge_all(Ledger(path), PLAN, run="3")
    with contextlib.closing(Ledger(path)) as book:
        assert book.accept() is not None
        assert book.trouble() is None


# --- limits and names ---


def test_a_dataset_without_a_limit_is_refused_once_another_has_one(path):
    charge_all(Ledger(path), PLAN, run="1", rounds=1)
    session = opened(path, run="2", rounds_ahead=8)
    charge(session, PLAN, 0)
    Ledger(path).set_limit("poeple", paper_limit())  # the name is misspelt
    for number in (1, 2):
        with pytest.raises(LedgerError, match=r"'people' has no limit .* others have; .*set a limit: `pbmvfl"):
            charge(session, PLAN, number)
    session.close()
    with pytest.raises(LedgerError, match="'people' has no limit"):
        opened(path, run="3")
    assert len(Ledger(path).sessions(NAME)) == 2
    Ledger(path).set_limit(NAME, paper_limit())
    assert charge_all(Ledger(path), PLAN, run="3", rounds=1) == 1


def test_a_limit_that_is_removed_and_set_again_keeps_its_order(path):
    Ledger(path).set_limit(NAME, paper_limit(order=8.0))
    Ledger(path).remove_limit(NAME, Unit.CELL, Accounting.PAPER, 0)
    assert Ledger(path).set_limit(NAME, paper_limit(order=4.0)).order == 4.0  # nothing was released yet
    charge_all(Ledger(path), PLAN, rounds=1)
    Ledger(path).remove_limit(NAME, Unit.CELL, Accounting.PAPER, 0)
    assert Ledger(path).set_limit(NAME, paper_limit(order=16.0)).order == 4.0
    Ledger(path).remove_limit(NAME, Unit.CELL, Accounting.PAPER, 0)
    charge_all(Ledger(path), PLAN, run="between", rounds=1)
    assert Ledger(path).set_limit(NAME, paper_limit(order=32.0)).order == 4.0


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        *(({"first_round": value}, "first_round=.*permitted: 0 to 20") for value in (-1, 21, 1.0, True, "0", None)),
        *(({"rounds_ahead": value}, "rounds_ahead=.*permitted: 1 or more") for value in (0, 1.5, True, "8", None)),
        ({"public_start": 1}, "public_start=1"),
        ({"exact_metrics": "yes"}, "exact_metrics='yes'"),
        ({"train_ids": range(0, 46, 2)}, "without a step"),
        ({"train_ids": range(-1, 22)}, "from 0 or above"),
        ({"train_ids": [0.5, *map(str, range(22))]}, "row id 0.5"),
        ({"train_ids": [0, "0", *map(str, range(1, 22))]}, "different from each other"),
    ],
)
def test_odd_numbers_and_row_ids_are_refused_before_anything_is_written(choices, words, path):
    with pytest.raises(LedgerError, match=words):
        opened(path, **choices)
    assert Ledger(path).sessions(NAME) == []


def test_row_0_and_row_named_0_are_one_row(path):
    plan = small_plan(num_epochs=1, num_samples=4, batch_size=2, num_test_samples=0)
    rate = plan.embedding_dim * cell_rdp(plan.num_trials, plan.beta_16, plan.num_parties, (4.0,))[0]
    Ledger(path).set_limit(NAME, paper_limit(epsilon_at(1.5 * rate, DELTA, 4.0)))
    assert charge_all(Ledger(path), plan, run="1") == 2
    for ids in (["3", "2", "1", "0"], [3, 2, 1, 0]):
        assert charge_all(Ledger(path), plan, run="2", train_ids=ids, test_ids=[]) == 0
    assert charge_all(Ledger(path), plan, run="3", train_ids=["03", "02", "01", "00"], test_ids=[]) == 2
    assert len(spending(Ledger(path), NAME, paper_limit()).rows) == 8


# --- values ---


def test_values_under_another_name_are_refused_unless_the_owner_says_that_they_are_others(path):
    charge_all(Ledger(path), PLAN, run="1", rounds=1, train_values=VALUES, test_values=TEST_VALUES)
    again = {"dataset": "folk", "run": "2", "train_values": VALUES, "test_values": TEST_VALUES}
    changed = [{**again, "test_values": None}, {**again, "test_values": TEST_VALUES + 1}]
    for same in (again, *changed):
        with pytest.raises(LedgerError, match=r"'folk' has the values of dataset='people'.*pbmvfl ledger allow"):
            opened(path, **same)
    assert Ledger(path).datasets() == [NAME]
    opened(path, **{**again, "train_values": VALUES + 1, "test_values": None}).close()  # other values are others
    Ledger(path).allow("folk")
    opened(path, **again).close()
    assert any("about other people" in note for note in Ledger(path).notes("folk"))


def test_a_name_under_which_nothing_was_released_is_in_nobody_s_way(path):
    opened(path, dataset="misspelt", train_values=VALUES).close()
    opened(path, train_values=VALUES).close()


@settings(max_examples=50)
@given(st.permutations(range(7)), st.integers(1, 6))
def test_digests_of_named_rows_do_not_depend_on_order_or_split(order: list[int], cut: int) -> None:
    rows, names = VALUES[:7], [f"row {i}" for i in range(7)]
    whole = keyed_digests(b"k" * 32, rows, None, names, [])[0]
    moved, moved_names = rows[order], [names[i] for i in order]
    split = keyed_digests(b"k" * 32, moved[:cut], moved[cut:], moved_names[:cut], moved_names[cut:])
    assert split[0] == whole
    assert keyed_digests(b"l" * 32, rows, None, names, [])[0] != whole
    assert keyed_digests(b"k" * 32, rows + 1, None, names, [])[0] != whole


def everything_in(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for file in folder.rglob("*"):
        if file.is_file():
            yield file, file.read_bytes()


def test_nothing_that_leaves_a_ledger_can_be_tried_against_values(data, make_plan, tmp_path):
    """Digests and keys are in the ledgers alone: not in an export, not in a folder of the run, not on the wire."""
    messages = []
    federation = Federation(make_plan(data, num_epochs=1))
    federation.taps.append(lambda *message: messages.append(message[2]))
    result = federation.fit(data, ledger=tmp_path / "books", checkpoints=tmp_path / "run")
    secrets = set()
    exports = []
    for file in sorted((tmp_path / "books").glob("*.sqlite")):
        with contextlib.closing(Ledger(file, read_only=True)) as book:
            with contextlib.closing(sqlite3.connect(file)) as database:
                secrets |= {digest for (digest,) in database.execute("SELECT digest FROM seen_values")}
                secrets |= {key.hex() for (key,) in database.execute("SELECT key FROM identity")}
            assert {entry.fingerprint for entry in book.sessions(data.name)} <= secrets
            exports.append(json.dumps(book.export()))
    assert len(secrets) == 3 * 4  # all rows, train rows, test rows and a key for each of three parties
    public = [text.encode() for text in exports] + [result.to_json().encode(), b"".join(messages)]
    public += [content for _, content in everything_in(tmp_path / "run")]
    for secret, text in itertools.product(secrets, public):
        assert secret.encode() not in text
        assert bytes.fromhex(secret) not in text


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_their_owner_may_read_ledgers_and_run_folders(umask, data, make_plan, tmp_path, monkeypatch):
    monkeypatch.setenv("PBMVFL_STATE", str(tmp_path / "state"))
    before = os.umask(umask)
    try:
        session = opened(tmp_path / "alone" / "a.sqlite")
        charge(session, PLAN, 0)
        names = {file.name for file in (tmp_path / "alone").iterdir()}
        Federation(make_plan(data, num_epochs=1)).fit(data, ledger=tmp_path / "books", checkpoints=tmp_path / "run")
    finally:
        os.umask(before)
    assert names == {"a.sqlite", "a.sqlite-wal", "a.sqlite-shm", "a.sqlite.lock"}
    files = [file for folder in ("alone", "books", "run", "state") for file, _ in everything_in(tmp_path / folder)]
    assert len(files) > 15
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    folders = [tmp_path / "run", *(each for each in (tmp_path / "run").rglob("*") if each.is_dir())]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    session.close()


# --- exact metrics ---


def test_exact_metrics_of_rows_with_a_limit_need_the_owner_s_word(path):
    Ledger(path).set_limit(NAME, paper_limit())
    both_ways_out = r"evaluation=simulator .*evaluation=released, .*--exact-metrics"
    with pytest.raises(LedgerError, match=both_ways_out):
        opened(path, exact_metrics=False)
    assert Ledger(path).sessions(NAME) == []
    opened(path, plan=small_plan(evaluation="released"), exact_metrics=False).close()
    assert Ledger(path).notes(NAME) == []
    opened(path, exact_metrics=True).close()
    assert any("exact metrics of its rows were permitted" in note for note in Ledger(path).notes(NAME))


@pytest.mark.parametrize("rounds_ahead", [1, 8])
def test_a_limit_set_under_way_ends_a_session_with_exact_metrics(rounds_ahead, path):
    session = opened(path, exact_metrics=False, rounds_ahead=rounds_ahead)
    charge(session, PLAN, 0)
    Ledger(path).set_limit(NAME, paper_limit())
    for _ in range(2):
        with pytest.raises(LedgerError, match="looks at exact metrics"):
            charge(session, PLAN, 1)
    session.close()
    assert Ledger(path).sessions(NAME)[0].charged_until == 1


def test_a_federation_with_exact_metrics_is_refused_before_anything_is_sent(data, make_plan, tmp_path):
    plan: Plan = make_plan(data)
    make_ledgers(tmp_path / "books", data.party_names)
    Ledger(tmp_path / "books" / "party-1.sqlite").set_limit(data.name, paper_limit(1e6))
    sent: list[bytes] = []
    federation = Federation(plan)
    federation.taps.append(lambda *message: sent.append(message[2]))
    with pytest.raises(LedgerError, match=r"evaluation=simulator .*evaluation=released, or .*exact_metrics=True"):
        federation.fit(data, ledger=tmp_path / "books", checkpoints=tmp_path / "run")
    assert sent == []
    result = federation.fit(data, ledger=tmp_path / "books", checkpoints=tmp_path / "run", exact_metrics=True)
    assert not result.stopped
    assert len(result.sessions) == 1
    released = make_plan(data, evaluation="released")
    assert not Federation(released).fit(data, ledger=tmp_path / "books").stopped
