"""Codecs of the one gradient that goes to all parties.

The gradient is computed from sums that were released already, so coarse rounding costs no privacy. Its randomness
is public (seed and round) and never touches the noise or the masks; its scale comes from the gradient alone.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol, assert_never

import numpy as np
import numpy.typing as npt

from pbmvfl.crypto.public_streams import CODEC_STREAM, public_bits
from pbmvfl.errors import NonFiniteError, NonFiniteMessage, TruncatedMessage

_Floats = npt.NDArray[np.float32]
#: The largest bfloat16, as bits, of which 127 steps are still finite.
_LARGEST_SCALE = np.uint16((np.finfo(np.float32).max / np.float32(127)).view(np.uint32) >> np.uint32(16))


_LARGEST_FLOAT = float(np.finfo(np.float32).max)


class GradientCodecName(StrEnum):
    """Names of the gradient codecs."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


class GradientCodec(Protocol):
    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the exact length of an encoded gradient."""

    def encode(self, gradient: _Floats, *, seed: int, round_number: int) -> bytes: ...

    def decode(self, payload: bytes | memoryview, rows: int, columns: int, *, bound: float) -> _Floats:
        """Return the gradient, with every entry clipped to [-bound, bound].

        Raises:
            TruncatedMessage: The payload has the wrong length.
            NonFiniteMessage: The gradient holds NaN or infinity.
        """


class Float32:
    """float32 codec, as in the paper."""

    def num_bytes(self, rows: int, columns: int) -> int:
        return 4 * rows * columns

    def encode(self, gradient: _Floats, *, seed: int, round_number: int) -> bytes:
        del seed, round_number
        _require_finite(gradient)
        return gradient.astype("<f4", copy=False).tobytes()

    def decode(self, payload: bytes | memoryview, rows: int, columns: int, *, bound: float) -> _Floats:
        _require_length(payload, self.num_bytes(rows, columns))
        return _received(np.frombuffer(payload, dtype="<f4"), bound).reshape(rows, columns)


class BFloat16:
    """bfloat16 codec: the upper half of a float32, rounded to nearest even."""

    def num_bytes(self, rows: int, columns: int) -> int:
        return 2 * rows * columns

    def encode(self, gradient: _Floats, *, seed: int, round_number: int) -> bytes:
        del seed, round_number
        _require_finite(gradient)
        words = np.ascontiguousarray(gradient, dtype="<f4").view(np.uint32)
        rounded = (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        # Only the last half step below the largest float32 would round to infinity; keep it finite.
        rounded = np.where((rounded & np.uint32(0x7FFF)) == 0x7F80, rounded - np.uint32(1), rounded)
        return rounded.astype("<u2").tobytes()

    def decode(self, payload: bytes | memoryview, rows: int, columns: int, *, bound: float) -> _Floats:
        _require_length(payload, self.num_bytes(rows, columns))
        return _received(_widen(np.frombuffer(payload, dtype="<u2")), bound).reshape(rows, columns)


class Int8:
    """int8 codec: one byte a value and one bfloat16 scale a row, rounded stochastically so that the mean is right."""

    def num_bytes(self, rows: int, columns: int) -> int:
        return rows * (columns + 2)

    def encode(self, gradient: _Floats, *, seed: int, round_number: int) -> bytes:
        _require_finite(gradient)
        rows, columns = gradient.shape
        scale_16 = np.minimum(_bfloat16_at_least(np.abs(gradient).max(axis=1) / np.float32(127)), _LARGEST_SCALE)
        scale = _widen(scale_16)
        divisor = np.where(scale > 0, scale, np.float32(1))
        words = public_bits(-(-rows * columns // 2), seed=seed, stream=CODEC_STREAM, index=round_number)
        uniform = (words.view(np.uint32)[: rows * columns] >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
        steps = np.floor(gradient / divisor[:, None] + uniform.reshape(rows, columns))
        return scale_16.astype("<u2").tobytes() + np.clip(steps, -127, 127).astype(np.int8).tobytes()

    def decode(self, payload: bytes | memoryview, rows: int, columns: int, *, bound: float) -> _Floats:
        _require_length(payload, self.num_bytes(rows, columns))
        halves = np.frombuffer(payload, dtype="<u2", count=rows)
        if (halves > _LARGEST_SCALE).any():  # negative, NaN, infinite, or infinite after 127 steps
            raise NonFiniteMessage("the gradient's scales are not numbers of which 127 steps are finite")
        scale = _widen(halves)
        steps = np.frombuffer(payload, dtype=np.int8, offset=2 * rows).reshape(rows, columns)
        return _received(steps.astype(np.float32) * scale[:, None], bound)


def codec_for(name: GradientCodecName) -> GradientCodec:
    """Return the codec of this name."""
    match name:
        case GradientCodecName.FLOAT32:
            return Float32()
        case GradientCodecName.BFLOAT16:
            return BFloat16()
        case GradientCodecName.INT8:
            return Int8()
        case _:
            assert_never(name)


def _widen(halves: npt.NDArray[np.uint16]) -> _Floats:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _bfloat16_at_least(values: _Floats) -> npt.NDArray[np.uint16]:
    """Return the smallest bfloat16 that is not below the value, for finite values of 0 or more: no step exceeds 127."""
    words = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((words + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)


def _require_finite(gradient: _Floats) -> None:
    """Refuse NaN and infinity in the server's own gradient, before it is sent."""
    if not np.isfinite(gradient).all():
        raise NonFiniteError("the gradient holds NaN or infinity; lower the learning rate or raise num_trials and beta")


def _received(gradient: _Floats, bound: float) -> _Floats:
    largest = np.abs(gradient).max(initial=0)
    if largest <= min(bound, _LARGEST_FLOAT):  # the gradient is public, so what it takes to look at it may depend on it
        return gradient
    if not np.isfinite(largest):
        raise NonFiniteMessage(
            "the gradient that arrived holds NaN or infinity, which no server of this protocol sends"
        )
    return np.clip(gradient, np.float32(-bound), np.float32(bound))


def _require_length(payload: bytes | memoryview, expected: int) -> None:
    if len(payload) != expected:
        raise TruncatedMessage(f"gradient length={len(payload)}: the plan's codec gives {expected} bytes")
