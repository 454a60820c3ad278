"""Exact embeddings of one party's rows, for a simulator's evaluation.

Where columns of different parties act together, it shows every party the exact levels of the others' rows. Only
somebody who runs all roles can do that; no epsilon covers it, as none covers exact sums.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from pbmvfl.plan.schedule import Split
from pbmvfl.protocol.party import Party

#: Rows that are evaluated together.
_ROWS_AT_ONCE = 1000


def exact_embeddings(
    party: Party,
    rows: npt.NDArray[np.float32] | npt.NDArray[np.uint8],
    split: Split,
    levels: Mapping[int, npt.NDArray[np.int64]] | None = None,
) -> npt.NDArray[np.float32]:
    """Noise-free embeddings that no role of the protocol ever sees; `levels` are all parties', if context is made."""
    whole = torch.from_numpy(rows)
    context = party.rows.exact_context(split, levels) if party.rows.has_context and levels is not None else None
    parts = []
    for start in range(0, len(whole), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        parts.append(party.exact_embeddings(whole[some], None if context is None else context[some]).numpy())
    return np.concatenate(parts) if parts else np.empty((0, party.plan.embedding_dim), dtype=np.float32)
