"""A federation as an estimator of scikit-learn: in a pipeline, and cross-validated, with every fold charged.

Run it in this folder, with pandas installed: `python estimator_in_a_pipeline.py`. It writes folds/ with the ledgers.
"""

import json
from contextlib import closing
from pathlib import Path

import pandas as pd
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import pbmvfl

people = pd.read_csv("people.csv", index_col="customer")  # the index names the rows in the ledgers
X, y = people.drop(columns="left"), people["left"]


def with_spending(rows: pd.DataFrame) -> pd.DataFrame:
    """Each row by itself, from columns of one party: such a step needs no epsilon. One that learns from rows, as
    StandardScaler does, would need one, and nobody would count it; give ranges in the schema instead."""
    return rows.assign(spending=rows["visits"] * rows["basket"])


schema = json.loads(Path("schema.json").read_text())
schema["columns"]["spending"] = {"range": [0, 2000], "missing": True}
who = {
    "bank": ["age", "income", "debt", "job", "owns_home"],
    "shop": ["visits", "basket", "spending", "channel", "member"],
}
classifier = pbmvfl.VerticalClassifier(columns=who, schema=schema, epsilon=8, ledger="folds", dataset="people")
pipeline = make_pipeline(FunctionTransformer(with_spending), classifier)

# Three trainings on two thirds of the rows each, and one prediction of every row: all of it is charged.
scores = cross_val_score(pipeline, X, y, cv=3)
print(f"accuracy of released predictions, three folds: {scores.mean():.3f}")
print(f"most frequent class: {y.value_counts(normalize=True).max():.3f}")
with closing(pbmvfl.Ledger("folds/bank.sqlite", read_only=True)) as ledger:
    print(f"sessions in the bank's ledger: {len(ledger.sessions('people'))}")
