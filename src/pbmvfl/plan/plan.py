"""Plan: every public number of a run, in small frozen values.

The only place where mechanism, schedule and account meet: all are derived from one plan, so they cannot disagree. A
plan holds nothing private and nothing that depends on anyone's columns; its hash is what the parties sign.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, cast, overload

from pbmvfl._settings import one_of, vars_of, written
from pbmvfl._text import html_table, short_repr
from pbmvfl.crypto.protocol_version import PROTOCOL_VERSION
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import Mechanism
from pbmvfl.mechanisms.label_response import USUAL_LABEL_EPSILON, LabelResponse
from pbmvfl.mechanisms.votes import Vote
from pbmvfl.plan.checks import NO_COUNTS, NO_INTERACTIONS, check_together
from pbmvfl.plan.flat_names import (
    PREDICTION_PREFIX,
    PlanChoices,
    PlanOptions,
    data_sizes,
    groups_of,
    is_planned,
    names_with_words,
)
from pbmvfl.plan.groups import (
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
)
from pbmvfl.plan.round_kinds import RoundKind
from pbmvfl.plan.schedule import Order, Phase, RowUses, Schedule
from pbmvfl.plan.shapes import PartyShapes, parse_shapes
from pbmvfl.privacy.events import Event, ExactRelease, ReleaseEvent, UpdateEvent
from pbmvfl.wire.gradient_codecs import GradientCodecName

if TYPE_CHECKING:
    from pbmvfl.data.vertical import VerticalDataset
    from pbmvfl.privacy.accounting import TrainingRun
    from pbmvfl.privacy.table import PrivacyTable
    from pbmvfl.privacy.units import Accounting, Adversary, Unit
    from pbmvfl.wire.traffic import Traffic

#: The form in which a plan is written; read back are this one and the flat one of version 0.1.
FORMAT = 2


# --- the plan ---

_Value = TypeVar("_Value")
_USUAL_ROUNDS, _USUAL_LEARNING, _NO_NOISE, _USUAL_NETWORK = Rounds(), Learning(), UpdateNoise(), Network()
_USUAL_SUPERVISION, _NO_PREPARATION, _NO_VOTING = Supervision(), Preparation(), Voting()
#: Groups that plans have not always had: written only where something in them is not its default.
_LATER_GROUPS = ("supervision", "preparing", "voting")


class _In(Generic[_Value]):
    """Descriptor for a number of a group: `plan.num_parties` is `plan.sizes.num_parties`."""

    def __init__(self, group: str) -> None:
        self._group = group

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, plan: None, owner: type) -> _In[_Value]: ...

    @overload
    def __get__(self, plan: Plan, owner: type) -> _Value: ...

    def __get__(self, plan: Plan | None, owner: type) -> _Value | _In[_Value]:
        if plan is None:
            return self
        return cast(_Value, getattr(getattr(plan, self._group), self._name))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that the roles of a run agree on before it starts.

    Plans are made from flat names, `Plan.of(num_parties=5, num_samples=1000, num_classes=2, num_trials=16, ...)`,
    `Plan.for_data(data, num_trials=16)` or `Plan.for_budget(epsilon=8, ..., data=data)`, and read by the same names
    (`plan.num_trials`) or by group (`plan.release.num_trials`). `plan.replace(beta=0.1)` makes another one. What each
    name means is in the groups: help(Sizes), help(Rounds), help(Learning), help(UpdateNoise), help(Network) of
    `pbmvfl.plan.groups`, and in the mechanisms (`pbmvfl.mechanisms`).
    """

    #: How many parties, rows and classes there are.
    sizes: Sizes
    #: How training rounds release embeddings: the mechanism with its numbers.
    release: Mechanism
    #: How predictions release them; None means like training rounds.
    prediction: Mechanism | None = None
    #: Batches and phases.
    rounds: Rounds = _USUAL_ROUNDS
    #: Steps of the networks.
    learning: Learning = _USUAL_LEARNING
    #: Labels, loss and head.
    supervision: Supervision = _USUAL_SUPERVISION
    #: Noise on the parties' updates.
    update: UpdateNoise = _NO_NOISE
    #: What is learned about columns before training.
    preparing: Preparation = _NO_PREPARATION
    #: What is released of scores for a prediction, and how it is read.
    voting: Voting = _NO_VOTING
    #: The parties' networks.
    network: Network = _USUAL_NETWORK
    #: Where accuracy figures come from.
    evaluation: Evaluation = Evaluation.SIMULATOR
    #: Public: the schedule, the first weights and the codec's rounding. Never noise, never masks.
    seed: int = 0

    num_parties = _In[int]("sizes")
    num_samples = _In[int]("sizes")
    num_classes = _In[int]("sizes")
    num_test_samples = _In[int]("sizes")
    embedding_dim = _In[int]("release")
    bound = _In[float]("release")
    secure_aggregation = _In[bool]("release")
    num_trials = _In[int]("release")
    beta = _In[float]("release")
    beta_16 = _In[int]("release")
    batch_size = _In[int]("rounds")
    num_epochs = _In[int]("rounds")
    learning_rate = _In[float]("learning")
    optimizer = _In[OptimizerName]("learning")
    momentum = _In[float]("learning")
    gradient_codec = _In[GradientCodecName]("learning")
    gradient_bound = _In[float]("learning")
    training = _In[Training]("rounds")
    nesterov = _In[bool]("learning")
    averaging = _In[float]("learning")
    labels = _In[Labels]("supervision")
    loss = _In[Loss]("supervision")
    head = _In[Head]("supervision")
    label_epsilon = _In["float | None"]("supervision")
    preparation = _In[PreparationName]("preparing")
    mean_noise = _In[float]("preparing")
    mean_clip = _In[float]("preparing")
    gram_noise = _In[float]("preparing")
    gram_clip = _In[float]("preparing")
    ridge = _In[float]("preparing")
    num_fusion_samples = _In[int]("voting")
    fusion = _In[FusionName]("voting")
    vote_gain = _In[float]("voting")
    vote_grades = _In[int]("voting")
    features = _In[FeatureMap]("network")
    column_values = _In[int]("network")
    shapes = _In[str]("network")
    start = _In[Start]("network")
    noise_multiplier = _In[float]("update")
    clip_norm = _In[float]("update")
    noise_band = _In[int]("update")
    encoder = _In[str]("network")
    activation = _In[Activation]("network")
    first_weights = _In[tuple[str, ...]]("network")
    model = _In[str]("network")
    couples_rows = _In[bool]("network")

    def __post_init__(self) -> None:
        object.__setattr__(self, "evaluation", one_of("evaluation", self.evaluation, Evaluation))
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 1 << 63:
            raise PlanError(f"seed={self.seed!r} must be a whole number in 0..2^63-1")
        check_together(self)

    # --- derived ---

    @property
    def mechanism(self) -> str:
        """The name of the training rounds' mechanism."""
        return self.release.name

    def __repr__(self) -> str:
        return short_repr("Plan", *(f"{name}={value}" for name, value in self._described.items()))

    def _repr_html_(self) -> str:
        return html_table("plan", self._described.items())

    @property
    def _described(self) -> dict[str, object]:
        names = ("algorithm", "num_parties", "num_samples", "num_classes", "num_epochs", "batch_size", "mechanism")
        return {
            **{name: getattr(self, name) for name in names},
            "noise_multiplier": f"{self.noise_multiplier:.4g}",
            "label_epsilon": self.label_epsilon,
            "hash": self.hash.hex()[:8],
        }

    @property
    def algorithm(self) -> Algorithm:
        """Algorithm by which this plan trains; of one that only predicts, the algorithm behind its model.

        Joint rounds are `pbm`, also with another mechanism: with `none` and `ldp` they are the paper's comparisons.
        Local rounds alone are `staged`. A plan that only predicts is taken for `staged` where no head was trained.
        """
        if any(phase.kind.trains for phase in self.rounds.phases):
            return Algorithm.STAGED if self.training is Training.LOCAL else Algorithm.PBM
        return Algorithm.STAGED if self.head is Head.FIXED else Algorithm.PBM

    @property
    def vote(self) -> Vote:
        """The map of a party's class scores to what it releases for a prediction."""
        return self.voting.as_vote((self.prediction or self.release).bound)

    @property
    def num_symbols(self) -> int | None:
        """Symbols of which a party releases one for a prediction; None where votes are numbers, which are added up."""
        return self.vote.symbols(self.num_classes)

    @cached_property
    def label_response(self) -> LabelResponse | None:
        """Law by which training labels are drawn; None if they are used in clear."""
        return self.supervision.label_response(self.num_classes)

    @property
    def num_network_samples(self) -> int:
        """Training rows that train networks: all but the fusion rows."""
        return self.num_samples - self.num_fusion_samples

    @property
    def label_kept(self) -> float:
        """Probability that a drawn label is the true one by itself; 1 if labels are used in clear."""
        return 1.0 if self.label_response is None else self.label_response.kept

    @cached_property
    def party_shapes(self) -> tuple[PartyShapes, ...]:
        """Shapes of every party's columns; empty unless features=shapes."""
        return parse_shapes(self.shapes)

    def clip_norm_of(self, num_weights: int) -> float:
        """Return what a party with so many weights clips a row's gradient to.

        With shapes a party has as few or as many hats as its columns are worth. D prepared numbers and a constant have
        a norm of about sqrt(D + 1), so that a narrow party needs no more; noise is a multiple of the party's own clip.

        Args:
            num_weights: Weights of the network whose updates are clipped.
        """
        return min(self.clip_norm, math.sqrt(num_weights / self.embedding_dim)) if self.shapes else self.clip_norm

    @property
    def sends_labels(self) -> bool:
        """True if the labels of the training rows go to every party."""
        return self.labels is Labels.PARTIES

    @cached_property
    def schedule(self) -> Schedule:
        """All rounds of the plan: the only counter of rounds, rows and uses."""
        return Schedule(
            num_samples=self.num_samples,
            num_test_samples=self.num_test_samples,
            batch_size=self.batch_size,
            seed=self.seed,
            phases=self.rounds.phases,
            num_fusion_samples=self.num_fusion_samples,
        )

    def mechanism_for(self, kind: RoundKind) -> Mechanism:
        """Return the mechanism by which rounds of a kind release: `release` if they train, else `prediction`.

        Args:
            kind: A kind of round.
        """
        return self.release if kind.updates or self.prediction is None else self.prediction

    def stores_answers(self, kind: RoundKind) -> bool:
        """Return whether a party can send its answers of this kind again without a charge.

        That holds where an answer needs no other party's noise, and no weight moves.

        Args:
            kind: A kind of round.
        """
        mechanism = self.mechanism_for(kind)
        return kind.releases and not kind.trains and mechanism.stands_alone and not mechanism.secure_aggregation

    @cached_property
    def releases(self) -> tuple[Mechanism, ...]:
        """Mechanisms by which rounds of this plan release rows, in order; empty where no round does."""
        return tuple(dict.fromkeys(self.mechanism_for(kind) for kind in self.schedule.kinds if kind.releases))

    def answer_bytes(self, kind: RoundKind, rows: int) -> int:
        """Return the bytes of each party's answer to a round of so many rows, without its header.

        Args:
            kind: A kind of round.
            rows: Rows of the round.
        """
        if kind.releases:
            mechanism = self.mechanism_for(kind)
            return mechanism.payload.num_bytes(rows * mechanism.embedding_dim)
        return 0

    def update_event(self, kind: RoundKind) -> UpdateEvent | None:
        """Return the event by which a use of a row changes what its party keeps; None if it changes nothing.

        Args:
            kind: A kind of round.
        """
        if not kind.updates:
            return None
        if kind.statistic:
            return self.preparing.event(kind.statistic)
        return self.update.event

    def events(self, kind: RoundKind) -> tuple[Event, ...]:
        """Return all events that one use of a row in a round of this kind is charged for.

        Args:
            kind: A kind of round.
        """
        found = self._events.get(kind)
        if found is None:
            released: tuple[Event, ...] = (self.mechanism_for(kind).event,) if kind.releases else ()
            update = self.update_event(kind)
            found = self._events[kind] = released if update is None else (*released, update)
        return found

    @cached_property
    def _events(self) -> dict[RoundKind, tuple[Event, ...]]:
        """Cache of `events`: parties and ledgers look them up in every round."""
        return {}

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of the canonical JSON form and the protocol version, which parties compare and sign."""
        text = json.dumps({"protocol": PROTOCOL_VERSION, **self.to_dict()}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()

    def model_digest(self, run_id: bytes) -> str:
        """Return the digest that the parts of one training run share, and those of no other run.

        Args:
            run_id: Id of the training run.
        """
        return hashlib.sha256(b"pbmvfl model\0" + self.hash + run_id).hexdigest()

    def training_run(self, uses: Iterable[RowUses] | None = None, *, public_start: bool = True) -> TrainingRun:
        """Return the run as the account sees it.

        Args:
            uses: How often rows were used; None for a whole run without interruption.
            public_start: Whether every party began with public weights, which depend on no row.
        """
        from pbmvfl.privacy.accounting import Activity, TrainingRun

        activities = tuple(
            Activity(
                split=use.kind.split,
                part=use.kind.part,
                release=self.mechanism_for(use.kind).event if use.kind.releases else None,
                update=self.update_event(use.kind),
                row_releases=use.releases,
                row_updates=use.updates,
                total_releases=use.total_releases,
            )
            for use in (self.schedule.uses() if uses is None else uses)
        )
        return TrainingRun(
            activities=activities,
            num_parties=self.num_parties,
            # After the first round weights, or what columns are prepared by, may know its rows, released or not.
            first_batch=self.schedule.num_rows(0) if public_start and self.schedule.kind(0).releases else 1,
            public_start=public_start,
            rows_together=self.schedule.num_rows(0) if self.network.couples_rows else 1,
            label=self._label_event,
        )

    @property
    def uses_labels(self) -> bool:
        """True if what parties see depends on the labels of the training rows."""
        return self.sends_labels or any(kind.carries_gradient or kind.needs_labels for kind in self.schedule.kinds)

    @property
    def _label_event(self) -> ReleaseEvent | None:
        """Release of each training label; None if no round uses labels."""
        if not self.uses_labels:
            return None
        response = self.label_response
        return ExactRelease(num_parties=1, embedding_dim=1) if response is None else response.event

    def privacy(self, *, delta: float | None = None, adversaries: Iterable[Adversary] | None = None) -> PrivacyTable:
        """Return the epsilon of this plan for every unit, adversary and accounting, before anything runs.

        Args:
            delta: Delta of every epsilon; None for the one that `Plan.for_budget` plans with by default, a tenth of
                1/num_samples and at most 1e-5.
            adversaries: Whom to count against; None for the usual ones: server, party, server with others.

        Raises:
            PlanError: `delta` is not in (0, 1).
        """
        from pbmvfl.privacy.conversion import usual_delta
        from pbmvfl.privacy.table import privacy_table

        delta = usual_delta(self.num_samples) if delta is None else delta
        return privacy_table(self.training_run(), delta=delta, adversaries=adversaries)

    def traffic(self) -> Traffic:
        """Return the exact number of bytes that this plan will move, before anything runs."""
        from pbmvfl.wire.traffic import predicted_traffic

        return predicted_traffic(self)

    # --- making plans ---

    @classmethod
    def of(cls, **values: Unpack[PlanChoices]) -> Plan:
        """Make a plan from flat names.

        Args:
            **values: Flat names (`pbmvfl.plan.flat_names.PlanChoices`). `num_parties`, `num_samples` and `num_classes`
                are required; a name that is not given has its default.

        Raises:
            PlanError: A name is unknown or missing, a value is out of range, or two contradict each other.
        """
        return cls(**groups_of(values))

    @classmethod
    def for_data(cls, data: VerticalDataset, **choices: Unpack[PlanChoices]) -> Plan:
        """Make a plan for these rows, parties and classes.

        Args:
            data: The data, of which only public sizes are used.
            **choices: Flat names, as in `of`. Without any, or with `algorithm`, `seed`, `evaluation` or `label_epsilon`
                alone, the plan is that of `for_budget` with epsilon 8. So it is with `algorithm` and any others but
                numbers of a mechanism, which say themselves what is spent. Otherwise the plan has what is given, and
                the rest is not planned.

        Raises:
            PlanError: As in `of` and `for_budget`.
        """
        if is_planned(choices):
            from pbmvfl.plan.search import USUAL_EPSILON

            return cls.for_budget(epsilon=USUAL_EPSILON, data=data, **choices)
        return cls.of(**{**data_sizes(data), **choices})

    @classmethod
    def for_budget(
        cls,
        *,
        epsilon: float,
        algorithm: Algorithm | str | None = None,
        delta: float | None = None,
        unit: Unit | str = "cell",
        accounting: Accounting | str = "strict",
        colluding_parties: int = 0,
        data: VerticalDataset | None = None,
        num_parties: int | None = None,
        num_samples: int | None = None,
        num_classes: int | None = None,
        num_test_samples: int = 0,
        largest_bytes: int | None = None,
        columns: int | None = None,
        kinds: Sequence[str] = (),
        prediction_epsilon: float | None = None,
        same_rows: bool = False,
        serving_epsilon: float | None = 8.0,
        label_epsilon: float | None = USUAL_LABEL_EPSILON,
        **choices: Unpack[PlanOptions],
    ) -> Plan:
        """Find the plan with the least noise within a privacy budget.

        Args:
            epsilon: The budget of training for each `unit`.
            algorithm: "staged" or "pbm". None: "staged", unless other choices are of joint rounds alone, which are
                accounting="paper", unit="party", an encoder, and a mechanism or its numbers.
            delta: Delta of the budget; None for a tenth of 1/N, at most 1e-5.
            unit: What the budget protects: a cell (one party's columns of a row), a record or a party.
            accounting: "strict", or "paper" for the paper's way of counting.
            colluding_parties: How many parties share what they see with the server.
            data: The data, of which only public sizes are used; or give the sizes themselves.
            num_parties: M, if there is no `data`.
            num_samples: N, training rows, if there is no `data`.
            num_classes: Classes of the label, if there is no `data`.
            num_test_samples: Test rows, if there is no `data`.
            largest_bytes: Limit of the whole run's traffic; None for any.
            columns: The most columns that a party has, if there is no `data`.
            kinds: For each party what is public of its columns, a letter each (`pbmvfl.plan.shapes`), such as "uugc",
                if there is no `data`; columns then get shapes where rows pay for them.
            prediction_epsilon: Budget of each test row, whose predictions are then released; None: test rows are
                evaluated exactly, outside of any epsilon.
            same_rows: Whether `epsilon` is the total of a row that is trained on and predicted.
            serving_epsilon: What the trained model spends on the `unit` of a row that it predicts later, unless the
                call names another epsilon. Fusion rows are released by the same law, and there are none where it is
                above `epsilon`. None: no fusion rows; a later prediction costs a cell 8 by default. Staged alone.
            label_epsilon: Pure epsilon of each training label, against all parties together. None: labels are used in
                clear.
            **choices: Any other flat name, fixed, as in `of`.

        Returns:
            A plan whose epsilon is at most the budget.

        Raises:
            PlanError: No plan is within the budget, or an argument is out of range; the message has the way out.
        """
        from pbmvfl.plan.search import plan_for_budget

        return plan_for_budget(
            cls,
            epsilon=epsilon,
            algorithm=algorithm,
            delta=delta,
            unit=unit,
            accounting=accounting,
            colluding_parties=colluding_parties,
            data=data,
            num_parties=num_parties,
            num_samples=num_samples,
            num_classes=num_classes,
            num_test_samples=num_test_samples,
            largest_bytes=largest_bytes,
            columns=columns,
            kinds=kinds,
            prediction_epsilon=prediction_epsilon,
            same_rows=same_rows,
            serving_epsilon=serving_epsilon,
            label_epsilon=label_epsilon,
            **choices,
        ).plan

    def replace(self, **changes: Unpack[PlanChoices]) -> Plan:
        """Return this plan with some flat names changed, checked again. A new mechanism brings its own defaults.

        Args:
            **changes: Flat names, as `of` takes them.

        Raises:
            PlanError: As in `of`.
        """
        kept = self.flat()
        anew = {"num_epochs", "evaluation", "algorithm", "training", "preparation", "noise_band", "num_fusion_samples"}
        if not anew.isdisjoint(changes):
            kept.pop("phases", None)
        if "algorithm" in changes:
            kept.pop("training", None)
        return Plan.of(**{**kept, **changes})

    def with_release(self, release: Mechanism) -> Plan:
        """Return this plan with another mechanism, or other numbers of it, in training rounds.

        Args:
            release: The mechanism of training rounds.
        """
        groups = {each.name: getattr(self, each.name) for each in fields(self)}
        return Plan(**{**groups, "release": release})

    # --- forms ---

    def flat(self) -> dict[str, Any]:
        """Return every public number by its flat name, as `of` takes them."""
        values: dict[str, Any] = {**vars_of(self.sizes), **self.release.to_dict()}
        stays = self.rounds.order is Order.FIXED
        usual = self.rounds.usual and stays == (self.noise_band > 1) and self.rounds.order is not Order.AS_GIVEN
        if usual and (self.evaluation is Evaluation.RELEASED) == self.rounds.is_released:
            values |= {"num_epochs": self.num_epochs, "training": str(self.training)}
        else:
            values |= {"phases": self.rounds.phases}
        values |= {"batch_size": self.batch_size, **vars_of(self.learning), **vars_of(self.update)}
        values |= {**vars_of(self.supervision), **vars_of(self.preparing), **vars_of(self.voting)}
        values |= {**vars_of(self.network), "evaluation": self.evaluation, "seed": self.seed}
        for name in ("first_weights", "model"):
            if not values[name]:
                del values[name]
        if self.noise_band == 1:
            del values["noise_band"]
        if self.prediction is not None:
            values |= {PREDICTION_PREFIX + name: value for name, value in self.prediction.to_dict().items()}
            del values[PREDICTION_PREFIX + "embedding_dim"]  # one network makes both, or the vote says it
            if self.prediction.bound == self.bound:
                del values[PREDICTION_PREFIX + "bound"]
        return values

    def to_dict(self) -> dict[str, Any]:
        """Return plain values by group, for JSON; `from_dict` reads them back."""
        later = {name: values for name in _LATER_GROUPS if (values := written(getattr(self, name)))}
        return {
            "format": FORMAT,
            "sizes": written(self.sizes),
            "release": self.release.to_dict(),
            "prediction": None if self.prediction is None else self.prediction.to_dict(),
            "rounds": {"batch_size": self.batch_size, "phases": [phase.to_dict() for phase in self.rounds.phases]},
            "learning": written(self.learning),
            "update": written(self.update),
            "network": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in written(self.network).items()
            },
            **later,
            "evaluation": str(self.evaluation),
            "seed": self.seed,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Read what `to_dict` wrote, or flat names as version 0.1 wrote them.

        Args:
            values: What `to_dict` returned.

        Returns:
            The plan.

        Raises:
            PlanError: The values are no plan, or one of a newer format.
        """
        if "format" not in values:
            return cls.of(**values)
        if values["format"] != FORMAT:
            raise PlanError(f"format={values['format']!r}: this version reads plans of format {FORMAT}; update it")
        if "interactions" in values:
            raise PlanError(NO_INTERACTIONS)
        if isinstance(values.get("voting"), dict) and "table_noise" in values["voting"]:
            raise PlanError(NO_COUNTS)
        known = {"format", *(each.name for each in fields(cls))}
        later = set(_LATER_GROUPS)
        if not known - later <= set(values) <= known:
            wrong = ", ".join(sorted((set(values) ^ known) - (later - set(values))))
            raise PlanError(f"the plan lacks or has too much of: {wrong}; make it anew with `pbmvfl plan`")
        flat: dict[str, Any] = {"evaluation": values["evaluation"], "seed": values["seed"]}
        for group in ("sizes", "release", "rounds", "learning", "update", "network", *_LATER_GROUPS):
            numbers = values.get(group, {})
            if not isinstance(numbers, dict):
                raise PlanError(f"{group}={numbers!r} must be an object")
            flat |= numbers
        if values["prediction"] is not None:
            flat |= {PREDICTION_PREFIX + name: value for name, value in dict(values["prediction"]).items()}
        if isinstance(flat.get("phases"), list):
            flat["phases"] = tuple(Phase.from_dict(phase) for phase in flat["phases"])
        return cls.of(**flat)

    def to_json(self) -> str:
        """Return the text of a plan file."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read the text of a plan file.

        Args:
            text: What `to_json` returned.

        Returns:
            The plan.

        Raises:
            PlanError: The text is not JSON, or no plan.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"the plan is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise PlanError("the plan must be a JSON object")
        return cls.from_dict(values)


Plan.__doc__ = f"{Plan.__doc__}\n    The names, with what is taken where none is given:\n\n{names_with_words()}\n    "
