"""No privacy and no quantisation (the paper's NPQ): exact embeddings in clear, for studies and for oracles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import numpy.typing as npt

from pbmvfl.crypto.payloads import Floats
from pbmvfl.mechanisms.base import Mechanism, NoisySum, Scratch, register
from pbmvfl.privacy.events import ExactRelease

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pbmvfl.crypto.entropy import Entropy


@register
@dataclass(frozen=True, kw_only=True)
class Exact(Mechanism):
    """Every embedding as it is."""

    name: ClassVar[str] = "none"
    words: ClassVar[str] = "no noise, for studies"
    sums_are_hidden: ClassVar[bool] = False

    @property
    def event(self) -> ExactRelease:
        return ExactRelease(num_parties=self.num_parties, embedding_dim=self.embedding_dim)

    @property
    def ring(self) -> None:
        return None

    @property
    def payload(self) -> Floats:
        return Floats()

    @property
    def variance_upper_bound(self) -> float:
        return 0.0

    def randomize(
        self, embedding: npt.NDArray[np.float32], entropy: Entropy, scratch: Scratch | None = None
    ) -> npt.NDArray[np.float32]:
        del entropy, scratch  # nothing random about it
        return np.nan_to_num(embedding, nan=0.0, posinf=self.bound, neginf=-self.bound)

    def estimate(self, total: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return total

    def simulated_sum(self, *, seed: int, device: torch.device) -> NoisySum:
        del seed, device
        return ExactSum()

    @classmethod
    def candidates(cls, base: Self, fixed: frozenset[str], fits: Callable[[Self], bool]) -> Iterator[Self]:
        del fixed
        if fits(base):
            yield base

    @classmethod
    def quietest(cls, base: Self, fixed: frozenset[str]) -> Self:
        del fixed
        return base

    def describe(self) -> str:
        return "no privacy"

    @property
    def notes(self) -> tuple[str, ...]:
        return ("mechanism none protects nothing: every embedding goes to the server in clear",)

    @property
    def is_private(self) -> bool:
        return False


class ExactSum:
    """Nothing random."""

    def __call__(self, embedding_MBP: Tensor) -> Tensor:
        return embedding_MBP.sum(0)

    def state(self) -> Tensor:
        import torch

        return torch.empty(0, dtype=torch.uint8)

    def load_state(self, state: Tensor) -> None:
        del state
