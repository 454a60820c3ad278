"""Data sets of the comparison, their public maps, and hold-outs of their training rows.

Rows of a file that are neighbours in it are alike, and so are rows of one person. Hold-outs follow the split that the
test rows come from: for Phishing, blocks of the file in order, and what follows the rows that are learned from; for
Activity, people.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from pbmvfl.data.datasets import data_root, load_dataset
from pbmvfl.data.vertical import VerticalDataset

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

_PAIR_WEIGHT = 0.5
_BLOCKS, _GROUPS_OF_PEOPLE = 4, 3


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows of one party, or of all side by side, after a public map; `bound` is their largest norm."""

    rows_ND: Floats
    bound: float
    #: What is left of a row after its mean is taken off is clipped to this share of the bound.
    centred_share: float

    def at(self, rows: Indices) -> Part:
        return Part(rows_ND=self.rows_ND[rows], bound=self.bound, centred_share=self.centred_share)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Training rows, or some of them, and the rows that a model is judged by."""

    name: str
    num_classes: int
    train: tuple[Part, ...]
    labels: Indices
    judged: tuple[Part, ...]
    judged_labels: Indices
    #: The columns before the map, for methods that release them; few-valued ones as whole numbers.
    columns: tuple[Floats, ...]
    judged_columns: tuple[Floats, ...]
    column_values: int | None

    @property
    def prior_K(self) -> npt.NDArray[np.float64]:
        """Return the logarithms of the classes' shares."""
        return np.log(np.bincount(self.labels, minlength=self.num_classes) / len(self.labels))

    def pooled(self) -> Table:
        """Return a table of one party that has all columns."""
        return Table(
            name=self.name,
            num_classes=self.num_classes,
            train=(_side_by_side(self.train),),
            labels=self.labels,
            judged=(_side_by_side(self.judged),),
            judged_labels=self.judged_labels,
            columns=self.columns,
            judged_columns=self.judged_columns,
            column_values=self.column_values,
        )

    def hold_outs(self) -> Iterator[Table]:
        """Return smaller tables, made of training rows alone."""
        for kept, held in _splits(self.name, len(self.labels)):
            yield Table(
                name=self.name,
                num_classes=self.num_classes,
                train=tuple(part.at(kept) for part in self.train),
                labels=self.labels[kept],
                judged=tuple(part.at(held) for part in self.train),
                judged_labels=self.labels[held],
                columns=tuple(columns[kept] for columns in self.columns),
                judged_columns=tuple(columns[held] for columns in self.columns),
                column_values=self.column_values,
            )


def load(name: str, num_parties: int) -> tuple[VerticalDataset, Table]:
    """Return the data set as the library has it, and as a table."""
    data = load_dataset(name, num_parties=num_parties, progress=False)
    train, judged = (
        [np.asarray(part, np.float32) for part in parts] for parts in (data.train_features, data.test_features)
    )
    values = data.column_values
    return data, Table(
        name=name,
        num_classes=data.num_classes,
        train=tuple(_mapped(part, values) for part in train),
        labels=np.asarray(data.train_labels, np.int64),
        judged=tuple(_mapped(part, values) for part in judged),
        judged_labels=np.asarray(data.test_labels, np.int64),
        columns=tuple(train),
        judged_columns=tuple(judged),
        column_values=values,
    )


def _mapped(rows_ND: Floats, column_values: int | None) -> Part:
    """Apply the map of the library's planner: every two values of few-valued columns, else the columns."""
    columns = rows_ND.shape[1]
    if column_values is None:
        return Part(rows_ND=rows_ND, bound=float(np.sqrt(columns)), centred_share=0.3)
    values = np.arange(column_values)
    symbols_ND = as_symbols(rows_ND, column_values)
    single_NDV = symbols_ND[:, :, None] == values
    left, right = np.triu_indices(columns, k=1)
    double_NPV = (symbols_ND[:, left] * column_values + symbols_ND[:, right])[:, :, None] == np.arange(column_values**2)
    count = len(rows_ND)
    mapped = np.concatenate(
        (single_NDV.reshape(count, -1), _PAIR_WEIGHT * double_NPV.reshape(count, -1)), axis=1, dtype=np.float32
    )
    return Part(rows_ND=mapped, bound=float(np.sqrt(columns + _PAIR_WEIGHT**2 * len(left))), centred_share=0.6)


def as_symbols(rows_ND: Floats, column_values: int) -> Indices:
    """Convert values from 0 to 1 to whole numbers."""
    return np.rint(rows_ND * (column_values - 1)).astype(np.int64)


def _side_by_side(parts: tuple[Part, ...]) -> Part:
    return Part(
        rows_ND=np.concatenate([part.rows_ND for part in parts], axis=1),
        bound=float(np.sqrt(sum(part.bound**2 for part in parts))),
        centred_share=parts[0].centred_share,
    )


def _splits(name: str, count: int) -> Iterator[tuple[Indices, Indices]]:
    everybody = np.arange(count)
    if name == "activity":
        people = _people()
        for group in range(_GROUPS_OF_PEOPLE):
            is_held = np.isin(people, np.unique(people)[group :: _GROUPS_OF_PEOPLE + 1])
            yield everybody[~is_held], everybody[is_held]
        return
    for held in np.array_split(everybody, _BLOCKS):
        yield np.setdiff1d(everybody, held), held
    for begin, end in ((0.6, 0.75), (0.75, 0.87)):
        yield everybody[: int(begin * count)], everybody[int(begin * count) : int(end * count)]


def _people() -> Indices:
    """Return the person of each training row of Activity, which the library leaves out."""
    root = data_root()
    if root is None:
        raise FileNotFoundError("Activity's hold-outs are people: set PBMVFL_DATA to a folder with activity/*.parquet")
    table = pq.read_table(root / "activity" / "har_train.parquet", columns=["subject"], use_threads=False)
    return np.asarray(table.column("subject").to_numpy(), np.int64)
