"""The wire: exact sizes, exact round trips, and a typed refusal for everything else."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pbmvfl.crypto.ring import add_packed, pack, packed_bytes
from pbmvfl.errors import ProtocolError, TruncatedMessage, WrongVersion
from pbmvfl.federation.federation import Federation
from pbmvfl.plan.plan import Plan
from pbmvfl.wire.messages import HEADER_BYTES, SERVER, Message, MessageKind


def header(kind: int, sender: int, run: bytes, session: bytes, number: int, size: int, round_kind: int, flags: int):
    """The documented layout, field by field."""
    parts = [b"PBMV", bytes([2, kind]), sender.to_bytes(2, "little"), run, session]
    parts += [number.to_bytes(4, "little"), size.to_bytes(4, "little"), bytes([round_kind, flags, 0, 0])]
    return b"".join(parts)


messages = st.builds(
    Message,
    kind=st.sampled_from(list(MessageKind)),
    sender=st.one_of(st.integers(0, 65535), st.just(SERVER)),
    run_id=st.binary(min_size=8, max_size=8),
    session_id=st.binary(min_size=16, max_size=16),
    round_number=st.integers(0, 2**32 - 1),
    round_kind=st.integers(0, 255),
    carries_gradient=st.booleans(),
    payload=st.binary(max_size=200),
)


# --- messages ---


@given(message=messages)
def test_messages_have_the_documented_bytes_and_read_back(message):
    data = message.to_bytes()
    expected = header(
        message.kind,
        message.sender,
        message.run_id,
        message.session_id,
        message.round_number,
        len(message.payload),
        message.round_kind,
        int(message.carries_gradient),
    )
    assert data == expected + message.payload
    assert Message.from_bytes(data) == message


def test_a_header_has_at_most_48_bytes():
    assert len(Message(MessageKind.HELLO, 0).to_bytes()) == HEADER_BYTES <= 48


@given(message=messages, data=st.data())
def test_truncated_and_extended_messages_are_refused_at_every_length(message, data):
    whole = message.to_bytes()
    for length in range(len(whole)):
        with pytest.raises(TruncatedMessage):
            Message.from_bytes(whole[:length])
    extra = data.draw(st.binary(min_size=1, max_size=20))
    with pytest.raises(TruncatedMessage):
        Message.from_bytes(whole + extra)


@given(message=messages, position=st.integers(0, 4), bit=st.integers(0, 7))
def test_a_changed_bit_of_magic_or_version_is_refused(message, position, bit):
    changed = bytearray(message.to_bytes())
    changed[position] ^= 1 << bit
    with pytest.raises(WrongVersion):
        Message.from_bytes(bytes(changed))


@given(message=messages, value=st.integers(0, 255))
@example(message=Message(MessageKind.HELLO, 0), value=0)
@example(message=Message(MessageKind.HELLO, 0), value=8)
@example(message=Message(MessageKind.HELLO, 0), value=11)
@example(message=Message(MessageKind.HELLO, 0), value=12)
def test_only_the_eleven_kinds_are_read(message, value):
    changed = bytearray(message.to_bytes())
    changed[5] = value
    if 1 <= value <= 11:
        assert Message.from_bytes(bytes(changed)).kind == value
    else:
        with pytest.raises(WrongVersion, match=f"kind={value}"):
            Message.from_bytes(bytes(changed))


@given(message=messages, position=st.sampled_from([41, 42, 43]), value=st.integers(2, 255))
def test_unknown_flags_and_reserved_bytes_are_refused(message, position, value):
    changed = bytearray(message.to_bytes())
    changed[position] = value
    with pytest.raises(WrongVersion):
        Message.from_bytes(bytes(changed))


@settings(max_examples=300)
@given(data=st.binary(max_size=100), valid_start=st.integers(0, 8))
def test_random_bytes_are_only_ever_refused_with_a_protocol_error(data, valid_start):
    data = b"PBMV\x02\x05\xff\xff"[:valid_start] + data
    try:
        message = Message.from_bytes(data)
    except ProtocolError:
        return
    assert message.to_bytes() == data  # what is accepted means exactly what it says


# --- packed integers ---


def smallest_type(bits):
    return next(kind for kind in (np.uint8, np.uint16, np.uint32, np.uint64) if bits <= 8 * np.dtype(kind).itemsize)


@st.composite
def packable(draw):
    bits = draw(st.integers(1, 32))
    values = draw(st.lists(st.integers(0, 2**bits - 1), max_size=300))
    return bits, values


@given(case=packable(), wide=st.booleans())
@example(case=(16, [65535] * 9), wide=True)
@example(case=(1, [1] * 9), wide=True)
@example(case=(31, [2**31 - 1] * 9), wide=False)
@example(case=(32, [2**32 - 1] * 9), wide=False)
def test_packing_is_the_one_long_integer_of_exact_size_and_reads_back(case, wide):
    bits, values = case
    kind = smallest_type(bits + 8 * wide)
    size = math.ceil(bits * len(values) / 8)
    packed = pack(np.array(values, dtype=kind), bits)
    assert packed == sum(value << (bits * i) for i, value in enumerate(values)).to_bytes(size, "little")
    assert packed_bytes(len(values), bits) == size
    totals = np.zeros(len(values), dtype=np.uint16 if bits <= 16 else np.uint32)
    add_packed(packed, bits, totals)
    assert totals.tolist() == values


@given(case=packable(), start=st.integers(0, 2**32 - 1), wide=st.booleans())
def test_adding_packed_values_wraps_where_the_totals_do(case, start, wide):
    bits, values = case
    size = 32 if wide or bits > 16 else 16
    totals = np.full(len(values), start % 2**size, dtype=smallest_type(size))
    add_packed(memoryview(pack(np.array(values, dtype=smallest_type(size)), bits)), bits, totals)
    assert totals.tolist() == [(start + value) % 2**size for value in values]


@given(bits=st.integers(1, 32), values=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=50))
def test_only_the_low_bits_of_a_value_are_packed_and_its_neighbours_are_untouched(bits, values):
    packed = pack(np.array(values, dtype=np.uint32), bits)
    low = [value % 2**bits for value in values]
    size = math.ceil(bits * len(values) / 8)
    assert packed == sum(value << (bits * i) for i, value in enumerate(low)).to_bytes(size, "little")


@given(num_parties=st.integers(2, 20), num_trials=st.integers(1, 3000), rows=st.integers(1, 100), masked=st.booleans())
def test_an_embedding_takes_exactly_its_bits(num_parties, num_trials, rows, masked):
    plan = Plan.of(
        num_parties=num_parties,
        num_trials=num_trials,
        num_samples=100,
        num_classes=2,
        embedding_dim=3,
        secure_aggregation=masked,
    )
    largest = num_trials * num_parties if masked else num_trials
    bits = next(k for k in range(17) if 2**k >= largest + 1)  # ceil(log2(largest + 1)) without a logarithm
    assert plan.release.payload.num_bytes(3 * rows) == math.ceil(bits * 3 * rows / 8)
    ring = plan.release.ring
    assert ring is not None
    assert 2 ** (ring.bits - 1) <= num_trials * num_parties < 2**ring.bits


@settings(max_examples=50)
@given(
    num_parties=st.integers(2, 8),
    num_trials=st.integers(1, 500),
    count=st.integers(1, 100),
    seed=st.integers(0, 2**32),
)
def test_unmasked_payloads_add_up_to_the_integers(num_parties, num_trials, count, seed):
    plan = Plan.of(
        num_parties=num_parties, num_trials=num_trials, num_samples=1, num_classes=2, secure_aggregation=False
    )
    values = np.random.default_rng(seed).integers(0, num_trials + 1, (num_parties, count)).astype(np.uint16)
    form = plan.release.payload
    assert np.array_equal(form.total([form.encode(value) for value in values], count), values.sum(axis=0))


@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_payloads_in_clear_are_little_endian_float32(values):
    plan = Plan.of(num_parties=2, num_samples=1, num_classes=2, mechanism="none")
    form, x = plan.release.payload, np.array(values, dtype=np.float32)
    assert form.encode(x) == struct.pack(f"<{len(values)}f", *values)
    assert form.num_bytes(len(values)) == 4 * len(values)
    assert np.array_equal(form.total([form.encode(x), form.encode(np.zeros_like(x))], x.size), x)


# --- traffic ---


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"secure_aggregation": False},
        {"mechanism": "none"},
        {"mechanism": "ldp"},
        {"gradient_codec": "bfloat16"},
        {"gradient_codec": "int8"},
        {"evaluation": "released"},
        {"evaluation": "released", "mechanism": "none", "gradient_codec": "int8"},
        {"batch_size": 37},
        {"batch_size": 1000},
        {"batch_size": 1, "num_epochs": 1},
        {"num_trials": 100, "evaluation": "released", "batch_size": 12, "num_epochs": 3},
    ],
    ids=str,
)
def test_predicted_traffic_is_measured_to_the_byte(choices, data, make_plan):
    plan = make_plan(data, **choices)
    federation = Federation(plan)
    sent: list[tuple[str, bytes]] = []
    federation.taps.append(lambda direction, _, message: sent.append((direction, message)))
    result = federation.fit(data)
    assert result.traffic == plan.traffic()
    # The measurement itself, counted again by the tap.
    of_rounds = (MessageKind.ROUND, MessageKind.EMBEDDING, MessageKind.UPDATE)
    rounds = [(way, m) for way, m in sent if Message.from_bytes(m).kind in of_rounds]
    assert result.traffic.bytes_up == sum(len(m) for way, m in rounds if way == "up")
    assert result.traffic.bytes_down == sum(len(m) for way, m in rounds if way == "down")
    assert result.traffic.total == sum(len(m) for _, m in sent)
    assert result.traffic.rounds == sum(1 for way, _ in rounds if way == "up") / plan.num_parties


def test_traffic_up_is_the_formula_of_the_packed_bits_and_small_headers(make_data, make_plan):
    # M * sum over rounds of ceil(k B P / 8), B the rows of that round, and a header of at most 48 bytes.
    data = make_data(num_parties=5, num_samples=57)
    plan = make_plan(data, num_trials=64, embedding_dim=7, batch_size=25)
    k, batches = 9, [25, 25, 7] * 2  # 64 * 5 = 320 needs 9 bits
    payloads = 5 * sum(math.ceil(k * size * 7 / 8) for size in batches)
    headers = plan.traffic().bytes_up - payloads
    assert 0 < headers <= 48 * 5 * len(batches)


def test_int8_cuts_the_bytes_down_at_least_3_2_times_at_the_shape_of_the_paper():
    plan = Plan.of(num_parties=5, num_samples=7352, num_classes=6, embedding_dim=16, num_epochs=30, batch_size=100)
    assert plan.traffic().bytes_down >= 3.2 * plan.replace(gradient_codec="int8").traffic().bytes_down
