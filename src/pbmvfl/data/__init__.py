"""Aligned rows, columns split over the parties, labels at the server."""

from pbmvfl.data.assignment import parse_columns
from pbmvfl.data.columns import ColumnRule, PartyColumns
from pbmvfl.data.datasets import DATASETS, data_root, load_dataset
from pbmvfl.data.rows import NewRows, load_rows
from pbmvfl.data.table import load_table
from pbmvfl.data.vertical import VerticalDataset

__all__ = [
    "DATASETS",
    "ColumnRule",
    "NewRows",
    "PartyColumns",
    "VerticalDataset",
    "data_root",
    "load_dataset",
    "load_rows",
    "load_table",
    "parse_columns",
]
