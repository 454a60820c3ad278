"""Vertically split data: aligned rows, columns split over the parties, labels at the label holder.

`datasets` and `sources` load named datasets, `tables` and `schema` read own tables by public rules alone, `joining`
aligns files by an id column.
May import `errors`, `_text` and `crypto`.
Begin with `vertical`, the one type that training takes.
"""

from pbmvfl.data.column_rules import ColumnRule, PartyColumns, parse_columns
from pbmvfl.data.datasets import DATASETS, data_root, load_dataset
from pbmvfl.data.new_rows import NewRows, load_rows
from pbmvfl.data.tables import load_table
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
