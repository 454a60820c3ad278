"""A network of your own for each party, inside `Bounded`.

Run it in this folder: `python own_encoder.py`. It writes own_model/.
"""

import torch
from torch import nn

import pbmvfl
from pbmvfl.training.encoders import Bounded, weights_digest

who = {"bank": ["age", "income", "debt", "job", "owns_home"], "shop": ["visits", "basket", "channel", "member"]}
data = pbmvfl.load_table("people.csv", columns=who, label="left", id="customer", schema="schema.json")


def networks() -> list[nn.Module]:
    """One for each party: its columns in, a score for each class out.

    Anything that treats each row by itself will do; batch normalisation and dropout are refused. Scores may have any
    size here, as training at home releases none, and the votes of predictions are bounded by themselves. First weights
    come from a public seed: everybody can make them, so they know nothing of any row.
    """
    torch.manual_seed(1)
    widths = [part.shape[1] for part in data.train_features]
    bodies = [nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, data.num_classes)) for width in widths]
    return [Bounded(body, activation="none") for body in bodies]


encoders = networks()
# The plan names the first weights. Others would be charged as weights that know the rows already.
declared = [weights_digest(encoder) for encoder in encoders]
plan = pbmvfl.Plan.for_budget(epsilon=8, data=data, features="columns", first_weights=declared)
result = pbmvfl.Federation(plan, encoders=encoders).fit(data)
print(f"epsilon {result.privacy().epsilon('cell', 'strict'):.2f} of a cell, strict, as planned")

result.model.save("own_model")  # weights only: code stays with its owner, who brings it again
model = pbmvfl.load("own_model", encoders=networks())
print(f"accuracy of released predictions: {model.score(data):.3f}")
print(f"most frequent class: {result.majority['test'].rate:.3f}")
