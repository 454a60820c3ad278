"""Parties as objects of this process, and exact embeddings for a simulator's evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.plan.schedule import Split
from pbmvfl.protocol.party import Party
from pbmvfl.protocol.transport import Answers

# --- Exact embeddings of one party's rows, for a simulator's evaluation ---
# Where columns of different parties act together, it shows every party the exact levels of the others' rows. Only
# a caller who runs all roles can do that; no epsilon covers it, as none covers exact sums.


#: Rows that are evaluated together.
_ROWS_AT_ONCE = 1000


def exact_embeddings(
    party: Party,
    rows: npt.NDArray[np.float32] | npt.NDArray[np.uint8],
    split: Split,
    levels: Mapping[int, npt.NDArray[np.int64]] | None = None,
) -> npt.NDArray[np.float32]:
    """Return noise-free embeddings, which no role sees; `levels` are all parties', where context is made."""
    whole = torch.from_numpy(rows)
    context = party.rows.exact_context(split, levels) if party.rows.has_context and levels is not None else None
    parts = []
    for start in range(0, len(whole), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        parts.append(party.exact_embeddings(whole[some], None if context is None else context[some]).numpy())
    return np.concatenate(parts) if parts else np.empty((0, party.plan.embedding_dim), dtype=np.float32)


# --- All parties are objects of this process ---


class InProcess:
    """Transport that calls one party after the other. A call cannot be cut, so there is no timeout."""

    def __init__(self, setups: Sequence[PartySetup], encoders: Sequence[nn.Module] | None = None) -> None:
        self._setups = setups
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
        pairs = list(zip(self.parties, self._setups, strict=True))
        levels = None
        if any(party.rows.has_context for party in self.parties):
            levels = {index: party.rows.exact_levels(split) for index, party in enumerate(self.parties)}
        return [exact_embeddings(party, setup.features(split), split, levels) for party, setup in pairs]

    def public_starts(self) -> list[bool]:
        return [party.public_start for party in self.parties]

    def owner_error(self, party: int) -> Exception | None:
        return self.parties[party].last_error or self.parties[party].fault
