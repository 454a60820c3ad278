"""How `result-version-1.json` was made: by version 0.1.0, commit d035394, of a run that was killed once and continued.

It does not run again. Of its table of epsilons the file keeps the rows of a server alone, without the words of their
conditions.
"""

from pathlib import Path

import numpy as np

from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.federation import Federation
from pbmvfl.plan import Plan

random = np.random.default_rng(1)
labels = np.arange(50) % 2
columns = [(labels[:, None] + random.normal(size=(50, 2))).astype(np.float32) for _ in range(2)]
data = VerticalDataset(
    name="small",
    party_names=("a", "b"),
    train_features=tuple(part[:40] for part in columns),
    test_features=tuple(part[40:] for part in columns),
    train_labels=labels[:40].astype(np.int64),
    test_labels=labels[40:].astype(np.int64),
    class_names=("no", "yes"),
    default_encoder="linear",
)
plan = Plan.for_data(
    data,
    num_epochs=3,
    batch_size=16,
    embedding_dim=2,
    num_trials=4,
    beta=0.125,
    evaluation="released",
    seed=5,
)


class Killed(Exception):
    pass


def kill(completed: int, *_: object) -> None:
    if completed == 5:
        raise Killed


try:
    Federation(plan).fit(data, checkpoints=Path("checkpoints"), on_round=kill)
except Killed:
    result = Federation(plan).fit(data, checkpoints=Path("checkpoints"))
    Path("result-version-1.json").write_text(result.to_json())
