"""How often a ledger has charged each predicted row, read from the tables of its file by their definition alone."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import zlib
from collections import Counter
from pathlib import Path

#: Kinds of rounds with all rows in one round.
_WHOLE = ("mean", "gram", "counts")


def charged_predictions(book: Path, dataset: str = "people") -> Counter[str]:
    """Count the charged predictions of each row, by its name: a line's rounds in turn, as far as it is charged."""
    found: Counter[str] = Counter()
    with contextlib.closing(sqlite3.connect(f"file:{book}?mode=ro", uri=True)) as db:
        lines = db.execute(
            "SELECT first_round, charged_until, terms, test_ids FROM sessions JOIN charged ON charged.session = id "
            "JOIN plans ON plans.hash = sessions.plan WHERE dataset = ?",
            (dataset,),
        ).fetchall()
        for first, until, terms, reference in lines:
            schedule, names, number = json.loads(terms)["schedule"], _names(db, reference), 0
            for phase in schedule["phases"]:
                predicts = phase["kind"] == "prediction"
                fused = schedule.get("num_fusion_samples", 0)
                sizes = {"prediction": schedule["num_test_samples"], "fusion": fused}
                rows = sizes.get(phase["kind"], schedule["num_samples"] - fused)
                each = rows if phase["kind"] in _WHOLE else schedule["batch_size"]
                for start in [*range(0, rows, each)] * phase["passes"]:
                    if predicts and first <= number < until:
                        assert phase["order"] == "as-given"
                        found.update(names[start : start + each])
                    number += 1
    return found


def _names(db: sqlite3.Connection, reference: str) -> list[str]:
    kind, _, rest = reference.partition(":")
    if kind == "range":
        return [str(number) for number in range(*map(int, rest.split(":")))]
    ((packed,),) = db.execute("SELECT ids FROM row_ids WHERE hash = ?", (rest,))
    return [str(name) for name in json.loads(zlib.decompress(packed))]
