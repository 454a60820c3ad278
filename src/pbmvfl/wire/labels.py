"""Labels of the training rows as they travel: one number a row, in the order of the rows, as few bytes as all fit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pbmvfl.errors import ProtocolError, TruncatedMessage


def _kind(num_classes: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype("u1") if num_classes <= 1 << 8 else np.dtype("<u2") if num_classes <= 1 << 16 else np.dtype("<u4")


def label_bytes(num_samples: int, num_classes: int) -> int:
    """How long the payload is."""
    return num_samples * _kind(num_classes).itemsize


def encode_labels(labels: npt.NDArray[np.int64], num_classes: int) -> bytes:
    return labels.astype(_kind(num_classes)).tobytes()


def decode_labels(payload: bytes | memoryview, *, num_samples: int, num_classes: int) -> npt.NDArray[np.int64]:
    """A class of 0..num_classes-1 for each row, or an error."""
    expected = label_bytes(num_samples, num_classes)
    if len(payload) != expected:
        raise TruncatedMessage(f"labels length={len(payload)}: {num_samples} rows make {expected}")
    labels = np.frombuffer(payload, dtype=_kind(num_classes)).astype(np.int64)
    if labels.size and int(labels.max()) >= num_classes:
        raise ProtocolError(f"label={int(labels.max())} must be in 0..{num_classes - 1}, the plan's classes")
    return labels
