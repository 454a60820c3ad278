"""A party's rows as its network takes them: columns after the public map, prepared, with context features beside them.

Symbols of own columns, which are released without a network, are made here too. Nothing here sends or charges anything.

Shape suffixes: N rows, D columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pbmvfl.crypto.key_exchange import IDENTITY_BYTES
from pbmvfl.data.encoding import LARGEST_COLUMN
from pbmvfl.errors import DataError, WrongPlan
from pbmvfl.mechanisms.interactions.features import OwnColumns, PublishedContext
from pbmvfl.mechanisms.interactions.symbols import as_coordinates
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
    """Rows of both splits. They change when a statistic is learned and when symbols are published."""

    def __init__(
        self,
        plan: Plan,
        *,
        index: int,
        train: Features | LazyRows,
        test: Features | LazyRows | None,
        own_columns: Mapping[Split, OwnColumns] | None,
    ) -> None:
        """Prepare the rows.

        Args:
            plan: The plan that the session follows.
            index: The party's number.
            train: Columns of the training rows, before the public map.
            test: Columns of the test rows, likewise, or None.
            own_columns: The columns that symbols are made of, by split, if the plan has symbols.

        Raises:
            WrongPlan: The plan has symbols and there are no columns to make them of.
        """
        self._interactions, self._index, self._num_parties = plan.interactions, index, plan.num_parties
        self._context_width = 0 if plan.interactions is None else plan.interactions.context_width(index)
        self._own_columns = dict(own_columns or {})
        #: Columns in memory, after the public map and before preparation.
        self.columns: dict[Split, Tensor] = {}
        #: Columns that stay in their file.
        self._lazy: dict[Split, LazyRows] = {}
        for split, rows in ((Split.TRAIN, train), (Split.TEST, test)):
            if isinstance(rows, LazyRows):
                self._lazy[split] = rows
            elif rows is not None:
                self.columns[split] = torch.from_numpy(mapped(plan, rows))
        self._preparation = preparation_for(plan, index=index, rows=self._some)
        #: Context features from all parties' symbols, once they are published.
        self.context: PublishedContext | None = None
        self._symbols_N = self._make_symbols(plan.seed)
        #: Rows in memory, as the network takes them.
        self.features: dict[Split, Tensor] = {}
        self._lazy_context: Tensor | None = None
        self._prepare()

    @property
    def first(self) -> Tensor:
        """A few training rows before anything is learned of them, to try a network with."""
        return self._with_context(self._some, None)

    @property
    def _some(self) -> Tensor:
        """Rows like those of training, or zeros where there are none any more, as in a plan that only predicts."""
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
        context = self._lazy_context if split is Split.TRAIN else None
        own_BD = self._preparation(torch.from_numpy(self._lazy[split].take(rows)))
        return self._beside(own_BD, None if context is None else context.index_select(0, torch.from_numpy(rows)))

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

    def publish(self, sent: Mapping[int, npt.NDArray[np.int64]]) -> None:
        """Take all parties' released symbols of the training rows."""
        assert self._interactions is not None
        self.context = PublishedContext(self._interactions, party=self._index, sent=sent, num_parties=self._num_parties)
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
        self.features = {
            split: self._with_context(self._preparation(columns), self._context_of(split))
            for split, columns in self.columns.items()
        }
        if Split.TRAIN in self._lazy:
            context = self._context_of(Split.TRAIN)
            self._lazy_context = None if context is None else torch.from_numpy(context)

    def _context_of(self, split: Split) -> npt.NDArray[np.float32] | None:
        """Return context features of the training rows, or None before symbols are published. Test rows have none."""
        if self.context is None or split is not Split.TRAIN or not self._context_width:
            return None
        return self.context.of_training(self._own_columns[split])

    def _with_context(self, own_ND: Tensor, context: npt.NDArray[np.float32] | None) -> Tensor:
        """Return own numbers with context features beside them, or zeros as long as there are none."""
        return self._beside(own_ND, None if context is None else torch.from_numpy(context))

    def _beside(self, own_ND: Tensor, context: Tensor | None) -> Tensor:
        if not self._context_width:
            return own_ND
        beside = torch.zeros(len(own_ND), self._context_width) if context is None else context
        return torch.cat((own_ND, beside), dim=1)

    # --- symbols ---

    def _make_symbols(self, seed: int) -> npt.NDArray[np.int64] | None:
        if self._interactions is None:
            return None
        if Split.TRAIN not in self._own_columns:
            raise WrongPlan(f"party={self._index}: the plan has symbols, and no columns were given to make them of")
        return self._own_columns[Split.TRAIN].symbols(seed=seed)

    def symbols(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the symbols of training rows, as randomised response takes them."""
        assert self._symbols_N is not None
        assert self._interactions is not None
        return as_coordinates(self._symbols_N[rows], num_symbols=self._interactions.num_symbols, bound=1.0)

    # --- beside the protocol: for a simulator's evaluation alone ---

    @property
    def has_context(self) -> bool:
        """Return whether the network takes context features."""
        return self._context_width > 0

    def for_network(self, columns_ND: Tensor, context: Tensor | None) -> Tensor:
        """Return other rows as the network would take them."""
        return self._with_context(self._preparation(columns_ND), None if context is None else context.numpy())

    def exact_levels(self, split: Split) -> npt.NDArray[np.int64]:
        """Return the levels of the released column. A deployment would have to release them."""
        return self._own_columns[split].levels_N

    def exact_context(self, split: Split, levels: Mapping[int, npt.NDArray[np.int64]]) -> Tensor:
        """Return context features of rows whose levels at the other parties are known."""
        if self.context is None:
            return torch.zeros(len(self._own_columns[split].levels_N), self._context_width)
        return torch.from_numpy(self.context.of_known(self._own_columns[split], levels))
