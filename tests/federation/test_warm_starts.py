"""Weights that a run begins with are public, or are charged as weights that know the rows."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pbmvfl.errors import EncoderError, PlanError
from pbmvfl.federation.federation import Federation
from pbmvfl.federation.results import Result
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.spending import spending
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import OWN_START, PUBLIC_SCHEDULE, charges, epsilon_bounds, rdp_curve
from pbmvfl.privacy.events import WEIGHTS_STAY
from pbmvfl.privacy.units import SERVER, Accounting, Unit
from pbmvfl.training.encoders import Bounded, build_encoder, is_public_start, weights_digest
from pbmvfl.wire.messages import MessageKind
from support.ledger_books import NAME, charge_all, paper_limit
from support.ledger_books import small_plan as book_plan

STRICT: Limit = paper_limit(accounting="strict")


def public_networks(plan: Plan, data: Any) -> list[nn.Module]:
    return [
        build_encoder(plan, index=index, input_shape=part.shape[1:]) for index, part in enumerate(data.train_features)
    ]


def rate_of(plan: Plan) -> float:
    (kind,) = plan.schedule.kinds
    return float(plan.mechanism_for(kind).event.rdp(Unit.CELL, SERVER, (STRICT.order,))[0])


def test_trained_weights_that_open_a_new_run_get_no_discount(data, make_plan, tmp_path):
    """Oracle: after the first round of the first run every release of every row may be about any row."""
    plan = make_plan(data, num_epochs=1, batch_size=data.num_samples)
    networks = public_networks(plan, data)
    runs = 6
    results = [Federation(plan, encoders=networks).fit(data, ledger=tmp_path) for _ in range(runs)]
    book = Ledger(tmp_path / "party-0.sqlite")
    releases = 1 + (runs - 1) * plan.num_samples
    assert spending(book, data.name, STRICT).worst == pytest.approx(rate_of(plan) * releases, rel=1e-9)
    assert [entry.terms.public_start for entry in book.sessions(data.name)] == [True] + [False] * (runs - 1)
    assert [result.public_start for result in results] == [True] + [False] * (runs - 1)
    assert not any("own networks" in note for note in results[0].notes)
    assert any("own networks: their first weights are not the plan's public ones" in note for note in results[1].notes)


@pytest.mark.parametrize("start", ["the plan's", "declared", "own", "declared for another party"])
def test_first_weights_are_public_if_the_plan_makes_or_declares_them(start, data, make_plan, tmp_path):
    plan = make_plan(data)
    networks = public_networks(plan, data)
    if start != "the plan's":
        with torch.no_grad():
            for network in networks:
                next(network.parameters()).add_(1)
    digests = [weights_digest(network) for network in networks]
    if start == "declared":
        plan = plan.replace(first_weights=digests)
    elif start == "declared for another party":
        plan = plan.replace(first_weights=[*digests[1:], digests[0]])
    result = Federation(plan, encoders=networks).fit(data, ledger=tmp_path)
    public = start in ("the plan's", "declared")
    assert [session.public_start for session in result.sessions] == [public]
    spent = spending(Ledger(tmp_path / "party-1.sqlite"), data.name, STRICT).worst
    first_batch = plan.schedule.num_rows(0)
    releases = plan.num_epochs * plan.num_samples - (first_batch - 1 if public else 0)
    assert spent == pytest.approx(rate_of(plan) * releases, rel=1e-9)
    # the run's own account says the same, and reads it back
    expected = rdp_curve(
        plan.training_run(public_start=public), Unit.CELL, Accounting.STRICT, SERVER, orders=(STRICT.order,)
    )
    assert spent == pytest.approx(expected[0], rel=1e-9)
    (tmp_path / "result.json").write_text(result.to_json())
    assert Result.read(tmp_path / "result.json").public_start is public
    assert json.loads(result.to_json())["public_start"] is public


def test_one_party_with_weights_of_its_own_takes_the_discount_from_the_run(data, make_plan):
    plan = make_plan(data)
    networks = public_networks(plan, data)
    with torch.no_grad():
        next(networks[2].parameters()).mul_(1 + 2**-20)  # the smallest difference counts
    assert not Federation(plan, encoders=networks).fit(data).public_start


@pytest.mark.parametrize("public", [True, False])
def test_a_resumed_run_keeps_what_is_known_of_its_first_weights(public, data, make_plan, tmp_path):
    plan = make_plan(data, num_epochs=3)

    def networks() -> list[nn.Module]:
        made = public_networks(plan, data)
        if not public:
            with torch.no_grad():
                next(made[0].parameters()).add_(1)
        return made

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    folders = {"ledger": tmp_path / "books", "checkpoints": tmp_path / "checkpoints"}
    with pytest.raises(KeyboardInterrupt):
        Federation(plan, encoders=networks()).fit(data, on_epoch=interrupt, **folders)
    # a resume that is given public weights goes on with the trained ones all the same
    result = Federation(plan, encoders=public_networks(plan, data)).fit(data, **folders)
    assert [session.public_start for session in result.sessions] == [public, public]
    entries = Ledger(tmp_path / "books" / "party-0.sqlite").sessions(data.name)
    assert [entry.terms.public_start for entry in entries] == [public, public]
    assert entries[1].first_round > 0


def test_a_ledger_gives_no_discount_to_later_sessions_of_a_run_that_began_without(tmp_path):
    plan = book_plan()
    path = tmp_path / "a.sqlite"
    charge_all(Ledger(path), plan, rounds=1, public_start=False)
    charge_all(Ledger(path), plan, session="t", first_round=1, rounds=1, public_start=True)
    charge_all(Ledger(path), plan, run="another", rounds=1)
    assert [entry.terms.public_start for entry in Ledger(path).sessions(NAME)] == [False, False, True]


def test_weights_that_change_between_the_handshake_and_the_first_round_are_refused(data, make_plan, make_cohort):
    cohort = make_cohort(make_plan(data), data)

    def train_elsewhere(party: Any, message: bytes) -> None:
        if message[5] == MessageKind.ROUND and party.index == 1:
            with torch.no_grad():
                next(party.encoder.parameters()).add_(1)

    with pytest.raises(EncoderError, match="its weights changed between the handshake and the first round"):
        cohort.run(before_party=train_elsewhere)


# --- the strict count ---


@settings(max_examples=60, deadline=None)
@given(
    noise=st.sampled_from([0.0, 2.0]),
    unit=st.sampled_from([Unit.CELL, Unit.RECORD, Unit.PARTY]),
    pieces=st.lists(st.tuples(st.integers(0, 19), st.integers(1, 6)), min_size=1, max_size=3),
)
def test_without_public_weights_every_release_is_charged_everywhere(
    noise: float, unit: Unit, pieces: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Oracle: the number of rows of every round that was charged, whether updates are noisy or not."""
    plan = book_plan(noise_multiplier=noise)
    path = tmp_path_factory.mktemp("ledger") / "a.sqlite"
    reached = releases = 0
    for i, (anywhere, count) in enumerate(pieces):
        first = min(anywhere, reached)
        last = min(first + count, len(plan.schedule))
        reached = max(reached, last)
        charge_all(Ledger(path), plan, session=str(i), first_round=first, rounds=last - first, public_start=False)
        releases += sum(plan.schedule[number].num_rows for number in range(first, last))
    limit = replace(STRICT, unit=unit)
    rate = plan.release.event.rdp(unit, SERVER, (limit.order,))[0]
    assert spending(Ledger(path), NAME, limit).worst == pytest.approx(rate * releases, rel=1e-9)


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_the_account_of_a_run_without_public_weights_leaves_nothing_out(noise):
    plan = book_plan(noise_multiplier=noise)
    run = plan.training_run(public_start=False)
    assert run.first_batch == 1
    everything = plan.num_epochs * plan.num_samples
    assert charges(run, Unit.CELL, Accounting.STRICT) == (((everything, plan.release.event),),)
    assert charges(run, Unit.CELL, Accounting.PAPER) == charges(plan.training_run(), Unit.CELL, Accounting.PAPER)
    (strict,) = (
        bound.conditions
        for bound in epsilon_bounds(run, delta=1e-5, pld=False)
        if (bound.unit, bound.accounting) == (Unit.CELL, Accounting.STRICT)
    )
    assert OWN_START in strict
    assert WEIGHTS_STAY in strict  # noise on updates does not hide weights that were there before
    assert PUBLIC_SCHEDULE not in strict


# --- digests ---


@pytest.mark.parametrize(
    "change",
    [
        lambda network: network.register_buffer("more", torch.zeros(1), persistent=False),
        lambda network: network.register_parameter("more", nn.Parameter(torch.zeros(0))),
        lambda network: network.network[-1].to(torch.float64),
        lambda network: network.network[-1].bias.data.neg_(),
    ],
)
def test_whatever_a_network_computes_with_is_in_its_digest(change: Callable[[Any], object], data, make_plan):
    plan = make_plan(data)
    network = public_networks(plan, data)[0]
    changed = copy.deepcopy(network)
    assert weights_digest(changed) == weights_digest(network)
    change(changed)
    assert weights_digest(changed) != weights_digest(network)


def test_a_network_of_another_class_is_not_the_plan_s_although_its_weights_are(data, make_plan):
    class Remembering(nn.Linear):
        pass

    plan = make_plan(data)
    network = public_networks(plan, data)[0]
    shape = data.train_features[0].shape[1:]
    assert is_public_start(network, plan, index=0, input_shape=shape)
    assert not is_public_start(network, plan, index=1, input_shape=shape)
    other = Remembering(shape[0], plan.embedding_dim)
    other.load_state_dict(network.network[-1].state_dict())
    network.network[-1] = other
    assert not is_public_start(network, plan, index=0, input_shape=shape)


def test_a_network_without_its_weights_yet_is_not_public(data, make_plan):
    plan = make_plan(data)
    lazy = Bounded(nn.LazyLinear(plan.embedding_dim))
    with pytest.raises(EncoderError, match="has no bytes to be compared"):
        weights_digest(lazy)
    assert not is_public_start(lazy, plan, index=0, input_shape=data.train_features[0].shape[1:])


def test_a_plan_carries_declared_weights_in_every_form(data, make_plan):
    plan = make_plan(data)
    declared = plan.replace(first_weights=("ab" * 32,) * plan.num_parties)
    assert declared.first_weights == ("ab" * 32,) * plan.num_parties
    assert declared.hash != plan.hash
    for again in (Plan.from_json(declared.to_json()), Plan.of(**declared.flat()), declared.replace(seed=declared.seed)):
        assert again == declared
        assert again.hash == declared.hash
    assert "first_weights" not in plan.flat()
    assert "first_weights" not in plan.to_json()  # plans without keep the hash that they had


@pytest.mark.parametrize("bad", ["ab" * 32, ("ab" * 32,), ("AB" * 32,) * 3, ("ab" * 31,) * 3, (b"ab" * 32,) * 3, 7])
def test_digests_of_first_weights_are_checked_for_form_and_count(bad, data, make_plan):
    with pytest.raises(PlanError, match="first_weights"):
        make_plan(data, first_weights=bad)
