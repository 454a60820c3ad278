"""Vertically split rows: every party shares the rows, each holds its own columns, and only the server has the labels.

Shapes: N rows, M parties. Party m's features are one array (N, *shape_m); row i is the same person, picture or
object in each of the M arrays. The *layout* says how a whole table or picture is split into M parts, so that a data
set can be split again for another number of parties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from pbmvfl._text import counted
from pbmvfl.errors import DataError

if TYPE_CHECKING:
    from pbmvfl.data.column_rules import PartyColumns

#: columns: contiguous blocks of a table. digits: 8x8 pictures as 64 columns. quadrants: (N, channels, H, W) pictures.
#: views: (N, views, H, W) pictures of one object. assigned: the owner named the columns of each party.
Layout = Literal["columns", "digits", "quadrants", "views", "assigned"]

Array = npt.NDArray[Any]

_DIGIT_SIDE = 8
_QUADRANTS = 4


def require_party_count(num_parties: int) -> None:
    """Refuse fewer than two parties: a sum over one party hides nothing, and there is no other to hide it from."""
    if isinstance(num_parties, bool) or not isinstance(num_parties, int | np.integer) or num_parties < 2:
        raise DataError(f"num_parties={num_parties!r} is not permitted; give an integer of at least 2")


def column_blocks(layout: Layout, num_columns: int, num_parties: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Return each party's column numbers; together they are 0..num_columns-1, each exactly once."""
    require_party_count(num_parties)
    if num_parties > num_columns:
        raise DataError(
            f"num_parties={num_parties} is more than the {num_columns} columns; "
            f"each party needs one, so give 2 to {num_columns} parties"
        )
    columns = np.arange(num_columns, dtype=np.int64)
    if layout == "digits" and num_parties == _QUADRANTS and num_columns == _DIGIT_SIDE**2:
        picture = columns.reshape(1, 1, _DIGIT_SIDE, _DIGIT_SIDE)
        return tuple(quadrant.reshape(-1) for quadrant in picture_quadrants(picture))
    return tuple(np.array_split(columns, num_parties))


def picture_quadrants(pictures: Array) -> tuple[Array, ...]:
    """Split (N, channels, H, W) into four (N, channels, H/2, W/2): top left, top right, bottom left, bottom right."""
    if pictures.ndim != 4 or pictures.shape[2] % 2 or pictures.shape[3] % 2:
        raise DataError(
            f"pictures of shape={pictures.shape} have no quadrants; give (N, channels, H, W) with even H and W"
        )
    top, left = pictures.shape[2] // 2, pictures.shape[3] // 2
    rows, columns = (slice(None, top), slice(top, None)), (slice(None, left), slice(left, None))
    return tuple(np.ascontiguousarray(pictures[:, :, r, c]) for r in rows for c in columns)


def split_whole(whole: Array, *, layout: Layout, num_parties: int) -> tuple[Array, ...]:
    """Split one array over all columns, views or pixels into one array per party."""
    require_party_count(num_parties)
    if layout in ("columns", "digits"):
        blocks = column_blocks(layout, whole.shape[1], num_parties)
        return tuple(np.ascontiguousarray(whole[:, block]) for block in blocks)
    if layout == "quadrants":
        require_four_parties(num_parties)
        return picture_quadrants(whole)
    if layout == "views":
        views = whole.shape[1]
        if views % num_parties:
            permitted = ", ".join(str(count) for count in range(2, views + 1) if views % count == 0)
            raise DataError(
                f"num_parties={num_parties} does not divide the {views} views; each party holds as many "
                f"views as any other, so give one of {permitted}"
            )
        return tuple(np.ascontiguousarray(part) for part in np.split(whole, num_parties, axis=1))
    raise DataError(
        "the columns were assigned to the parties explicitly, so they cannot be split again; "
        "load the table with another assignment instead"
    )


def require_four_parties(num_parties: int) -> None:
    """Refuse any number of parties but four, of which each holds one quadrant of a picture."""
    if num_parties != _QUADRANTS:
        raise DataError(
            f"num_parties={num_parties} is not permitted for pictures: each party holds one quadrant, "
            f"so only num_parties={_QUADRANTS} is possible"
        )


def _join_parts(parts: Sequence[Array], layout: Layout) -> Array:
    """Invert `split_whole` for tables and views."""
    if layout == "views":
        return np.concatenate(parts, axis=1)
    whole = np.concatenate(parts, axis=1)
    order = np.concatenate(column_blocks(layout, whole.shape[1], len(parts)))
    return whole[:, np.argsort(order)]


def numbered_parties(num_parties: int) -> tuple[str, ...]:
    """Return the names party-0, party-1, ..."""
    return tuple(f"party-{index}" for index in range(num_parties))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VerticalDataset:
    """Aligned training and test rows, one feature array per party, labels for the server.

    Nothing in it was learned from private values: features are as their owners hold them, or scaled by public ranges.
    """

    name: str
    party_names: tuple[str, ...]
    train_features: tuple[Array, ...]
    test_features: tuple[Array, ...]
    train_labels: npt.NDArray[np.int64]
    test_labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]
    default_encoder: str
    layout: Layout = "assigned"
    #: Notes for the reader, in whole sentences.
    notes: tuple[str, ...] = ()
    #: The owners' names of the rows, by which ledgers identify them whatever the order and the split. None: a row is
    #: identified by its position, which is right only if every load of this name gives the same rows in the same order.
    train_ids: tuple[str, ...] | None = None
    test_ids: tuple[str, ...] | None = None
    #: False where the ids are places in a table: another table has the same people at other places, or others at these.
    rows_are_named: bool = True
    #: How many values every column has, equally spaced from 0 to 1, where the data's public description says so.
    column_values: int | None = None
    #: Public rules of every party's columns, by which new rows are encoded as these were. None: the arrays have no
    #: column names, as in the named sets.
    columns: tuple[PartyColumns, ...] | None = None
    #: Name of the label's column in the table that the rows came from, if they did.
    label: str | None = None

    def __post_init__(self) -> None:
        if len(self.party_names) < 2:
            raise DataError(
                f"{self._this}: {counted(len(self.party_names), 'party', 'parties')}; at least 2 are needed"
            )
        if len(set(self.party_names)) < len(self.party_names) or not all(self.party_names):
            raise DataError(f"{self._this}: party_names={self.party_names} must be different and not empty")
        if len(self.class_names) < 2:
            raise DataError(f"{self._this}: class_names={self.class_names}; at least 2 classes are needed")
        self._check_split("train", self.train_features, self.train_labels)
        self._check_split("test", self.test_features, self.test_labels)
        self._check_ids("train", self.train_ids, self.num_samples)
        self._check_ids("test", self.test_ids, self.num_test_samples)
        self._check_columns()
        for party, train, test in zip(self.party_names, self.train_features, self.test_features, strict=True):
            if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
                raise DataError(
                    f"{self._this}, party={party!r}: training rows are {train.dtype}{train.shape[1:]} and test rows "
                    f"{test.dtype}{test.shape[1:]}; both splits need the same columns and type"
                )

    @classmethod
    def from_frames(
        cls,
        frames: Mapping[str, Any],
        *,
        labels: Any,
        ids: Any = None,
        schema: Any = None,
        test_fraction: float = 0.2,
        seed: int = 0,
        name: str | None = None,
    ) -> VerticalDataset:
        """Make a data set from one DataFrame (pandas, polars, pyarrow) per party.

        Args:
            frames: {"bank": frame, "shop": frame}.
            labels: A column's name; or, unless `ids` joins the rows, a list, an array or a series, one label per row.
            ids: The name of a column that all frames have, by which their rows are joined; or one name per row, where
                row i of every frame is the same row; or None for rows without names.
            schema: As in `load_table`.
            test_fraction: As in `load_table`.
            seed: As in `load_table`.
            name: As in `load_table`.

        Returns:
            The data set.

        Raises:
            DataError: With every fault of the frames.
        """
        from pbmvfl.data.tables import dataset_of_frames

        return dataset_of_frames(
            frames, labels=labels, ids=ids, schema=schema, test_fraction=test_fraction, seed=seed, name=name
        )

    def __repr__(self) -> str:
        """Return names and shapes only: a notebook shows and keeps what it prints, and the values are private."""
        parties = ", ".join(
            f"{party}: train {_shape(train)} test {_shape(test)}"
            for party, train, test in zip(self.party_names, self.train_features, self.test_features, strict=False)
        )
        return f"{type(self).__name__}(name={self.name!r}, {parties})"

    @property
    def num_parties(self) -> int:
        """M: parties that hold columns."""
        return len(self.party_names)

    @property
    def num_samples(self) -> int:
        """N: training rows."""
        return len(self.train_labels)

    @property
    def num_test_samples(self) -> int:
        """Test rows."""
        return len(self.test_labels)

    @property
    def num_classes(self) -> int:
        """K: classes of the label."""
        return len(self.class_names)

    def split_features(self, *, num_parties: int) -> VerticalDataset:
        """Split the columns of the same rows over another number of parties.

        Args:
            num_parties: At least 2, and as many as the layout permits.

        Returns:
            A data set with parties named party-0, party-1, ...; this one if it already has so many.

        Raises:
            DataError: If the columns were assigned explicitly, or cannot be split over so many parties.
        """
        require_party_count(num_parties)
        if self.layout == "assigned":
            raise DataError(
                f"{self._this}: the columns were assigned to {', '.join(self.party_names)} explicitly, so they cannot "
                f"be split again over num_parties={num_parties}; load the table with another assignment instead"
            )
        if self.layout == "quadrants":
            require_four_parties(num_parties)
        if num_parties == self.num_parties:
            return self
        train, test = (_join_parts(parts, self.layout) for parts in (self.train_features, self.test_features))
        return replace(
            self,
            party_names=numbered_parties(num_parties),
            train_features=split_whole(train, layout=self.layout, num_parties=num_parties),
            test_features=split_whole(test, layout=self.layout, num_parties=num_parties),
        )

    @property
    def _this(self) -> str:
        return f"dataset={self.name!r}"

    def _check_split(self, split: str, features: tuple[Array, ...], labels: Array) -> None:
        if len(features) != len(self.party_names):
            raise DataError(
                f"{self._this}: {len(features)} arrays of {split} features for {len(self.party_names)} parties; "
                "give one array per party"
            )
        num_rows = self._check_labels(split, labels)
        for party, array in zip(self.party_names, features, strict=True):
            where = f"{self._this}, party={party!r}, {split} features"
            if not isinstance(array, np.ndarray) or array.dtype not in (np.float32, np.uint8):
                kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
                raise DataError(f"{where}: dtype={kind}; give a numpy array of float32, or uint8 for pictures")
            if array.ndim < 2 or 0 in array.shape[1:]:
                raise DataError(f"{where}: shape={array.shape} has no columns; each party needs at least one")
            if len(array) != num_rows:
                raise DataError(
                    f"{where}: {len(array)} rows, but there are {num_rows} labels; "
                    "row i must be the same row at every party and in the labels"
                )
            if array.dtype == np.float32:
                _require_finite(array, where)

    def _check_ids(self, split: str, ids: tuple[str, ...] | None, num_rows: int) -> None:
        if ids is None:
            return
        where = f"{self._this}, {split}_ids"
        if not isinstance(ids, tuple) or not all(isinstance(name, str) for name in ids):
            raise DataError(f"{where} must be a tuple of texts; give str(number) where rows have numbers")
        if len(ids) != num_rows:
            raise DataError(f"{where}: {len(ids)} ids for {num_rows} rows; give one per row, in the rows' order")
        if len(set(ids)) < num_rows:
            (twice, _), *_ = Counter(ids).most_common(1)
            raise DataError(f"{where}: {twice!r} occurs more than once; ids must tell the rows apart")

    def _check_columns(self) -> None:
        if self.columns is None:
            return
        if tuple(part.party for part in self.columns) != self.party_names:
            raise DataError(f"{self._this}: columns must be those of {', '.join(self.party_names)}, in this order")
        for part, features in zip(self.columns, self.train_features, strict=True):
            if features.shape[1:] != (part.width,):
                raise DataError(
                    f"{self._this}, party={part.party!r}: columns make {part.width} numbers of a row, but the features "
                    f"have shape={features.shape}; encode the rows by these columns"
                )

    def _check_labels(self, split: str, labels: Array) -> int:
        where = f"{self._this}, {split} labels"
        if labels is None or not isinstance(labels, np.ndarray) or labels.ndim != 1:
            raise DataError(f"{where} are missing or not one-dimensional; give a numpy array of int64, one per row")
        if labels.dtype == object or np.issubdtype(labels.dtype, np.floating):
            missing = np.flatnonzero([label is None or label != label for label in labels.tolist()])
            if len(missing):
                raise DataError(f"{where}: row={missing[0]} (counted from 0) has no label; every row needs one")
        if labels.dtype != np.int64:
            raise DataError(f"{where}: dtype={labels.dtype}; give int64 class numbers")
        if not len(labels) and split == "train":
            raise DataError(f"{where}: there are no rows; at least one is needed")
        outside = np.flatnonzero((labels < 0) | (labels >= self.num_classes))
        if len(outside):
            raise DataError(
                f"{where}: row={outside[0]} (counted from 0) has label={labels[outside[0]]}; "
                f"permitted are 0 to {self.num_classes - 1}"
            )
        return len(labels)


def _shape(array: Any) -> object:
    """Describe an array's shape, also that of an array of another kind that is being refused."""
    return getattr(array, "shape", "?")


def _require_finite(array: Array, where: str) -> None:
    finite = np.isfinite(array)
    if finite.all():
        return
    row, *column = (int(index) for index in np.argwhere(~finite)[0])
    position = column[0] if len(column) == 1 else tuple(column)
    raise DataError(
        f"{where}: row={row}, column={position} (counted from 0) is NaN or infinite; "
        "every value must be a finite number, so leave the row out or fill it in before loading"
    )
