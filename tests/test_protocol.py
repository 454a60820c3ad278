"""The protocol: what does not fit is refused by its own error, and leaves no trace."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pbmvfl.encoders import Bounded
from pbmvfl.errors import (
    DuplicateMessage,
    EncoderError,
    IdentityError,
    NonFiniteError,
    NonFiniteMessage,
    OutOfOrder,
    ProtocolError,
    TruncatedMessage,
    WrongPlan,
    WrongSender,
    WrongSession,
    WrongVersion,
)
from pbmvfl.party import Party
from pbmvfl.secagg.keys import Identity
from pbmvfl.server import Server
from pbmvfl.transport.links import PartyInputs

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
HELLO, NONCES, KEY, KEYS, ROUND, EMBEDDING, UPDATE = range(1, 8)
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
    yield "the next version", edited(message, version=2), WrongVersion
    yield "an unknown kind", edited(message, kind=8), WrongVersion
    yield "another run", edited(message, run=field(message, "run") ^ 1), WrongSession
    yield "another session", edited(message, session=field(message, "session") ^ 1), WrongSession


def for_a_party(party: Party, message: bytes) -> Iterator[Disturbance]:
    yield from common(message)
    payload = message[HEADER:]
    for sender in (0, party.index, party.plan.num_parties):
        yield f"from {sender}", edited(message, sender=sender), WrongSender
    for kind in (HELLO, KEY, EMBEDDING):
        yield f"of kind {kind}", edited(message, kind=kind), WrongSender
    for kind in {NONCES, KEYS, ROUND, UPDATE} - {kind_of(message)}:
        yield f"of kind {kind}", edited(message, kind=kind), OutOfOrder
    if kind_of(message) == NONCES:
        yield "another plan", with_payload(message, bytes(32) + payload[32:]), WrongPlan
        yield "a nonce missing", with_payload(message, payload[:-32]), TruncatedMessage
        yield "a changed nonce", with_payload(message, payload[:-1] + bytes([payload[-1] ^ 1])), WrongSession
        stale = payload[:32] + hashlib.sha256(b"an earlier session").digest() * party.plan.num_parties
        yield "an earlier session", consistent_nonces(message, stale), WrongSession
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
        for other in (number + 1, number - 2, number + 2**31):  # the one before, as it was, is a duplicate: see below
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
    agreed = b"pbmvfl session\0" + (1).to_bytes(2, "little") + count.to_bytes(2, "little")
    digest = hashlib.sha256(agreed + payload[:32] + message[8:16] + payload[32:]).digest()
    return with_payload(edited(message, session=int.from_bytes(digest[:16], "little")), payload)


def for_a_server(server: Server, message: bytes) -> Iterator[Disturbance]:
    yield from common(message)
    payload = message[HEADER:]
    for sender in (server.plan.num_parties, 0xFFFE, 0xFFFF):
        yield f"from {sender}", edited(message, sender=sender), WrongSender
    for kind in set(range(1, 8)) - {kind_of(message)}:
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


def assert_twins(one, other) -> None:
    assert one.transcript == other.transcript
    assert same_state(one.server.state(), other.server.state())
    assert all(same_state(a.state(), b.state()) for a, b in zip(one.parties, other.parties, strict=True))


@pytest.mark.parametrize("choices", PLANS, ids=str)
def test_twins_with_known_randomness_make_the_same_bytes(choices, data, make_plan, make_cohort):
    plan = make_plan(data, **choices)
    one, other = make_cohort(plan, data), make_cohort(plan, data)
    assert one.run() is None
    assert other.run() is None
    assert one.server.completed_rounds == plan.num_rounds + plan.num_prediction_rounds
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
        with pytest.raises(OutOfOrder):
            party.hello()
        with pytest.raises(OutOfOrder):
            party.resend(message)  # not answered yet
        for what, wrong, error in for_a_party(party, message):
            with pytest.raises(ProtocolError) as refusal:
                party.receive(wrong)
            assert type(refusal.value) is error, f"{what} (kind {kind_of(message)}): {refusal.value!r}"
            refused.add(error)
        earlier = [old for way, index, old in disturbed.transcript if way == "down" and index == party.index]
        for old in earlier:
            last = old is earlier[-1] and kind_of(old) in (ROUND, UPDATE)
            with pytest.raises(DuplicateMessage if last else OutOfOrder):
                party.receive(old)

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
    for line, party in enumerate(cohort.parties):
        cohort.server.receive(party.hello(), sender=line)
    assert kind_of(cohort.server.advance()) == NONCES


@pytest.mark.parametrize("choices", PLANS, ids=str)
def test_a_retry_gets_the_same_bytes_and_only_for_the_same_request(choices, data, make_plan, make_cohort):
    plan = make_plan(data, **choices)
    calm, retried = make_cohort(plan, data), make_cohort(plan, data)
    calm.run()
    kinds = set()

    def retry(party: Party, message: bytes, answer: bytes) -> None:
        if kind_of(message) in (ROUND, UPDATE):
            for _ in range(3):
                with pytest.raises(DuplicateMessage):
                    party.receive(message)
                assert party.resend(message) == answer
            kinds.add(kind_of(message))
        else:
            with pytest.raises(OutOfOrder):
                party.receive(message)
            with pytest.raises(OutOfOrder):
                party.resend(message)  # a handshake is not repeated: a new session begins
        for position in (6, 20, 33, 40, len(message) - 1):
            changed = bytearray(message)
            changed[position] ^= 1
            with pytest.raises(OutOfOrder):
                party.resend(bytes(changed))

    retried.run(after_party=retry)
    assert kinds == {ROUND, UPDATE}
    assert_twins(calm, retried)


@pytest.mark.parametrize("choices", PLANS, ids=str)
def test_nothing_is_accepted_after_the_end(choices, data, make_plan, make_cohort):
    plan = make_plan(data, **choices)
    cohort = make_cohort(plan, data)
    cohort.run()
    states = [party.state() for party in cohort.parties]
    last = plan.num_rounds + plan.num_prediction_rounds
    assert cohort.server.advance() is None
    assert cohort.server.advance() is None
    down = next(message for way, _, message in reversed(cohort.transcript) if way == "down")
    up = next(message for way, _, message in reversed(cohort.transcript) if way == "up")
    for message in (up, edited(up, round=last)):
        with pytest.raises(OutOfOrder, match="expects nothing"):
            cohort.server.receive(message)
    for party, state in zip(cohort.parties, states, strict=True):
        with pytest.raises(DuplicateMessage):
            party.receive(down)
        beyond = with_payload(edited(down, kind=ROUND, round=last, flags=0), b"")
        for round_kind in (JOINT, PREDICTION):
            with pytest.raises(OutOfOrder, match=f"rounds 0 to {last - 1}"):
                party.receive(edited(beyond, round_kind=round_kind))
        gradient = with_payload(edited(beyond, kind=UPDATE, round=last - 1, flags=1), bytes(84))
        with pytest.raises((OutOfOrder, WrongPlan, DuplicateMessage)):
            party.receive(gradient)
        assert same_state(party.state(), state)


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
        cohort.parties[0].receive(bytes(changed))


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
    for role in (cohort.parties[1], cohort.server):
        with pytest.raises(ProtocolError) as refusal:
            role.receive(wrong)
        if what == "a gradient":
            assert type(refusal.value) is (NonFiniteMessage if role is cohort.parties[1] else WrongSender)


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
    return PartyInputs(
        plan=plan,
        index=index,
        identity=identities[index].private_bytes(),
        identities=tuple(identity.public for identity in identities),
        train_features=data.train_features[index] if train is None else train,
        test_features=data.test_features[index] if test is None else test,
        known_randomness=b"twins",
    ).build(encoder)


@pytest.mark.parametrize("mechanism", ["pbm", "ldp", "none"])
def test_nan_features_raise_and_nothing_is_released(mechanism, data, make_plan, make_cohort):
    plan = make_plan(data, mechanism=mechanism)
    cohort = make_cohort(plan, data)
    columns = data.train_features[1].copy()
    columns[-1, 2] = np.nan  # one cell of one row: its round raises, and no round after it happens
    cohort.parties[1] = built(plan, data, 1, train=columns)
    with pytest.raises(NonFiniteError):
        cohort.run()
    answered = sum(1 for way, index, m in cohort.transcript if (way, index) == ("up", 1) and kind_of(m) == EMBEDDING)
    asked = cohort.server.round
    assert asked is not None
    assert plan.num_samples - 1 in asked.rows
    assert answered == asked.number


def test_a_request_that_failed_can_be_answered_later_and_its_gradient_counts_once(data, make_plan, make_cohort):
    plan = make_plan(data, mechanism="none")  # noise drawn for a failed attempt would be gone: only exact runs compare
    calm, cohort = make_cohort(plan, data), make_cohort(plan, data)
    calm.run()
    columns = data.train_features[1].copy()
    cohort.parties[1] = built(plan, data, 1, train=columns)
    attempts = []

    def spoil(party: Party, message: bytes) -> None:
        if party.index != 1 or kind_of(message) != ROUND:
            return
        columns[:] = np.nan
        for _ in range(2):
            with pytest.raises(NonFiniteError):
                party.receive(message)
        columns[:] = data.train_features[1]
        attempts.append(field(message, "flags"))

    cohort.run(before_party=spoil)
    assert set(attempts) == {0, 1}  # requests with and without a gradient
    assert_twins(calm, cohort)


def test_an_encoder_of_the_wrong_width_is_refused_before_anything_is_released(data, make_plan, make_cohort):
    plan = make_plan(data)
    cohort = make_cohort(plan, data)
    wide = Bounded(torch.nn.Linear(4, plan.embedding_dim + 1))
    cohort.parties[2] = built(plan, data, 2, encoder=wide)
    with pytest.raises(EncoderError, match=r"party=2: .*shape=\(10, 4\)"):
        cohort.run()
    assert not any(kind_of(message) == EMBEDDING and index == 2 for _, index, message in cohort.transcript)


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
            PartyInputs(**inputs, identity=own.private_bytes(), identities=known).build()


def test_a_gradient_that_is_not_finite_does_not_reach_the_weights(data, make_plan, make_cohort):
    cohort = make_cohort(make_plan(data), data)
    request = cohort.run(until=lambda message: kind_of(message) == ROUND and field(message, "round") == 1)
    party = cohort.parties[0]
    before = party.state()
    with pytest.raises(NonFiniteMessage):
        party.receive(with_payload(request, np.full(30, np.nan, dtype="<f4").tobytes()))
    assert same_state(party.state(), before)


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
