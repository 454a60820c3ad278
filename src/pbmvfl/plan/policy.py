"""Conditions of a party's owner on a plan, checked before a party exists.

A refusal is public: it names a number of the plan, what the owner permits, and a way out; never a value of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from pbmvfl._settings import settings_of
from pbmvfl.errors import PlanError, PolicyError
from pbmvfl.mechanisms.label_response import check_label_epsilon
from pbmvfl.plan.flat_names import PREDICTION_PREFIX, known_names
from pbmvfl.plan.groups import Evaluation, Learning, Rounds, UpdateNoise
from pbmvfl.plan.plan import Plan
from pbmvfl.privacy.accounting import TrainingRun, epsilon_bound
from pbmvfl.privacy.conversion import check_delta
from pbmvfl.privacy.table import format_epsilon
from pbmvfl.privacy.units import Accounting, Unit, column_unit

_WAY_OUT = "or change the policy"
#: Lists and digests, which no rule is about. Their meaning is in `training`, `num_epochs` and the account.
_NOT_RULED = frozenset({"phases", "first_weights", "model"})
#: Names without a meaning in a plan that only predicts.
_OF_TRAINING = frozenset(
    {"num_epochs", "algorithm", "training", "labels", "evaluation"}
    | {each.name for group in (Rounds, Learning, UpdateNoise) for each in settings_of(group)}
)


#: An epsilon by Renyi divergences so many times above what is permitted needs no closer look.
_FAR_ABOVE = 10.0


@dataclass(frozen=True)
class Permitted:
    """Permitted values of a plan's field: a few of them, or a range of numbers."""

    values: tuple[Any, ...] | None = None
    least: float = -math.inf
    most: float = math.inf

    @classmethod
    def of(cls, name: str, rule: object) -> Permitted:
        """Read a rule.

        Args:
            name: Flat name of the field, for messages.
            rule: A list of values, one value, or {"least": ..., "most": ...} with one of the two or both.

        Raises:
            PlanError: The rule has another form, or permits nothing.
        """
        if isinstance(rule, Permitted):
            return rule
        if isinstance(rule, Mapping):
            if not rule or not set(rule) <= {"least", "most"} or not all(map(_is_number, rule.values())):
                raise PlanError(f"{name}={dict(rule)!r}: a range has numbers named least and most, or one of them")
            found = cls(least=float(rule.get("least", -math.inf)), most=float(rule.get("most", math.inf)))
            if found.least > found.most:
                raise PlanError(f"{name}: least={found.least:g} is above most={found.most:g}, and nothing is permitted")
            return found
        values = tuple(rule) if isinstance(rule, list | tuple | set | frozenset) else (rule,)
        if not values or not all(isinstance(value, str | int | float) for value in values):
            raise PlanError(f"{name}={rule!r}: give the permitted values, such as [1, 2], or {{least = 1, most = 2}}")
        return cls(values=values)

    def permits(self, value: object) -> bool:
        """Return whether a field may have this value."""
        if self.values is not None:
            # To Python True is 1; to an owner it is not.
            return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.values)
        return _is_number(value) and self.least <= value <= self.most  # type: ignore[operator]  # it is a number

    def __str__(self) -> str:
        if self.values is not None:
            return ", ".join(str(value) for value in self.values)
        if self.least == -math.inf:
            return f"at most {self.most:g}"
        return f"at least {self.least:g}" if self.most == math.inf else f"{self.least:g} to {self.most:g}"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Conditions of one party's owner on a plan. The default accepts every plan that a simulation may run."""

    #: The sum hides a party among the others: with fewer than this it hides too little.
    smallest_num_parties: int = 2
    #: Names of mechanisms by which rows may be released; None for any.
    mechanisms: frozenset[str] | None = None
    #: Whether only sums may be readable.
    needs_secure_aggregation: bool = False
    #: Whether a simulator may look at exact sums. A deployment cannot.
    allows_exact_metrics: bool = True
    #: The most that one plan may spend by the strict count, for this unit at this delta; None for any. What all runs
    #: together may spend is the ledger's.
    largest_epsilon: float | None = None
    unit: Unit = Unit.CELL
    delta: float = 1e-5
    #: Of the noise on updates, as a multiple of what a row is clipped to; 0 permits steps without noise.
    smallest_noise: float = 0.0
    #: The label holder's: the largest epsilon by which training labels may be drawn; None for any.
    largest_label_epsilon: float | None = None
    #: The label holder's: whether training labels may be used in clear.
    allows_clear_labels: bool = True
    #: What fields of a plan may be, by their flat names: ["local"], or {"most": 200}.
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", column_unit(self.unit))
        check_delta(self.delta)
        if self.largest_epsilon is not None and not (_is_number(self.largest_epsilon) and self.largest_epsilon > 0):
            raise PlanError(f"largest_epsilon={self.largest_epsilon!r} must be a number above 0")
        if not _is_number(self.smallest_noise) or not 0 <= self.smallest_noise < math.inf:
            raise PlanError(f"smallest_noise={self.smallest_noise!r} must be a finite number of at least 0")
        if self.largest_label_epsilon is not None:
            check_label_epsilon(self.largest_label_epsilon)
        known = sorted(known_names() - _NOT_RULED)
        for name in self.fields:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise PlanError(f"{name} is no field of a plan that a policy can be about; {hint}It has {_list(known)}")
        rules = {name: Permitted.of(name, rule) for name, rule in self.fields.items()}
        object.__setattr__(self, "fields", rules)

    def check(self, plan: Plan, *, public_start: bool | None = None) -> None:
        """Refuse a plan that does not meet the conditions.

        Args:
            plan: The plan of a session.
            public_start: Whether the weights that the session begins with know rows only by what was charged for them.
                If not, every release may be about any row. None where it is not known: then the plan must be within
                `largest_epsilon` by both counts.

        Raises:
            PolicyError: The plan does not meet a condition.
        """
        if plan.num_parties < self.smallest_num_parties:
            raise PolicyError(
                f"num_parties={plan.num_parties}: the policy permits {self.smallest_num_parties} or more; "
                f"find more parties, {_WAY_OUT}"
            )
        for release in plan.releases:
            if self.mechanisms is not None and release.name not in self.mechanisms:
                raise PolicyError(
                    f"mechanism={release.name}: the policy permits {_list(sorted(self.mechanisms))}; plan with one "
                    f"of them, {_WAY_OUT}"
                )
            if self.needs_secure_aggregation and not release.secure_aggregation:
                raise PolicyError(
                    "secure_aggregation=False: the policy permits only sums to be readable; plan with "
                    f"secure_aggregation=True, {_WAY_OUT}"
                )
        if not self.allows_exact_metrics and plan.evaluation is Evaluation.SIMULATOR:
            raise PolicyError(
                "evaluation=simulator: the policy permits nobody to look at exact sums; plan with evaluation=none or "
                f"evaluation=released, {_WAY_OUT}"
            )
        self._check_fields(plan)
        self._check_noise(plan)
        self._check_labels(plan)
        if self.largest_epsilon is not None:
            # Neither count is always the larger one: noise on updates is charged by the first alone.
            for public in (True, False) if public_start is None else (public_start,):
                self._check_epsilon(plan.training_run(public_start=public), self.largest_epsilon)

    def _check_fields(self, plan: Plan) -> None:
        values = _values(plan)
        for name, rule in self.fields.items():
            if plan.model and name in _OF_TRAINING:
                continue
            if name not in values:
                raise PolicyError(
                    f"{name}: the policy permits {rule}, and the plan has no such number; plan with a mechanism that "
                    f"has it, {_WAY_OUT}"
                )
            if not rule.permits(values[name]):
                raise PolicyError(
                    f"{name}={_shown(values[name])}: the policy permits {rule}; plan with what it permits, {_WAY_OUT}"
                )

    def _check_noise(self, plan: Plan) -> None:
        for kind in plan.schedule.kinds if self.smallest_noise else ():
            if not kind.trains:
                continue
            # Noise that is correlated over steps hides less than its multiplier says.
            multiplier = plan.noise_multiplier / plan.update.band.norm
            if multiplier < self.smallest_noise:
                raise PolicyError(
                    f"noise_multiplier={multiplier:g} of {kind.name} rounds: the policy permits "
                    f"{self.smallest_noise:g} or more; plan with more noise, {_WAY_OUT}"
                )

    def _check_labels(self, plan: Plan) -> None:
        """Refuse labels in clear, or drawn with too large an epsilon; a plan that only predicts uses none."""
        epsilon, most = plan.label_epsilon, self.largest_label_epsilon
        if not plan.uses_labels:
            return
        if epsilon is None and not self.allows_clear_labels:
            raise PolicyError(
                "label_epsilon=none: the policy permits no training labels in clear, and parties of this plan would "
                f"learn them; plan with a label_epsilon{'' if most is None else f' of {most:g} or less'}, {_WAY_OUT}"
            )
        if epsilon is not None and most is not None and epsilon > most:
            raise PolicyError(
                f"label_epsilon={epsilon:g}: the policy permits {most:g} or less; plan with that, {_WAY_OUT}"
            )

    def _check_epsilon(self, run: TrainingRun, largest: float) -> None:
        # The quick way is an upper bound too. The exact one can take seconds, and is never so much smaller.
        for exactly in (False, True):
            found = epsilon_bound(run, self.unit, Accounting.STRICT, delta=self.delta, pld=exactly).epsilon
            if found <= largest:
                return
            if found > _FAR_ABOVE * (largest + 1):
                break
        weights = "" if run.public_start else ", weights that may know any row"
        raise PolicyError(
            f"epsilon={format_epsilon(found)} ({self.unit}, strict, delta={self.delta:g}{weights}): the policy permits "
            f"{largest:g} or less in one plan; plan with a smaller budget, {_WAY_OUT}"
        )


def _values(plan: Plan) -> dict[str, Any]:
    """Return every number of a plan by its flat name, also those that a plan file leaves out."""
    answers = plan.prediction or plan.release
    found: dict[str, Any] = {
        "num_epochs": plan.num_epochs,
        "algorithm": str(plan.algorithm),
        "training": str(plan.training),
        "noise_band": plan.noise_band,
        **{PREDICTION_PREFIX + name: value for name, value in answers.to_dict().items()},
        **plan.flat(),
    }
    return {name: str(value) if isinstance(value, str) else value for name, value in found.items()}


def _shown(value: object) -> str:
    """Return a value that another organisation chose, safe for a terminal."""
    text = str(value)
    return text if text.isprintable() and len(text) <= 60 else repr(text[:60])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
