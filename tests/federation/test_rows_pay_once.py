"""Stored answers and ledgers: over any questions, a row is charged when it is answered first, and never again.

The oracle counts distinct rows, and reads charges from the tables of the ledgers' files. Kills are real: a child
process ends itself by SIGKILL before a charge, after it, or after the answers are stored.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pbmvfl import FederatedModel, Federation, Ledger, Limit, ReleaseOptions, load
from pbmvfl.data.new_rows import NewRows
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import AnswersError, BudgetExceeded
from pbmvfl.federation import serving
from pbmvfl.ledger.charging import Charging
from pbmvfl.ledger.spending import spending
from pbmvfl.protocol.party import Party
from pbmvfl.protocol.stored_answers import StoredAnswers
from support import release_monitor
from support.charged_rows import charged_predictions
from support.local_plans import voting_plan

PARTIES = ("bank", "shop")
RESPONSE, DELTA = 1.5, 1e-5
#: Rows of a round, so that questions have several; and people who can be asked about.
TOGETHER, PEOPLE = 3, 12


@pytest.fixture(autouse=True)
def _several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "ROWS_PER_ROUND", TOGETHER)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on a disk, which no ledger knows: each world charges one of its own."""
    known = np.random.default_rng(5)
    labels = known.integers(0, 2, size=40)
    parts = [(known.normal(size=(40, 3)) + labels[:, None]).astype(np.float32) / 4 for _ in PARTIES]
    data = VerticalDataset(
        name="people",
        party_names=PARTIES,
        train_features=tuple(part[:30] for part in parts),
        test_features=tuple(part[30:] for part in parts),
        train_labels=labels[:30],
        test_labels=labels[30:],
        class_names=("no", "yes"),
        default_encoder="linear",
    )
    plan = voting_plan(data, prediction_response_epsilon=RESPONSE, num_epochs=2, batch_size=30, evaluation="none")
    model = Federation(plan).fit(data).model
    assert model is not None
    return model.save(tmp_path_factory.mktemp("trained") / "model")


def people(which: Sequence[int]) -> NewRows:
    known = np.random.default_rng(9)
    columns = [known.normal(size=(PEOPLE, 3)).astype(np.float32) / 4 for _ in PARTIES]
    return NewRows(
        name="people",
        party_names=PARTIES,
        features=tuple(part[list(which)] for part in columns),
        ids=tuple(f"new{row}" for row in which),
    )


class World:
    """A model on a disk with its ledgers; each question is another program's."""

    def __init__(self, folder: Path, trained: Path, *, limit: float = 1e3) -> None:
        self.folder = folder
        shutil.copytree(trained, folder / "model")
        self.limit = Limit.choose(unit="cell", accounting="strict", epsilon=limit, delta=DELTA)
        for party in PARTIES:
            with contextlib.closing(Ledger(self.book(party), owner=party)) as book:
                book.set_limit("people", self.limit)

    def book(self, party: str) -> Path:
        return self.folder / "books" / f"{party}.sqlite"

    def model(self) -> FederatedModel:
        return load(self.folder / "model", ledger=self.folder / "books")

    def charged(self, party: str) -> Counter[str]:
        return charged_predictions(self.book(party))

    def spent(self, party: str) -> float:
        with contextlib.closing(Ledger(self.book(party), read_only=True)) as book:
            assert book.trouble() is None
            return spending(book, "people", self.limit).epsilon


# --- kills ---

#: Methods that a child kills itself in front of, or behind.
POINTS: dict[str, tuple[type[Any], str, bool]] = {
    "before a charge": (Charging, "charge", False),
    "after a charge": (Charging, "charge", True),
    "after a store": (StoredAnswers, "settle", True),
}


def killed(point: str, time: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that dies at the given call of a method; return whether it got there."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            owner, name, after = POINTS[point]
            method, calls = getattr(owner, name), iter(range(time, -1, -1))

            def deadly(self: Any, *values: Any) -> Any:
                last = next(calls) == 0
                if last and not after:
                    os.kill(os.getpid(), signal.SIGKILL)
                found = method(self, *values)
                if last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return found

            setattr(owner, name, deadly)
            work()
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


class Oracle:
    """What each party has answered and what its rows have paid, from the words alone.

    A row pays when it has no stored answer. What a process was charged for and killed before it stored stays charged.
    """

    def __init__(self) -> None:
        self.answered: dict[str, set[tuple[str, int]]] = {party: set() for party in PARTIES}
        self.for_nothing: dict[str, Counter[str]] = {party: Counter() for party in PARTIES}

    def new(self, party: str, which: Sequence[int], version: str) -> list[int]:
        return [row for row in which if (version, row) not in self.answered[party]]

    def ask(self, which: Sequence[int], version: str, point: str = "", time: int = -1) -> bool:
        """Go through the rounds; return whether the process was killed in one."""
        calls = dict.fromkeys(POINTS, 0)

        def dies(name: str) -> bool:
            calls[name] += 1
            return name == point and calls[name] == time + 1

        for start in range(0, len(which), TOGETHER):
            for party in PARTIES:
                some = which[start : start + TOGETHER]
                if new := self.new(party, some, version):
                    if dies("before a charge"):
                        return True
                    if dies("after a charge"):
                        self.for_nothing[party].update(f"new{row}" for row in new)
                        return True
                self.answered[party] |= {(version, row) for row in some}
                if dies("after a store"):
                    return True
        return False

    def paid(self, party: str) -> Counter[str]:
        """One payment for each row and version that was answered, and what kills cost."""
        return Counter(f"new{row}" for _, row in self.answered[party]) + self.for_nothing[party]


QUESTIONS = st.fixed_dictionaries(
    {
        "which": st.lists(st.integers(0, PEOPLE - 1), min_size=1, max_size=9, unique=True),
        "version": st.sampled_from(["", "", "", "2"]),
        "kill": st.none() | st.tuples(st.sampled_from(list(POINTS)), st.integers(0, 5)),
    }
)
#: Overlapping spans of rows, as 1-100, 50-149 and 1-199 are.
OVERLAPPING = [{"which": list(which), "version": "", "kill": None} for which in (range(6), range(3, 9), range(12))]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(questions=OVERLAPPING)
@example(questions=[{**OVERLAPPING[0], "kill": ("after a charge", 2)}, {**OVERLAPPING[1], "kill": None}])
@given(questions=st.lists(QUESTIONS, min_size=2, max_size=5))
def test_every_row_pays_once_over_any_overlapping_questions(questions, trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    world, oracle = World(folder, trained), Oracle()
    first: dict[tuple[str, int], np.ndarray] = {}
    try:
        for asked in questions:
            which, version = asked["which"], asked["version"]
            options = ReleaseOptions(data_version=version)
            for ahead in world.model().forecast(people(which), options):
                charged = len(which) if ahead.charged_rows is None else ahead.charged_rows
                assert charged == len(oracle.new(ahead.party, which, version))
            if asked["kill"] is not None:
                point, time = asked["kill"]
                reached = killed(point, time, partial(world.model().release, people(which), options))
                assert reached == oracle.ask(which, version, point, time)
            else:
                found = world.model().release(people(which), options)
                assert not oracle.ask(which, version)
                for row, scores in zip(which, found.scores_NK, strict=True):
                    assert np.array_equal(first.setdefault((version, row), scores), scores)
            for party in PARTIES:
                assert world.charged(party) == oracle.paid(party)
                assert world.spent(party) == pytest.approx(RESPONSE * max(oracle.paid(party).values(), default=0))
        for party in PARTIES:  # without kills and other versions: once each
            rows = {row for version, row in oracle.answered[party] if version == ""}
            once = {f"new{row}" for row in rows if ("2", row) not in oracle.answered[party]}
            assert all(world.charged(party)[name] == 1 for name in once - set(oracle.for_nothing[party]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_the_oracle_sees_rows_that_pay_with_their_round(trained, tmp_path, monkeypatch):
    """The control: where rounds are charged as wholes, rows that are asked about again pay again."""
    monkeypatch.setattr(Party, "unanswered", lambda *_, **__: None)
    world, oracle = World(tmp_path, trained), Oracle()
    for asked in OVERLAPPING:
        world.model().release(people(asked["which"]))
        oracle.ask(asked["which"], "")
    for party in PARTIES:
        assert world.charged(party) != oracle.paid(party)
        assert max(world.charged(party).values()) == 3


@pytest.mark.releases_uncharged
def test_the_monitor_sees_a_new_row_that_pays_nothing(trained, tmp_path, monkeypatch):
    """The control on the other side: of the new rows of a round all but one are charged."""
    world = World(tmp_path, trained)
    world.model().release(people([0, 1]))
    assert release_monitor.violations() == []
    new_rows, to_charge = Party.unanswered, Party._to_charge
    monkeypatch.setattr(Party, "unanswered", lambda self, *args, **named: new_rows(self, *args, **named)[1:])
    monkeypatch.setattr(Party, "_to_charge", lambda self, current, rows: to_charge(self, current, rows[rows != 1]))
    world.model().release(people([1, 2, 3]))
    assert any("1 answers left a party that no charge has paid for" in each for each in release_monitor.violations())


# --- limits ---


def test_a_limit_is_for_rows_that_are_new(trained, tmp_path):
    """One release of each row: known rows are answered beside new ones; another version is refused beforehand."""
    world = World(tmp_path, trained, limit=1.2 * RESPONSE)
    world.model().release(people(range(6)))
    found = world.model().release(people(range(3, 9)))
    assert found.is_known.all()
    before = [world.charged(party) for party in PARTIES]
    assert before == [Counter({f"new{row}": 1 for row in range(9)})] * 2
    with pytest.raises(BudgetExceeded, match=r"would end this run at round=1 of 2.*Nothing was sent"):
        world.model().release(people([9, 10, 11, 0]), ReleaseOptions(data_version="2"))
    assert [world.charged(party) for party in PARTIES] == before


def test_until_a_limit_rows_before_it_are_predicted_and_known_ones_cost_nothing(trained, tmp_path):
    world = World(tmp_path, trained, limit=1.2 * RESPONSE)
    world.model().release(people([6, 7, 8]), ReleaseOptions(data_version="2"))
    which = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    for _ in range(2):  # a second time the first rows are known, and it ends at the same place
        found = world.model().release(people(which), ReleaseOptions(until_limit=True))
        assert found.is_known.tolist() == [True] * 6 + [False] * 6
        assert "round=2 would bring dataset 'people' to epsilon" in found.stopped
    assert [world.charged(party) for party in PARTIES] == [Counter({f"new{row}": 1 for row in range(9)})] * 2


def test_a_second_process_waits_for_the_first(trained, tmp_path):
    """Both would find the same rows unanswered."""
    world = World(tmp_path, trained)
    model = world.model()
    seen: list[str] = []

    def ask(way: str, _: int, message: bytes) -> None:
        if way == "up" and message[5] == 6 and not seen:
            seen.append("answered")
            with pytest.raises(AnswersError, match="in use by another process"):
                world.model().release(people([0, 1, 2]))

    model.taps = [ask]
    model.release(people([0, 1, 2]))
    assert seen
    assert world.charged("bank") == Counter({"new0": 1, "new1": 1, "new2": 1})
