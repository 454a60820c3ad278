"""What `pbmvfl train DATASET` uses where the user says nothing: settings that work, per dataset."""

from __future__ import annotations

from typing import Any

#: Plan fields. Those of the paper's datasets are the paper's own sizes; the mechanism's are a middle of its tables.
_PRESETS: dict[str, dict[str, Any]] = {
    "digits": {
        "embedding_dim": 8,
        "num_trials": 16,
        "num_epochs": 30,
        "batch_size": 64,
        "optimizer": "adam",
        "learning_rate": 0.003,
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
