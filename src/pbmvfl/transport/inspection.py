"""Exact embeddings of one party's rows, for a simulator's evaluation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pbmvfl.party import Party

#: Rows that are evaluated together.
_ROWS_AT_ONCE = 1000


def exact_embeddings(party: Party, rows: npt.NDArray[np.float32] | npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Noise-free embeddings that no role of the protocol ever sees."""
    whole = torch.from_numpy(rows)
    parts = [
        party.exact_embeddings(whole[start : start + _ROWS_AT_ONCE]).numpy()
        for start in range(0, len(whole), _ROWS_AT_ONCE)
    ]
    return np.concatenate(parts) if parts else np.empty((0, party.plan.embedding_dim), dtype=np.float32)
