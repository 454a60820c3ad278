"""From a budget to a plan: the inverse of the account.

For fixed sizes the account leaves one trade: more trials b or a larger beta mean less noise and more epsilon. For each
b the largest beta under the budget is found by bisection on the exact account (beta is an integer, so this ends), and
the pair with the least noise wins. How many epochs, how large a batch and how long an embedding are choices about
learning, not about privacy: rules of thumb below, each of which a caller can overrule.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from pbmvfl._settings import check_whole
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import Mechanism
from pbmvfl.mechanisms.label_response import USUAL_LABEL_EPSILON
from pbmvfl.plan.flat_names import algorithm_of, groups_of, mechanism_numbers
from pbmvfl.plan.groups import Algorithm, Evaluation
from pbmvfl.plan.local_search import LocalRules, dense_columns, largest_shift
from pbmvfl.plan.prediction_search import PredictionChoice, fusion_rows, plan_prediction
from pbmvfl.plan.round_kinds import Split
from pbmvfl.plan.shapes import KINDS
from pbmvfl.privacy.accounting import TrainingRun, epsilon_bound, rdp_curve
from pbmvfl.privacy.conversion import check_delta, epsilon_from_rdp, usual_delta
from pbmvfl.privacy.orders import ORDERS
from pbmvfl.privacy.table import format_epsilon, named
from pbmvfl.privacy.units import SERVER, Accounting, Adversary, Unit, column_unit

if TYPE_CHECKING:
    from pbmvfl.data.vertical import VerticalDataset
    from pbmvfl.plan.plan import Plan

#: Epsilon of training where none is given.
USUAL_EPSILON = 8.0
#: Noise grows with the square root of the epochs and averages out over steps, so few epochs and small batches win, as
#: long as the networks get enough steps; fewest where noise would drown the sums. Seen on two datasets at epsilon 8.
_EPOCHS, _FEWEST_EPOCHS = 4, 2
_STEPS = 350
_BATCHES = (8, 16, 25, 32, 50, 64, 100, 128, 200, 256)
#: Enough for a search, and what a ledger's whole count is taken at.
FEW_ORDERS = ORDERS[2::8]
#: Numbers of a plan that say what predictions release.
_VOTES = frozenset({"vote", "prediction_mechanism"})
#: Names that plan joint rounds where no algorithm is given.
_OF_JOINT_ROUNDS = frozenset({"phases", "mechanism", "encoder", "num_trials", "beta"})
#: So small a shift is as good as no information.
_QUIETEST_SHIFT = 1e-4
#: The noise of updates is sought to within this share, in at most so many exact accounts.
_MULTIPLIER_SHARE, _MULTIPLIER_STEPS = 5e-4, 6
#: So many of the plans with the least noise are refined: the faster account now and then ranks close ones wrongly.
_REFINED = 3


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A privacy budget: how much, of what, against whom, counted how."""

    epsilon: float
    delta: float
    unit: Unit
    accounting: Accounting
    adversary: Adversary = SERVER

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise PlanError(f"{name}={value!r} is of type {type(value).__name__}; permitted: a number above 0")
        check_delta(self.delta)
        if not 0 < self.epsilon < math.inf:
            raise PlanError(f"epsilon={self.epsilon!r} must be a finite number above 0")

    def spent_by(self, plan: Plan) -> float:
        """Return the plan's epsilon of exactly this kind."""
        return self.spent_on(plan.training_run())

    def spent_on(self, run: TrainingRun) -> float:
        """Return the epsilon of a run, such as that of one split's rows."""
        return epsilon_bound(run, self.unit, self.accounting, self.adversary, delta=self.delta).epsilon

    def roughly_spent_by(self, plan: Plan) -> float:
        """Return an upper bound of `spent_by`, some per cent above and ten times faster: Renyi curves at few orders."""
        curve = rdp_curve(plan.training_run(), self.unit, self.accounting, self.adversary, orders=FEW_ORDERS)
        return epsilon_from_rdp(curve, self.delta, FEW_ORDERS)[0]

    def __str__(self) -> str:
        return (
            f"epsilon {self.epsilon:g} at delta {self.delta:g} for a {self.unit} against {self.adversary}, "
            f"{self.accounting} accounting"
        )


@dataclass(frozen=True, kw_only=True)
class PlannedBudget:
    """A plan within a budget, the epsilon it spends, and its neighbours."""

    plan: Plan
    budget: Budget
    epsilon: float
    alternatives: tuple[tuple[Plan, float], ...]
    #: Reasons, where there was a choice.
    words: tuple[str, ...] = ()

    @property
    def noise(self) -> float:
        return noise_deviation(self.plan)


def noise_deviation(plan: Plan) -> float:
    """Return the largest standard deviation of one coordinate of the estimated sum."""
    return math.sqrt(plan.release.variance_upper_bound)


def plan_for_budget(
    plans: type[Plan],
    *,
    epsilon: float,
    delta: float | None,
    unit: Unit | str,
    accounting: Accounting | str,
    colluding_parties: int = 0,
    data: VerticalDataset | None = None,
    num_parties: int | None = None,
    num_samples: int | None = None,
    num_classes: int | None = None,
    num_test_samples: int = 0,
    largest_bytes: int | None = None,
    columns: int | None = None,
    column_values: int | None = None,
    kinds: Sequence[str] = (),
    prediction_epsilon: float | None = None,
    same_rows: bool = False,
    serving_epsilon: float | None = USUAL_EPSILON,
    label_epsilon: float | None = USUAL_LABEL_EPSILON,
    **choices: Any,
) -> PlannedBudget:
    """Find the plan with the least noise within a budget; the arguments are those of `Plan.for_budget`.

    The algorithm is `staged`, unless the choices name or need joint rounds.

    Args:
        plans: The class `Plan`, which imports this module.
        column_values: How many values each column has, where all have few; `data` says so itself.
        kinds: For each party the kinds of its columns (`plan.shapes`), where they have ranges; `data` says so itself.
    """
    if data is not None:
        num_parties, num_samples, num_classes = data.num_parties, data.num_samples, data.num_classes
        num_test_samples = data.num_test_samples
        columns = max(dense_columns(part.shape[1:]) for part in data.train_features)
        column_values = data.column_values
        kinds = tuple(part.kinds for part in data.columns or ())
        if column_values is not None:
            kinds = tuple("v" * dense_columns(part.shape[1:]) for part in data.train_features)
    elif column_values is not None and columns is not None and num_parties is not None:
        kinds = ("v" * columns,) * num_parties
    if kinds and (len(kinds) != num_parties or not all(part and not part.strip(KINDS) for part in kinds)):
        raise PlanError(
            f"kinds={list(kinds)} with num_parties={num_parties}; permitted: one text for each party, with one of the "
            "letters c, u, v, g, b and w for each of its columns"
        )
    if num_parties is None or num_samples is None or num_classes is None:
        raise PlanError("give data, or num_parties, num_samples and num_classes")
    budget = Budget(
        epsilon=epsilon,
        delta=usual_delta(num_samples) if delta is None else delta,
        unit=column_unit(unit),
        accounting=named(Accounting, accounting, "accounting"),
        adversary=Adversary(colluding_parties=colluding_parties),
    )
    sizes = {
        "num_parties": num_parties,
        "num_samples": num_samples,
        "num_classes": num_classes,
        "num_test_samples": num_test_samples,
    }
    choices["label_epsilon"] = label_epsilon
    if _algorithm(budget, choices) is Algorithm.STAGED:
        if choices.get("evaluation") == Evaluation.RELEASED and "prediction_mechanism" not in choices:
            # Releases without a planned mechanism would be exact, and so without any epsilon.
            prediction_epsilon = budget.epsilon if prediction_epsilon is None else prediction_epsilon
        served = None if prediction_epsilon is not None or not _VOTES.isdisjoint(choices) else serving_epsilon
        predicted = (prediction_epsilon, served, same_rows)
        about = {"columns": columns, "column_values": column_values, "kinds": tuple(kinds)}
        planned = _local(plans, budget, sizes, about, predicted, choices)
        _check_bytes(planned, largest_bytes)
        return planned
    if data is not None:
        choices = {"encoder": data.default_encoder, **choices}
    own = {"prediction_epsilon": prediction_epsilon, "serving_epsilon": serving_epsilon}
    for name, value in own.items():  # a budget of their own needs training that no release is part of
        if value is not None and (name, value) != ("serving_epsilon", USUAL_EPSILON):
            raise PlanError(
                f"{name}={value:g} goes with algorithm=staged and a budget of a cell or record, where rows that are "
                "predicted have a budget of their own; leave it out (none), or choose staged"
            )
    # The rules of thumb divide by these, so they are checked before the rest of the plan exists.
    known: dict[str, Any] = {name: choices[name] for name in ("embedding_dim", "batch_size") if name in choices}
    plans.of(**{**sizes, "num_epochs": 1, "embedding_dim": 1, **known})
    base = plans.of(**{**sizes, **_rules_of_thumb(num_parties, num_samples, num_classes, budget, choices), **choices})
    budget.adversary.honest_parties(num_parties)  # names a colluding_parties that is too large
    return _least_noise(base, budget, choices, largest_bytes)


# --- parties that train alone ---


def _algorithm(budget: Budget, choices: dict[str, Any]) -> Algorithm:
    """Return the algorithm of a budget: the chosen one, or else `staged` where no other choice needs joint rounds.

    Raises:
        PlanError: `staged` was chosen together with something that only joint rounds have.
    """
    asked = algorithm_of(choices)
    if asked is Algorithm.STAGED:
        if budget.unit is Unit.PARTY:
            raise PlanError(
                "unit=party with algorithm=staged: its noise is made for one row, not for all rows of a party; plan "
                "for a cell or a record, or with algorithm=pbm"
            )
        numbers = sorted(mechanism_numbers().intersection(choices))
        if choices.get("mechanism", "none") != "none":
            numbers.insert(0, "mechanism")
        if numbers:
            raise PlanError(
                f"{numbers[0]}={choices[numbers[0]]} with algorithm=staged: it is about releases in joint rounds, of "
                f"which there are none; leave it out, or plan with algorithm=pbm"
            )
        return asked
    if asked is not None:
        return asked
    needs_joint = budget.accounting is not Accounting.STRICT or budget.unit is Unit.PARTY
    return Algorithm.STAGED if not needs_joint and _OF_JOINT_ROUNDS.isdisjoint(choices) else Algorithm.PBM


def _local(
    plans: type[Plan],
    budget: Budget,
    sizes: dict[str, int],
    about: dict[str, Any],
    predicted: tuple[float | None, float | None, bool],
    choices: dict[str, Any],
) -> PlannedBudget:
    """Plan local training.

    `about` describes columns, as `LocalRules` takes them; `predicted` is (prediction_epsilon, serving_epsilon,
    same_rows) of `Plan.for_budget`.
    """
    budget.adversary.honest_parties(sizes["num_parties"])
    prediction_epsilon, serving_epsilon, same_rows = predicted
    epsilon = serving_epsilon if prediction_epsilon is None else prediction_epsilon
    usual = 0 if epsilon is None else fusion_rows(sizes["num_samples"], sizes["num_classes"], epsilon)
    fused = choices.get("num_fusion_samples", usual)
    # A fusion row is released once, by the law of predictions, and is a training row: the budget holds for it, too.
    fused = fused if epsilon is not None and epsilon * (1 + same_rows) <= budget.epsilon else 0
    choice: PredictionChoice | None = None
    words: tuple[str, ...] = ()
    evaluation = Evaluation.SIMULATOR if prediction_epsilon is None else Evaluation.RELEASED
    if prediction_epsilon is not None:
        choice = _prediction(budget, sizes, prediction_epsilon, fused=fused > 0)
        words = (f"predictions within {choice.words}",)
    elif epsilon is not None and (fused or epsilon != USUAL_EPSILON or budget.unit is Unit.RECORD):
        # Later predictions cost this by default, with or without fusion rows; the usual epsilon of a cell needs no
        # mechanism for that, and where it is too small for any release there are no fusion rows.
        with contextlib.suppress(*([PlanError] if epsilon == USUAL_EPSILON else [])):
            choice = _prediction(budget, sizes, epsilon, fused=fused > 0)
    prediction = None if choice is None else choice.mechanism
    released: dict[str, Any] = {}
    if choice is not None:
        released = {**choice.vote_settings(), "num_fusion_samples": fused, "evaluation": str(evaluation)}
    if str(choices.get("features", "shapes")) != "shapes":
        about = {**about, "kinds": ()}  # another map was chosen: knots would have nothing to belong to
    rules = LocalRules(
        num_samples=sizes["num_samples"] - {**released, **choices}.get("num_fusion_samples", 0),
        num_classes=sizes["num_classes"],
        **about,
    )
    settings = {**sizes, **rules.settings(), **released, **choices}
    check_whole("num_epochs", settings["num_epochs"], least=1)

    def plan(shift: float) -> Plan:
        prepared = settings["preparation"] != "none"
        features = str(settings.get("features", "columns"))
        noise = rules.strength(shift, num_epochs=settings["num_epochs"], prepared=prepared, features=features)
        return plans(**groups_of({**settings, **noise, **choices}, prediction))

    def spent(shift: float) -> float:
        run = plan(shift).training_run()
        return budget.spent_on(run.of_one_row() if same_rows else run.of_split(Split.TRAIN))

    shift = largest_shift(spent, budget.epsilon)
    if shift is not None:
        # What rows are mapped to costs nothing; only whether they are prepared does.
        settings = {**sizes, **rules.settings(shift), **released, **choices}
        if "preparation" not in choices and not rules.can_prepare(shift, str(settings.get("features", "columns"))):
            settings["preparation"] = "none"
            shift = largest_shift(spent, budget.epsilon)
    if shift is None:
        least = plan(_QUIETEST_SHIFT)
        raise PlanError(
            f"no plan is within {budget}: even {least.noise_multiplier:.4g} times the clip norm of noise costs "
            f"{format_epsilon(spent(_QUIETEST_SHIFT))}"
            + (", predictions included; give them less" if same_rows else "; ask for at least that")
        )
    found = plan(shift)
    return PlannedBudget(plan=found, budget=budget, epsilon=spent(shift), alternatives=(), words=words)


def _prediction(budget: Budget, sizes: dict[str, int], epsilon: float, *, fused: bool = True) -> PredictionChoice:
    """Choose the mechanism and the vote by which predicted rows are released."""
    return plan_prediction(
        epsilon=epsilon,
        delta=budget.delta,
        unit=budget.unit,
        adversary=budget.adversary,
        num_parties=sizes["num_parties"],
        num_classes=sizes["num_classes"],
        num_rows=sizes["num_samples"],
        fused=fused,
    )


def _check_bytes(planned: PlannedBudget, largest_bytes: int | None) -> None:
    total = planned.plan.traffic().total
    if largest_bytes is not None and total > largest_bytes:
        raise PlanError(
            f"no plan within {planned.budget} stays within {largest_bytes:,} bytes: local training moves {total:,}, "
            "most of it labels; allow more bytes"
        )


# --- sums in every round ---


def _drowned(num_parties: int, embedding_dim: int, budget: Budget) -> bool:
    """Return whether a full number of epochs' noise exceeds the largest sum; to first order, in Gaussian terms."""
    strength = budget.epsilon / math.sqrt(2 * math.log(1.25 / budget.delta))
    cells = num_parties if budget.unit is Unit.RECORD else 1
    return 2 * math.sqrt(max(1, embedding_dim) * _EPOCHS * cells) / strength > num_parties


def _rules_of_thumb(
    num_parties: int, num_samples: int, num_classes: int, budget: Budget, choices: dict[str, Any]
) -> dict[str, Any]:
    """Return sizes that learn well: few coordinates, few epochs, and batches that leave enough steps."""
    # Two classes need one number. More classes were learned better with a number each than with fewer.
    embedding_dim = choices.get("embedding_dim", 1 if num_classes == 2 else min(num_classes, 16))
    few = _FEWEST_EPOCHS if _drowned(num_parties, embedding_dim, budget) else _EPOCHS
    batch = choices.get("batch_size")
    if not isinstance(batch, int):
        batch = max(size for size in _BATCHES if size == _BATCHES[0] or few * num_samples / size >= _STEPS)
    epochs = min(max(round(_STEPS * batch / num_samples), few), 30)
    chosen: dict[str, Any] = {
        "embedding_dim": embedding_dim,
        "batch_size": batch,
        "num_epochs": epochs,
        "optimizer": "adam",
        "learning_rate": 0.002,
        "gradient_codec": "int8",
    }
    if choices.get("optimizer") == "sgd":
        chosen |= {"learning_rate": 0.05, "momentum": 0.9}
    if budget.accounting is Accounting.STRICT and budget.unit is not Unit.PARTY:
        chosen |= {"clip_norm": 1.0}
    return chosen


def _least_noise(base: Plan, budget: Budget, choices: dict[str, Any], largest_bytes: int | None) -> PlannedBudget:
    base = _with_update_noise(base, budget, choices)
    fixed = frozenset(choices)

    def roughly_fits(release: Mechanism) -> bool:
        return budget.roughly_spent_by(base.with_release(release)) <= budget.epsilon

    def fits(release: Mechanism) -> bool:
        return budget.spent_by(base.with_release(release)) <= budget.epsilon

    kind = type(base.release)
    # What is fixed already needs no search, and so no shortcut.
    test = fits if fixed.issuperset(kind.own_settings()) else roughly_fits
    found = [base.with_release(release) for release in kind.candidates(base.release, fixed, test)]
    too_big = [plan for plan in found if largest_bytes is not None and plan.traffic().total > largest_bytes]
    found = [plan for plan in found if plan not in too_big]
    if not found and not too_big:
        # The search counts some per cent too much, so the exact account decides about the quietest plan of all.
        quietest = _quietest(base, fixed)
        if budget.spent_by(quietest) <= budget.epsilon:
            fits_bytes = largest_bytes is None or quietest.traffic().total <= largest_bytes
            found, too_big = ([quietest], []) if fits_bytes else ([], [quietest])
    if not found:
        raise PlanError(_infeasible(_quietest(base, fixed), budget, largest_bytes, too_big[-1] if too_big else None))
    found.sort(key=noise_deviation)
    # The smaller of two valid bounds is what gets reported, so the last per cents come from the slower one.
    refined = [base.with_release(plan.release.refined(fixed, fits)) for plan in found[:_REFINED]]
    best = min(refined, key=noise_deviation)
    others = tuple((plan, budget.spent_by(plan)) for plan in found[1:4])
    return PlannedBudget(plan=best, budget=budget, epsilon=budget.spent_by(best), alternatives=others)


def _quietest(base: Plan, fixed: frozenset[str]) -> Plan:
    """The least epsilon that is to be had with what the caller fixed."""
    return base.with_release(type(base.release).quietest(base.release, fixed))


def _with_update_noise(base: Plan, budget: Budget, choices: dict[str, Any]) -> Plan:
    """Strict accounting of a cell or record is useless without weight noise: give it half of the squared budget."""
    if budget.accounting is not Accounting.STRICT or budget.unit is Unit.PARTY or "noise_multiplier" in choices:
        return base
    if base.couples_rows:  # such an encoder has no account with weight noise
        return base
    half = replace(budget, epsilon=budget.epsilon / math.sqrt(2))
    quiet = _quietest(base, frozenset(choices))

    def fits(hundredths: int) -> bool:
        return half.roughly_spent_by(quiet.replace(noise_multiplier=hundredths / 100)) <= half.epsilon

    smallest = 1
    largest = 1 << 20
    if not fits(largest):
        return base.replace(noise_multiplier=largest / 100)
    while largest - smallest > 1:
        middle = (smallest + largest) // 2
        smallest, largest = (smallest, middle) if fits(middle) else (middle, largest)
    # Renyi curves ask for about 7% more noise than the exact account, which decides.
    multiplier = _least_multiplier(
        lambda tried: half.spent_by(quiet.replace(noise_multiplier=tried)), largest / 100, half.epsilon
    )
    return base.replace(noise_multiplier=multiplier)


def _least_multiplier(spent: Callable[[float], float], enough: float, epsilon: float) -> float:
    """Nearly the smallest noise that spends at most epsilon, below one that does: false position in logarithms.

    Every step is a whole account, so there are few; what is returned was tried, or is where the search began.
    """
    spent_enough = spent(enough)
    if not 0 < spent_enough <= epsilon:
        return enough
    # Epsilon falls at least as fast as the noise rises, so this is too little noise, or just enough.
    too_little = float(f"{enough * spent_enough / epsilon:.5g}")
    spent_too_little = spent(too_little)
    if spent_too_little <= epsilon:
        return too_little
    for _ in range(_MULTIPLIER_STEPS):
        if enough <= too_little * (1 + _MULTIPLIER_SHARE):
            break
        slope = math.log(spent_too_little / spent_enough) / math.log(enough / too_little)
        tried = enough * (spent_enough / epsilon) ** (1 / slope) * (1 + _MULTIPLIER_SHARE / 4)
        tried = float(f"{tried:.5g}")  # a number for people too
        if not too_little < tried < enough:
            break
        spent_tried = spent(tried)
        if spent_tried <= epsilon:
            enough, spent_enough = tried, spent_tried
        else:
            too_little, spent_too_little = tried, spent_tried
    return enough


def _infeasible(least: Plan, budget: Budget, largest_bytes: int | None, too_big: Plan | None) -> str:
    if too_big is not None and largest_bytes is not None:
        return (
            f"no plan within {budget} stays within {largest_bytes:,} bytes; the smallest found moves "
            f"{too_big.traffic().total:,} (embedding_dim={too_big.embedding_dim}, num_epochs={too_big.num_epochs}): "
            "allow more bytes, fewer epochs, or a shorter embedding"
        )
    smallest = budget.spent_by(least)
    if not least.release.is_private:
        return (
            f"no plan is within {budget}: mechanism={least.mechanism} releases embeddings as they are, and no epsilon "
            "is finite; leave the mechanism out, or name another"
        )
    way_out = [f"epsilon of at least {format_epsilon(smallest)} with these sizes"]
    if least.num_epochs > 1 or least.embedding_dim > 1:
        single = least.replace(num_epochs=1, embedding_dim=1)
        way_out.append(f"num_epochs=1 and embedding_dim=1 (then from {format_epsilon(budget.spent_by(single))} on)")
    if budget.accounting is Accounting.STRICT and budget.unit is not Unit.PARTY and not least.noise_multiplier:
        coupled = f"an encoder other than {least.encoder}, and with it " if least.couples_rows else ""
        way_out.append(
            f"{coupled}weight noise (--noise-multiplier), without which strict accounting charges every release"
        )
    if least.evaluation is Evaluation.RELEASED and budget.accounting is Accounting.STRICT:
        way_out.append("evaluation=simulator")
    settings = "".join(f"{name}={getattr(least.release, name):.4g}, " for name in type(least.release).own_settings())
    return (
        f"no plan is within {budget}: even {settings}"
        f"embedding_dim={least.embedding_dim}, num_epochs={least.num_epochs} costs {format_epsilon(smallest)}. "
        "It would take " + ", or ".join(way_out)
    )
