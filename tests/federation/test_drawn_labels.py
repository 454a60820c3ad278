"""Labels that are drawn once: kept by their holder, charged to its ledger, whatever is killed, lost or damaged."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pbmvfl import Ledger, Limit
from pbmvfl.errors import AnswersError, BudgetExceeded, LedgerError, PlanError
from pbmvfl.ledger.charging import Charging
from pbmvfl.mechanisms.label_response import LabelResponse
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import LABELS
from pbmvfl.plan.schedule import Phase
from pbmvfl.protocol import stored_answers
from pbmvfl.protocol.stored_answers import StoredAnswers
from support.label_draws import CLASSES, LEDGER, NAME, STORE, charged, holder_in, law, made, true_labels


class Crash(BaseException):
    """A process that ends here."""


def _crash() -> None:
    raise Crash


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _torn(descriptor: int, data: bytes) -> None:
    os.write(descriptor, data[: len(data) // 2])


def _patched(patch: pytest.MonkeyPatch, where: Any, name: str, end: Callable[[], None], *, after: bool) -> None:
    known = getattr(where, name)

    def ending(*arguments: Any, **named: Any) -> Any:
        found = known(*arguments, **named) if after else None
        end()
        return found

    patch.setattr(where, name, ending)


#: Steps of a draw: (what is called, whether the process ends after it and not before it).
STEPS: dict[str, tuple[Any, str, bool]] = {
    "before the session": (Ledger, "open_session", False),
    "before the draw": (LabelResponse, "draw", False),
    "after the draw": (LabelResponse, "draw", True),
    "before the store": (StoredAnswers, "settle", False),
    "after the store": (StoredAnswers, "settle", True),
    "before the charge": (Charging, "charge", False),
    "after the charge": (Charging, "charge", True),
}
HALF_A_BLOCK = "in the middle of the store's write"


@contextlib.contextmanager
def ending_at(step: str | None, end: Callable[[], None]) -> Iterator[None]:
    """End a process at a step of the draw."""
    with pytest.MonkeyPatch.context() as patch:
        if step == HALF_A_BLOCK:
            patch.setattr(stored_answers, "_write", lambda descriptor, data: (_torn(descriptor, data), end()))
        elif step is not None:
            where, name, after = STEPS[step]
            _patched(patch, where, name, end, after=after)
        yield


# --- the ledger's total is the number of draws made ---


class Draws(RuleBasedStateMachine):
    """Runs over some of the people by some law, ended at any step, and stores that are lost in between."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.truth = {f"p{number}": number % len(CLASSES) for number in range(8)}
        #: Charges of stores that are gone.
        self.before: Counter[tuple[str, int, str]] = Counter()
        #: Labels that were used, by row, law and version, as long as their store is there.
        self.used: dict[tuple[str, int, str], int] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(
        rows=st.sets(st.sampled_from([f"p{number}" for number in range(8)]), min_size=1),
        epsilon=st.sampled_from([1.0, 3.0]),
        version=st.sampled_from(["", "second"]),
        step=st.sampled_from([None, None, None, HALF_A_BLOCK, *STEPS]),
    )
    def train(self, rows: set[str], epsilon: float, version: str, step: str | None) -> None:
        names, response = sorted(rows), law(epsilon)
        holder = holder_in(self.folder, row_ids=names, data_version=version, redraw=True)
        truth = np.array([self.truth[name] for name in names])
        with ending_at(step, _crash):
            try:
                drawn = holder.draw(response, truth).labels_N
            except Crash:
                return
        keys = [(name, response.event.other_weight, version) for name in names]
        paid = charged(self.folder) - self.before
        for key, label in zip(keys, drawn.tolist(), strict=True):
            assert self.used.setdefault(key, label) == label
            assert paid[key] == 1, "a label was used that is not charged, or is charged twice"
        assert paid.total() == made(self.folder)

    @rule(name=st.sampled_from([f"p{number}" for number in range(8)]))
    def correct_a_label(self, name: str) -> None:
        self.truth[name] = (self.truth[name] + 1) % len(CLASSES)

    @rule()
    def lose_the_store(self) -> None:
        """With what a process that ended had stored, not charged and not used."""
        shutil.rmtree(self.folder / STORE, ignore_errors=True)
        self.before, self.used = charged(self.folder), {}

    @invariant()
    def no_charge_is_without_a_draw(self) -> None:
        assert (charged(self.folder) - self.before).total() <= made(self.folder)


Draws.TestCase.settings = settings(max_examples=20, stateful_step_count=10)
test_the_ledger_has_every_draw_that_was_made_and_no_other = Draws.TestCase


def kill_at(step: str, work: Callable[[], Any]) -> None:
    """Run `work` in a child that is killed at a step."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), ending_at(step, _killed):
            work()
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child did not get to that step"


@pytest.mark.parametrize("step", [*STEPS, HALF_A_BLOCK, "before the session's end"])
def test_a_kill_at_any_step_leaves_the_ledger_with_what_was_drawn(step: str, tmp_path: Path) -> None:
    """The next run is one of other rows by another law: what the killed one has stored is charged all the same."""
    truth = true_labels(12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STEPS, "before the session's end", (Charging, "close", False))
        kill_at(step, lambda: holder_in(tmp_path).draw(law(), truth))
    stored = made(tmp_path)
    assert stored == (12 if step in ("after the store", "before the charge", "after the charge") else 0) or (
        step == "before the session's end" and stored == 12
    )
    other = holder_in(tmp_path, row_ids=[f"p{row}" for row in range(5)])
    other.draw(law(1.0), truth[:5])
    assert charged(tmp_path).total() == made(tmp_path) == stored + 5
    drawn = holder_in(tmp_path).draw(law(), truth).labels_N
    assert charged(tmp_path).total() == made(tmp_path) == 12 + 5
    assert np.array_equal(holder_in(tmp_path).draw(law(), truth).labels_N, drawn)


def test_without_the_second_look_a_kill_would_leave_draws_that_are_not_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    kill_at("after the store", lambda: holder_in(tmp_path).draw(law(), true_labels(12)))
    monkeypatch.setattr("pbmvfl.federation.drawn_labels.LabelHolder._charge_left", lambda *_: None)
    holder_in(tmp_path, row_ids=["a"]).draw(law(), true_labels(1))
    assert charged(tmp_path).total() == 1 < made(tmp_path) == 13


# --- the same row has the same label, for nothing ---


def test_a_label_is_drawn_once_for_every_later_run_whatever_the_true_one_is_by_then(tmp_path: Path) -> None:
    truth, response = true_labels(200), law(0.5)
    first = holder_in(tmp_path).draw(response, truth).labels_N
    assert first.dtype == np.int64
    assert not np.array_equal(first, truth)  # each is the true one with probability 0.45
    for seed in range(4):
        assert np.array_equal(holder_in(tmp_path).draw(response, true_labels(200, seed=seed)).labels_N, first)
    assert charged(tmp_path) == {(str(row), response.event.other_weight, ""): 1 for row in range(200)}


def test_a_larger_table_costs_its_new_rows_and_the_order_of_rows_does_not_matter(tmp_path: Path) -> None:
    names, truth = [f"p{row}" for row in range(30)], true_labels()
    first = holder_in(tmp_path, row_ids=names[:20]).draw(law(), truth[:20]).labels_N
    turned = holder_in(tmp_path, row_ids=names[::-1]).draw(law(), truth[::-1]).labels_N[::-1]
    assert np.array_equal(turned[:20], first)
    assert set(charged(tmp_path).values()) == {1}
    assert charged(tmp_path).total() == made(tmp_path) == 30


@pytest.mark.parametrize("choices", [{"data_version": "second"}, {"label": "other"}, {"dataset": "others"}])
def test_another_version_label_or_dataset_is_another_draw_and_charged(choices: dict[str, Any], tmp_path: Path) -> None:
    drawn = [holder_in(tmp_path, **each).draw(law(0.5), true_labels(200)).labels_N for each in ({}, choices)]
    assert not np.array_equal(*drawn)
    assert charged(tmp_path).total() == made(tmp_path) == 400


def test_another_epsilon_is_another_draw_and_charged(tmp_path: Path) -> None:
    truth = true_labels()
    first, _, again = (holder_in(tmp_path).draw(law(epsilon), truth).labels_N for epsilon in (2.0, 1.0, 2.0))
    assert np.array_equal(first, again)
    assert charged(tmp_path).total() == made(tmp_path) == 60


def test_labels_in_clear_are_neither_stored_nor_charged(tmp_path: Path) -> None:
    truth = true_labels()
    assert holder_in(tmp_path).draw(None, truth).labels_N is truth
    assert not list(tmp_path.iterdir())


def test_the_store_is_its_owner_s_alone_and_holds_drawn_labels_without_names(tmp_path: Path) -> None:
    names, truth = [f"Ada Lovelace {row}" for row in range(40)], true_labels(40)
    drawn = holder_in(tmp_path, row_ids=names).draw(law(), truth).labels_N
    path = tmp_path / STORE / "answers"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    data = path.read_bytes()
    assert b"Ada" not in data
    entries = np.frombuffer(data[64 + 24 + 41 * 16 : -16], dtype="<u4")  # one block: 40 labels and the batch's mark
    assert np.array_equal(entries[:-1], drawn)


# --- limits ---


def limit_labels(folder: Path, epsilon: float, unit: str = "label") -> None:
    with contextlib.closing(Ledger(folder / LEDGER, owner="label-holder")) as ledger:
        ledger.set_limit(NAME, Limit.choose(unit=unit, accounting="strict", epsilon=epsilon, delta=1e-5))


@pytest.mark.parametrize("unit", ["label", "cell", "record"])
def test_a_limit_permits_as_many_draws_as_fit_and_refuses_the_next_before_it_is_drawn(
    unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A label is all that its holder has of a row, so that every unit of a row counts it."""
    limit_labels(tmp_path, 4.0, unit)
    for version in ("1", "2"):
        holder_in(tmp_path, data_version=version).draw(law(2.0), true_labels())
    monkeypatch.setattr(LabelResponse, "draw", lambda *_: pytest.fail("drawn"))
    third = holder_in(tmp_path, data_version="3")
    assert third.forecast(law(2.0), 30).ends is not None
    with pytest.raises(BudgetExceeded, match=r"from epsilon 4\.00 to 6\.00.*smaller label epsilon"):
        third.draw(law(2.0), true_labels())
    assert charged(tmp_path).total() == made(tmp_path) == 60
    # What is stored costs nothing, also at the limit.
    again = holder_in(tmp_path, data_version="1")
    (ahead,) = again.forecast(law(2.0), 30).limits
    assert (ahead.spent, ahead.will_be, ahead.stops_at) == (pytest.approx(4.0), pytest.approx(4.0), None)
    again.draw(law(2.0), true_labels())


def test_rows_that_are_not_drawn_are_not_charged_and_a_forecast_says_what_will_be(tmp_path: Path) -> None:
    limit_labels(tmp_path, 4.0)
    names = [f"p{row}" for row in range(10)]
    holder_in(tmp_path, row_ids=names[:5]).draw(law(3.0), true_labels(5))
    ahead = holder_in(tmp_path, row_ids=names).forecast(law(3.0), 10)
    assert ahead.ends is None
    assert [limit.will_be for limit in ahead.limits] == [pytest.approx(3.0)]
    holder_in(tmp_path, row_ids=names).draw(law(3.0), true_labels(10))
    with pytest.raises(BudgetExceeded):
        holder_in(tmp_path, row_ids=names, data_version="2").draw(law(2.0), true_labels(10))


def test_a_limit_lowered_between_draw_and_charge_keeps_the_labels_from_being_used(tmp_path: Path) -> None:
    limit_labels(tmp_path, 4.0)
    with pytest.MonkeyPatch.context() as patch:
        _patched(patch, StoredAnswers, "settle", lambda: limit_labels(tmp_path, 1.0), after=True)
        with pytest.raises(BudgetExceeded, match="Nothing was sent"):
            holder_in(tmp_path).draw(law(), true_labels())
    for _ in range(2):
        with pytest.raises(BudgetExceeded):
            holder_in(tmp_path).draw(law(), true_labels())
    limit_labels(tmp_path, 4.0)
    holder_in(tmp_path).draw(law(), true_labels())
    assert charged(tmp_path).total() == made(tmp_path) == 30


def test_a_limit_of_labels_counts_nothing_of_a_party_s_releases(tmp_path: Path) -> None:
    from support.ledger_books import charge_all, small_plan

    with contextlib.closing(Ledger(tmp_path / "bank.sqlite")) as ledger:
        ledger.set_limit(NAME, Limit.choose(unit="label", accounting="strict", epsilon=0.1, delta=1e-5))
        assert charge_all(ledger, small_plan()) == len(small_plan().schedule)


def test_no_plan_has_rounds_of_labels() -> None:
    with pytest.raises(PlanError, match=r"labels rounds: .*give label_epsilon"):
        Plan.of(num_parties=2, num_samples=5, num_classes=2, phases=(Phase(kind=LABELS, passes=1),))


# --- lost, damaged, other ---


def lost(folder: Path) -> None:
    shutil.rmtree(folder / STORE)


def replaced(folder: Path) -> None:
    lost(folder)
    holder_in(folder, ledger=None, dataset="others").draw(law(), true_labels())


@pytest.mark.parametrize("lose", [lost, replaced])
def test_a_lost_store_is_named_and_drawn_anew_only_with_a_permission_and_charged(
    lose: Callable[[Path], None], tmp_path: Path
) -> None:
    holder_in(tmp_path).draw(law(), true_labels())
    lose(tmp_path)
    other = made(tmp_path)
    for refuse in (
        lambda: holder_in(tmp_path).draw(law(), true_labels()),
        lambda: holder_in(tmp_path).forecast(law(), 30),
    ):
        with pytest.raises(LedgerError, match=r"30 labels were drawn before.*lost, or is another.*--redraw-labels"):
            refuse()
    assert made(tmp_path) == other
    assert charged(tmp_path).total() == 30
    holder_in(tmp_path, redraw=True).draw(law(), true_labels())
    assert charged(tmp_path) == {(str(row), law().event.other_weight, ""): 2 for row in range(30)}
    holder_in(tmp_path, redraw=True).draw(law(), true_labels())  # a permission is no order
    assert charged(tmp_path).total() == 60


def test_a_kill_in_a_second_draw_is_charged_beside_the_first(tmp_path: Path) -> None:
    holder_in(tmp_path).draw(law(), true_labels())
    lost(tmp_path)
    kill_at("after the store", lambda: holder_in(tmp_path, redraw=True).draw(law(), true_labels()))
    holder_in(tmp_path).draw(law(), true_labels())
    assert set(charged(tmp_path).values()) == {2}


@pytest.mark.parametrize(
    ("names", "words"),
    [(("no", "yes"), "among 3 classes; now there are 2"), (("maybe", "no", "yes"), "or they have other names")],
)
def test_other_classes_of_the_same_rows_are_named(names: tuple[str, ...], words: str, tmp_path: Path) -> None:
    holder_in(tmp_path).draw(law(), true_labels())
    other = holder_in(tmp_path, class_names=names)
    truth = np.zeros(30, dtype=np.int64)
    with pytest.raises(LedgerError, match=words):
        other.draw(law(num_classes=len(names)), truth)
    assert made(tmp_path) == 30
    replace(other, redraw=True).draw(law(num_classes=len(names)), truth)
    assert charged(tmp_path).total() == made(tmp_path) == 60


def test_a_damaged_store_is_named_and_nothing_is_drawn(tmp_path: Path) -> None:
    holder_in(tmp_path).draw(law(), true_labels())
    path = tmp_path / STORE / "answers"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(AnswersError, match=r"drawn labels: .*answers are damaged.*--redraw-labels"):
            holder_in(tmp_path, redraw=True).draw(law(), true_labels())
    assert path.read_bytes() == data
    assert charged(tmp_path).total() == 30


def test_a_store_in_use_is_named(tmp_path: Path) -> None:
    with contextlib.closing(StoredAnswers(tmp_path / STORE)), pytest.raises(AnswersError, match="in use"):
        holder_in(tmp_path).draw(law(), true_labels())


def test_stored_labels_that_a_ledger_does_not_know_are_charged_to_it_before_they_are_used(tmp_path: Path) -> None:
    """A ledger that was lost, or one that comes later than the draw."""
    first = holder_in(tmp_path, ledger=None).draw(law(), true_labels()).labels_N
    assert holder_in(tmp_path).forecast(law(), 30).runs == 0
    limit_labels(tmp_path, 1.0)
    with pytest.raises(BudgetExceeded):
        holder_in(tmp_path).draw(law(), true_labels())
    limit_labels(tmp_path, 3.0)
    assert np.array_equal(holder_in(tmp_path).draw(law(), true_labels()).labels_N, first)
    assert np.array_equal(holder_in(tmp_path).draw(law(), true_labels()).labels_N, first)
    assert charged(tmp_path).total() == made(tmp_path) == 30


def test_a_run_that_is_resumed_has_its_own_labels_or_none(tmp_path: Path) -> None:
    for ledger in (None, tmp_path / LEDGER):
        holder = holder_in(tmp_path, ledger=ledger, redraw=True)
        first = holder.draw(law(), true_labels()).labels_N
        assert np.array_equal(holder.draw(law(), true_labels(), resumes=True).labels_N, first)
        lost(tmp_path)
        with pytest.raises(LedgerError, match=r"lacks 30 labels of this run.*start a new run"):
            holder.draw(law(), true_labels(), resumes=True)
        assert made(tmp_path) == 0


def test_ids_for_other_rows_than_there_are_labels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="row_ids has 2 rows, and there are 30 labels"):
        holder_in(tmp_path, row_ids=["a", "b"]).draw(law(), true_labels())
    with pytest.raises(LedgerError, match="different from each other"):
        holder_in(tmp_path, row_ids=["a"] * 30).draw(law(), true_labels())


# --- what depends on labels ---


def outcome(folder: Path, truth: npt.NDArray[np.int64]) -> list[Any]:
    """All that others may see of draws, whether they are refused, and how large the files become."""
    said: list[Any] = []
    holder = holder_in(folder)
    limit_labels(folder, 5.0)
    steps: list[Callable[[], Any]] = [
        lambda: holder.draw(law(), truth),
        lambda: holder.draw(law(), truth[::-1].copy()),
        lambda: holder.forecast(law(), 30).limits,
        lambda: holder_in(folder, data_version="2").draw(law(), truth),
        lambda: holder_in(folder, data_version="3").draw(law(), truth),
        lambda: holder_in(folder, class_names=("a", "b", "c")).draw(law(), truth),
        lambda: (lost(folder), holder.draw(law(), truth)),
    ]
    for step in steps:
        try:
            found = step()
            said.append(found if isinstance(found, tuple) else "drawn")
        except (LedgerError, BudgetExceeded) as error:
            said.append(str(error).replace(str(folder), ""))
        said.append(made(folder))
    return [*said, sorted(charged(folder).items())]


def test_nothing_that_is_refused_charged_or_forecast_depends_on_a_label(tmp_path: Path) -> None:
    worlds = [np.zeros(30, dtype=np.int64), np.full(30, 2), true_labels(), true_labels(seed=5)]
    first, *others = (outcome(tmp_path / str(number), truth) for number, truth in enumerate(worlds))
    assert any("lost" in str(each) for each in first)
    assert any("limit" in str(each) for each in first)
    assert all(other == first for other in others)


def test_stored_labels_of_other_rows_are_named_to_their_holder_alone(tmp_path: Path) -> None:
    """By chance the note comes at most once in 1e9 draws; here 300 rows are turned by one place, or left."""
    truth = np.sort(true_labels(300))
    fresh = holder_in(tmp_path).draw(law(3.0), truth)
    kept = holder_in(tmp_path).draw(law(3.0), truth)
    turned = holder_in(tmp_path).draw(law(3.0), truth[::-1].copy())
    assert (fresh.notes, kept.notes) == ((), ())
    assert "drawn for other rows" in turned.notes[0]
    assert np.array_equal(turned.labels_N, fresh.labels_N)
    few = truth.copy()
    few[:10] = 2 - few[:10]  # corrected labels are no other rows
    assert holder_in(tmp_path).draw(law(3.0), few).notes == ()


def test_a_note_on_few_rows_or_one_class_would_be_a_guess(tmp_path: Path) -> None:
    for number, truth in enumerate((np.zeros(500, dtype=np.int64), np.array([0, 1, 2]))):
        holder = holder_in(tmp_path / str(number))
        holder.draw(law(1.0), truth)
        assert holder.draw(law(1.0), truth[::-1].copy()).notes == ()
