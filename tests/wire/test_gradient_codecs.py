"""Gradient codecs: exact sizes, known rounding, and a mean that is right."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pbmvfl.errors import NonFiniteError, NonFiniteMessage, ProtocolError, TruncatedMessage
from pbmvfl.plan.plan import GradientCodecName
from pbmvfl.wire.gradient_codecs import codec_for
from support import statistical

FLOAT32, BFLOAT16, INT8 = (codec_for(name) for name in GradientCodecName)
LARGEST_FLOAT32 = np.finfo(np.float32).max
LARGEST_BFLOAT16 = float(torch.finfo(torch.bfloat16).max)
#: The smallest float32 above zero. Below 127 halves of it a row's scale underflows to zero, and the row with it.
TINY = 2.0**-149

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
gradients = arrays.arrays(np.float32, arrays.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=finite)
#: Like gradients: zeros, and magnitudes from subnormal to huge within one row.
uneven = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=2, max_dims=2, max_side=12),
    elements=st.one_of(
        st.just(0.0),
        st.builds(
            lambda m, e: float(np.float32(m) * np.float32(2.0**e)), st.floats(-1, 1, width=32), st.integers(-149, 100)
        ),
    ),
)
seeds, rounds = st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1)


def bfloat16(word: bytes) -> float:
    """A bfloat16 is the upper half of a float32."""
    return struct.unpack("<f", b"\0\0" + word)[0]


def int8_parts(payload: bytes, rows: int, columns: int) -> tuple[list[float], list[list[int]]]:
    """Scales and steps, read by the documented layout: one bfloat16 a row, then one signed byte a value."""
    scales = [bfloat16(payload[2 * row : 2 * row + 2]) for row in range(rows)]
    steps = struct.unpack(f"{rows * columns}b", payload[2 * rows :])
    return scales, [list(steps[row * columns : (row + 1) * columns]) for row in range(rows)]


@given(gradient=gradients, seed=seeds, number=rounds)
def test_float32_is_exact(gradient, seed, number):
    payload = FLOAT32.encode(gradient, seed=seed, round_number=number)
    assert payload == struct.pack(f"<{gradient.size}f", *gradient.reshape(-1).tolist())
    assert FLOAT32.decode(payload, *gradient.shape, bound=np.inf).tobytes() == gradient.tobytes()


@given(gradient=gradients, seed=seeds, number=rounds)
@example(gradient=np.array([[LARGEST_FLOAT32, -LARGEST_FLOAT32]]), seed=0, number=0)
@example(gradient=np.array([[1 + 2**-8, 1 + 3 * 2**-8, -0.0]], dtype=np.float32), seed=0, number=0)
def test_bfloat16_rounds_as_torch_does_and_stays_finite(gradient, seed, number):
    payload = BFLOAT16.encode(gradient, seed=seed, round_number=number)
    expected = torch.from_numpy(gradient).to(torch.bfloat16).to(torch.float32)
    expected = expected.clamp(-LARGEST_BFLOAT16, LARGEST_BFLOAT16).numpy()
    assert BFLOAT16.decode(payload, *gradient.shape, bound=np.inf).tobytes() == expected.tobytes()


#: The largest bfloat16 (8 significant bits) not above the largest float32 divided by 127.
LARGEST_SCALE = float((Fraction(float(LARGEST_FLOAT32)) / 127 // 2**114) * 2**114)


@settings(max_examples=200)
@given(gradient=st.one_of(gradients, uneven), seed=seeds, number=rounds)
@example(gradient=np.array([[LARGEST_FLOAT32, -LARGEST_FLOAT32, 1.0, 0.0]]), seed=0, number=0)
@example(gradient=np.array([[TINY, -TINY], [0.0, -0.0]], dtype=np.float32), seed=0, number=0)
@example(gradient=np.array([[127.0, -127.0, 1.0]], dtype=np.float32), seed=0, number=0)
@example(gradient=np.array([[0.0, 0.0], [0.0, -3.4026162e38]], dtype=np.float32), seed=53_433_106_642, number=0)
def test_int8_steps_fit_a_byte_and_err_by_at_most_one_step(gradient, seed, number):
    payload = INT8.encode(gradient, seed=seed, round_number=number)
    scales, steps = int8_parts(payload, *gradient.shape)
    decoded = INT8.decode(payload, *gradient.shape, bound=np.inf)
    for row, scale in enumerate(scales):
        largest = float(np.abs(gradient[row]).max())
        assert scale >= 0
        assert max(abs(step) for step in steps[row]) <= 127
        if largest < 64 * TINY:  # half of 127: see TINY
            assert not decoded[row].any()
            continue
        # Rounded up: 127 steps reach the largest value (but for the last bit of a float32 quotient), and the scale is
        # at most one bfloat16 step, 1/128, or one subnormal bfloat16 step larger than needed.
        # At the very end of float32 it is the largest one of which 127 steps are finite: half a step short at most.
        assert scale * 127 >= largest * (1 - 2**-23) - 64 * TINY or scale == LARGEST_SCALE
        assert scale <= max(largest / 127 * (1 + 2**-7), largest / 127 + 2.0**-133)
        for column, step in enumerate(steps[row]):
            value = float(gradient[row, column])
            assert decoded[row, column] == np.float32(Fraction(step) * Fraction(scale))
            # Exactly one step off is possible only for a value that is itself a whole number of steps, at the last of
            # 2^24 roundings, because x + u is a float32 too.
            assert abs(Fraction(step) * Fraction(scale) - Fraction(value)) <= Fraction(scale) * (1 + Fraction(1, 2**16))
            if value == 0:
                assert step == 0


@given(rows=st.integers(1, 8), columns=st.integers(1, 8), seed=seeds, number=rounds)
def test_zero_rows_stay_zero(rows, columns, seed, number):
    payload = INT8.encode(np.zeros((rows, columns), dtype=np.float32), seed=seed, round_number=number)
    assert payload == bytes(rows * (columns + 2))
    assert not INT8.decode(payload, rows, columns, bound=np.inf).any()


@given(gradient=uneven, seed=seeds, number=rounds)
def test_int8_bytes_depend_on_gradient_seed_and_round_alone(gradient, seed, number):
    first, second = (INT8.encode(gradient.copy(), seed=seed, round_number=number) for _ in range(2))
    assert first == second


def test_int8_rounds_differently_in_another_round_and_with_another_seed():
    gradient = np.full((10, 100), 0.3, dtype=np.float32)
    gradient[:, 0] = 127
    made = {INT8.encode(gradient, seed=seed, round_number=number) for seed in (0, 1) for number in (0, 1, 2**31)}
    assert len(made) == 6  # equal by chance: 0.58 ** 990


#: A row of 127 and one other value: the scale is exactly 1, and the value is its own number of steps.
STEPS = [0.3, -0.3, 0.5, 100.01, -126.75]


def rounded_up(encode, value: float) -> tuple[int, int]:
    """How often a value was rounded up, over many rounds."""
    gradient = np.full((1, 1001), value, dtype=np.float32)
    gradient[0, 0] = 127
    ups = total = 0
    for number in range(statistical.NUM_DRAWS // 1000):
        scales, steps = int8_parts(encode(gradient, number), 1, 1001)
        assert scales == [1.0]
        found = np.array(steps[0][1:])
        assert set(found.tolist()) <= {math.floor(value), math.floor(value) + 1}
        ups += int((found == math.floor(value) + 1).sum())
        total += found.size
    return ups, total


@pytest.mark.parametrize("value", STEPS)
def test_int8_is_unbiased_over_rounds(value):
    # x + u is rounded to float32, which moves the chance by at most 2^-18: 0.003 standard deviations of this count.
    ups, total = rounded_up(lambda g, number: INT8.encode(g, seed=3, round_number=number), value)
    assert total == statistical.NUM_DRAWS
    chance = float(np.float32(value)) - math.floor(value)
    assert not statistical.count_rejects(ups, total, chance, statistical.FALSE_ALARM)


def test_a_rounding_that_is_biased_by_one_percent_of_a_step_is_caught():
    random = np.random.default_rng(9)
    assert statistical.count_rejects(int(random.binomial(200_000, 0.31)), 200_000, 0.3, statistical.FALSE_ALARM)
    assert statistical.count_rejects(0, 200_000, 0.3, statistical.FALSE_ALARM)  # to the nearest


def test_rounding_in_one_place_does_not_follow_another():
    gradient = np.full((1, 1001), 0.5, dtype=np.float32)
    gradient[0, 0] = 127
    steps = np.array([int8_parts(INT8.encode(gradient, seed=3, round_number=n), 1, 1001)[1][0][1:] for n in range(200)])
    centred = 2.0 * steps - 1
    pairs = [(centred[:, :-1], centred[:, 1:]), (centred[:-1], centred[1:])]  # next column, next round
    assert not any(
        statistical.products_reject_independence(left.reshape(-1), right.reshape(-1)) for left, right in pairs
    )


@pytest.mark.parametrize(("codec", "size"), [(FLOAT32, 4 * 6 * 5), (BFLOAT16, 2 * 6 * 5), (INT8, 6 * 5 + 2 * 6)])
def test_sizes_are_exact_and_every_other_length_is_refused(codec, size):
    gradient = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    payload = codec.encode(gradient, seed=1, round_number=2)
    assert len(payload) == codec.num_bytes(6, 5) == size
    for wrong in (b"", payload[:-1], payload + b"\0", payload[:-2]):
        with pytest.raises(TruncatedMessage):
            codec.decode(wrong, 6, 5, bound=np.inf)


@pytest.mark.parametrize("codec", [FLOAT32, BFLOAT16, INT8])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_raises(codec, bad):
    gradient = np.zeros((3, 4), dtype=np.float32)
    gradient[2, 1] = bad
    with pytest.raises(NonFiniteError) as refusal:
        codec.encode(gradient, seed=0, round_number=0)
    assert not isinstance(refusal.value, ProtocolError)  # one's own numbers, not somebody's message


#: The upper halves of numbers that are none, and where each codec keeps such a half of its row 2.
NOT_NUMBERS = {"infinity": 0x7F80, "-infinity": 0xFF80, "NaN": 0x7FC0, "another NaN": 0xFFFF}


@pytest.mark.parametrize(("codec", "offset"), [(FLOAT32, 4 * 9 + 2), (BFLOAT16, 2 * 9), (INT8, 2 * 2)])
@pytest.mark.parametrize("half", NOT_NUMBERS.values(), ids=NOT_NUMBERS)
def test_a_gradient_that_arrives_and_is_not_finite_is_a_refused_message(codec, offset, half):
    payload = bytearray(codec.encode(np.ones((3, 4), dtype=np.float32), seed=0, round_number=0))
    payload[offset : offset + 2] = half.to_bytes(2, "little")
    with pytest.raises(NonFiniteMessage):
        codec.decode(bytes(payload), 3, 4, bound=np.inf)


def test_a_scale_of_which_127_steps_are_infinite_is_a_refused_message():
    payload = bytearray(INT8.encode(np.ones((1, 4), dtype=np.float32), seed=0, round_number=0))
    payload[:2] = struct.pack("<f", LARGEST_SCALE)[2:]
    assert np.isfinite(INT8.decode(bytes(payload), 1, 4, bound=np.inf)).all()
    payload[:2] = (int.from_bytes(payload[:2], "little") + 1).to_bytes(2, "little")
    with pytest.raises(NonFiniteMessage):
        INT8.decode(bytes(payload), 1, 4, bound=np.inf)


@pytest.mark.parametrize("codec", [FLOAT32, BFLOAT16, INT8])
def test_a_gradient_that_is_not_contiguous_is_read_by_rows(codec):
    gradient = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    twice = np.asfortranarray(gradient)
    assert codec.encode(twice, seed=1, round_number=2) == codec.encode(gradient, seed=1, round_number=2)
