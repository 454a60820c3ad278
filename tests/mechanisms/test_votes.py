"""Votes: total, inside their range, and read back as what they were. Oracles are loops over Python's own numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.crypto.ring import Floats, Ring
from pbmvfl.crypto.secure_sum import PackedIntegers
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import PolyaLaplace, RandomisedSymbols
from pbmvfl.mechanisms.votes import LARGEST_SYMBOLS, SYMBOLIC, Vote, VoteKind

TWO = [VoteKind.MARGIN, VoteKind.BINS]
odd_scores = arrays.arrays(
    np.float32,
    st.tuples(st.integers(0, 6), st.integers(2, 9)),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
)


def known(value: float) -> float:
    """What a score counts as."""
    return 0.0 if math.isnan(value) else min(max(value, -1e30), 1e30)


def the_symbol(vote: Vote, scores: list[float]) -> int:
    """By sorting."""
    numbers = [known(each) for each in scores]
    order = sorted(range(len(numbers)), key=lambda k: (-numbers[k], k))
    pairs = [(a, b) for a in range(len(numbers)) for b in range(len(numbers)) if a != b]
    symbol = pairs.index((order[0], order[1])) if vote.kind is VoteKind.RANKS else order[0]
    lead = math.tanh(vote.gain * (numbers[order[0]] - numbers[order[1]]) / 2)
    return symbol * vote.grades + min(int(lead * vote.grades), vote.grades - 1)


@pytest.mark.parametrize("kind", list(VoteKind))
@settings(max_examples=60, deadline=None)
@given(scores=odd_scores, gain=st.floats(1e-6, 1e6), bound=st.sampled_from([1e-3, 1.0, 2.5, 1e4]))
def test_whatever_the_scores_are_a_vote_is_in_its_range(
    kind: VoteKind, scores: np.ndarray[Any, Any], gain: float, bound: float
) -> None:
    scores = scores[:, :2] if kind in TWO else scores
    vote = Vote(kind=kind, gain=gain, bound=bound, grades=3 if kind in SYMBOLIC else 1)
    cast = vote(scores)
    assert cast.dtype == np.float32
    assert cast.shape == (len(scores), vote.width(scores.shape[1]))
    assert np.all(np.abs(cast) <= np.float32(bound))  # NaN would fail
    if kind is VoteKind.SHARES:
        assert np.all(cast >= 0)
        assert np.all(cast.astype(np.float64).sum(axis=1) <= bound * (1 + 1e-6))


@pytest.mark.parametrize("kind", sorted(SYMBOLIC))
@settings(max_examples=60, deadline=None)
@given(scores=odd_scores, bound=st.sampled_from([1e-3, 1.0, 3.7]), grades=st.integers(1, 3))
def test_randomised_response_rounds_a_vote_to_its_very_symbol(
    kind: VoteKind, scores: np.ndarray[Any, Any], bound: float, grades: int
) -> None:
    scores = scores[:, :2] if kind is VoteKind.BINS else scores
    vote = Vote(kind=kind, bound=bound, grades=11 if kind is VoteKind.BINS else grades)
    symbols = vote.symbols(scores.shape[1])
    assert symbols is not None
    mechanism = RandomisedSymbols(num_parties=3, embedding_dim=1, symbols=symbols, bound=bound)
    expected = vote.symbol(scores)
    assert expected.dtype == np.int64
    assert mechanism.bins(vote(scores))[:, 0].tolist() == expected.tolist()
    if kind is not VoteKind.BINS:
        assert expected.tolist() == [the_symbol(vote, row) for row in scores.tolist()]


@pytest.mark.parametrize("symbols", range(2, LARGEST_SYMBOLS + 1, 3))
def test_every_symbol_has_a_centre_of_its_own(symbols: int) -> None:
    vote = Vote(kind=VoteKind.TOP, bound=0.3)
    mechanism = RandomisedSymbols(num_parties=2, embedding_dim=1, symbols=symbols, bound=0.3)
    assert mechanism.bins(vote(np.eye(symbols)))[:, 0].tolist() == list(range(symbols))


@pytest.mark.parametrize("gain", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("bins", [2, 3, 16])
def test_bins_are_equal_parts_of_the_logistic(gain: float, bins: int) -> None:
    vote = Vote(kind="bins", gain=gain, grades=bins)  # type: ignore[arg-type]  # names are taken too
    margins = np.linspace(-9, 9, 501) / gain
    scores = np.stack([np.full(501, 0.4), 0.4 + margins], axis=1)
    found = vote.symbol(scores)
    places = [bins / (1 + math.exp(-gain * (b - a))) for a, b in scores.tolist()]
    sure = [i for i, place in enumerate(places) if abs(place - round(place)) > 1e-9]
    assert [found[i] for i in sure] == [int(places[i]) for i in sure]
    assert len(sure) > 490
    assert sorted(set(found.tolist())) == list(range(bins))


def test_shares_and_margins_are_what_they_say() -> None:
    rows = [[0.1, 2.0, -1.0], [0.0, 0.0, 0.0], [5.0, 4.0, 3.0]]
    cast = Vote(kind=VoteKind.SHARES, gain=0.7)(np.array(rows))
    for row, found in zip(rows, cast.tolist(), strict=True):
        total = sum(math.exp(0.7 * each) for each in row)
        assert found == pytest.approx([math.exp(0.7 * each) / total for each in row], rel=1e-6)
    pairs = np.array([[0.2, 0.9], [1.0, -1.0]])
    margin = Vote(kind=VoteKind.MARGIN, gain=0.5, bound=2.0)(pairs)[:, 0].tolist()
    assert margin == pytest.approx([2 * 0.35, -2], rel=1e-6)


def test_sums_of_votes_are_decoded_into_scores_of_the_classes() -> None:
    margin = Vote(kind=VoteKind.MARGIN)
    decoded = margin.decode_sums(np.array([[1.5], [-0.5]], dtype=np.float32))
    assert (decoded[:, 1] - decoded[:, 0]).tolist() == [1.5, -0.5]
    assert decoded.argmax(axis=1).tolist() == [1, 0]
    sums = np.array([[0.1, 0.7, 0.2]], dtype=np.float32)
    for kind in (VoteKind.SHARES, VoteKind.RAW, VoteKind.BALLOT):
        assert Vote(kind=kind).decode_sums(sums).tolist() == sums.tolist()
    for kind in SYMBOLIC:
        with pytest.raises(PlanError, match="read party by party"):
            Vote(kind=kind, grades=2).decode_sums(sums)
    for kind in set(VoteKind) - SYMBOLIC:
        assert Vote(kind=kind).symbols(3) is None
        if kind is not VoteKind.BALLOT:
            with pytest.raises(PlanError, match="is no symbol"):
                Vote(kind=kind).symbol(sums)


def test_a_ballot_is_one_for_the_class_with_the_largest_score() -> None:
    vote = Vote(kind=VoteKind.BALLOT, bound=2.0)
    scores = np.array([[0.1, 0.3, 0.2], [math.nan, -1.0, -2.0], [5.0, math.inf, 1.0], [1.0, 1.0, 1.0]])
    assert vote(scores).tolist() == [[0, 2, 0], [2, 0, 0], [0, 2, 0], [2, 0, 0]]
    assert vote.symbol(scores).tolist() == [1, 0, 1, 0]
    mechanism = PolyaLaplace(num_parties=2, embedding_dim=3, levels=1, bounded_total=True, bound=2.0)
    assert mechanism.integers(vote(scores)).tolist() == [[0, 1, 0], [1, 0, 0], [0, 1, 0], [1, 0, 0]]


def test_exact_sums_of_three_parties_survive_a_mechanism_with_hardly_any_noise() -> None:
    rng = np.random.default_rng(3)
    parts = rng.normal(size=(3, 50, 2)).astype(np.float32)
    vote = Vote(kind=VoteKind.MARGIN, gain=0.5)
    mechanism = PolyaLaplace(num_parties=3, embedding_dim=1, levels=4096, scale=1 / 16, secure_aggregation=True)
    sent = [mechanism.payload.encode(mechanism.randomize(vote(part), SystemEntropy())) for part in parts]
    estimated = mechanism.estimate(mechanism.payload.total(sent, 50)).reshape(50, 1)
    exact = np.clip(0.5 * (parts[:, :, 1] - parts[:, :, 0]), -1, 1).sum(axis=0)
    assert np.abs(estimated[:, 0] - exact).max() < 0.002


@pytest.mark.parametrize("bits", [1, 2, 4, 7, 8, 9, 16, 17, 32])
def test_each_party_s_integers_are_read_apart_and_add_up_to_the_total(bits: int) -> None:
    form = PackedIntegers(bits=bits, ring=Ring(bits))
    kind = np.uint16 if bits <= 16 else np.uint32
    values = np.random.default_rng(bits).integers(0, 1 << bits, (4, 37)).astype(kind)
    payloads = [form.encode(row) for row in values]
    assert form.each(payloads, 37).tolist() == values.tolist()
    total = [sum(int(row[i]) for row in values) % (1 << bits) for i in range(37)]
    assert form.total(payloads, 37).tolist() == total
    assert form.each([], 37).shape == (0, 37)


def test_each_party_s_floats_are_read_apart() -> None:
    values = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    assert np.array_equal(Floats().each([Floats().encode(row) for row in values], 5), values)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"kind": "nope"}, "vote='nope' is not one of raw, margin"),
    ({"gain": 0.0}, "vote_gain=0 must be in"),
    ({"gain": math.nan}, "vote_gain=nan must be a finite"),
    ({"gain": -1.0}, "vote_gain=-1 must be in"),
    ({"bound": 0.0}, "vote_bound=0 must be in"),
    ({"grades": 0}, "vote_grades=0 must be"),
    ({"grades": 257}, "vote_grades=257 must be"),
    ({"grades": 2.5}, "vote_grades=2.5 must be"),
    ({"kind": "bins", "grades": 1}, "vote_grades=1 must be .*of at least 2 for vote=bins"),
    ({"kind": "margin", "grades": 2}, "vote_grades=2 must be at most 1 for vote=margin"),
]


@pytest.mark.parametrize(("numbers", "words"), BAD, ids=str)
def test_numbers_out_of_range_are_named(numbers: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Vote(**{"kind": "top", **numbers})


@pytest.mark.parametrize(("kind", "classes"), [("margin", 3), ("bins", 10), ("ranks", 17), ("top", 257), ("top", 1)])
def test_a_number_of_classes_that_a_vote_is_not_for_is_refused(kind: VoteKind, classes: int) -> None:
    with pytest.raises(PlanError, match=f"num_classes={classes}"):
        Vote(kind=kind, grades=2 if kind == "bins" else 1).check_classes(classes)
    Vote(kind=VoteKind.SHARES).check_classes(max(classes, 2))


def test_a_vote_has_a_plain_form() -> None:
    vote = Vote(kind=VoteKind.BINS, gain=2.0, grades=4)
    assert vote.to_dict() == {"kind": "bins", "gain": 2.0, "grades": 4, "bound": 1.0}
    assert Vote(**vote.to_dict()) == vote


# --- symbols as the scores that they stand for ---


@pytest.mark.parametrize(
    ("vote", "num_classes"),
    [
        (Vote(kind=VoteKind.BINS, gain=0.6, grades=16), 2),
        (Vote(kind=VoteKind.TOP, gain=0.6), 3),
        (Vote(kind=VoteKind.TOP, gain=0.6, grades=4), 5),
        (Vote(kind=VoteKind.RANKS, gain=0.6, grades=3), 4),
    ],
    ids=str,
)
def test_a_symbol_stands_for_scores_that_become_this_symbol_again(vote: Vote, num_classes: int) -> None:
    scores = vote.symbol_scores(num_classes)
    assert scores.shape == (vote.symbols(num_classes), num_classes)
    assert vote.symbol(scores).tolist() == list(range(len(scores)))


def test_only_symbols_stand_for_scores() -> None:
    with pytest.raises(PlanError, match="vote=shares is no symbol; permitted: bins, ranks, top"):
        Vote(kind=VoteKind.SHARES).symbol_scores(3)


def test_symbols_are_read_as_bayes_would_where_each_party_is_believed_as_often_as_it_is_shown() -> None:
    """By enumeration: a party's symbol is its own with probability a, and else says nothing."""
    vote, a = Vote(kind=VoteKind.TOP, gain=1.0, grades=2), 0.8
    rows = np.array([[0, 5], [3, 2], [-1, 6]])
    found = np.exp(vote.read_symbols(rows, 3, kept=a).astype(np.float64))
    for row, each in zip(rows.tolist(), found, strict=True):
        expected = [1.0, 1.0, 1.0]
        for symbol in row:
            # Bins of tanh(lead / 2): 1/4 and 3/4 in the middle.
            lead = 2 * math.atanh([0.25, 0.75][symbol % 2])
            odds = [math.exp(lead) if symbol // 2 == k else 1.0 for k in range(3)]
            none = not 0 <= symbol < 6
            shares = [1 / 3 if none else a * each / sum(odds) + (1 - a) / 3 for each in odds]
            expected = [one * other for one, other in zip(expected, shares, strict=True)]
        assert (each / each.sum()).tolist() == pytest.approx([one / sum(expected) for one in expected], rel=1e-5)
