"""The typed keyword arguments of a plan are its registered flat names, with their types."""

from __future__ import annotations

import inspect
import subprocess
import sys
from enum import StrEnum
from typing import get_args, get_type_hints

import pytest

from pbmvfl.plan.flat_names import PREDICTION_PREFIX, PlanChoices, PlanOptions, plan_settings
from pbmvfl.plan.groups import Sizes
from pbmvfl.plan.plan import Plan

HINTS = get_type_hints(PlanChoices)


def test_the_typed_names_are_the_registered_ones():
    """In a process of its own: other tests register mechanisms with numbers that no type knows."""
    code = """
from pbmvfl.plan.flat_names import PlanChoices
from pbmvfl.plan.flat_names import known_names
print(sorted(known_names() ^ set(PlanChoices.__annotations__)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_options_are_all_names_but_the_arguments_of_a_search():
    own = {*Sizes.__dataclass_fields__, "algorithm", "label_epsilon"}
    assert set(HINTS) - set(get_type_hints(PlanOptions)) == own
    assert own <= set(inspect.signature(Plan.for_budget).parameters)


@pytest.mark.parametrize("name", sorted(HINTS))
def test_a_name_has_the_type_of_its_setting(name):
    declared = plan_settings().get(name.removeprefix(PREDICTION_PREFIX))
    if declared is None:
        assert name in ("phases", "first_weights", "model")
        return
    permitted = set(get_args(HINTS[name])) or {HINTS[name]}
    if get_args(declared.kind):
        assert permitted == set(get_args(declared.kind))
        return
    wanted = {declared.kind, str} if issubclass(declared.kind, StrEnum) else {declared.kind}
    # None stands for the mechanism's own default.
    assert permitted == (wanted | {type(None)} if declared.name == "secure_aggregation" else wanted)


def test_type_hints_are_evaluated_for_the_first_plan_alone(monkeypatch):
    """They are most of the work of a plan, which every session, search step and file makes anew."""
    plan = Plan.of(num_parties=3, num_samples=100, num_classes=2)
    monkeypatch.setattr("pbmvfl._settings.get_type_hints", lambda group: pytest.fail(f"{group} is read again"))
    assert Plan.from_dict(plan.to_dict()) == Plan.of(num_parties=3, num_samples=100, num_classes=2) == plan
    assert plan.replace(batch_size=7).batch_size == 7
