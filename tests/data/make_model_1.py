"""Make model-format-1: a small model with fusion rows, two rows to predict, and what it computes of them.

Run it only when the format of models changes, and then under another number.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa

import pbmvfl
from pbmvfl import ReleaseOptions

FOLDER = Path(__file__).parent / "model-format-1"
COLUMNS = {"bank": ["income", "job"], "shop": ["visits"]}
SCHEMA = {
    "columns": {
        "income": {"range": [0, 5], "missing": True},
        "job": {"vocabulary": ["clerk", "cook"]},
        "visits": {"range": [-2, 2]},
    }
}


def main() -> None:
    """Train on made-up people, and write the model beside the scores of two of them."""
    random = np.random.default_rng(1)
    stays = random.integers(0, 2, size=200)
    table = pa.table(
        {
            "income": np.round(random.uniform(0, 3, size=200) + 2 * stays, 2),
            "job": [("clerk", "cook")[int(value)] for value in random.integers(0, 2, size=200)],
            "visits": np.round(random.uniform(-2, 0, size=200) + 2 * stays, 2),
            "churn": [("goes", "stays")[value] for value in stays],
        }
    )
    data = pbmvfl.load_table(table, label="churn", columns=COLUMNS, schema=SCHEMA, name="people")
    federation = pbmvfl.Federation(pbmvfl.Plan.for_budget(epsilon=8, data=data, evaluation="none"))
    federation.fit(data)
    FOLDER.mkdir()
    (FOLDER / "rows.csv").write_text("income,job,visits\n2.5,clerk,1.5\n,cook,-1\n")
    model = pbmvfl.load(federation.save(FOLDER / "model"))
    exact = model.release(FOLDER / "rows.csv", ReleaseOptions(exact=True))
    (FOLDER / "scores.json").write_text(json.dumps(exact.scores_NK.tolist()) + "\n")


if __name__ == "__main__":
    main()
