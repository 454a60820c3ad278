"""How `ledger-symbols.sqlite` was made: by the last version whose plans had interactions, commit 7ffaba7.

Parties released symbols of their training rows then. Later versions make no such plan, and must price these sessions as
that version did. Kept to show what is in the file; it does not run with later versions.
"""

import contextlib
from pathlib import Path

from pbmvfl.mechanisms.interactions.plan_group import Interactions

from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.ledger.spending import spending
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.schedule import SYMBOLS, Order, Phase

BOOK = Path(__file__).parent / "ledger-symbols.sqlite"
SIZES = {"num_parties": 2, "num_samples": 23, "num_test_samples": 7, "num_classes": 2, "batch_size": 10}
COLUMNS = (((0, -1.0, 1.0, 4),),) * 2
SCREEN = Plan.of(
    **SIZES,
    interactions=Interactions(columns=COLUMNS, shown=1, response_epsilon=2.0),
    phases=(Phase(kind=SYMBOLS, passes=1, order=Order.AS_GIVEN),),
    evaluation="released",
)
TRAINED = Plan.of(
    **SIZES,
    interactions=Interactions(columns=COLUMNS, shown=1, response_epsilon=2.0, pairs=(((0, 0), (1, 0)),)),
    algorithm="staged",
    labels="parties",
    head="fixed",
    mechanism="none",
    embedding_dim=2,
    activation="none",
    encoder="linear",
    num_epochs=3,
    noise_multiplier=6.0,
    evaluation="none",
)

BOOK.unlink(missing_ok=True)
with contextlib.closing(Ledger(BOOK)) as book:
    for dataset in ("screened", "trained"):
        book.set_limit(dataset, Limit.choose(unit="cell", accounting="strict", epsilon=50, delta=1e-5, order=4.0))
for number, (dataset, plan, until) in enumerate(
    (("screened", SCREEN, 3), ("screened", SCREEN, 1), ("trained", TRAINED, len(TRAINED.schedule)))
):
    opened = Ledger(BOOK).open_session(
        dataset=dataset,
        plan=plan,
        run=f"{number:02x}" * 8,
        session=f"{number:02x}" * 16,
        public_start=True,
        exact_metrics=True,
    )
    with contextlib.closing(opened):
        for current in list(plan.schedule)[:until]:
            opened.charge(current, plan.events(current.kind))
with contextlib.closing(Ledger(BOOK, read_only=True)) as book:
    for dataset in ("screened", "trained"):
        print(dataset, spending(book, dataset, *book.limits(dataset)).rows)
BOOK.with_name(BOOK.name + ".lock").unlink()
