"""Plans mean what they meant: their hashes are frozen, and so is what an earlier version said of the old ones.

Parties sign a plan's hash, checkpoints and ledgers keep it. A change that moves one of these hashes needs another
protocol version, and then another set of them.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from pbmvfl.errors import PlanError
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import JOINT, PREDICTION
from pbmvfl.plan.schedule import Order, Phase
from pbmvfl.plan.search import noise_deviation, plan_for_budget

DATA = Path(__file__).parents[1] / "data"
PLANS: dict[str, dict[str, Any]] = json.loads((DATA / "frozen-plans.json").read_text())
OLD: dict[str, list[dict[str, Any]]] = json.loads((DATA / "accounts-0.1.json").read_text())
SIZES: dict[str, Any] = {"num_parties": 5, "num_samples": 1000, "num_classes": 3, "num_test_samples": 200}

STAGED = {"training": "local", "labels": "parties", "label_epsilon": 4.0, "head": "fixed", "mechanism": "none"}
STAGED |= {"embedding_dim": 3, "activation": "none", "start": "zero", "encoder": "linear", "noise_multiplier": 6.0}
STAGED |= {"preparation": "whiten", "mean_noise": 4.0, "gram_noise": 5.0, "mean_clip": 1.0, "gram_clip": 0.8}
STAGED |= {
    "features": "shapes",
    "shapes": "2u16+5c;1g12;3c;2v4+p4;1u8",
    "num_fusion_samples": 200,
    "fusion": "logistic",
}
RELEASED = {"evaluation": "released", "vote": "top", "prediction_mechanism": "krr", "prediction_symbols": 3}
RELEASED |= {"prediction_response_epsilon": 2.0, "prediction_secure_aggregation": False}

#: name -> (flat names, hash). The whole form of each plan is in data/frozen-plans.json.
FROZEN: dict[str, tuple[dict[str, Any], str]] = {
    "usual": (SIZES, "54241a0eb431ad808ac13b0c25eb409b61c97a9b64dc714c0bf312ccda5c55a8"),
    "smallest": (
        {"num_parties": 2, "num_samples": 1, "num_classes": 2, "num_trials": 1, "num_epochs": 1},
        "0230500d3b5547d85875d8de2515f1984cbd0e46fd1489f1bf19cb0fa8e1001f",
    ),
    "quiet": (
        {**SIZES, "num_trials": 3, "beta": 0.01, "embedding_dim": 1, "bound": 2.5, "seed": 2**63 - 1},
        "834738aa84674558e7d65066658b1fdf6872f96385286f2814129311f7911f57",
    ),
    "released": (
        {**SIZES, "evaluation": "released", "batch_size": 37, "gradient_codec": "int8", "activation": "softsign"},
        "70cfb6850b8a039b4bcdc5990543e8aee9adbb4e84cfe1a6290c39f965e822d0",
    ),
    "local-gaussian": (
        {**SIZES, "mechanism": "ldp", "optimizer": "adam", "learning_rate": 0.002},
        "3c54203259aac1983cb02f81e70ccc95249cdcea00e158ef48db729bab7dab2c",
    ),
    "exact": (
        {**SIZES, "mechanism": "none", "encoder": "resnet18-batchnorm", "momentum": 0.9},
        "55a9490e0ea1d2255a4f738824fc101075b3470b3ffbe4647aad3aeb917af23d",
    ),
    "noisy-updates": (
        {**SIZES, "noise_multiplier": 6.3, "clip_norm": 0.5, "num_trials": 1, "secure_aggregation": False},
        "fbb0446faf4946afdcacf43fe17b0de1552ef62a5dcf67bf05a6238b4073079b",
    ),
    "phases": (
        {
            **SIZES,
            "phases": (
                Phase(kind=JOINT, passes=2),
                Phase(kind=PREDICTION, passes=3, order=Order.AS_GIVEN),
                Phase(kind=JOINT, passes=1, order=Order.AS_GIVEN),
            ),
            "prediction_num_trials": 2,
            "prediction_beta": 0.125,
        },
        "ed104fca623057f77fdd2fc0105682bf5ebc42800a7d0efbdfe4460813e99402",
    ),
    "staged": (
        {**SIZES, **STAGED, **RELEASED},
        "90732a215ff2b6b256af0d2332e65030890d84e57b02fab239bcc7e429fdc329",
    ),
}


def test_every_frozen_plan_has_its_form_in_the_data() -> None:
    assert set(PLANS) == set(FROZEN)
    assert len({expected for _, expected in FROZEN.values()}) == len(FROZEN)


@pytest.mark.parametrize("name", FROZEN)
def test_a_plan_has_the_hash_that_was_signed(name: str) -> None:
    choices, expected = FROZEN[name]
    for plan in (Plan.of(**choices), Plan.from_dict(PLANS[name]), Plan.from_json(json.dumps(PLANS[name]))):
        assert plan.hash.hex() == expected
        assert plan.to_dict() == PLANS[name]


@pytest.mark.parametrize("name", FROZEN)
def test_the_hash_is_that_of_the_written_form_and_the_protocol_s_version(name: str) -> None:
    text = json.dumps({"protocol": 2, **PLANS[name]}, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == FROZEN[name][1]


@pytest.mark.parametrize("name", FROZEN)
def test_any_changed_whole_number_of_the_written_form_changes_the_hash(name: str) -> None:
    changed = 0
    for group, values in PLANS[name].items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, bool) or not isinstance(value, int):
                continue
            try:
                other = Plan.from_dict({**PLANS[name], group: {**values, key: value + 1}})
            except PlanError:
                continue  # numbers that belong to each other would have to change together
            assert other.hash.hex() != FROZEN[name][1]
            changed += 1
    assert changed >= 4


# --- what version 0.1.0 said ---


def as_number(epsilon: float | str) -> float:
    return float(epsilon)  # infinity is written as a word


@pytest.mark.parametrize("index", range(len(OLD["plans"])))
def test_a_plan_of_version_0_1_costs_what_that_version_said_or_less(index: int) -> None:
    """Better bounds may come later. None may be above what was promised then, nor suspiciously far below."""
    said = OLD["plans"][index]
    *now, label = Plan.from_dict(said["plan"]).privacy(delta=1e-6).to_dicts()
    assert (label["unit"], label["epsilon"]) == (
        "label",
        "inf",
    )  # that version used labels in clear, and did not say so
    keys = ("unit", "accounting", "adversary", "colluding_parties", "delta")
    assert [[row[key] for key in keys] for row in now] == [[row[key] for key in keys] for row in said["privacy"]]
    for row, old in zip(now, said["privacy"], strict=True):
        epsilon, promised = as_number(row["epsilon"]), as_number(old["epsilon"])
        if math.isinf(promised):
            assert math.isinf(epsilon)
        else:
            # The search for an epsilon ends anywhere within 1e-5 above it; beside noisy updates it takes other steps.
            room = 1.1e-5 if said["plan"]["noise_multiplier"] else 1e-12
            assert epsilon <= promised * (1 + room) + 1e-9
            assert epsilon >= promised / 2
        assert set(old["conditions"]) <= set(row["conditions"])  # nothing that was said is left out


@pytest.mark.parametrize("index", range(len(OLD["plans"])))
def test_a_plan_of_version_0_1_moves_the_bytes_that_that_version_said(index: int) -> None:
    said = OLD["plans"][index]
    now, then = Plan.from_dict(said["plan"]).traffic().to_dict(), said["traffic"]
    assert set(now) == set(then)
    for name in set(now) - {"bytes_setup"}:  # the handshake is the protocol's, not the plan's
        assert now[name] == then[name]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(OLD["budgets"])))
def test_a_budget_of_version_0_1_buys_at_least_as_much_as_then(index: int) -> None:
    said = OLD["budgets"][index]
    asked, old = said["asked"], Plan.from_dict(said["plan"])
    found = plan_for_budget(Plan, **asked, training="joint")
    assert found.epsilon <= asked["epsilon"]
    # A search may end elsewhere within a fifth of a per cent of beta. Updates had more than their half of the noise
    # then, which left more for releases.
    noisy = bool(old.noise_multiplier)
    assert found.noise <= noise_deviation(old) * (1.1 if noisy else 1.003)
    assert found.plan.noise_multiplier <= old.noise_multiplier
    spent = old.privacy(delta=asked["delta"]).epsilon(asked["unit"], asked["accounting"])
    assert spent <= said["epsilon"] * (1 + (1.1e-5 if noisy else 1e-9))
    same = ("num_epochs", "batch_size", "embedding_dim", "optimizer", "learning_rate", "gradient_codec")
    assert {name: getattr(found.plan, name) for name in same} == {name: getattr(old, name) for name in same}


def test_plans_of_version_0_1_are_read_number_by_number() -> None:
    for said in OLD["plans"]:
        plan = Plan.from_dict(said["plan"])
        flat = plan.flat()
        left_out = {"num_trials", "beta"} if plan.mechanism == "none" else set()
        assert set(said["plan"]) - set(flat) == left_out
        # These came later; their defaults change nothing of an honest run.
        later = {
            "gradient_bound": 1000.0,
            "training": "joint",
            "nesterov": False,
            "averaging": 0.0,
            "labels": "server",
            "loss": "cross-entropy",
            "head": "trained",
            "label_epsilon": None,
            "features": "columns",
            "vote": "raw",
            "vote_gain": 1.0,
            "vote_grades": 1,
            "num_fusion_samples": 0,
            "fusion": "auto",
            "column_values": 3,
            "shapes": "",
            "start": "random",
            "preparation": "none",
            "mean_noise": 0.0,
            "mean_clip": 1.0,
            "gram_noise": 0.0,
            "gram_clip": 1.0,
            "ridge": 0.5,
        }
        assert {name: value for name, value in said["plan"].items() if name not in left_out} | later == flat
