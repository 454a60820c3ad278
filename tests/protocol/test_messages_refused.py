"""The protocol: what does not fit is refused by its own error, and leaves no trace."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.crypto.ring import pack
from pbmvfl.errors import (
    BudgetExceeded,
    DataError,
    DuplicateMessage,
    EncoderError,
    IdentityError,
    NonFiniteMessage,
    OutOfOrder,
    PartyRefused,
    ProtocolError,
    TruncatedMessage,
    WrongPlan,
    WrongSender,
    WrongSession,
    WrongVersion,
)
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.protocol.party import Party
from pbmvfl.protocol.server import Server
from pbmvfl.training.encoders import Bounded
from support.known_randomness import TwinSetup

#: field -> (offset, bytes): the documented header.
FIELDS = {
    "magic": (0, 4),
    "version": (4, 1),
    "kind": (5, 1),
    "sender": (6, 2),
    "run": (8, 8),
    "session": (16, 16),
    "round": (32, 4),
    "length": (36, 4),
    "round kind": (40, 1),
    "flags": (41, 1),
}
HEADER = 44
HELLO, NONCES, KEY, KEYS, ROUND, EMBEDDING, UPDATE, START, STOP, REFUSAL = range(1, 11)
JOINT, PREDICTION = 1, 2
Disturbance = tuple[str, bytes, type[ProtocolError]]


def field(message: bytes, name: str) -> int:
    offset, size = FIELDS[name]
    return int.from_bytes(message[offset : offset + size], "little")


def edited(message: bytes, **fields: int) -> bytes:
    changed = bytearray(message)
    for name, value in fields.items():
        offset, size = FIELDS[name.replace("_", " ")]
        changed[offset : offset + size] = (value % 256**size).to_bytes(size, "little")
    return bytes(changed)


def with_payload(message: bytes, payload: bytes) -> bytes:
    return edited(message[:HEADER], length=len(payload)) + payload


def kind_of(message: bytes) -> int:
    return field(message, "kind")


#: The upper halves of infinities and NaNs.
NOT_NUMBERS = (0x7F80, 0xFF80, 0x7FC0, 0xFFFF)


def not_finite(payload: bytes, codec: str, index: int, half: int) -> bytes:
    """The payload with one number that is none: value `index`, or with int8 the scale of row `index`."""
    offset = 4 * index + 2 if codec == "float32" else 2 * index
    return payload[:offset] + half.to_bytes(2, "little") + payload[offset + 2 :]


def common(message: bytes) -> Iterator[Disturbance]:
    """What nobody accepts at any time."""
    for length in (0, 1, HEADER - 1, len(message) - 1):
        yield f"cut to {length}", message[:length], TruncatedMessage
    yield "one byte more", message + b"\0", TruncatedMessage
    yield "a shorter announced length", edited(message, length=field(message, "length") + 1), TruncatedMessage
    yield "another format", edited(message, magic=0), WrongVersion
    yield "the next version", edited(message, version=3), WrongVersion
    yield "an unknown kind", edited(message, kind=13), WrongVersion
    if kind_of(message) != START:  # a start is what names the run, and there is no session yet
        yield "another run", edited(message, run=field(message, "run") ^ 1), WrongSession
    if kind_of(message) not in (START, HELLO):
        yield "another session", edited(message, session=field(message, "session") ^ 1), WrongSession


def for_a_party(party: Party, message: bytes) -> Iterator[Disturbance]:
    yield from common(message)
    payload = message[HEADER:]
    for sender in (0, party.index, party.plan.num_parties):
        yield f"from {sender}", edited(message, sender=sender), WrongSender
    for kind in (HELLO, KEY, EMBEDDING, REFUSAL):
        yield f"of kind {kind}", edited(message, kind=kind), WrongSender
    for kind in {START, NONCES, KEYS, ROUND, UPDATE} - {kind_of(message)}:
        yield f"of kind {kind}", edited(message, kind=kind), OutOfOrder
    if kind_of(message) in (START, NONCES, KEYS):
        yield "a stop before the first round", edited(message, kind=STOP), OutOfOrder
    if kind_of(message) == START:
        yield "another plan", with_payload(message, bytes(32)), WrongPlan
        yield "half a plan", with_payload(message, payload[:16]), TruncatedMessage
    elif kind_of(message) == NONCES:
        yield "another plan", with_payload(message, bytes(32) + payload[32:]), WrongPlan
        yield "a nonce missing", with_payload(message, payload[:-32]), TruncatedMessage
        yield "a changed nonce", with_payload(message, payload[:-1] + bytes([payload[-1] ^ 1])), WrongSession
        stale = payload[:32] + hashlib.sha256(b"an earlier session").digest() * party.plan.num_parties
        yield "an earlier session", consistent_nonces(message, stale), WrongSession
        yield "another first round", edited(message, round=4), WrongSession
        yield "a first round that it never kept", consistent_nonces(edited(message, round=4), payload), OutOfOrder
    elif kind_of(message) == KEYS:
        yield "a key missing", with_payload(message, payload[:-96]), TruncatedMessage
        yield "a byte missing", with_payload(message, payload[:-1]), TruncatedMessage
        for index in range(party.plan.num_parties):
            changed = bytearray(payload)
            changed[96 * index] ^= 1
            yield f"the key of {index} changed", with_payload(message, bytes(changed)), IdentityError
        yield "keys in another order", with_payload(message, payload[96:] + payload[:96]), IdentityError
    else:
        number, carries = field(message, "round"), field(message, "flags")
        for other in (number + 1, number - 2, number + 2**31):
            yield f"round {other}", edited(message, round=other), OutOfOrder
        other_kind = PREDICTION if field(message, "round kind") == JOINT else JOINT
        for round_kind in (other_kind, 0, 3):
            yield f"round kind {round_kind}", edited(message, round_kind=round_kind), WrongPlan
        if carries:
            yield "no gradient", with_payload(edited(message, flags=0), b""), OutOfOrder
            yield "a gradient that is not one", edited(message, flags=0), OutOfOrder
            yield "a short gradient", with_payload(message, payload[:-1]), TruncatedMessage
            yield "a long gradient", with_payload(message, payload + b"\0"), TruncatedMessage
            yield "an empty gradient", with_payload(message, b""), TruncatedMessage
            for half in NOT_NUMBERS:
                spoiled = not_finite(payload, party.plan.gradient_codec, 0, half)
                yield f"a gradient with {half:#x}", with_payload(message, spoiled), NonFiniteMessage
        else:
            yield "a gradient too many", with_payload(edited(message, flags=1), bytes(120)), OutOfOrder
            yield "a payload too many", with_payload(message, bytes(120)), TruncatedMessage


def consistent_nonces(message: bytes, payload: bytes) -> bytes:
    """Nonces with the session that they make: SHA-256 of label, version, count, plan, run and nonces."""
    count = (len(payload) - 32) // 32
    agreed = b"pbmvfl session\0" + (2).to_bytes(2, "little") + count.to_bytes(2, "little") + message[32:36]
    digest = hashlib.sha256(agreed + payload[:32] + message[8:16] + payload[32:]).digest()
    return with_payload(edited(message, session=int.from_bytes(digest[:16], "little")), payload)


def for_a_server(server: Server, message: bytes) -> Iterator[Disturbance]:
    yield from common(message)
    payload = message[HEADER:]
    for sender in (server.plan.num_parties, 0xFFFE, 0xFFFF):
        yield f"from {sender}", edited(message, sender=sender), WrongSender
    for kind in set(range(1, 10)) - {kind_of(message)}:
        yield f"of kind {kind}", edited(message, kind=kind), OutOfOrder
    yield "a byte less", with_payload(message, payload[:-1]), TruncatedMessage
    yield "a byte more", with_payload(message, payload + b"\0"), TruncatedMessage
    yield "nothing in it", with_payload(message, b""), TruncatedMessage
    if kind_of(message) == HELLO:
        yield "another plan", with_payload(message, bytes(32) + payload[32:]), WrongPlan
    if kind_of(message) == EMBEDDING:
        for other in (field(message, "round") + 1, field(message, "round") - 1):
            yield f"round {other}", edited(message, round=other), OutOfOrder
        for round_kind in (0, 3 - field(message, "round kind")):
            yield f"round kind {round_kind}", edited(message, round_kind=round_kind), WrongPlan
        if server.plan.mechanism != "pbm":
            for half in NOT_NUMBERS:
                spoiled = not_finite(payload, "float32", 0, half)
                yield f"an embedding with {half:#x}", with_payload(message, spoiled), NonFiniteMessage


#: What both roles refuse.
COMMON = {TruncatedMessage, WrongVersion, WrongSession, WrongPlan, WrongSender, OutOfOrder}

PLANS = [
    {"evaluation": "released"},
    {"evaluation": "released", "gradient_codec": "int8", "optimizer": "adam"},
    {"mechanism": "none"},
    {"mechanism": "ldp", "gradient_codec": "bfloat16", "momentum": 0.5, "secure_aggregation": False},
]


def same_state(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def weights(party: Party) -> dict[str, torch.Tensor]:
    """All that a checkpoint of the party would hold."""
    return party.network.update.state()


def assert_twins(one, other) -> None:
    assert one.transcript == other.transcript
    assert same_state(one.server.state(), other.server.state())
    assert all(same_state(weights(a), weights(b)) for a, b in zip(one.parties, other.parties, strict=True))


@pytest.mark.parametrize("choices", PLANS, ids=str)
def test_twins_with_known_randomness_make_the_same_bytes(choices, data, make_plan, make_cohort):
    plan = make_plan(data, **choices)
    one, other = make_cohort(plan, data), make_cohort(plan, data)
    assert one.run() is None
    assert other.run() is None
    assert one.server.completed_rounds == len(plan.schedule)
    assert_twins(one, other)
    assert len({message for way, _, message in one.transcript if way == "up"}) == len(
        [1 for way, _, _ in one.transcript if way == "up"]
    )


@pytest.mark.parametrize("choices", PLANS, ids=str)
def test_a_party_refuses_what_does_not_fit_and_stays_as_it_was(choices, data, make_plan, make_cohort):
    plan = make_plan(data, **choices)
    calm, disturbed = make_cohort(plan, data), make_cohort(plan, data)
    calm.run()
    refused: set[type[ProtocolError]] = set()

    def disturb(party: Party, message: bytes) -> None:
        for what, wrong, error in for_a_party(party, message):
            with pytest.raises(ProtocolError) as refusal:
                party.answer(wrong)
            assert type(refusal.value) is error, f"{what} (kind {kind_of(message)}): {refusal.value!r}"
            refused.add(error)
            said = party.receive(wrong)  # the same on the wire: no error travels, but a refusal in public words
            assert kind_of(said) == REFUSAL
            assert str(refusal.value).encode()[:400] == said[HEADER + 2 :]
        earlier = [old for way, index, old in disturbed.transcript if way == "down" and index == party.index]
        newest = next((old for old in reversed(earlier) if kind_of(old) == ROUND), b"")
        for old in earlier[:-1]:
            if old == newest:  # a retry, also after the message that ended its epoch
                own = [each for way, index, each in disturbed.transcript if way == "up" and index == party.index]
                assert party.answer(old) == own[-1]
                continue
            with pytest.raises(OutOfOrder):
                party.answer(old)

    disturbed.run(before_party=disturb)
    assert refused == {*COMMON, IdentityError, NonFiniteMessage}
    assert_twins(calm, disturbed)


@pytest.mark.parametrize("choices", PLANS, ids=str)
def test_a_server_refuses_what_does_not_fit_and_stays_as_it_was(choices, data, make_plan, make_cohort):
    plan = make_plan(data, **choices)
    calm, disturbed = make_cohort(plan, data), make_cohort(plan, data)
    calm.run()
    refused: set[type[ProtocolError]] = set()

    def disturb(server: Server, message: bytes) -> None:
        with pytest.raises(OutOfOrder, match="waiting for"):
            server.advance()
        for what, wrong, error in for_a_server(server, message):
            with pytest.raises(ProtocolError) as refusal:
                server.receive(wrong)
            assert type(refusal.value) is error, f"{what} (kind {kind_of(message)}): {refusal.value!r}"
            refused.add(error)

    def repeat(server: Server, message: bytes) -> None:
        other = message[:-1] + bytes([message[-1] ^ 1])
        for again in (message, other):
            with pytest.raises(DuplicateMessage):
                server.receive(again)

    disturbed.run(before_server=disturb, after_server=repeat)
    assert refused == {*COMMON, NonFiniteMessage} if plan.mechanism != "pbm" else COMMON
    assert_twins(calm, disturbed)


@pytest.mark.parametrize("choices", PLANS, ids=str)
def test_a_party_cannot_speak_in_another_s_name_on_a_line_that_is_known(choices, data, make_plan, make_cohort):
    plan = make_plan(data, **choices)
    calm, disturbed = make_cohort(plan, data), make_cohort(plan, data)
    calm.run()
    kinds = set()

    def disturb(server: Server, message: bytes) -> None:
        own = field(message, "sender")
        for line in {*range(plan.num_parties), plan.num_parties, 0xFFFF} - {own}:
            with pytest.raises(WrongSender, match=f"sender={own}: the message came from party {line}"):
                server.receive(message, sender=line)
        kinds.add(kind_of(message))

    def repeat(server: Server, message: bytes) -> None:
        with pytest.raises(DuplicateMessage):  # on its own line the sender is right, and the rest is looked at
            server.receive(message, sender=field(message, "sender"))

    disturbed.run(before_server=disturb, after_server=repeat)
    assert kinds == {HELLO, KEY, EMBEDDING}
    assert_twins(calm, disturbed)


def test_a_message_on_its_sender_s_own_line_is_taken(data, make_plan, make_cohort):
    cohort = make_cohort(make_plan(data), data)
    start = cohort.server.advance()
    assert kind_of(start) == START
    for line, party in enumerate(cohort.parties):
        cohort.server.receive(party.receive(start), sender=line)
    assert kind_of(cohort.server.advance()) == NONCES


@pytest.mark.parametrize("choices", PLANS, ids=str)
def test_a_retry_gets_the_same_bytes_and_only_for_the_same_request(choices, data, make_plan, make_cohort):
    plan = make_plan(data, **choices)
    calm, retried = make_cohort(plan, data), make_cohort(plan, data)
    calm.run()
    kinds = set()

    def retry(party: Party, message: bytes, answer: bytes) -> None:
        for _ in range(3):
            assert party.receive(message) == answer
        kinds.add(kind_of(message))
        for position in (6, 20, 33, 40, len(message) - 1):
            changed = bytearray(message)
            changed[position] ^= 1
            assert kind_of(party.receive(bytes(changed))) == REFUSAL

    retried.run(after_party=retry)
    assert kinds == {START, NONCES, KEYS, ROUND, UPDATE}
    assert_twins(calm, retried)


@pytest.mark.parametrize("choices", PLANS, ids=str)
def test_nothing_is_accepted_after_the_end(choices, data, make_plan, make_cohort):
    plan = make_plan(data, **choices)
    cohort = make_cohort(plan, data)
    cohort.run()
    states = [weights(party) for party in cohort.parties]
    last = len(plan.schedule)
    assert cohort.server.advance() is None
    assert cohort.server.advance() is None
    down = next(message for way, _, message in reversed(cohort.transcript) if way == "down")
    up = next(message for way, _, message in reversed(cohort.transcript) if way == "up")
    for message in (up, edited(up, round=last)):
        with pytest.raises(OutOfOrder, match="expects nothing"):
            cohort.server.receive(message)
    for party, state in zip(cohort.parties, states, strict=True):
        last_answer = party.receive(down)
        assert last_answer == party.receive(down)
        beyond = with_payload(edited(down, kind=ROUND, round=last, flags=0), b"")
        for round_kind in (JOINT, PREDICTION):
            with pytest.raises(OutOfOrder, match=f"rounds 0 to {last - 1}"):
                party.answer(edited(beyond, round_kind=round_kind))
        gradient = with_payload(edited(beyond, kind=UPDATE, round=last - 1, flags=1), bytes(84))
        with pytest.raises((OutOfOrder, WrongPlan)):
            party.answer(gradient)
        assert same_state(weights(party), state)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8"])
def in_the_middle(request, data, make_plan, make_cohort):
    """A cohort that has been asked for round 2 and has not heard it yet, with that request."""
    cohort = make_cohort(make_plan(data, gradient_codec=request.param), data)
    return cohort, cohort.run(until=lambda message: kind_of(message) == ROUND and field(message, "round") == 2)


@given(position=st.integers(0, HEADER - 1), bit=st.integers(0, 7))
@settings(max_examples=352)
def test_every_bit_of_a_request_s_header_counts(in_the_middle, position, bit):
    cohort, request = in_the_middle
    changed = bytearray(request)
    changed[position] ^= 1 << bit
    with pytest.raises(ProtocolError):
        cohort.parties[0].answer(bytes(changed))


@given(
    noise=st.binary(max_size=300),
    start=st.integers(0, HEADER),
    what=st.sampled_from(["bytes", "a payload", "a gradient"]),
    spoiled=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(NOT_NUMBERS)), min_size=1, max_size=3),
)
@settings(max_examples=300)
def test_random_bytes_never_raise_anything_but_protocol_errors(in_the_middle, noise, start, what, spoiled):
    cohort, request = in_the_middle
    wrong = request[:start] + noise
    if what == "a payload":
        wrong = with_payload((wrong + request[len(wrong) :])[:HEADER], noise)
    if what == "a gradient":  # of the right length, so that everything fits but some of its numbers, which are none
        gradient = (noise * len(request))[: len(request) - HEADER] or request[HEADER:]
        for index, half in spoiled:
            gradient = not_finite(gradient, cohort.plan.gradient_codec, index, half)
        wrong = request[:HEADER] + gradient
    # A finite gradient of the right length is a gradient: there is nothing wrong with it.
    assume(what == "a gradient" or wrong[:HEADER] != request[:HEADER] or len(wrong) != len(request))
    for take, error in ((cohort.parties[1].answer, NonFiniteMessage), (cohort.server.receive, WrongSender)):
        with pytest.raises(ProtocolError) as refusal:
            take(wrong)
        if what == "a gradient":
            assert type(refusal.value) is error
    assert kind_of(cohort.parties[1].receive(wrong)) == REFUSAL


def test_after_all_that_the_middle_still_accepts_the_right_request(in_the_middle, data, make_cohort):
    cohort, request = in_the_middle
    calm = make_cohort(cohort.plan, data)
    twin = calm.run(until=lambda message: kind_of(message) == ROUND and field(message, "round") == 2)
    assert request == twin
    assert [p.receive(request) for p in cohort.parties] == [p.receive(request) for p in calm.parties]


# --- a party that cannot answer ---


def built(plan, data, index: int, *, train=None, test=None, encoder=None) -> Party:
    """A party of its own, with the identities of a cohort."""
    identities = [Identity.from_private_bytes(bytes([100 + i]) * 32) for i in range(plan.num_parties)]
    return TwinSetup(
        plan=plan,
        index=index,
        identity=identities[index].private_bytes(),
        identities=tuple(identity.public for identity in identities),
        train_features=data.train_features[index] if train is None else train,
        test_features=data.test_features[index] if test is None else test,
    ).build(encoder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2e9])
def test_columns_that_are_no_numbers_are_refused_before_there_is_a_party(value, data, make_plan):
    columns = data.train_features[1].copy()
    columns[-1, 2] = value
    with pytest.raises(DataError, match=r"party=1: row 36 of its train rows, column \[2\]"):
        built(make_plan(data), data, 1, train=columns)
    columns = data.test_features[1].copy()
    columns[3, 0] = value
    with pytest.raises(DataError, match=r"party=1: row 3 of its test rows, column \[0\]"):
        built(make_plan(data), data, 1, test=columns)


def test_an_encoder_of_the_wrong_width_is_refused_before_there_is_a_party(data, make_plan):
    plan = make_plan(data)
    wide = Bounded(torch.nn.Linear(4, plan.embedding_dim + 1))
    with pytest.raises(EncoderError, match=r"party=2: .*shape=\(4,\), the plan needs shape=\(3,\)"):
        built(plan, data, 2, encoder=wide)


class Refusing:
    """A guard that refuses what it is told to refuse."""

    def __init__(self) -> None:
        self.refuses = False

    def charge(self, current, events) -> None:
        del current, events
        if self.refuses:
            raise BudgetExceeded("dataset 'secret name' would come to epsilon 9 in /home/owner/ledger.sqlite")

    def close(self) -> None: ...


def test_a_request_that_was_refused_can_be_answered_later_and_its_gradient_counts_once(data, make_plan, make_cohort):
    plan = make_plan(data, mechanism="none")  # noise drawn for a failed attempt would be gone: only exact runs compare
    calm, cohort = make_cohort(plan, data), make_cohort(plan, data)
    calm.run()
    guard = Refusing()
    cohort.parties[1].guard_with(guard)
    attempts = []

    def refuse(party: Party, message: bytes) -> None:
        if party.index != 1 or kind_of(message) != ROUND:
            return
        guard.refuses = True
        for _ in range(2):
            with pytest.raises(BudgetExceeded):
                party.answer(message)
            said = party.receive(message)
            assert kind_of(said) == REFUSAL
            assert said[HEADER + 2 :] == b"a limit that its owner set would be crossed; nothing was sent"
        guard.refuses = False
        attempts.append(field(message, "flags"))

    cohort.run(before_party=refuse)
    assert set(attempts) == {0, 1}  # requests with and without a gradient
    assert_twins(calm, cohort)


def test_rows_that_are_not_the_plan_s_are_refused(data, make_plan):
    plan = make_plan(data, evaluation="released")
    with pytest.raises(WrongPlan, match="36 rows"):
        built(plan, data, 0, train=data.train_features[0][:-1])
    with pytest.raises(WrongPlan, match="36 labels"):
        Server(plan, train_labels=data.train_labels[:-1])


def test_test_rows_that_are_not_the_plan_s_are_refused(data, make_plan):
    plan = make_plan(data, evaluation="released")
    with pytest.raises(WrongPlan):
        built(plan, data, 0, test=data.test_features[0][:-1])


def test_an_identity_that_is_not_pinned_at_the_party_s_index_is_refused(data, make_plan):
    plan = make_plan(data)
    identities = [Identity.generate() for _ in range(plan.num_parties)]
    pinned = tuple(identity.public for identity in identities)
    inputs = {"plan": plan, "index": 0, "train_features": data.train_features[0], "test_features": None}
    for own, known in ((identities[1], pinned), (identities[0], pinned[:-1])):
        with pytest.raises(WrongPlan, match="pinned identities"):
            PartySetup(**inputs, identity=own.private_bytes(), identities=known).build()


def test_identities_that_are_not_everybody_s_own_are_refused(data, make_plan):
    plan = make_plan(data)
    identities = [Identity.generate() for _ in range(plan.num_parties)]
    pinned = tuple(identity.public for identity in identities)
    inputs = {"plan": plan, "index": 0, "train_features": data.train_features[0], "test_features": None}
    for known, what in (
        ((pinned[0], pinned[1], pinned[1]), "party=1 and party=2 have the same pinned identity"),
        ((pinned[0], pinned[1], pinned[0]), "party=0 and party=2 have the same pinned identity"),
        ((pinned[0], pinned[1][:-1], pinned[2]), "party=1: its pinned identity has 31 bytes"),
        ((pinned[0], pinned[1], pinned[2] + b"x"), "party=2: its pinned identity has 33 bytes"),
    ):
        with pytest.raises(WrongPlan, match=what):
            PartySetup(**inputs, identity=identities[0].private_bytes(), identities=known).build()


def test_a_gradient_that_is_not_finite_does_not_reach_the_weights(data, make_plan, make_cohort):
    cohort = make_cohort(make_plan(data), data)
    request = cohort.run(until=lambda message: kind_of(message) == ROUND and field(message, "round") == 1)
    party = cohort.parties[0]
    before = weights(party)
    with pytest.raises(NonFiniteMessage):
        party.answer(with_payload(request, np.full(30, np.nan, dtype="<f4").tobytes()))
    assert same_state(weights(party), before)


def test_an_embedding_that_is_not_finite_does_not_reach_the_server_s_weights(data, make_plan, make_cohort):
    cohort = make_cohort(make_plan(data, mechanism="none"), data)
    request = cohort.run(until=lambda message: kind_of(message) == ROUND and field(message, "round") == 1)
    answers = [party.receive(request) for party in cohort.parties]
    before = cohort.server.state()
    with pytest.raises(NonFiniteMessage):
        cohort.server.receive(with_payload(answers[0], np.full(30, np.nan, dtype="<f4").tobytes()))
    assert same_state(cohort.server.state(), before)
    for answer in answers:  # the refused one left no trace, and its sender may still send the right one
        cohort.server.receive(answer)
    assert kind_of(cohort.server.advance()) == ROUND


def test_a_sum_that_honest_parties_cannot_make_is_refused_by_the_server(data, make_plan, make_cohort):
    plan = make_plan(data, secure_aggregation=False, num_trials=4)  # values of 3 bits, sums of at most 12 in 4 bits
    cohort = make_cohort(plan, data)
    request = cohort.run(until=lambda message: kind_of(message) == ROUND and field(message, "round") == 1)
    before = cohort.server.state()
    for party in cohort.parties:
        answer = party.receive(request)
        values = np.full(30, 7 if party.index == 0 else 4, dtype=np.uint8)
        cohort.server.receive(with_payload(answer, pack(values, 3)))
    with pytest.raises(ProtocolError, match="round=1: a sum is 15, and honest parties make at most 12"):
        cohort.server.advance()
    assert same_state(cohort.server.state(), before)


def test_refusals_that_a_party_made_up_are_fit_to_be_printed(data, make_plan, make_cohort):
    cohort = make_cohort(make_plan(data), data)
    answer = cohort.parties[1].receive(cohort.server.advance())
    for words, shown in ((b"\x1b[2Jgone\n", "?[2Jgone?"), (b"\xff\xfe", "\ufffd\ufffd"), (b"", "")):
        said = with_payload(edited(answer, kind=REFUSAL), b"\x04\0" + words)
        with pytest.raises(PartyRefused) as refusal:
            cohort.server.receive(said, sender=1)
        assert (refusal.value.party, refusal.value.code, refusal.value.words) == (1, 4, shown)
    for payload in (b"", b"\x04", b"\x63\0words", b"\x04\0" + b"x" * 401):
        with pytest.raises(TruncatedMessage):
            cohort.server.receive(with_payload(edited(answer, kind=REFUSAL), payload), sender=1)
