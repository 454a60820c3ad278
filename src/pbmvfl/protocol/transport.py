"""One interface for every way to reach the parties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pbmvfl.plan.schedule import Split


@dataclass(frozen=True)
class Answers:
    """What came back for one message: an answer of every party (no bytes where it has none), or why there is none."""

    received: Mapping[int, bytes]
    lost: Mapping[int, str] = field(default_factory=dict)


class Transport(Protocol):
    """Carries bytes between the server and its parties, and knows nothing of what they mean."""

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        """Send one message to every party and wait for all of their answers, so many seconds at most.

        Parties work at the same time where they can. One that is lost does not keep the others' answers back.
        """

    def close(self) -> None:
        """Let every party end its session and give back what it holds. Twice is once."""


class Inspection(Protocol):
    """The simulator's door: what only somebody who runs all roles on one machine can see. A deployment has none."""

    def exact_embeddings(self, split: Split) -> Sequence[npt.NDArray[np.float32]]:
        """Every party's noise-free embeddings of a split."""

    def public_starts(self) -> Sequence[bool]:
        """Of every party, whether its run began with public weights."""

    def owner_error(self, party: int) -> Exception | None:
        """What the owner of a party would find in its log: about the last refusal, or the first failed network."""
