"""How `ledger-format-1.sqlite` and `ledger-format-1.json` were made: by version 0.1.0, commit 9dcc15c, and never again.

The file is what that version wrote; the JSON is what that version said about it. Later versions must read the one and
say the other. Kept to show what is in them; it does not run with later versions.
"""

import contextlib
import json
from pathlib import Path

from pbmvfl.data.schedule import Schedule
from pbmvfl.privacy.filters import Limit, epsilon_at
from pbmvfl.privacy.ledger import Ledger
from pbmvfl.privacy.spending import fixed_plan_epsilon, spending

from pbmvfl.errors import BudgetExceeded
from pbmvfl.plan import Plan

HERE = Path(__file__).parent
BOOK = HERE / "ledger-format-1.sqlite"
SIZES = {"num_parties": 4, "num_samples": 50, "num_test_samples": 9, "num_classes": 3}
SMALL = {**SIZES, "embedding_dim": 2, "num_trials": 2, "beta": 0.0625, "num_epochs": 3, "batch_size": 20}
PLANS = {
    "released": Plan(**SMALL, evaluation="released"),
    "noisy updates": Plan(**SMALL, noise_multiplier=12.5, clip_norm=0.5, seed=1),
    "local": Plan(**SMALL, mechanism="ldp", bound=2.0),
    "readable": Plan(**SMALL, secure_aggregation=False, activation="softsign"),
    "coupled": Plan(**SMALL, encoder="resnet18-batchnorm"),
    "in clear": Plan(**SMALL, mechanism="none"),
}
NAMED = [f"person-{i}" for i in range(50)]


def charge(dataset, plan, run, session, first=0, until=None, **ids):
    opened = Ledger(BOOK).open_session(
        dataset=dataset,
        plan=plan,
        run=run,
        session=session,
        first_round=first,
        fingerprint=f"values of {dataset}",
        **ids,
    )
    schedule = Schedule(plan)
    with contextlib.closing(opened), contextlib.suppress(BudgetExceeded):
        for number in range(first, len(schedule) if until is None else until):
            opened.charge(schedule[number])


BOOK.unlink(missing_ok=True)
book = Ledger(BOOK)
for unit in ("cell", "record", "party"):
    for accounting in ("paper", "strict"):
        for colluding in (0, 2):
            limit = Limit.choose(unit=unit, accounting=accounting, epsilon=900, delta=1e-6, colluding_parties=colluding)
            book.set_limit("people", limit)
            book.set_limit("animals", limit)
book.set_limit("tight", Limit.choose(unit="cell", accounting="paper", epsilon=2, delta=1e-6))
book.close()
charge("people", PLANS["released"], "aa" * 8, "01" * 16, until=5)
charge("people", PLANS["released"], "aa" * 8, "02" * 16, first=3)
charge("people", PLANS["noisy updates"], "bb" * 8, "03" * 16, train_ids=NAMED, test_ids=[f"new-{i}" for i in range(9)])
charge("people", PLANS["readable"], "cc" * 8, "04" * 16, train_ids=NAMED[::-1], test_ids=range(9))
charge("animals", PLANS["local"], "dd" * 8, "05" * 16)
charge("animals", PLANS["coupled"], "ee" * 8, "06" * 16, until=4)
charge("tight", PLANS["released"], "ff" * 8, "07" * 16)
charge("unlimited", PLANS["in clear"], "ab" * 8, "08" * 16)

book = Ledger(BOOK, read_only=True)
said = {"export": book.export(), "spent": {}, "as one plan": {}, "refusals": {}}
for dataset in book.datasets():
    for limit in book.limits(dataset):
        spent = spending(book, dataset, limit)
        name = f"{dataset}, {limit}"
        said["spent"][name] = {
            "epsilon": epsilon_at(spent.worst, limit.delta, limit.order),
            "everywhere": spent.everywhere,
            "rows": [float(value) for value in spent.rows],
        }
        said["as one plan"][name] = fixed_plan_epsilon(
            book,
            dataset,
            unit=limit.unit,
            accounting=limit.accounting,
            colluding_parties=limit.colluding_parties,
            delta=limit.delta,
        )
    for entry in book.sessions(dataset):
        said["refusals"][entry.session] = [[number, reason] for number, reason, _ in book.refusals(entry.id)]
book.close()
(HERE / "ledger-format-1.json").write_text(json.dumps(said, indent=1) + "\n")
