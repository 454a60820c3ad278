"""What the tests of limits over names share: a table of people, a plan, ledgers with a limit, and what left a party."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

import pbmvfl
from pbmvfl import FederatedModel, Federation, Ledger, Limit
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.ledger.database import file_name
from support.local_plans import voting_plan

NAME = "people"
WHO = {"bank": ["income", "debt"], "shop": ["visits", "basket"]}
#: What one prediction costs, and a limit that two of them are within and three are not.
EACH, LIMIT = 2.0, 5.0
EMBEDDING = 6


def write_people(path: Path, numbers: Iterable[int], *, label: bool = True) -> Path:
    """People by their numbers: a person has the same values and the same id in every file."""
    chosen = list(numbers)
    values = np.random.default_rng(3).normal(size=(400, 4)).round(3)[chosen]
    columns: dict[str, Any] = {"person": [f"p{number}" for number in chosen]}
    columns |= {name: values[:, i] for i, name in enumerate(["income", "debt", "visits", "basket"])}
    if label:
        columns["churn"] = ["yes" if total > 0 else "no" for total in values.sum(axis=1)]
    pyarrow.csv.write_csv(pa.table(columns), path)
    return path


def load_people(
    path: Path, *, id: str | None = "person", who: dict[str, list[str]] | None = None, **choices: Any
) -> VerticalDataset:
    schema = {"columns": {name: {"range": [-4, 4]} for name in ("income", "debt", "visits", "basket")}}
    usual = {"label": "churn", "columns": who or WHO, "schema": schema, "name": NAME}
    return pbmvfl.load_table(path, id=id, **{**usual, **choices})


def plan_of(data: VerticalDataset, **choices: Any) -> pbmvfl.Plan:
    """Training that costs its rows little, and predictions by randomised response with a pure epsilon of EACH."""
    usual = {"noise_multiplier": 30.0, "mean_noise": 30.0, "gram_noise": 30.0, "batch_size": 60}
    usual |= {"num_epochs": 1, "prediction_response_epsilon": EACH, "evaluation": "none", "encoder": "linear"}
    return voting_plan(data, **{**usual, **choices})


def set_limits(folder: Path, parties: Iterable[str] = WHO, *, epsilon: float = LIMIT, dataset: str = NAME) -> None:
    limit = Limit.choose(unit="cell", accounting="strict", epsilon=epsilon, delta=1e-5)
    for party in parties:
        with contextlib.closing(Ledger(folder / file_name(party), owner=party)) as ledger:
            ledger.set_limit(dataset, limit)


def trained(data: VerticalDataset, ledger: Path | None, **choices: Any) -> FederatedModel:
    model = Federation(plan_of(data, **choices)).fit(data, ledger=ledger).model
    assert model is not None
    return model


class Left:
    """How many answers about rows left the first party, read from bytes alone."""

    def __init__(self, *watched: Any) -> None:
        self.count = 0
        for each in watched:
            each.taps.append(self)

    def __call__(self, direction: str, party: int, message: bytes) -> None:
        self.count += direction == "up" and party == 0 and message[5] == EMBEDDING


def sessions(folder: Path, party: str = "bank", dataset: str = NAME) -> int:
    with contextlib.closing(Ledger(folder / file_name(party), read_only=True)) as ledger:
        return len(ledger.sessions(dataset))


def noted(folder: Path, party: str = "bank") -> list[tuple[str, str]]:
    """(event, dataset) of the permissions in a ledger's history."""
    with contextlib.closing(Ledger(folder / file_name(party), read_only=True)) as ledger:
        found = [event for event in ledger.history() if event.what in ("exact", "uncharged", "opened")]
    return [(event.what, event.values["dataset"]) for event in found if event.values.get("exact_metrics", True)]
