"""Flat names of a plan's public numbers, as options and `Plan.of` have them, and their groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypedDict

from pbmvfl._settings import Setting, one_of, settings_of
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import MECHANISMS, Mechanism
from pbmvfl.mechanisms.votes import VoteKind
from pbmvfl.plan.groups import (
    MECHANISM,
    TRAINING,
    Activation,
    Algorithm,
    Evaluation,
    FeatureMap,
    FusionName,
    Head,
    Labels,
    Learning,
    Loss,
    Network,
    OptimizerName,
    Preparation,
    PreparationName,
    Rounds,
    Sizes,
    Start,
    Supervision,
    Training,
    UpdateNoise,
    Voting,
    usual_phases,
    words,
)
from pbmvfl.plan.schedule import Order, Phase
from pbmvfl.wire.gradient_codecs import GradientCodecName

if TYPE_CHECKING:
    from pbmvfl.data.vertical import VerticalDataset

#: Prefix of the names of a mechanism's numbers, where they are those of predictions.
PREDICTION_PREFIX = "prediction_"
#: Names that fit any plan: with these alone, the rest is still planned.
NEUTRAL = frozenset({"algorithm", "seed", "evaluation", "label_epsilon", "num_fusion_samples", "fusion"})
_REQUIRED = ("num_parties", "num_samples", "num_classes")
_PLAIN_GROUPS: dict[str, type] = {
    "learning": Learning,
    "supervision": Supervision,
    "update": UpdateNoise,
    "preparing": Preparation,
    "voting": Voting,
}


def data_sizes(data: VerticalDataset) -> dict[str, Any]:
    """Return the sizes of the data, and its default encoder, by their flat names."""
    return {
        "num_parties": data.num_parties,
        "num_samples": data.num_samples,
        "num_test_samples": data.num_test_samples,
        "num_classes": data.num_classes,
        "encoder": data.default_encoder,
    }


def plan_settings() -> dict[str, Setting]:
    """Return every flat name with its help, from which the command line makes its options."""
    described = " | ".join(f"{name} ({MECHANISMS[name].words})" for name in MECHANISMS)
    named = Setting("mechanism", str, "pbm", f"{described}.", MECHANISM)
    found = {"mechanism": named}
    groups: list[type] = [Sizes, *MECHANISMS.values(), Rounds, *_PLAIN_GROUPS.values(), Network]
    for group in groups:
        for each in settings_of(group):
            found.setdefault(each.name, each)
    found["num_epochs"] = Setting("num_epochs", int, 10, "E: uses of every row.", TRAINING)
    found["algorithm"] = Setting(
        "algorithm",
        Algorithm,
        None,
        "staged (every party trains alone by noisy steps; a row is released once, when it is predicted) | pbm (joint "
        f"rounds, as in the paper: {MECHANISMS['pbm'].words}). A budget is planned with staged.",
        TRAINING,
    )
    found["training"] = Setting(
        "training", Training, Training.JOINT, f"{words(Training)}: rounds of pbm, or of staged.", TRAINING
    )
    hidden = ", ".join(name for name in MECHANISMS if MECHANISMS[name].sums_are_hidden)
    found["secure_aggregation"] = Setting(
        "secure_aggregation",
        bool,
        None,
        f"Mask every party's message so that only sums can be read; the default of {hidden}.",
        MECHANISM,
        help_off="The server reads every party's message.",
    )
    found["evaluation"] = Setting(
        "evaluation",
        Evaluation,
        Evaluation.SIMULATOR,
        f"{words(Evaluation)}: exact sums outside the protocol, what the server reads by a release, or nothing.",
        MECHANISM,
    )
    found["seed"] = Setting("seed", int, 0, "Public: schedule and first weights. Never the noise.", TRAINING)
    return found


def known_names() -> set[str]:
    """Return every flat name that `Plan.of` takes."""
    names = {*plan_settings(), "phases", "first_weights", "model"}
    released = {"mechanism", "secure_aggregation", *(n for m in MECHANISMS.values() for n in m.own_settings())}
    return names | {PREDICTION_PREFIX + name for name in (*released, "embedding_dim", "bound")}


def _check_names(names: Iterable[str]) -> None:
    known = sorted(known_names())
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? The " if near else ""
            raise PlanError(f"unknown plan field {name!r}; {hint}fields are {', '.join(known)}")


def groups_of(values: Mapping[str, Any], prediction: Mechanism | None = None) -> dict[str, Any]:
    """Return the groups of a plan with these flat names.

    Args:
        values: Flat names with their values.
        prediction: Mechanism of predictions, where a search has found one; numbers in `values` overrule its own.
    """
    for name in ("mechanism", PREDICTION_PREFIX + "mechanism"):  # An unknown mechanism is reported before its numbers.
        if name in values:
            MECHANISMS.check(values[name])
    _check_names(values)
    missing = sorted(set(_REQUIRED) - set(values))
    if missing:
        raise PlanError(f"the plan lacks {', '.join(missing)}")
    groups: dict[str, Any] = {"sizes": Sizes(**_taken(values, Sizes))}
    sizes: Sizes = groups["sizes"]
    groups["release"] = _release(values, sizes.num_parties)
    voting = Voting(**_taken(values, Voting))
    of_predictions = {
        name.removeprefix(PREDICTION_PREFIX): value
        for name, value in values.items()
        if name.startswith(PREDICTION_PREFIX)
    }
    if of_predictions or prediction is not None:
        shared = {name: values[name] for name in ("mechanism", "embedding_dim", "bound") if name in values}
        if voting.vote is not VoteKind.RAW:
            shared["embedding_dim"] = voting.as_vote(1.0).width(sizes.num_classes)
        if prediction is not None:
            shared |= {"mechanism": prediction.name, "secure_aggregation": prediction.secure_aggregation}
        groups["prediction"] = _release({**shared, **of_predictions}, sizes.num_parties, prediction)
    for name in ("evaluation", "seed"):
        if name in values:
            groups[name] = values[name]
    evaluation = one_of("evaluation", values.get("evaluation", Evaluation.SIMULATOR), Evaluation)
    phases = values.get("phases")
    algorithm = algorithm_of(values)
    if phases is None:
        phases = usual_phases(
            values.get("num_epochs", 10),
            training=Training.JOINT if algorithm is None else algorithm.training,
            prepared=values.get("preparation", PreparationName.NONE) != PreparationName.NONE,
            fused=voting.num_fusion_samples > 0,
            # Noise that is correlated over steps is for rows that keep their places from pass to pass.
            order=Order.SHUFFLED if values.get("noise_band", 1) == 1 else Order.FIXED,
            released=evaluation is Evaluation.RELEASED,
        )
    elif "num_epochs" in values:
        raise PlanError("num_epochs and phases both say how long a run is; give one of them")
    elif algorithm is not None:
        given = "training" if "training" in values else "algorithm"
        raise PlanError(f"{given} and phases both say which rounds there are; give one of them")
    if evaluation is Evaluation.RELEASED and sizes.num_test_samples < 1:
        raise PlanError(
            f"evaluation=released needs num_test_samples of at least 1, got {sizes.num_test_samples}; "
            "give test rows or use evaluation=simulator"
        )
    groups["rounds"] = Rounds(**_taken(values, Rounds), phases=phases)
    for name, group in _PLAIN_GROUPS.items():
        groups[name] = group(**_taken(values, group))
    named = {name: values[name] for name in ("first_weights", "model") if name in values}
    groups["network"] = Network(**_taken(values, Network), **named)
    return groups


def algorithm_of(values: Mapping[str, Any]) -> Algorithm | None:
    """Return the algorithm that flat names choose, by `algorithm` or by `training`; None if neither is given.

    Raises:
        PlanError: One of them is unknown, or they contradict each other.
    """
    asked = None
    if values.get("algorithm") is not None:
        asked = one_of("algorithm", values["algorithm"], Algorithm)
    if "training" not in values:
        return asked
    training = one_of("training", values["training"], Training)
    if asked is not None and asked.training is not training:
        raise PlanError(
            f"algorithm={asked} has {asked.training} rounds, and training={training}; leave one of them out"
        )
    return next(each for each in Algorithm if each.training is training)


def mechanism_numbers() -> frozenset[str]:
    """Return the names of the numbers that mechanisms of training rounds have of their own."""
    return frozenset(name for each in MECHANISMS.values() for name in each.own_settings())


def is_planned(choices: Mapping[str, Any]) -> bool:
    """Return whether a budget plans what these choices leave open; otherwise they are a plan by themselves."""
    if NEUTRAL.issuperset(choices):
        return True
    algorithm = choices.get("algorithm")
    if algorithm == Algorithm.STAGED:
        return True
    return algorithm is not None and mechanism_numbers().isdisjoint(choices)


def _taken(values: Mapping[str, Any], group: type) -> dict[str, Any]:
    return {each.name: values[each.name] for each in settings_of(group) if each.name in values}


def _release(values: Mapping[str, Any], num_parties: int, found: Mechanism | None = None) -> Mechanism:
    """Return the named mechanism: its numbers in `values` alone, and for the rest those of `found`, if of its kind."""
    kind = MECHANISMS[values.get("mechanism", "pbm")]
    hidden = values.get("secure_aggregation")
    if hidden is None:
        hidden = kind.sums_are_hidden
    given = _taken(values, kind) | {"secure_aggregation": hidden}
    return replace(found, **given) if type(found) is kind else kind(num_parties=num_parties, **given)


def names_with_words() -> str:
    """Return every flat name with its default and its help, for `help(Plan)`."""
    lines = []
    for each in plan_settings().values():
        default = "" if each.is_required or each.default is None else f" = {each.default}"
        lines.append(f"    {each.name}{default}: {each.help}")
    return "\n".join(lines)


# --- The same names as keyword arguments, for editors and type checkers ---


class PlanOptions(TypedDict, total=False):
    """Flat names of a plan without its sizes. An enum may also be given as it is spelled."""

    # Mechanism of training rounds.
    mechanism: str
    secure_aggregation: bool | None
    embedding_dim: int
    bound: float
    num_trials: int
    beta: float
    levels: int
    scale: float
    honest_parties: int
    bounded_total: bool
    symbols: int
    response_epsilon: float
    # Mechanism of predictions, where it is another one.
    prediction_mechanism: str
    prediction_secure_aggregation: bool | None
    prediction_embedding_dim: int
    prediction_bound: float
    prediction_num_trials: int
    prediction_beta: float
    prediction_levels: int
    prediction_scale: float
    prediction_honest_parties: int
    prediction_bounded_total: bool
    prediction_symbols: int
    prediction_response_epsilon: float
    # Votes of predictions.
    vote: VoteKind | str
    vote_gain: float
    vote_grades: int
    num_fusion_samples: int
    fusion: FusionName | str
    # Rounds.
    batch_size: int
    num_epochs: int
    training: Training | str
    phases: Sequence[Phase] | None
    evaluation: Evaluation | str
    seed: int
    # Learning.
    learning_rate: float
    optimizer: OptimizerName | str
    momentum: float
    nesterov: bool
    averaging: float
    gradient_codec: GradientCodecName | str
    gradient_bound: float
    labels: Labels | str
    loss: Loss | str
    head: Head | str
    # Noise on updates, and preparation of columns.
    noise_multiplier: float
    clip_norm: float
    noise_band: int
    preparation: PreparationName | str
    mean_noise: float
    mean_clip: float
    gram_noise: float
    gram_clip: float
    ridge: float
    # Networks.
    encoder: str
    activation: Activation | str
    features: FeatureMap | str
    column_values: int
    shapes: str
    start: Start | str
    first_weights: Sequence[str]
    model: str


class PlanChoices(PlanOptions, total=False):
    """Every flat name of a plan; those here are arguments of their own in `Plan.for_budget`."""

    num_parties: int
    num_samples: int
    num_classes: int
    num_test_samples: int
    algorithm: Algorithm | str
    label_epsilon: float | None
