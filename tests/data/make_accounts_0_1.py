"""How `accounts-0.1.json` was made: what version 0.1.0, commit 9dcc15c, said of these plans. It does not run again."""

import itertools
import json
from pathlib import Path

from pbmvfl.privacy.calibration import plan_for_budget

from pbmvfl.plan import Plan

SIZES = {"num_parties": 5, "num_samples": 230, "num_test_samples": 41, "num_classes": 3}
CHOICES = [
    {},
    {"num_trials": 2, "beta": 0.05, "num_epochs": 9},
    {"evaluation": "released", "num_epochs": 1, "batch_size": 32},
    {"secure_aggregation": False, "num_trials": 3},
    {"mechanism": "ldp", "bound": 2.5},
    {"mechanism": "none"},
    {"noise_multiplier": 6.3, "num_trials": 1, "beta": 0.02, "embedding_dim": 1},
    {"encoder": "resnet18-batchnorm", "batch_size": 16, "num_trials": 1, "beta": 0.01},
]
CODECS = ("float32", "bfloat16", "int8")
said = []
for choices, codec in zip(CHOICES, itertools.cycle(CODECS)):
    plan = Plan.from_dict({**SIZES, **choices, "gradient_codec": codec})
    said.append(
        {"plan": plan.to_dict(), "privacy": plan.privacy(delta=1e-6).to_dicts(), "traffic": plan.traffic().to_dict()}
    )
budgets = []
for epsilon, unit, accounting in (
    (8, "cell", "paper"),
    (40, "record", "paper"),
    (3, "cell", "strict"),
    (60, "party", "paper"),
):
    asked = {"epsilon": epsilon, "delta": 1e-5, "unit": unit, "accounting": accounting, **SIZES}
    planned = plan_for_budget(**asked)
    budgets.append({"asked": asked, "plan": planned.plan.to_dict(), "epsilon": planned.epsilon})
path = Path(__file__).parent / "accounts-0.1.json"
path.write_text(json.dumps({"plans": said, "budgets": budgets}, indent=1) + "\n")
