"""Interface of every way to reach the parties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pbmvfl.plan.round_kinds import Split


@dataclass(frozen=True)
class Answers:
    """Answers of the parties to one message (no bytes where a party has none), or the reason why one is missing."""

    received: Mapping[int, bytes]
    lost: Mapping[int, str] = field(default_factory=dict)


class Transport(Protocol):
    """Carrier of bytes between the server and its parties. It knows nothing of what they mean."""

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        """Send one message to every party and wait for all of their answers.

        Parties work at the same time where they can. A lost party does not hold back the answers of others.

        Args:
            message: The bytes to send.
            timeout: Seconds to wait at most; None waits without limit.

        Returns:
            The answers, and a reason for each party that is lost.
        """

    def close(self) -> None:
        """Let every party end its session and release what it holds. Idempotent."""


class Inspection(Protocol):
    """Access for a simulator to what no role of a deployment sees, because one process runs all roles."""

    def exact_embeddings(self, split: Split) -> Sequence[npt.NDArray[np.float32]]:
        """Return every party's noise-free embeddings of a split."""

    def public_starts(self) -> Sequence[bool]:
        """Return for every party whether its run began with public weights."""

    def owner_error(self, party: int) -> Exception | None:
        """Return the error in a party's own log: of the last refusal, or of the first failure of its network."""
