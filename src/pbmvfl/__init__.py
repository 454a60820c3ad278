"""Vertical federated learning with the Poisson binomial mechanism.

import pbmvfl
data = pbmvfl.load_dataset("digits")
plan = pbmvfl.Plan.for_data(data, num_trials=16, beta=0.25, embedding_dim=8)
result = pbmvfl.Federation(plan).fit(data)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pbmvfl.errors import PbmvflError
from pbmvfl.plan import Activation, Evaluation, GradientCodecName, MechanismName, OptimizerName, Plan

if TYPE_CHECKING:
    from pbmvfl.data import VerticalDataset, load_dataset, load_table
    from pbmvfl.encoders import Bounded
    from pbmvfl.federation import Federation
    from pbmvfl.results import Result

__version__ = "0.1.0"

#: Names that need torch or data readers are loaded when first used: planning and accounting stay light.
_LAZY = {
    "Bounded": "pbmvfl.encoders",
    "Federation": "pbmvfl.federation",
    "Result": "pbmvfl.results",
    "VerticalDataset": "pbmvfl.data",
    "load_dataset": "pbmvfl.data",
    "load_table": "pbmvfl.data",
}

__all__ = [
    "Activation",
    "Bounded",
    "Evaluation",
    "Federation",
    "GradientCodecName",
    "MechanismName",
    "OptimizerName",
    "PbmvflError",
    "Plan",
    "Result",
    "VerticalDataset",
    "load_dataset",
    "load_table",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'pbmvfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
