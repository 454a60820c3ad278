"""Parties as objects of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import nn

from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.plan.round_kinds import Split
from pbmvfl.protocol.party import Party
from pbmvfl.protocol.transport import Answers


class InProcess:
    """Transport that calls one party after the other. A call cannot be cut, so there is no timeout."""

    def __init__(self, setups: Sequence[PartySetup], encoders: Sequence[nn.Module] | None = None) -> None:
        own = encoders if encoders is not None else [None] * len(setups)
        self.parties: list[Party] = []
        with contextlib.ExitStack() as made:  # if a later one cannot be made, the earlier ones hold nothing
            for setup, encoder in zip(setups, own, strict=True):
                self.parties.append(setup.build(encoder))
                made.callback(self.parties[-1].close)
            made.pop_all()

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        del timeout
        return Answers({index: party.receive(message) for index, party in enumerate(self.parties)})

    def close(self) -> None:
        with contextlib.ExitStack() as all_of_them:  # also if closing one of them fails
            for party in self.parties:
                all_of_them.callback(party.close)

    # --- inspection, for a simulator ---

    def exact_embeddings(self, split: Split) -> list[npt.NDArray[np.float32]]:
        return [party.exact_embeddings(split) for party in self.parties]

    def public_starts(self) -> list[bool]:
        return [party.public_start for party in self.parties]

    def owner_error(self, party: int) -> Exception | None:
        return self.parties[party].last_error or self.parties[party].fault
