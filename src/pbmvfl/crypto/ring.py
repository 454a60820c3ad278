"""The ring Z/2^k in which parties' integers are masked and summed.

Over the integers a mask leaks at the edges: the largest possible y gives q away. In a ring a uniform mask makes y
uniform whatever q is, and k = ceil(log2(b*M + 1)) bits hold every possible sum. Masks are added where the bits are
packed (`crypto.packing.pack`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

_Unsigned = TypeVar("_Unsigned", np.uint8, np.uint16, np.uint32)

#: Sums of more bits than this have no native type here.
LARGEST_BITS = 32


@dataclass(frozen=True)
class Ring:
    """Integers modulo 2^bits, held in the smallest native type, whose own wrap-around does most of the reduction."""

    bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= LARGEST_BITS:
            raise ValueError(f"bits={self.bits} must be in 1..{LARGEST_BITS}")

    @classmethod
    def for_sums_up_to(cls, largest: int) -> Ring:
        """The smallest ring in which 0..largest are all different."""
        return cls(largest.bit_length())

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16] | type[np.uint32]:
        if self.bits <= 8:
            return np.uint8
        return np.uint16 if self.bits <= 16 else np.uint32

    @property
    def itemsize(self) -> int:
        if self.bits <= 8:
            return 1
        return 2 if self.bits <= 16 else 4

    def reduce(self, values: npt.NDArray[_Unsigned]) -> npt.NDArray[_Unsigned]:
        """Modulo 2^bits, in place."""
        if self.bits != 8 * values.itemsize:
            values &= values.dtype.type((1 << self.bits) - 1)
        return values
