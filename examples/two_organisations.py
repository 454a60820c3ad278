"""Two organisations with a file each: rows are joined by an id, budgets are limited, and both limits hold.

Run it in this folder: `python two_organisations.py`. It writes limited/ with the two ledgers.
"""

from contextlib import closing

import pbmvfl
from pbmvfl.errors import BudgetExceeded

files = {"bank": "bank.csv", "shop": "shop.csv"}  # other rows, in another order; the bank has the label
data = pbmvfl.load_table(files, id="customer", label="left", schema="schema.json", name="customers")
print(f"{data.num_samples} training rows and {data.num_test_samples} test rows that both have")
print(*data.notes, sep="\n")

# Before the first run each owner sets a limit in a ledger of their own: training may know a cell up to epsilon 10.
limit = pbmvfl.Limit.choose(unit="cell", accounting="strict", epsilon=10, delta=1e-5)
for party in files:
    with closing(pbmvfl.Ledger(f"limited/{party}.sqlite", owner=party)) as ledger:
        ledger.set_limit("customers", limit)

# Test rows are predicted by charged releases: what a limit holds for is never looked at exactly.
plan = pbmvfl.Plan.for_budget(epsilon=8, prediction_epsilon=8, data=data)
result = pbmvfl.Federation(plan).fit(data, ledger="limited")
print(f"accuracy of released predictions: {result.released['test_accuracy']:.3f}")
print(f"most frequent class: {result.majority['test'].rate:.3f}")

# The same again would bring the training rows above 10. Nothing is sent.
try:
    pbmvfl.Federation(plan).fit(data, ledger="limited")
except BudgetExceeded as refused:
    print(f"the second run is refused: {refused}")
