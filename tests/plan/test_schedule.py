"""The schedule: every row once an epoch, the same everywhere, and different where it should be."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbmvfl.crypto.public_streams import public_bits, public_permutation
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import FUSION, JOINT, LOCAL, PREDICTION
from pbmvfl.plan.schedule import Order, Phase


def plan_of(num_samples: int, batch_size: int, num_epochs: int = 3, tests: int = 0, seed: int = 0) -> Plan:
    return Plan.of(
        num_parties=2,
        num_classes=2,
        num_samples=num_samples,
        num_test_samples=tests,
        batch_size=batch_size,
        num_epochs=num_epochs,
        evaluation="released" if tests else "simulator",
        seed=seed,
    )


plans = st.builds(
    plan_of,
    num_samples=st.integers(1, 200),
    batch_size=st.integers(1, 250),
    num_epochs=st.integers(1, 4),
    tests=st.integers(0, 60),
    seed=st.integers(0, 2**63 - 1),
)


@given(plan=plans)
def test_every_row_is_used_exactly_once_an_epoch(plan):
    schedule = plan.schedule
    rounds = list(range(schedule.num_rounds(JOINT)))
    per_epoch = len(rounds) // plan.num_epochs
    assert per_epoch * plan.num_epochs == len(rounds)
    for epoch in range(plan.num_epochs):
        rows: list[int] = []
        for number in rounds[epoch * per_epoch : (epoch + 1) * per_epoch]:
            assert schedule[number].kind is JOINT
            rows += schedule[number].rows.tolist()
        assert sorted(rows) == list(range(plan.num_samples))


@given(plan=plans)
def test_a_released_evaluation_covers_each_test_row_exactly_once(plan):
    schedule = plan.schedule
    released = [schedule[number] for number in range(schedule.num_rounds(JOINT), len(schedule))]
    assert all(r.kind is PREDICTION for r in released)
    assert [row for r in released for row in r.rows.tolist()] == list(range(plan.num_test_samples))


@given(plan=plans)
def test_only_the_last_batch_of_an_epoch_is_short(plan):
    schedule = plan.schedule
    whole, left = divmod(plan.num_samples, plan.batch_size)
    epoch = [plan.batch_size] * whole + ([left] if left else [])
    whole, left = divmod(plan.num_test_samples, plan.batch_size)
    tests = [plan.batch_size] * whole + ([left] if left else [])
    expected = epoch * plan.num_epochs + tests
    assert [schedule.num_rows(number) for number in range(len(schedule))] == expected
    assert [schedule[number].num_rows for number in range(len(schedule))] == expected
    assert max(expected) == schedule.largest_batch


@settings(max_examples=50)
@given(plan=plans, data=st.data())
def test_rounds_are_the_same_on_every_instance_and_in_any_order(plan, data):
    in_order = [current.rows.tolist() for current in plan.schedule]
    other = Plan.from_json(plan.to_json()).schedule
    assert other is not plan.schedule
    for number in data.draw(st.lists(st.integers(0, len(in_order) - 1), max_size=30)):
        assert other[number].rows.tolist() == in_order[number]
        assert other[number].number == number


@given(plan=plans, data=st.data())
def test_rows_of_several_rounds_are_those_of_each_in_turn(plan, data):
    first = data.draw(st.integers(0, len(plan.schedule) - 1))
    until = data.draw(st.integers(first + 1, plan.schedule.pass_of(first)[1]))
    each = [row for number in range(first, until) for row in plan.schedule[number].rows.tolist()]
    assert plan.schedule.rows_between(first, until).tolist() == each


def test_rows_that_are_handed_out_cannot_be_written_to():
    """They are kept and shared: a role that wrote to them would move the rows of every other role in its process."""
    plain = plan_of(40, 10, tests=6).schedule
    phases = (Phase(kind=LOCAL, passes=2), Phase(kind=LOCAL, passes=1, order=Order.FIXED), Phase(kind=FUSION, passes=1))
    fused = dataclasses.replace(plain, phases=(*phases, *plain.phases), num_fusion_samples=9)
    for schedule in (plain, fused):
        for number in range(len(schedule)):
            current = schedule[number]
            before = current.rows.tolist()
            handed_out = current.rows, current.rising, schedule.rows_between(number, number + 1)
            for rows in (*handed_out, schedule.part_of(current.kind)):
                with pytest.raises(ValueError, match="read-only"):
                    rows[0] = 0
            assert schedule[number].rows.tolist() == before


def test_epochs_differ_and_seeds_differ():
    orders = set()
    for seed in (0, 1, 2**63 - 1):
        schedule = plan_of(100, 100, num_epochs=5, seed=seed).schedule
        orders |= {tuple(schedule[number].rows.tolist()) for number in range(5)}
    assert len(orders) == 15  # two equal by chance: 105 / 100!


def test_nothing_but_rows_batches_and_seed_moves_the_schedule():
    plan = plan_of(100, 30)
    other = plan.replace(num_parties=7, num_trials=3, beta=0.1, learning_rate=0.5, num_epochs=9, embedding_dim=2)
    first, second = plan.schedule, other.schedule
    for number in range(len(first)):
        assert first[number].rows.tolist() == second[number].rows.tolist()


@pytest.mark.parametrize("number", [-1, 12, 10**9])
def test_rounds_outside_the_plan_do_not_exist(number):
    schedule = plan_of(100, 30).schedule
    assert len(schedule) == 12
    for ask in (schedule.num_rows, schedule.__getitem__):
        with pytest.raises(IndexError, match=f"round={number}"):
            ask(number)


@given(count=st.integers(1, 50), seed=st.integers(0, 2**63 - 1), index=st.integers(0, 2**32))
def test_public_words_are_philox_4x64_and_streams_do_not_meet(count, seed, index):
    words = public_bits(count, seed=seed, stream=3, index=index)
    assert words.tolist() == slow_philox(seed, 3 * 2**48 + index, count)
    others = [public_bits(4, seed=seed, stream=stream, index=at) for stream, at in ((4, index), (3, index + 1))]
    assert all(other[:4].tolist() != words[:4].tolist() for other in others)


def slow_philox(low_key: int, high_key: int, count: int) -> list[int]:
    """Philox-4x64 with ten rounds (Salmon et al., 2011), counter from 1, in Python's integers."""
    word = 2**64
    found: list[int] = []
    counter = 0
    while len(found) < count:
        counter += 1
        x, keys = [counter, 0, 0, 0], [low_key, high_key]
        for _ in range(10):
            first, second = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
            x = [second // word ^ x[1] ^ keys[0], second % word, first // word ^ x[3] ^ keys[1], first % word]
            keys = [(keys[0] + 0x9E3779B97F4A7C15) % word, (keys[1] + 0xBB67AE8584CAA73B) % word]
        found += x
    return found[:count]


@given(count=st.integers(1, 100), seed=st.integers(0, 2**63 - 1))
def test_a_permutation_sorts_the_public_words(count, seed):
    words = public_bits(count, seed=seed, stream=1)
    order = public_permutation(count, seed=seed, stream=1).tolist()
    assert order == sorted(range(count), key=words.tolist().__getitem__)


def test_first_places_are_spread_over_all_rows():
    # 20,000 epochs of 16 rows: each place of the first row expects 1,250; false alarm at most 1e-9.
    from support import statistical

    places = [public_permutation(16, seed=5, stream=1, index=epoch)[0] for epoch in range(20_000)]
    assert not statistical.uniform_law_rejects(np.bincount(places, minlength=16))
