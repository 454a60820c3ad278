"""Predictions: a class for every row, its probability, and what it cost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl._files import Kinds, checked_object, make_private
from pbmvfl._text import counted, html_table, short_repr
from pbmvfl.errors import DataError, RunFolderError
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import Split
from pbmvfl.privacy.accounting import TrainingRun
from pbmvfl.privacy.conversion import usual_delta
from pbmvfl.privacy.table import PrivacyTable, privacy_table
from pbmvfl.training.metrics import classification_metrics
from pbmvfl.wire.traffic import Traffic

FORMATS = (".parquet", ".csv")
#: Rows in a notebook.
_SHOWN = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """Released predictions, or exact ones where a simulator was asked for them.

    Everything here was computed from what was released: looking at it again, or in another way, costs nothing more.
    """

    ids: tuple[str, ...]
    class_names: tuple[str, ...]
    #: ln P(class), (N, K); NaN for rows that a limit kept back.
    scores_NK: npt.NDArray[np.float32]
    #: The session's plan: nothing was trained in it.
    plan: Plan
    traffic: Traffic
    seconds: float
    #: Exact sums, which no role of the protocol sees: outside of every epsilon.
    exact: bool = False
    #: Why it ended before all rows were predicted; empty if it did not.
    stopped: str = ""
    #: Whether weights know rows only by what was charged in training. If not, each release is about all of those.
    public_start: bool = True
    #: True only in tests: the noise is known, so epsilon is infinite.
    noise_is_seeded: bool = False
    #: Numbers of the true classes, from the label holder, if there are any.
    true_labels: npt.NDArray[np.int64] | None = None

    def __repr__(self) -> str:
        return short_repr("Predictions", *self._sizes)

    def _repr_html_(self) -> str:
        table = self.table().slice(0, _SHOWN)
        rows = zip(*(map(_cell, column.to_pylist()) for column in table.columns), strict=True)
        first = f"; the first {_SHOWN}" if len(self) > _SHOWN else ""
        return html_table(f"{', '.join(self._sizes)}{first}", rows, header=table.column_names)

    @property
    def _sizes(self) -> tuple[str, ...]:
        kind = "exact" if self.exact else "released"
        return counted(len(self), "row"), kind, f"classes={', '.join(self.class_names)}"

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Mask of the rows that have a prediction."""
        return np.asarray(np.isfinite(self.scores_NK).all(axis=1))

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        """Number of the class of each row; -1 for rows without a prediction."""
        known = self.is_known
        return np.where(known, np.where(known[:, None], self.scores_NK, 0.0).argmax(axis=1), -1)

    @property
    def labels(self) -> npt.NDArray[np.object_]:
        """The predicted class of each row, by its name; None for rows without a prediction."""
        names = np.array([*self.class_names, None], dtype=object)
        return names[self.numbers]

    @property
    def probabilities(self) -> npt.NDArray[np.float64]:
        """P(class) of each row, (N, K); every row adds up to 1."""
        shares = np.exp(self.scores_NK.astype(np.float64))
        totals: npt.NDArray[np.float64] = shares / shares.sum(axis=1, keepdims=True)
        return totals

    def metrics(self, labels: npt.NDArray[np.int64] | None = None) -> dict[str, float]:
        """Return accuracy, and AUPRC for two classes, of the rows that have a prediction.

        Args:
            labels: (N,) class numbers to compare with; None: the labels that came with the rows.

        Returns:
            Figures by name; none where no row has a prediction.

        Raises:
            DataError: There are no labels, or not one for each row.
        """
        labels = self.true_labels if labels is None else labels
        if labels is None:
            raise DataError("there are no labels to compare with; give the label's column (label=..., --label)")
        if len(labels) != len(self):
            raise DataError(f"{len(labels)} labels for {len(self)} rows; give one for each")
        known = self.is_known
        if not known.any():
            return {}
        return classification_metrics(self.scores_NK[known], labels[known], prefix="test")

    # --- what it cost ---

    @property
    def training_run(self) -> TrainingRun:
        """The session as the privacy account sees it."""
        return self.plan.training_run(public_start=self.public_start)

    def privacy(self, *, delta: float | None = None) -> PrivacyTable:
        """Return what one of these rows has spent by its prediction; rows of training have the run's table.

        Args:
            delta: Delta of every epsilon; None for the default of `Plan.privacy`, by the number of training rows.
        """
        delta = usual_delta(self.plan.num_samples) if delta is None else delta
        known = self.exact or self.noise_is_seeded
        return privacy_table(self.training_run.of_split(Split.TEST), delta=delta, noise_is_known=known)

    # --- files ---

    def table(self) -> Any:
        """Return a pyarrow table: id, prediction, a probability for each class, and the true label if there is one."""
        import pyarrow as pa

        columns: dict[str, Any] = {
            "id": pa.array(self.ids, type=pa.string()),
            "prediction": pa.array(self.labels.tolist(), type=pa.string()),
        }
        shares = self.probabilities
        for k, name in enumerate(self.class_names):
            columns[f"p({name})"] = pa.array(shares[:, k], mask=~self.is_known)
        if self.true_labels is not None:
            columns["label"] = pa.array([self.class_names[k] for k in self.true_labels], type=pa.string())
        return pa.table(columns)

    def to_pandas(self) -> Any:
        """Return `table` as a pandas DataFrame.

        Raises:
            DataError: pandas is not installed.
        """
        if find_spec("pandas") is None:
            raise DataError("pandas is not installed; pip install pandas, or use table(), a pyarrow table")
        return self.table().to_pandas()

    def write(self, path: Path | str) -> None:
        """Write a .parquet or .csv file.

        Args:
            path: A file that ends in .parquet or .csv.

        Raises:
            DataError: The path has another ending.
        """
        path = check_predictions_file(path)
        import pyarrow.csv
        import pyarrow.parquet

        writers = {".parquet": pyarrow.parquet.write_table, ".csv": pyarrow.csv.write_csv}
        temporary = path.with_name(path.name + ".tmp")
        try:
            writers[path.suffix](self.table(), temporary)
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise DataError(f"out={str(path)!r} cannot be written: {error}; give another file") from error


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def check_predictions_file(path: Path | str) -> Path:
    """Return the path of a file that predictions can be written to, or refuse it before anything is released."""
    path = Path(path)
    if path.suffix not in FORMATS:
        raise DataError(f"out={str(path)!r} ends in {path.suffix!r}; permitted are {' and '.join(FORMATS)}")
    if path.is_dir() or not path.parent.is_dir():
        raise DataError(f"out={str(path)!r} is a folder, or is in one that does not exist; give a file")
    return path


# --- Log of a run's predictions, one line a request, for people ---
# The count that holds is the ledgers'. The file has no row in it and no file's name.


FILE = "released.jsonl"
_KINDS: Kinds = {"rows": int, "predicted": int, "exact": bool, "law": str}
_NUMBERS = ("epsilon", "advantage", "delta", "accuracy", "auprc", "majority_rate")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request: predictions of some rows."""

    rows: int
    #: Rows that have a prediction; a limit may have kept others back.
    predicted: int
    #: Exact sums of a simulator: nothing was released, and no epsilon holds.
    exact: bool
    #: By which law a row was released.
    law: str
    #: Of one row's cell, strict, against the server; None for exact sums.
    epsilon: float | None = None
    advantage: float | None = None
    delta: float | None = None
    #: Where labels were known.
    accuracy: float | None = None
    auprc: float | None = None
    majority_rate: float | None = None

    def note(self, folder: Path) -> None:
        """Add a line to a run's folder."""
        path = folder / FILE
        make_private(path)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def read_asked(folder: Path) -> tuple[Asked, ...]:
    """Return all requests, the first one first."""
    path = folder / FILE
    if not path.is_file():
        return ()
    return tuple(_read_line(line, path) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def _read_line(line: str, path: Path) -> Asked:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged: a line is no JSON ({error}); restore it from a copy") from error
    values = checked_object(value, {**_KINDS, **dict.fromkeys(_NUMBERS, int | float | None)}, path, RunFolderError)
    return Asked(**{each.name: values[each.name] for each in fields(Asked)})
