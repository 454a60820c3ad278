"""The audit of a plan, or of everything that plans can use: its parts in their order, and the report.

Nothing here reads a row, opens a ledger or charges anything: what is drawn is drawn of made-up values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pbmvfl._text import for_json
from pbmvfl.audit import games, laws, sessions, training
from pbmvfl.audit.constants import (
    FALSE_ALARM_RATE,
    GAMES,
    LARGEST_DRAWS,
    LARGEST_GAME_BITS,
    LEVEL,
    MOST_TESTS,
    SESSIONS,
    SMALLEST_SESSIONS,
    TRIALS,
)
from pbmvfl.audit.games import EpsilonFinding
from pbmvfl.audit.statistics import Finding
from pbmvfl.audit.training import TrainingFinding
from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.errors import PlanError
from pbmvfl.mechanisms import MECHANISMS, Mechanism, PoissonBinomial
from pbmvfl.mechanisms.label_response import USUAL_LABEL_EPSILON, LabelResponse
from pbmvfl.plan.plan import Plan

#: Fewer would make the tests of tails and of single steps empty.
SMALLEST_TRIALS = 20_000
_MADE_UP_PARTIES, _MADE_UP_CLASSES = 4, 3
ALWAYS_OPEN = (
    "whether random bytes are secret: a generator that somebody else can compute passes every test of a law",
    "rows, labels and ledgers of any run: an audit reads none of them",
    "clipping in statistics of columns (mean and Gram matrix); their noise is that of the updates",
)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Subject of an audit: everything random that a plan uses.

    Args:
        name: For the report.
        mechanisms: Mechanisms of all rounds that release.
        label_response: Law of drawn labels; None if labels are used in clear.
        noise_multiplier: Noise of updates, in clip norms; 0 if updates have none.
        clip_norm: Largest norm of a row's gradient.
        not_tested: What of it no test covers, in words.
    """

    name: str
    mechanisms: tuple[Mechanism, ...]
    label_response: LabelResponse | None = None
    noise_multiplier: float = 0.0
    clip_norm: float = 1.0
    not_tested: tuple[str, ...] = ()

    @classmethod
    def of_plan(cls, plan: Plan, *, name: str = "the plan") -> Subject:
        """Return everything random that a plan uses. Only the plan's public numbers are read."""
        kinds = plan.schedule.kinds
        released = [plan.mechanism_for(kind) for kind in kinds if kind.releases]
        released += [] if plan.prediction is None else [plan.prediction]  # for later predictions
        noisy = any(kind.updates and not kind.statistic for kind in kinds) and plan.update.event.is_noisy
        return cls(
            name=name,
            mechanisms=tuple(dict.fromkeys(each for each in released if each.is_private)),
            label_response=plan.label_response,
            noise_multiplier=plan.noise_multiplier if noisy else 0.0,
            clip_norm=plan.clip_norm,
            not_tested=_open_of(plan),
        )

    @classmethod
    def everything(cls) -> Subject:
        """Return every registered mechanism with usual numbers, and two settings with small exact epsilons."""
        small = [
            PoissonBinomial(num_parties=5, num_trials=1, beta=0.25, embedding_dim=1, secure_aggregation=True),
            PoissonBinomial(num_parties=4, num_trials=16, beta=0.1, embedding_dim=1, secure_aggregation=True),
        ]
        usual = [
            kind(num_parties=_MADE_UP_PARTIES, embedding_dim=1, secure_aggregation=kind.sums_are_hidden)
            for kind in MECHANISMS.values()
        ]
        return cls(
            name="every mechanism, with usual numbers",
            mechanisms=(*small, *(each for each in usual if each.is_private)),
            label_response=LabelResponse(num_classes=_MADE_UP_CLASSES, epsilon=USUAL_LABEL_EPSILON),
            noise_multiplier=training.noise_multiplier_for(20),
        )


def _open_of(plan: Plan) -> tuple[str, ...]:
    """Return what of a plan no test covers."""
    found = []
    if plan.noise_band > 1:
        found.append(f"noise_band={plan.noise_band}: the noise of single steps is tested, not how steps are mixed")
    if plan.label_response is None:
        found.append("labels: this plan uses them in clear, and they have no law")
    found += [
        f"{plan.mechanism_for(kind).describe()} in {kind.name} rounds: it has no noise"
        for kind in plan.schedule.kinds
        if kind.releases and not plan.mechanism_for(kind).is_private
    ]
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Outcome of an audit."""

    subject: str
    findings: tuple[Finding, ...]
    epsilons: tuple[EpsilonFinding, ...] = ()
    training: TrainingFinding | None = None
    not_tested: tuple[str, ...] = ALWAYS_OPEN
    level: float = LEVEL
    false_alarm_rate: float = FALSE_ALARM_RATE

    @property
    def alarms(self) -> tuple[str, ...]:
        """Return what contradicts the charged laws, in words; empty for a sound build."""
        found = [
            f"{each.what}{f', {each.case}' if each.case else ''}: {each.law}: {each.statistic}"
            for each in self.findings
            if each.p_value < self.level
        ]
        found += [
            f"{each.what}: the games prove epsilon {each.epsilon_alarm_bound:.3g}, and {each.epsilon:.3g} is charged"
            for each in self.epsilons
            if not each.sound
        ]
        if self.training is not None and not self.training.sound:
            found.append(
                f"{self.training.what}: the games prove mu {self.training.mu_alarm_bound:.3g}, and "
                f"{self.training.mu:.3g} is charged"
            )
        return tuple(found)

    @property
    def sound(self) -> bool:
        """Return whether nothing contradicts the charged laws."""
        return not self.alarms

    @property
    def num_tests(self) -> int:
        return len(self.findings) + len(self.epsilons) + (self.training is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "subject": self.subject,
            "sound": self.sound,
            "alarms": list(self.alarms),
            "tests": self.num_tests,
            "level": self.level,
            "false_alarm_rate": self.false_alarm_rate,
            "findings": [{**each.to_dict(), "alarm": each.p_value < self.level} for each in self.findings],
            "epsilon": [for_json(each.to_dict()) for each in self.epsilons],
            "training": None if self.training is None else for_json(self.training.to_dict()),
            "not_tested": list(self.not_tested),
        }


@dataclass
class _Collected:
    """Findings so far."""

    findings: list[Finding] = field(default_factory=list)
    epsilons: list[EpsilonFinding] = field(default_factory=list)
    training: TrainingFinding | None = None


Part = tuple[str, Callable[[_Collected], None]]


def audit(
    subject: Subject,
    *,
    trials: int | None = None,
    sessions: int | None = None,
    on_part: Callable[[str, int, int], None] = lambda *_: None,
) -> Report:
    """Test every law that a subject uses against what is charged for it.

    Args:
        subject: What is audited.
        trials: Games of each world, and draws of each value of a law; None for the usual numbers.
        sessions: Trainings of each world; None for the usual number.
        on_part: Called before each part with its name, its number from 0 and the number of parts; at the end with "".

    Returns:
        The report; `sound` is its verdict.

    Raises:
        PlanError: `trials` or `sessions` is out of range.
    """
    if trials is not None and (isinstance(trials, bool) or not SMALLEST_TRIALS <= trials <= 10**9):
        raise PlanError(f"trials={trials} must be in {SMALLEST_TRIALS}..1000000000")
    if sessions is not None and (isinstance(sessions, bool) or not SMALLEST_SESSIONS <= sessions <= 10**6):
        raise PlanError(f"sessions={sessions} must be in {SMALLEST_SESSIONS}..1000000")
    parts = list(_parts(subject, trials=trials, sessions=SESSIONS if sessions is None else sessions))
    found = _Collected()
    for number, (name, run) in enumerate(parts):
        on_part(name, number, len(parts))
        run(found)
    on_part("", len(parts), len(parts))
    unknown = tuple(
        f"{each.describe()}: no exact law of it is known here" for each in subject.mechanisms if not laws.has_law(each)
    )
    report = Report(
        subject=subject.name,
        findings=tuple(found.findings),
        epsilons=tuple(found.epsilons),
        training=found.training,
        not_tested=(*subject.not_tested, *unknown, *ALWAYS_OPEN),
    )
    if report.num_tests > MOST_TESTS:
        raise PlanError(f"{report.num_tests} tests are more than {MOST_TESTS}, which the error rate is shared by")
    return report


def _parts(subject: Subject, *, trials: int | None, sessions: int) -> Iterator[Part]:
    draws = TRIALS if trials is None else min(trials, LARGEST_DRAWS)
    for mechanism in subject.mechanisms:
        name = mechanism.describe()
        if laws.has_law(mechanism):
            yield f"law of {name}", _adds(partial(laws.mechanism_tests, mechanism, SystemEntropy(), draws))
    yield from _mask_parts(subject.mechanisms, draws)
    if subject.label_response is not None:
        yield "drawn labels", _adds(partial(laws.label_tests, subject.label_response, SystemEntropy(), draws))
        yield "labels in gradients", _adds(partial(_label_uses, LEVEL))
    if subject.noise_multiplier:
        yield "noise of updates", _adds(partial(laws.noise_tests, SystemEntropy(), draws))
        yield "noise of steps", _adds(partial(_step_noise, subject, draws))
        yield "noise after a restart", _adds(training.fresh_step_tests)
        yield "fusion rows", _adds(partial(training.fusion_tests, training.training_data()))
        yield "trainings with one cell at two extremes", partial(_train, sessions)
    for mechanism in subject.mechanisms:
        if games.can_play(mechanism):
            yield f"games against {mechanism.describe()}", partial(_play, mechanism, trials)


def _mask_parts(mechanisms: Iterable[Mechanism], draws: int) -> Iterator[Part]:
    rings = []
    for mechanism in mechanisms:
        if not mechanism.secure_aggregation or mechanism.ring is None:
            continue
        if mechanism.ring not in rings:
            rings.append(mechanism.ring)
            yield f"masks of {mechanism.ring.bits} bits", _adds(partial(sessions.mask_tests, mechanism.ring, draws))
        if laws.has_law(mechanism):
            yield f"sessions with {mechanism.describe()}", _adds(partial(sessions.wire_tests, mechanism))


def _adds(run: Callable[[], Iterable[Finding]]) -> Callable[[_Collected], None]:
    return lambda found: found.findings.extend(run())


def _label_uses(level: float) -> Iterable[Finding]:
    return sessions.label_use_tests(sessions.sessions_to_see(level))


def _step_noise(subject: Subject, draws: int) -> Iterable[Finding]:
    data = training.wide_data()
    plan = training.training_plan(
        data, batches=1, noise_multiplier=subject.noise_multiplier, clip_norm=subject.clip_norm
    )
    return training.step_noise_tests(plan, data, draws)


def _train(sessions: int, found: _Collected) -> None:
    data = training.training_data()
    plan = training.training_plan(data)
    findings, shift = training.shift_tests(plan, data)
    found.findings += findings
    found.training, noise = training.training_game(plan, data, sessions, shift=shift, level=LEVEL)
    found.findings += noise


def _play(mechanism: Mechanism, trials: int | None, found: _Collected) -> None:
    if trials is None:
        # A value of a mechanism without trials of its own takes about as long as sixteen of these.
        bits = getattr(mechanism.event, "num_trials", 16) * mechanism.embedding_dim * mechanism.num_parties
        trials = max(GAMES // 100, min(GAMES, LARGEST_GAME_BITS // bits))
    found.epsilons.append(games.epsilon_test(mechanism, SystemEntropy, trials, level=LEVEL))
