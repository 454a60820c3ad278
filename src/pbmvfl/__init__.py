"""Vertical federated learning with a privacy account that holds.

import pbmvfl
data = pbmvfl.load_dataset("digits")
plan = pbmvfl.Plan.for_budget(epsilon=8, delta=1e-5, data=data)
result = pbmvfl.Federation(plan).fit(data)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pbmvfl.errors import (
    AlignmentError,
    AnswersError,
    BudgetExceeded,
    CheckpointError,
    DataError,
    DuplicateMessage,
    EncoderError,
    FederationError,
    IdentityError,
    LedgerError,
    LinkError,
    ModelError,
    NonFiniteError,
    NonFiniteMessage,
    OrderError,
    OutOfOrder,
    PartyLost,
    PartyRefused,
    PbmvflError,
    PlanError,
    PolicyError,
    PolicyFileError,
    ProtocolError,
    RunFolderError,
    TransportError,
    TruncatedMessage,
    WriteError,
    WrongPlan,
    WrongSender,
    WrongSession,
    WrongVersion,
)

if TYPE_CHECKING:
    from pbmvfl import data as data
    from pbmvfl.data import VerticalDataset, load_dataset, load_table
    from pbmvfl.federation.estimator import VerticalClassifier
    from pbmvfl.federation.federation import Federation, Parties
    from pbmvfl.federation.model import FederatedModel, load
    from pbmvfl.federation.predictions import Predictions
    from pbmvfl.federation.results import Result
    from pbmvfl.ledger.ledger import Ledger
    from pbmvfl.ledger.limits import Limit
    from pbmvfl.plan.groups import Activation, Evaluation, OptimizerName
    from pbmvfl.plan.plan import Plan
    from pbmvfl.plan.policy import Policy
    from pbmvfl.privacy.table import PrivacyTable
    from pbmvfl.privacy.units import Accounting, Adversary, Unit
    from pbmvfl.research.joint import train_jointly
    from pbmvfl.training.encoders import Bounded
    from pbmvfl.wire.gradient_codecs import GradientCodecName

__version__ = "0.1.0"

#: Names that need numpy, torch or data readers are loaded when first used: `import pbmvfl` stays light.
_LAZY = {
    "Accounting": "pbmvfl.privacy.units",
    "Activation": "pbmvfl.plan.groups",
    "Adversary": "pbmvfl.privacy.units",
    "Bounded": "pbmvfl.training.encoders",
    "Evaluation": "pbmvfl.plan.groups",
    "FederatedModel": "pbmvfl.federation.model",
    "Federation": "pbmvfl.federation.federation",
    "GradientCodecName": "pbmvfl.wire.gradient_codecs",
    "Ledger": "pbmvfl.ledger.ledger",
    "Limit": "pbmvfl.ledger.limits",
    "OptimizerName": "pbmvfl.plan.groups",
    "Parties": "pbmvfl.federation.federation",
    "Plan": "pbmvfl.plan.plan",
    "Policy": "pbmvfl.plan.policy",
    "Predictions": "pbmvfl.federation.predictions",
    "PrivacyTable": "pbmvfl.privacy.table",
    "Result": "pbmvfl.federation.results",
    "Unit": "pbmvfl.privacy.units",
    "VerticalClassifier": "pbmvfl.federation.estimator",
    "VerticalDataset": "pbmvfl.data",
    "data": "pbmvfl",
    "load": "pbmvfl.federation.model",
    "load_dataset": "pbmvfl.data",
    "load_table": "pbmvfl.data",
    "train_jointly": "pbmvfl.research.joint",
}

__all__ = [
    "Accounting",
    "Activation",
    "Adversary",
    "AlignmentError",
    "AnswersError",
    "Bounded",
    "BudgetExceeded",
    "CheckpointError",
    "DataError",
    "DuplicateMessage",
    "EncoderError",
    "Evaluation",
    "FederatedModel",
    "Federation",
    "FederationError",
    "GradientCodecName",
    "IdentityError",
    "Ledger",
    "LedgerError",
    "Limit",
    "LinkError",
    "ModelError",
    "NonFiniteError",
    "NonFiniteMessage",
    "OptimizerName",
    "OrderError",
    "OutOfOrder",
    "Parties",
    "PartyLost",
    "PartyRefused",
    "PbmvflError",
    "Plan",
    "PlanError",
    "Policy",
    "PolicyError",
    "PolicyFileError",
    "Predictions",
    "PrivacyTable",
    "ProtocolError",
    "Result",
    "RunFolderError",
    "TransportError",
    "TruncatedMessage",
    "Unit",
    "VerticalClassifier",
    "VerticalDataset",
    "WriteError",
    "WrongPlan",
    "WrongSender",
    "WrongSession",
    "WrongVersion",
    "load",
    "load_dataset",
    "load_table",
    "train_jointly",
]


if not TYPE_CHECKING:  # a type checker that saw this would find every misspelt name in it

    def __getattr__(name):
        if name in _LAZY:
            module = _LAZY[name]
            # A module of the package itself is loaded, not looked up: it is no attribute before that.
            return import_module(f"pbmvfl.{name}") if module == "pbmvfl" else getattr(import_module(module), name)
        raise AttributeError(f"module 'pbmvfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "data"])
