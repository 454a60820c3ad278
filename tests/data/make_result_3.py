"""How `result-version-2.json` and `result-version-3.json` were made: by the last commit that wrote version 2, and by
the first that wrote version 3. The noise is new at every call, so that it makes other files today.

Of their tables of epsilons the files keep the rows of a server alone, without the words of their conditions.
"""

import json
import sys
from pathlib import Path

import numpy as np

from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.federation import Federation
from pbmvfl.plan import Plan

random = np.random.default_rng(1)
labels = (np.arange(50) % 5 < 2).astype(np.int64)
columns = [(labels[:, None] + random.normal(size=(50, 2))).astype(np.float32) for _ in range(2)]
data = VerticalDataset(
    name="small",
    party_names=("a", "b"),
    train_features=tuple(part[:40] for part in columns),
    test_features=tuple(part[40:] for part in columns),
    train_labels=labels[:40],
    test_labels=labels[40:],
    class_names=("no", "yes"),
    default_encoder="linear",
)
plan = Plan.for_data(data, num_epochs=2, batch_size=16, embedding_dim=2, num_trials=4, beta=0.125, seed=5)
result = Federation(plan).fit(data).to_dict()
result["privacy"] = [
    {name: value for name, value in row.items() if name != "conditions"}
    for row in result["privacy"]
    if row["adversary"] == "server" and not row["colluding_parties"]
]
Path(sys.argv[1]).write_text(json.dumps(result) + "\n")
