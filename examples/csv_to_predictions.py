"""From a CSV file with mixed columns and missing values to charged predictions in a Parquet file.

Run it in this folder: `python csv_to_predictions.py`. It writes ledgers/, model/ and predictions.parquet.
"""

import pbmvfl

who = "bank=age,income,debt,job,owns_home;shop=visits,basket,channel,member"
data = pbmvfl.load_table("people.csv", columns=who, label="left", id="customer", schema="schema.json")
plan = pbmvfl.Plan.for_budget(epsilon=8, data=data)  # of a cell, strict
print(plan.privacy())  # what training will cost, before anything is trained
model = pbmvfl.Federation(plan).fit(data, ledger="ledgers").model  # each party keeps its own ledger there
model.save("model")  # a folder for each party, and one for the server
print(model.prediction_privacy())  # what a prediction will cost
print(model.evaluate(data))  # test rows: one release of each, charged
predictions = model.release("new_people.csv", id="customer")  # likewise of these
predictions.write("predictions.parquet")
