"""What a party is made of, checked on the owner's machine before there is one; and rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pbmvfl.crypto.key_exchange import IDENTITY_BYTES
from pbmvfl.errors import DataError, WrongPlan
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.schedule import Round, Split
from pbmvfl.training.features import LARGEST_COLUMN
from pbmvfl.training.lazy_rows import LazyRows

Features = npt.NDArray[np.float32] | npt.NDArray[np.uint8]
#: Of columns that are looked at together: they may be in a file larger than memory.
_PIECE_BYTES = 4 << 20


def check_identities(identities: Sequence[bytes], plan: Plan, *, index: int, own: bytes) -> None:
    """Everybody's pinned key once, each of its length, one's own at one's own place and nowhere else."""
    if len(identities) != plan.num_parties or own != identities[index]:
        raise WrongPlan(
            f"party={index}: {len(identities)} pinned identities for num_parties={plan.num_parties}, "
            "and its own must be among them at its index"
        )
    for other, pin in enumerate(identities):
        if len(pin) != IDENTITY_BYTES:
            raise WrongPlan(
                f"party={other}: its pinned identity has {len(pin)} bytes; permitted: {IDENTITY_BYTES}; pin the "
                "party's public key as it is"
            )
    for other, pin in enumerate(identities):
        first = identities.index(pin)
        if first != other:
            raise WrongPlan(
                f"party={first} and party={other} have the same pinned identity: one of them would stand for both, and "
                "the sum would hide fewer parties than the plan says; pin each party's own"
            )


def check_rows_once(current: Round) -> None:
    """The noise of an update is for one gradient of a row; one that is in a batch r times would cost r^2 times."""
    in_order = np.sort(current.rows)
    if (in_order[1:] == in_order[:-1]).any():
        raise WrongPlan(f"round={current.number}: a row stands in its batch more than once, and updates are noisy")


def check_rows(rows: Features | LazyRows | None, *, index: int, split: Split) -> None:
    """Refuse columns that are no numbers, or far out of scale, on the owner's machine and before any session.

    The columns are looked at before the plan's public map: which cells are permitted is the same for every plan.
    """
    if rows is None:
        return
    raw = rows.raw if isinstance(rows, LazyRows) else rows
    if not np.issubdtype(raw.dtype, np.floating):
        return
    at_a_time = max(1, _PIECE_BYTES // max(1, raw[:1].nbytes))
    for start in range(0, len(raw), at_a_time):
        permitted = np.abs(raw[start : start + at_a_time]) <= LARGEST_COLUMN  # NaN is not
        if not permitted.all():
            where = np.argwhere(~permitted)[0]
            raise DataError(
                f"party={index}: row {start + where[0]} of its {split} rows, column {where[1:].tolist()} is NaN or "
                f"beyond {LARGEST_COLUMN:g}; give finite numbers, scaled by public constants"
            )
