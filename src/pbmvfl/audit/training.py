"""Whole trainings with one cell at two extremes, for an adversary that sees every step's weights.

One party trains on made-up rows by local steps, as it does in a run. The cell is one row's columns at that party, at +x
or at -x, so large that its gradient is clipped in both. Three things are tested:

- the shift: both worlds take each step from the same weights with the same noise; squares of the distances of their
  noisy sums, in deviations of the noise, must add up to no more than the account's mu squared: no chance is in it.
- the noise: what a step added beyond the sum of clipped gradients, which is computed here once more in float64, must
  have the normal law that is charged.
- the game: from all weights of a session an adversary says which world it is. Telling N(0, 1) from N(mu, 1) has error
  rates a and b with mu = z(a) + z(b); upper ends of both give a lower bound on mu, and by it one on epsilon.

Shape suffixes: N rows, D columns and the bias, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch import Tensor

from pbmvfl.audit.constants import (
    CONFIDENCE,
    DELTA,
    READING_SHARE,
    TRAINING_EPSILON,
    TRAINING_ROWS,
    TRAINING_STEPS,
)
from pbmvfl.audit.games import at_most
from pbmvfl.audit.sessions import Restarted, made_up_data
from pbmvfl.audit.statistics import Finding, certain, normal_tests
from pbmvfl.crypto.entropy import Entropy, SystemEntropy
from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import FUSION, LOCAL
from pbmvfl.plan.schedule import Round
from pbmvfl.privacy.accounting import charges
from pbmvfl.privacy.composition import GaussianLosses
from pbmvfl.privacy.events import UpdateEvent
from pbmvfl.privacy.gaussian_filter import gaussian_epsilon, largest_square
from pbmvfl.privacy.units import Accounting, Unit
from pbmvfl.protocol.party import Party
from pbmvfl.training.encoders import build_encoder
from pbmvfl.training.fixed_point_grid import Grid

Matrix = npt.NDArray[np.float64]
#: Large enough that its gradient is clipped, small enough that scores of small weights stay near 0.
_EXTREME = 100.0
_CLASSES, _COLUMNS = 2, 4
#: Weights stay so near to 0 that no row's loss is ever small: then its gradient is clipped in every step.
_LEARNING_RATE = 1e-3
#: The row whose cell is changed.
_ROW = 0


class Replayed:
    """Random bytes of the system, kept to be given out once more: two worlds take a step with the same noise."""

    seeded = False

    def __init__(self) -> None:
        self._source: Entropy = SystemEntropy()
        self._kept: list[bytes] = []
        self._place: int | None = None

    def again(self) -> None:
        """Give out the same bytes again from here on."""
        self._place = 0

    def fill(self, buffer: npt.NDArray[Any]) -> None:
        if self._place is not None and self._place < len(self._kept):
            known = self._kept[self._place]
            self._place += 1
            if len(known) == buffer.nbytes:
                buffer.data.cast("B")[:] = known
                return
        self._source.fill(buffer)
        if self._place is None:
            self._kept.append(buffer.tobytes())


def noise_multiplier_for(uses: int) -> float:
    """Return the noise that makes so many uses of a row cost TRAINING_EPSILON: each moves a sum by 2 clip norms."""
    return 2 * math.sqrt(uses / largest_square(TRAINING_EPSILON, DELTA))


def training_plan(data: VerticalDataset, *, batches: int = 2, **choices: Any) -> Plan:
    """Return a plan of TRAINING_STEPS noisy local steps, each epoch in so many batches."""
    epochs = TRAINING_STEPS // batches
    usual: dict[str, Any] = {
        "training": "local",
        "labels": "parties",
        "head": "fixed",
        "mechanism": "none",
        "embedding_dim": _CLASSES,
        "activation": "none",
        "start": "zero",
        "encoder": "linear",
        "batch_size": -(-data.num_samples // batches),
        "num_epochs": epochs,
        "learning_rate": _LEARNING_RATE,
        "clip_norm": 1.0,
        "noise_multiplier": noise_multiplier_for(epochs),
        "label_epsilon": None,
        "evaluation": "none",
    }
    return Plan.for_data(data, **{**usual, **choices})


@dataclass(frozen=True)
class World:
    """A party whose cell is at one extreme."""

    party: Party
    features_ND: Matrix
    labels_N: npt.NDArray[np.int64]

    @cached_property
    def _parts(self) -> list[Tensor]:
        """Weight and bias of the party's one dense layer."""
        return sorted((each.detach() for each in self.party.network.encoder.parameters()), key=lambda part: -part.ndim)

    @cached_property
    def _longest(self) -> float:
        """Norm that longer gradients are scaled to: the clip norm, less what is left for rounding."""
        plan = self.party.plan
        grid = Grid(
            noise_multiplier=plan.noise_multiplier,
            clip_norm=plan.clip_norm,
            num_weights=sum(part.numel() for part in self._parts),
            largest_batch=plan.schedule.largest_batch,
        )
        return min(plan.clip_norm, grid.target / grid.units)

    @cached_property
    def _log_shares(self) -> Matrix:
        return np.asarray(np.log(np.bincount(self.labels_N, minlength=_CLASSES) / len(self.labels_N)))

    def weights(self) -> Matrix:
        """Return weights and bias beside each other, (K, D)."""
        matrix, bias = (part.numpy().astype(np.float64) for part in self._parts)
        return np.hstack((matrix, bias[:, None]))

    def step(self, current: Round, entropy: Entropy) -> Matrix:
        """Take one local step; return the noisy sum that it stepped along, (K, D)."""
        before = self.weights()
        self.party.network.learn_alone(current, entropy)
        return (before - self.weights()) * (current.num_rows / self.party.plan.learning_rate)

    def exact_sum(self, rows: npt.NDArray[np.int64], weights_KD: Matrix) -> Matrix:
        """Return the sum of clipped gradients of these rows in float64, by the algorithm's own description."""
        inputs = self.features_ND[rows]
        scores = inputs @ weights_KD.T + self._log_shares
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        slopes = odds / odds.sum(axis=1, keepdims=True) - np.eye(_CLASSES)[self.labels_N[rows]]
        norms = np.sqrt((slopes**2).sum(axis=1) * (inputs**2).sum(axis=1))
        slopes *= np.minimum(1.0, self._longest / norms)[:, None]
        return np.asarray(slopes.T @ inputs)


def world(plan: Plan, data: VerticalDataset, sign: float, row: int = _ROW) -> World:
    """Build the party with the cell of one row at an extreme, through the set-up that runs use."""
    columns = data.train_features[0].copy()
    columns[row] = sign * _EXTREME
    identities = [Identity.generate() for _ in range(plan.num_parties)]
    setup = PartySetup(
        plan=plan,
        index=0,
        identity=identities[0].private_bytes(),
        identities=tuple(each.public for each in identities),
        train_features=columns,
        test_features=data.test_features[0],
    )
    party = setup.build()
    party.network.hold(torch.from_numpy(data.train_labels[plan.schedule.part_of(LOCAL)]))
    inputs = np.hstack((columns.astype(np.float64), np.ones((len(columns), 1))))
    return World(party, inputs, data.train_labels)


def account_mu(plan: Plan) -> float:
    """Return the mu that the account charges a cell of the plan's training rows."""
    (counted,) = charges(plan.training_run(), Unit.CELL, Accounting.STRICT)
    total = 0.0
    for count, event in counted:
        losses = event.losses() if isinstance(event, UpdateEvent) else None
        assert isinstance(losses, GaussianLosses)
        total += count * losses.shift**2
    return math.sqrt(total)


@dataclass(frozen=True, kw_only=True)
class TrainingFinding:
    """Result of the game of whole trainings.

    Args:
        what: The training.
        sessions: Sessions of each world.
        mu: Of the account.
        shift: Distance of the two worlds along one path of weights, in deviations: what no noise hides further.
        mu_lower_bound: By the games, at the confidence.
        mu_alarm_bound: The same at the level of an alarm.
        epsilon: Of the account, at delta.
        epsilon_lower_bound: Of the Gaussian of `mu_lower_bound`, at delta.
        delta: Delta of the epsilons.
        confidence: Of the lower bounds that are printed.
    """

    what: str
    sessions: int
    mu: float
    shift: float
    mu_lower_bound: float
    mu_alarm_bound: float
    epsilon: float
    epsilon_lower_bound: float
    delta: float
    confidence: float

    @property
    def sound(self) -> bool:
        return self.mu_alarm_bound <= self.mu

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sound": self.sound}


def mu_at_least(misses: int, false_alarms: int, sessions: int, error: float) -> float:
    """Return a lower bound on mu from so many errors of either kind; each end is wrong with half of `error`."""
    first, second = (at_most(count, sessions, error / 2) for count in (misses, false_alarms))
    return max(0.0, float(stats.norm.isf(first) + stats.norm.isf(second)))


def local_rounds(plan: Plan) -> list[Round]:
    return [current for current in plan.schedule if current.kind == LOCAL]


def shift_tests(plan: Plan, data: VerticalDataset) -> tuple[list[Finding], float]:
    """Compare both worlds step by step, at the same weights and with the same noise.

    Returns:
        The findings, and the distance of the two worlds over the whole training in deviations of the noise.
    """
    what = "one cell at two extremes"
    here, there = (world(plan, data, sign) for sign in (1.0, -1.0))
    event = plan.update.event
    losses = event.losses()
    assert isinstance(losses, GaussianLosses)
    sigma = plan.noise_multiplier * plan.clip_norm
    squares, largest, others_moved, rows_seen = 0.0, 0.0, 0, 0
    uses = np.zeros(plan.num_samples, dtype=np.int64)
    for current in local_rounds(plan):
        np.add.at(uses, current.rows, 1)
        entropy = Replayed()
        there.party.network.load_state(here.party.network.state())
        if _ROW in current.rows:
            first, second = (
                each.party.network.embed(each.party.rows.batch(current.kind.split, current.rows), current)
                for each in (here, there)
            )
            rest = current.rows != _ROW
            others_moved += int((first[rest] != second[rest]).sum())
            rows_seen += int(rest.sum())
        sum_here = here.step(current, entropy)
        entropy.again()
        moved = float(np.linalg.norm(sum_here - there.step(current, entropy))) / sigma
        squares, largest = squares + moved**2, max(largest, moved)
    mu, limit = account_mu(plan), losses.shift
    charged = max(part.row_updates for part in plan.training_run().activities)
    text = f"{largest:.4f} of at most {limit:.4f} deviations"
    findings = [
        certain(
            what,
            "shift of one step",
            len(local_rounds(plan)),
            holds=largest <= limit * (1 + READING_SHARE),
            statistic=text,
        ),
        certain(
            what,
            "shift of the training",
            len(local_rounds(plan)),
            holds=math.sqrt(squares) <= mu * (1 + READING_SHARE),
            statistic=f"{math.sqrt(squares):.4f} of at most {mu:.4f} deviations",
        ),
        certain(
            what,
            "other rows stay",
            rows_seen,
            holds=not others_moved,
            statistic=f"{others_moved:,} numbers of other rows moved",
        ),
        certain(
            "rows of the schedule",
            "uses of a row",
            int(uses.sum()),
            holds=int(uses.max()) <= charged,
            statistic=f"{int(uses.max())} of at most {charged}",
        ),
    ]
    return findings, math.sqrt(squares)


def fusion_tests(data: VerticalDataset) -> Iterator[Finding]:
    """Train with a fusion row's cell at two extremes and the same noise: whatever the party learns must be the same.

    Args:
        data: Made-up rows; some of them are fusion rows.
    """
    plan = training_plan(
        data,
        num_fusion_samples=data.num_samples // 4,
        preparation="whiten",
        mean_noise=1.0,
        gram_noise=1.0,
        vote="top",
        prediction_mechanism="krr",
        prediction_symbols=_CLASSES,
        prediction_secure_aggregation=False,
    )
    fused = plan.schedule.part_of(FUSION)
    learning = [current for current in plan.schedule if current.kind.updates]
    uses = sum(int(np.isin(current.rows, fused).sum()) for current in learning)
    here, there = (world(plan, data, sign, int(fused[0])) for sign in (1.0, -1.0))
    moved = 0
    for current in learning:
        entropy = Replayed()
        here.party.network.learn_alone(current, entropy)
        entropy.again()
        there.party.network.learn_alone(current, entropy)
        states = [each.party.network.state() for each in (here, there)]
        moved += sum(not torch.equal(value, states[1][name]) for name, value in states[0].items())
    what = "a fusion row's cell at two extremes"
    text = f"{moved:,} of a party's tensors moved in {len(learning)} rounds; {uses:,} uses of fusion rows"
    yield certain(what, "fusion rows train nothing", len(learning), holds=not moved and not uses, statistic=text)


def step_noise_tests(plan: Plan, data: VerticalDataset, draws: int) -> Iterator[Finding]:
    """Take the first step again and again, and hold differences of two against the normal law that is charged.

    In a difference the sum of clipped gradients cancels, so nothing is read but noise, however little of it there is.

    Args:
        plan: A plan of local steps, as `training_plan` makes it.
        data: Made-up rows.
        draws: Differences, at least.
    """
    here = world(plan, data, 1.0)
    start, current, entropy = here.party.network.state(), local_rounds(plan)[0], SystemEntropy()
    sigma = plan.noise_multiplier * plan.clip_norm
    seen = []
    for _ in range(2 * math.ceil(draws / here.weights().size)):
        here.party.network.load_state(start)
        seen.append(here.step(current, entropy).reshape(-1))
    noise = (np.array(seen[::2]) - np.array(seen[1::2])) / (math.sqrt(2) * sigma)
    yield from normal_tests(f"noise of steps, multiplier {plan.noise_multiplier:.3g}", noise.reshape(-1))


def fresh_step_tests() -> Iterator[Finding]:
    """Run one noisy step twice, as after a restart, at two parties with the same columns: four different noises."""
    one = made_up_data(num_parties=2, num_samples=TRAINING_ROWS, num_classes=_CLASSES, columns=_COLUMNS)
    data = replace(one, train_features=(one.train_features[0],) * 2, test_features=(one.test_features[0],) * 2)
    plan = training_plan(data, batches=1, num_epochs=1)
    encoders = [build_encoder(plan, index=index, input_shape=(_COLUMNS,)) for index in range(2)]
    federation = Restarted(plan, encoders=encoders)
    found = []
    for _ in range(2):
        federation.fit(data)
        found += [b"".join(each.detach().numpy().tobytes() for each in encoder.parameters()) for encoder in encoders]
    text = f"{len(set(found))} different weights of {len(found)}"
    yield certain("noise of steps", "fresh at each party and start", 4, holds=len(set(found)) == 4, statistic=text)


def training_game(
    plan: Plan,
    data: VerticalDataset,
    sessions: int,
    *,
    shift: float,
    level: float,
) -> tuple[TrainingFinding, list[Finding]]:
    """Train in both worlds many times, and say from all weights which world it was.

    Args:
        plan: A plan of local steps, as `training_plan` makes it.
        data: Made-up rows.
        sessions: Sessions of each world.
        shift: Distance of the two worlds, for the report.
        level: Probability with which a sound program may raise an alarm.

    Returns:
        The bounds on mu, and findings about the noise of all steps.
    """
    worlds = [world(plan, data, sign) for sign in (1.0, -1.0)]
    start = worlds[0].party.network.state()
    rounds, sigma = local_rounds(plan), plan.noise_multiplier * plan.clip_norm
    scores = np.empty((2, sessions))
    residuals, changed = [], np.array([_ROW])
    for side, here in enumerate(worlds):
        for session in range(sessions):
            here.party.network.load_state(start)
            entropy, ratio = SystemEntropy(), 0.0
            for current in rounds:
                weights = here.weights()
                noise = here.step(current, entropy) - here.exact_sum(current.rows, weights)
                residuals.append((noise / sigma).reshape(-1))
                if _ROW in current.rows:
                    # Log-likelihood ratio of the step: normal laws of the same deviation around the two sums.
                    own, other = (each.exact_sum(changed, weights) for each in (here, worlds[1 - side]))
                    gained = float(((noise + (own - other) / 2) * (own - other)).sum()) / sigma**2
                    ratio += gained if side == 0 else -gained
            scores[side, session] = ratio
    misses, false_alarms = int((scores[0] < 0).sum()), int((scores[1] >= 0).sum())
    mu = account_mu(plan)
    what = f"{len(rounds)} local steps, N={plan.num_samples}, one cell at two extremes"
    bounds = [mu_at_least(misses, false_alarms, sessions, error) for error in (1 - CONFIDENCE, level)]
    found = TrainingFinding(
        what=what,
        sessions=sessions,
        mu=mu,
        shift=shift,
        mu_lower_bound=bounds[0],
        mu_alarm_bound=bounds[1],
        epsilon=gaussian_epsilon(mu**2, DELTA),
        epsilon_lower_bound=gaussian_epsilon(bounds[0] ** 2, DELTA),
        delta=DELTA,
        confidence=CONFIDENCE,
    )
    return found, list(normal_tests("noise of whole trainings", np.concatenate(residuals)))


def wide_data() -> VerticalDataset:
    """Return made-up rows of many columns: one step of a network on them draws noise for 202 weights."""
    return made_up_data(num_parties=2, num_samples=50, num_classes=_CLASSES, columns=100)


def training_data() -> VerticalDataset:
    """Return the made-up rows of the audited training."""
    return made_up_data(num_parties=2, num_samples=TRAINING_ROWS, num_classes=_CLASSES, columns=_COLUMNS)
