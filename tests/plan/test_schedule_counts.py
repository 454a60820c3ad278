"""Every count of a schedule equals that of a walk through its rounds, for any phases, sizes and spans.

The walk is written here from the definition: phase after phase, pass after pass, batch after batch. It shares with the
program only the public permutation of each shuffled pass.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.crypto.public_streams import SCHEDULE_STREAM, public_permutation
from pbmvfl.errors import PlanError
from pbmvfl.plan.round_kinds import JOINT, PREDICTION, RoundKind, Split
from pbmvfl.plan.schedule import Order, Phase, Schedule

#: Kinds that nobody registered: a schedule only asks them what they do.
REHEARSAL = RoundKind(name="rehearsal", code=200, releases=True)
LOCAL = RoundKind(name="local", code=201, updates=True, answered=False)
KINDS = (JOINT, PREDICTION, REHEARSAL, LOCAL)

phases = st.lists(
    st.builds(Phase, kind=st.sampled_from(KINDS), passes=st.integers(1, 3), order=st.sampled_from(Order)),
    min_size=1,
    max_size=5,
)
schedules = st.builds(
    Schedule,
    num_samples=st.integers(1, 12),
    num_test_samples=st.integers(1, 9),
    batch_size=st.integers(1, 14),
    seed=st.integers(0, 2**63 - 1),
    phases=phases.map(tuple),
)


@dataclass(frozen=True)
class Walked:
    """One round as the walk meets it."""

    kind: RoundKind
    rows: tuple[int, ...]
    #: Which pass of the whole run it belongs to, and whether it is that pass's last round.
    passed: int
    is_last: bool


def walk(schedule: Schedule) -> list[Walked]:
    rounds: list[Walked] = []
    shuffles = passed = 0
    for phase in schedule.phases:
        count = schedule.num_samples if phase.kind.split is Split.TRAIN else schedule.num_test_samples
        for _ in range(phase.passes):
            rows = list(range(count))
            if phase.order is Order.SHUFFLED:
                rows = public_permutation(count, seed=schedule.seed, stream=SCHEDULE_STREAM, index=shuffles).tolist()
                shuffles += 1
            elif phase.order is Order.FIXED:
                kept = 2**48 - 1  # frozen: plans of this order mean these rows
                rows = public_permutation(count, seed=schedule.seed, stream=SCHEDULE_STREAM, index=kept).tolist()
            if not phase.kind.releases and schedule.batch_size >= count:
                rows.sort()  # all at once, and nothing about a row leaves
            while rows:
                batch, rows = rows[: schedule.batch_size], rows[schedule.batch_size :]
                rounds.append(Walked(phase.kind, tuple(batch), passed, not rows))
            passed += 1
    return rounds


def spans_of(rounds: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    span = st.tuples(st.integers(0, rounds), st.integers(0, rounds)).map(lambda ends: (min(ends), max(ends)))
    return st.lists(span, max_size=4)


# --- rounds ---


@given(schedule=schedules)
def test_no_row_moves_weights_again_before_the_schedule_says(schedule: Schedule) -> None:
    last: dict[tuple[Split, int], int] = {}
    nearest = math.inf
    for step, current in enumerate(each for each in walk(schedule) if each.kind.updates):
        for row in current.rows:
            before = last.get((current.kind.split, row))
            nearest = nearest if before is None else min(nearest, step - before)
            last[current.kind.split, row] = step
    assert 1 <= schedule.steps_between_uses <= nearest
    orders = {phase.order for phase in schedule.phases if phase.kind.updates}
    if orders in ({Order.FIXED}, {Order.AS_GIVEN}) and nearest < math.inf:
        assert schedule.steps_between_uses == nearest


@given(schedule=schedules)
def test_rounds_are_those_of_the_walk(schedule: Schedule) -> None:
    walked = walk(schedule)
    assert len(schedule) == len(walked)
    for number, (current, expected) in enumerate(zip(schedule, walked, strict=True)):
        assert current.number == number
        assert current.kind == schedule.kind(number) == expected.kind
        assert tuple(current.rows.tolist()) == expected.rows
        assert current.num_rows == schedule.num_rows(number) == len(expected.rows)
    assert schedule.largest_batch >= max(len(each.rows) for each in walked)
    assert schedule.largest_batch == min(schedule.batch_size, max(schedule.num_samples, schedule.num_test_samples))
    assert list(schedule.kinds) == list(dict.fromkeys(each.kind for each in walked))
    for kind in KINDS:
        assert schedule.num_rounds(kind) == sum(each.kind == kind for each in walked)
        in_a_pass = math.ceil(Fraction(schedule.rows_of(kind.split), schedule.batch_size))
        assert schedule.rounds_per_pass(kind) == in_a_pass


@given(schedule=schedules)
def test_rounds_beyond_the_ends_do_not_exist(schedule: Schedule) -> None:
    for number in (-1, len(schedule), len(schedule) + 7):
        for ask in (schedule.kind, schedule.num_rows, schedule.pass_of, schedule.ends_epoch, schedule.__getitem__):
            with pytest.raises(IndexError, match=f"round={number} is not in the plan"):
                ask(number)


@given(schedule=schedules)
def test_batches_of_a_phase_are_its_rounds_by_size(schedule: Schedule) -> None:
    for phase in schedule.phases:
        alone = Schedule(
            num_samples=schedule.num_samples,
            num_test_samples=schedule.num_test_samples,
            batch_size=schedule.batch_size,
            seed=schedule.seed,
            phases=(phase,),
        )
        sizes = Counter(len(each.rows) for each in walk(alone))
        batches = schedule.batches(phase)
        assert dict(batches) == sizes
        assert len(batches) == len(sizes)  # no size twice


@given(schedule=schedules)
def test_a_round_s_pass_is_all_rounds_of_the_same_pass(schedule: Schedule) -> None:
    walked = walk(schedule)
    for number, current in enumerate(walked):
        of_the_pass = [other for other, each in enumerate(walked) if each.passed == current.passed]
        assert schedule.pass_of(number) == (of_the_pass[0], of_the_pass[-1] + 1)
        rows = sorted(row for other in of_the_pass for row in walked[other].rows)
        assert rows == list(range(schedule.rows_of(current.kind.split)))


# --- epochs ---


@given(schedule=schedules)
def test_epochs_are_the_passes_that_train(schedule: Schedule) -> None:
    walked = walk(schedule)
    trains = [each.kind.updates for each in walked]
    ends = [number for number, each in enumerate(walked) if each.kind.updates and each.is_last]
    assert schedule.num_epochs == len(ends)
    assert [number for number in range(len(walked)) if schedule.ends_epoch(number)] == ends
    assert schedule.trained_at == max((number + 1 for number, moves in enumerate(trains) if moves), default=0)
    sizes = Counter(each.passed for each in walked)
    for number in range(len(walked) + 1):
        done = sum((Fraction(1, sizes[each.passed]) for each in walked[:number] if each.kind.updates), Fraction(0))
        assert schedule.epochs_before(number) == pytest.approx(float(done), abs=1e-12)
        if done.denominator == 1:  # at the end of an epoch the number is exact: callers round it down
            assert schedule.epochs_before(number) == done


@given(schedule=schedules)
def test_the_end_of_an_epoch_is_the_round_after_its_last(schedule: Schedule) -> None:
    walked = walk(schedule)
    ends = [number for number, each in enumerate(walked) if each.kind.updates and each.is_last]
    for epoch in range(1, len(ends)):
        assert schedule.end_of_epoch(epoch) == ends[epoch - 1] + 1
    for epoch in (len(ends), len(ends) + 1, len(ends) + 100):
        assert schedule.end_of_epoch(epoch) == len(walked)
    if len(ends) > 0:
        first = next(number for number, each in enumerate(walked) if each.kind.updates)
        assert schedule.end_of_epoch(0) == first  # where training begins


# --- uses ---


@settings(max_examples=200)
@given(schedule=schedules, data=st.data())
def test_uses_of_rows_are_those_of_the_walk(schedule: Schedule, data: st.DataObject) -> None:
    walked = walk(schedule)
    spans = data.draw(spans_of(len(walked)))
    counted: dict[RoundKind, Counter[int]] = {kind: Counter() for kind in schedule.kinds}
    for first, until in spans:
        for each in walked[first:until]:
            counted[each.kind].update(each.rows)
    uses = schedule.uses(spans)
    assert [use.kind for use in uses] == list(schedule.kinds)
    for use in uses:
        most, total = max(counted[use.kind].values(), default=0), counted[use.kind].total()
        assert use.releases == (most if use.kind.releases else 0)
        assert use.updates == (most if use.kind.updates else 0)
        assert use.total_releases == (total if use.kind.releases else 0)


@given(schedule=schedules)
def test_without_spans_every_round_is_used(schedule: Schedule) -> None:
    assert schedule.uses() == schedule.uses([(0, len(schedule))])
    for use in schedule.uses():
        passes = sum(phase.passes for phase in schedule.phases if phase.kind == use.kind)
        assert use.releases == (passes if use.kind.releases else 0)
        assert use.total_releases == use.releases * schedule.rows_of(use.kind.split)


@given(schedule=schedules, data=st.data())
def test_total_uses_are_the_rows_of_the_rounds_between(schedule: Schedule, data: st.DataObject) -> None:
    walked = walk(schedule)
    first = data.draw(st.integers(0, len(walked)))
    until = data.draw(st.integers(0, len(walked) + 3))
    expected = dict.fromkeys(schedule.kinds, 0)
    for each in walked[first:until]:
        expected[each.kind] += len(each.rows)
    assert schedule.total_uses(first, until) == expected


# --- forms ---


@given(schedule=schedules)
def test_a_schedule_is_its_numbers(schedule: Schedule) -> None:
    again = Schedule(
        num_samples=schedule.num_samples,
        num_test_samples=schedule.num_test_samples,
        batch_size=schedule.batch_size,
        seed=schedule.seed,
        phases=tuple(schedule.phases),
    )
    assert again == schedule
    assert [each.rows.tolist() for each in again] == [each.rows.tolist() for each in schedule]
    if {REHEARSAL, LOCAL}.isdisjoint(schedule.kinds):
        assert Schedule.from_dict(schedule.to_dict()) == schedule


def test_phases_that_need_rows_which_are_not_there_are_refused() -> None:
    predict = Phase(kind=PREDICTION, passes=1)
    with pytest.raises(PlanError, match="prediction rounds need rows: num_test_samples must be at least 1"):
        Schedule(num_samples=5, num_test_samples=0, batch_size=2, seed=0, phases=(predict,))
    many = Phase(kind=JOINT, passes=2**31)
    with pytest.raises(PlanError, match=r"the phases make \d+ rounds; at most 2\^32-1 can be numbered"):
        Schedule(num_samples=2, num_test_samples=0, batch_size=1, seed=0, phases=(many,))


@pytest.mark.parametrize("passes", [0, -1, 1.5, True, "3", None])
def test_a_phase_has_a_whole_number_of_passes(passes: object) -> None:
    with pytest.raises(PlanError, match="must be a whole number of at least 1"):
        Phase(kind=JOINT, passes=passes)  # type: ignore[arg-type]
