"""Vertical federated learning with a privacy account that holds.

import pbmvfl
data = pbmvfl.load_dataset("digits")
plan = pbmvfl.Plan.for_budget(epsilon=8, delta=1e-5, data=data)
result = pbmvfl.Federation(plan).fit(data)

Errors are in `pbmvfl.errors`, the values that a plan's names take in the packages that use them: docs/reference/api.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pbmvfl.errors import PbmvflError

if TYPE_CHECKING:
    from pbmvfl import data as data
    from pbmvfl.data import VerticalDataset, load_dataset, load_table
    from pbmvfl.federation.estimator import VerticalClassifier
    from pbmvfl.federation.federation import Federation
    from pbmvfl.federation.model import FederatedModel, load
    from pbmvfl.federation.predictions import Predictions
    from pbmvfl.federation.results import Result
    from pbmvfl.federation.serving import ReleaseOptions
    from pbmvfl.ledger.ledger import Ledger
    from pbmvfl.ledger.limits import Limit
    from pbmvfl.plan.plan import Plan
    from pbmvfl.plan.policy import Policy

__version__ = "0.2.0"

#: Names that need numpy, torch or data readers are loaded when first used: `import pbmvfl` stays light.
_LAZY = {
    "FederatedModel": "pbmvfl.federation.model",
    "Federation": "pbmvfl.federation.federation",
    "Ledger": "pbmvfl.ledger.ledger",
    "Limit": "pbmvfl.ledger.limits",
    "Plan": "pbmvfl.plan.plan",
    "Policy": "pbmvfl.plan.policy",
    "Predictions": "pbmvfl.federation.predictions",
    "ReleaseOptions": "pbmvfl.federation.serving",
    "Result": "pbmvfl.federation.results",
    "VerticalClassifier": "pbmvfl.federation.estimator",
    "VerticalDataset": "pbmvfl.data",
    "data": "pbmvfl",
    "load": "pbmvfl.federation.model",
    "load_dataset": "pbmvfl.data",
    "load_table": "pbmvfl.data",
}

__all__ = [
    "FederatedModel",
    "Federation",
    "Ledger",
    "Limit",
    "PbmvflError",
    "Plan",
    "Policy",
    "Predictions",
    "ReleaseOptions",
    "Result",
    "VerticalClassifier",
    "VerticalDataset",
    "load",
    "load_dataset",
    "load_table",
]


if not TYPE_CHECKING:  # A type checker that saw this would accept every misspelt name.

    def __getattr__(name):
        if name in _LAZY:
            module = _LAZY[name]
            # A submodule is imported: it becomes an attribute of the package only then.
            return import_module(f"pbmvfl.{name}") if module == "pbmvfl" else getattr(import_module(module), name)
        raise AttributeError(f"module 'pbmvfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "data"])
