"""A party's rows as its network takes them: columns after the public map, prepared. Nothing here sends or charges.

Shape suffixes: N rows, D columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pbmvfl.crypto.key_exchange import IDENTITY_BYTES
from pbmvfl.data.encoding import LARGEST_COLUMN
from pbmvfl.errors import DataError, WrongPlan
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.schedule import Round, Split
from pbmvfl.training.features import LazyRows, mapped
from pbmvfl.training.preparation import preparation_for

if TYPE_CHECKING:
    from pbmvfl.crypto.entropy import Entropy


# --- Checks of a party's inputs, on the owner's machine and before any session; checks of a batch ---


Features = npt.NDArray[np.float32] | npt.NDArray[np.uint8]
#: Bytes of columns that are checked together: they may be in a file larger than memory.
_PIECE_BYTES = 4 << 20


def check_identities(identities: Sequence[bytes], plan: Plan, *, index: int, own: bytes) -> None:
    """Refuse pinned identities unless each party has one of its own, of the right length, and `own` stands at `index`.

    Raises:
        WrongPlan: The identities do not fit.
    """
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
    """Refuse a batch with a row in it twice.

    The noise of an update is for one gradient of a row; a row that is in a batch r times would cost r^2 times as much.
    """
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


# --- party rows ---


class PartyRows:
    """Rows of both splits. They change when a statistic is learned."""

    def __init__(
        self,
        plan: Plan,
        *,
        index: int,
        train: Features | LazyRows,
        test: Features | LazyRows | None,
    ) -> None:
        """Prepare the rows.

        Args:
            plan: The plan that the session follows.
            index: The party's number.
            train: Columns of the training rows, before the public map.
            test: Columns of the test rows, likewise, or None.
        """
        #: Columns in memory, after the public map and before preparation.
        self.columns: dict[Split, Tensor] = {}
        #: Columns that stay in their file.
        self._lazy: dict[Split, LazyRows] = {}
        for split, rows in ((Split.TRAIN, train), (Split.TEST, test)):
            if isinstance(rows, LazyRows):
                self._lazy[split] = rows
            elif rows is not None:
                self.columns[split] = torch.from_numpy(mapped(plan, rows, index=index))
        self._preparation = preparation_for(plan, index=index, rows=self.first)
        #: Rows in memory, as the network takes them.
        self.features: dict[Split, Tensor] = {}
        self._prepare()

    @property
    def first(self) -> Tensor:
        """A few training rows before anything is learned of them, to try a network with.

        Zeros where there are none any more, as in a plan that only predicts.
        """
        lazy = self._lazy.get(Split.TRAIN)
        columns = (
            self.columns[Split.TRAIN][:8] if lazy is None else torch.from_numpy(lazy.take(np.arange(len(lazy))[:8]))
        )
        return columns if len(columns) else torch.zeros((8, *columns.shape[1:]), dtype=columns.dtype)

    # --- as the network takes them ---

    def shape(self, split: Split) -> tuple[int, ...]:
        """Return the shape of one row."""
        return tuple(self.features[split].shape[1:] if split in self.features else self.first.shape[1:])

    def batch(self, split: Split, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return these rows, in this order."""
        if split in self.features:
            return self.features[split].index_select(0, torch.from_numpy(rows))
        return self._preparation(torch.from_numpy(self._lazy[split].take(rows)))

    def pieces(self, split: Split) -> Iterator[Tensor]:
        """Yield all rows in their order: at once if they are in memory, else some at a time."""
        if split in self.features:
            yield self.features[split]
            return
        for start in range(0, len(self._lazy[split]), self._lazy[split].piece_rows):
            rows = np.arange(start, min(start + self._lazy[split].piece_rows, len(self._lazy[split])))
            yield self.batch(split, rows)

    def piece_rows(self, split: Split) -> int | None:
        """Return how many rows are read from a file at a time, or None where all are in memory."""
        return self._lazy[split].piece_rows if split in self._lazy else None

    # --- what changes them ---

    def learn(self, statistic: str, split: Split, entropy: Entropy) -> None:
        """Learn a noisy statistic of all rows of a split, and prepare the columns by it."""
        if split in self.columns:
            pieces: Iterable[Tensor] = (self.columns[split],)
        else:
            pieces = map(torch.from_numpy, self._lazy[split].pieces())
        self._preparation.learn(statistic, pieces, entropy)
        self._prepare()

    def state(self) -> dict[str, Tensor]:
        return self._preparation.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take the rows' own entries out of a party's state."""
        self._preparation.load_state(state)
        self._prepare()

    @property
    def digest(self) -> bytes:
        """Digest of what was learned about columns. Together with the weights it determines a row's scores."""
        digest = hashlib.sha256()
        for name, value in sorted(self._preparation.state().items()):
            digest.update(name.encode() + value.numpy().tobytes())
        return digest.digest()

    def _prepare(self) -> None:
        self.features = {split: self._preparation(columns) for split, columns in self.columns.items()}

    # --- beside the protocol: for a simulator's evaluation alone ---

    def for_network(self, columns_ND: Tensor) -> Tensor:
        """Return other rows as the network would take them."""
        return self._preparation(columns_ND)
