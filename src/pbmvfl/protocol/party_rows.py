"""A party's rows as its network takes them: columns after the public map, prepared. Nothing here sends or charges.

Shape suffixes: N rows, D columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pbmvfl.crypto.key_exchange import IDENTITY_BYTES
from pbmvfl.data.encoding import LARGEST_COLUMN
from pbmvfl.errors import DataError, WrongPlan
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import LOCAL, Split
from pbmvfl.plan.schedule import Round
from pbmvfl.training.features import LazyRows, following, run_of
from pbmvfl.training.preparation import preparation_for

if TYPE_CHECKING:
    from pbmvfl.crypto.entropy import Entropy


# --- Checks of a party's inputs, on the owner's machine and before any session; checks of a batch ---


Features = npt.NDArray[np.float32] | npt.NDArray[np.uint8]
#: Bytes of columns that are checked together: they may be in a file larger than memory.
_PIECE_BYTES = 4 << 20
#: Bytes of rows that a party whose columns are in a file keeps as its network takes them: to make them again in every
#: step takes several times as long as the step.
_MOST_KEPT = 512 << 20


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
    if len(current.rising) < current.num_rows:
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
        #: Columns of each split, before the public map.
        self._sources = {
            split: rows if isinstance(rows, LazyRows) else LazyRows(plan, rows, index=index)
            for split, rows in ((Split.TRAIN, train), (Split.TEST, test))
            if rows is not None
        }
        self._preparation = preparation_for(plan, index=index, rows=self.first)
        source = self._sources[Split.TRAIN]
        self._unchanged = source.is_raw and not self._preparation.changes_rows
        #: Numbers of the training rows that are kept as the network takes them, rising; None for all. Fusion rows and
        #: test rows are seldom used.
        self._kept_rows = None if self._unchanged or not plan.num_fusion_samples else plan.schedule.part_of(LOCAL)
        self._kept_ND: Tensor | None = None
        #: Rows in a file are kept if the network takes other numbers than are there, and these fit.
        fit = not self._unchanged and plan.num_network_samples * source.row_bytes <= _MOST_KEPT
        self._keeps = fit or not isinstance(train, LazyRows)

    @property
    def first(self) -> Tensor:
        """A few training rows before anything is learned of them, to try a network with.

        Zeros where there are none any more, as in a plan that only predicts.
        """
        source = self._sources[Split.TRAIN]
        columns = torch.from_numpy(source.take(np.arange(min(8, len(source)))))
        return columns if len(columns) else torch.zeros((8, *columns.shape[1:]), dtype=columns.dtype)

    # --- as the network takes them ---

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one row."""
        return tuple(self.first.shape[1:])

    def batch(self, split: Split, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return these rows, in this order. They may be in memory that is kept, and must not be changed."""
        if split is Split.TEST or not self._keeps:
            return self._made(split, rows)
        if self._kept_ND is None:
            self._kept_ND = self._all_kept()
        at = following(rows) if self._kept_rows is None else run_of(rows, self._kept_rows)
        if at is not None:
            return self._kept_ND[at]
        if self._kept_rows is None:
            return self._kept_ND.index_select(0, torch.from_numpy(rows.copy()))
        places = np.searchsorted(self._kept_rows, rows).clip(max=len(self._kept_rows) - 1)
        found_BD = self._kept_ND.index_select(0, torch.from_numpy(places))
        others = np.flatnonzero(self._kept_rows[places] != rows)
        if len(others):
            found_BD[torch.from_numpy(others)] = self._made(split, rows[others])
        return found_BD

    def _made(self, split: Split, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return these rows from their columns."""
        return self._preparation(torch.from_numpy(self._sources[split].take(rows)))

    def _all_kept(self) -> Tensor:
        source = self._sources[Split.TRAIN]
        if self._unchanged:
            return torch.from_numpy(source.raw)
        rows = np.arange(len(source)) if self._kept_rows is None else self._kept_rows
        found_ND = torch.empty((len(rows), *source.shape[1:]))
        for start in range(0, len(rows), source.piece_rows):
            at = slice(start, start + source.piece_rows)
            found_ND[at] = self._made(Split.TRAIN, rows[at])
        return found_ND

    def train_no_more(self) -> None:
        """Free the memory of rows that are kept for training. Rows are made again where they are asked for."""
        self._keeps, self._kept_ND = self._keeps and self._unchanged, None

    def count(self, split: Split) -> int:
        """Return the number of rows of a split."""
        return len(self._sources[split]) if split in self._sources else 0

    def pieces(self, split: Split) -> Iterator[Tensor]:
        """Yield all rows of a split in their order, some at a time; none where there are no rows."""
        count = self.count(split)
        for start in range(0, count, self.piece_rows):
            yield self.batch(split, np.arange(start, min(start + self.piece_rows, count)))

    @property
    def piece_rows(self) -> int:
        """Number of rows that are taken at a time."""
        return self._sources[Split.TRAIN].piece_rows

    # --- what changes them ---

    def learn(self, current: Round, entropy: Entropy) -> None:
        """Learn the noisy statistic of a round's rows, and of no others, and prepare all columns by it."""
        self._preparation.learn(current.kind.statistic, self._columns_of(current), entropy)
        self._kept_ND = None

    def _columns_of(self, current: Round) -> Iterator[Tensor]:
        """Yield a round's rows before preparation, some at a time. Sums do not depend on their order."""
        source, rows = self._sources[current.kind.split], current.rising
        for start in range(0, len(rows), source.piece_rows):
            yield torch.from_numpy(source.take(rows[start : start + source.piece_rows]))

    def state(self) -> dict[str, Tensor]:
        return self._preparation.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take the rows' own entries out of a party's state."""
        self._preparation.load_state(state)
        self._kept_ND = None

    @property
    def digest(self) -> bytes:
        """Digest of what was learned about columns. Together with the weights it determines a row's scores."""
        digest = hashlib.sha256()
        for name, value in sorted(self._preparation.state().items()):
            digest.update(name.encode() + value.numpy().tobytes())
        return digest.digest()
