"""Rows that a model is asked about, in whatever form they come, as every party's network takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.data.new_rows import NewRows, load_rows
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import DataError, ModelError
from pbmvfl.federation.model_files import PartyPart, ServerPart

_LONGEST_VERSION = 80
#: What can be asked about: rows that were loaded, a file or a frame with all columns, one of each for each party, or
#: one array for each party.
Rows = NewRows | VerticalDataset | str | Path | Mapping[str, Any] | Sequence[npt.NDArray[Any]] | Any


def taken_rows(
    server: ServerPart,
    parts: Sequence[PartyPart],
    rows: Rows,
    *,
    label: str | None,
    label_data: Any,
    id: str | None,
    dataset: str | None,
) -> NewRows:
    """The rows, checked against what the model was trained on; `dataset` names them otherwise than they do."""
    if isinstance(rows, VerticalDataset):
        rows = test_rows(rows)
    if isinstance(rows, list | tuple) and rows and all(isinstance(each, np.ndarray) for each in rows):
        _check_arrays(parts, rows)
        rows = NewRows(
            name=server.dataset,
            party_names=server.party_names,
            features=tuple(rows),
            ids=tuple(f"rows:{row}" for row in range(len(rows[0]))),
            rows_are_named=False,
        )
    if not isinstance(rows, NewRows):
        columns = [part.columns for part in parts if part.columns is not None]
        if len(columns) < len(parts):
            raise ModelError(
                f"this model was trained on arrays without column names (dataset={server.dataset!r}), and no table can "
                "be read for it; give one array for each party, or predict its own test rows"
            )
        rows = load_rows(
            rows,
            columns=columns,
            class_names=server.class_names,
            label=label,
            label_data=label_data,
            id=id,
            name=dataset or server.dataset,
        )
    _check_arrays(parts, rows.features)
    # Ledgers are found by the parties' names: those of the model, whatever the rows call them.
    return replace(rows, name=rows.name if dataset is None else dataset, party_names=server.party_names)


def _check_arrays(parts: Sequence[PartyPart], features: Sequence[npt.NDArray[Any]]) -> None:
    if len(features) != len(parts):
        names = ", ".join(part.party for part in parts)
        raise ModelError(f"there are columns of {len(features)} parties; this model has {len(parts)}: {names}")
    for part, rows in zip(parts, features, strict=True):
        if rows.shape[1:] != part.shape or str(rows.dtype) != part.dtype:
            raise ModelError(
                f"party={part.party!r}: rows are {rows.dtype}{rows.shape[1:]}, the model was trained on "
                f"{part.dtype}{part.shape}"
            )
    if not len(features[0]):
        raise DataError("there are no rows to predict; give at least one")


def check_data_version(version: object) -> None:
    """Refuse what cannot be the owners' name of the state that their columns are in."""
    if not isinstance(version, str) or version != version.strip() or len(version) > _LONGEST_VERSION:
        raise DataError(
            f"data_version={version!r}; permitted: a text of at most {_LONGEST_VERSION} characters that neither begins "
            "nor ends with a blank, as in '2026-01'"
        )


def test_rows(data: VerticalDataset) -> NewRows:
    """A dataset's own test rows, under the names by which training's ledgers know them."""
    if not data.num_test_samples:
        raise DataError(f"dataset={data.name!r} has no test rows; give rows to predict")
    ids = data.test_ids
    if ids is None:
        ids = tuple(str(data.num_samples + row) for row in range(data.num_test_samples))
    return NewRows(
        name=data.name,
        party_names=data.party_names,
        features=data.test_features,
        ids=ids,
        rows_are_named=data.rows_are_named,
        labels=data.test_labels,
    )
