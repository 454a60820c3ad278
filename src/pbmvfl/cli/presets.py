"""What `pbmvfl train DATASET --paper` uses, and what it adds to numbers by hand: settings that work, per dataset."""

from __future__ import annotations

from typing import Any

#: Plan fields. Those of the paper's datasets are the paper's own sizes, with a middle of its tables for the mechanism:
#: they reproduce the paper's accuracy at the paper's (very large) epsilon. Plan with a budget for privacy.
_PRESETS: dict[str, dict[str, Any]] = {
    # `pbmvfl plan --epsilon 8 --delta 1e-5 --unit cell --accounting paper` for its sizes
    "digits": {
        "embedding_dim": 10,
        "num_trials": 16,
        "beta": 0.046,
        "num_epochs": 2,
        "batch_size": 8,
        "optimizer": "adam",
        "learning_rate": 0.002,
        "gradient_codec": "int8",
    },
    "phishing": {"num_trials": 32, "num_epochs": 20},
    "activity": {"num_trials": 64, "num_epochs": 30},
    "cifar10": {"beta": 0.15, "num_epochs": 30},
    "modelnet10": {"embedding_dim": 4096, "batch_size": 64, "num_trials": 8, "beta": 0.15, "num_epochs": 20},
    "imagenet100": {
        "embedding_dim": 128,
        "batch_size": 256,
        "num_trials": 8,
        "beta": 0.1,
        "learning_rate": 0.03,
        "num_epochs": 30,
    },
}
_OWN_TABLE: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.003, "num_epochs": 20}


def preset(dataset: str | None) -> dict[str, Any]:
    """Plan fields for a named dataset, or for a table of the user's own."""
    return dict(_PRESETS.get(dataset, {})) if dataset is not None else dict(_OWN_TABLE)


def uses_pictures(dataset: str | None) -> bool:
    """Networks on pictures profit from several threads; small dense ones only lose time to them."""
    return dataset in ("cifar10", "modelnet10", "imagenet100")
