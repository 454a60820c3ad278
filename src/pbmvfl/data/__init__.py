"""Aligned rows, columns split over the parties, labels at the server."""

from pbmvfl.data.datasets import DATASETS, data_root, load_dataset
from pbmvfl.data.table import load_table, parse_columns
from pbmvfl.data.vertical import VerticalDataset

__all__ = ["DATASETS", "VerticalDataset", "data_root", "load_dataset", "load_table", "parse_columns"]
