"""Which releases of a run are charged to a unit, and the table of bounds that follows.

The only place where counts meet curves. A `TrainingRun` says what happens; `charge` says how much of it counts;
`bounds` says what that costs. Nothing here trains or imports anything that does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from pbmvfl.errors import PlanError
from pbmvfl.privacy.conversion import (
    cell_epsilon_by_losses,
    check_delta,
    epsilon_from_rdp,
    record_epsilon_by_losses,
)
from pbmvfl.privacy.events import (
    ExactRelease,
    LocalGaussianRelease,
    NoisyUpdate,
    PoissonBinomialRelease,
    ReleaseEvent,
)
from pbmvfl.privacy.orders import ORDERS, Curve
from pbmvfl.privacy.rdp import composed, local_gaussian_shift, noisy_parties, release_rdp, update_rdp, update_shift
from pbmvfl.privacy.units import SERVER, Accounting, Adversary, Unit

Method = Literal["rdp", "pld"]

NOT_A_PROOF = (
    "not a proof: counts only the unit's own releases, although weights trained on it carry it into other rows"
)
LABELS_PUBLIC = "labels are the same in both data sets: they are not protected"
PUBLIC_SCHEDULE = (
    "batches, their order, the number of rows, initial weights and scaling do not depend on private columns"
)
ROW_ONCE = "a row is at most once in a batch and exactly once in an epoch"
IDEAL_RANDOMNESS = "randomness is ideal: the program's guarantee is computational"
IDEAL_SUM = "the secure sum is ideal, and the other honest parties add their noise"
NO_SECURE_SUM = "without secure aggregation every party's integers are readable: only its own noise hides a cell"
WEIGHTS_STAY = "weights never leave a party: exporting them is not covered"
CLIP_LAST = "gradients are clipped after any preconditioning, and non-finite ones are zero before summing"
FIXED_PLAN = "the plan was fixed before the first release"
CLEAR_FLOATS = "Gaussian noise is continuous in the theory and 32-bit in the program: for studies only"
OWN_ROW = "a row's embedding depends on that row and on its party's own weights alone"
COUPLED_ROWS = "rows of a batch are coupled by the encoder: each use of a row is charged as its whole batch"
EXACT = "embeddings are sent exactly: nothing is protected"


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What a run releases. Every epoch uses every row exactly once; a last batch may be short."""

    num_samples: int
    batch_size: int
    num_epochs: int
    event: ReleaseEvent
    update: NoisyUpdate | None = None
    extra_row_releases: int = 0
    """Evaluations of the kind `released` and predictions: the most that any one row has."""
    extra_releases: int = 0
    """The same, over all rows together; at least extra_row_releases."""
    secure_aggregation: bool = True
    couples_rows: bool = False
    """Whether a row's embedding depends on the other rows of its batch, as with batch normalisation."""

    def __post_init__(self) -> None:
        for name, least in (("num_samples", 1), ("batch_size", 1), ("num_epochs", 0), ("extra_row_releases", 0)):
            value = getattr(self, name)
            if value < least:
                raise PlanError(f"{name}={value}; permitted: {least} or more.")
        if self.extra_releases < self.extra_row_releases:
            raise PlanError(
                f"extra_releases={self.extra_releases} with extra_row_releases={self.extra_row_releases}; permitted: "
                "at least as many over all rows as for one."
            )
        if self.update is not None and self.couples_rows:
            # The noise hides one clipped gradient that moves by 2c. Here all of the batch move, by up to 2c each, and
            # batch statistics that are kept are a state that no update covers.
            raise PlanError(
                f"noise_multiplier={self.update.noise_multiplier:g} with an encoder that couples the rows of a batch "
                "(resnet18-batchnorm): one row moves every clipped gradient of its batch, and the noise is for one; "
                "use encoder=resnet18, which normalises by groups, or noise_multiplier=0."
            )

    @property
    def total_releases(self) -> int:
        """Row releases of the whole run, short batches counted as they are."""
        return self.num_samples * self.num_epochs + self.extra_releases

    @property
    def own_releases(self) -> int:
        """Row releases that depend on the row that has the most; with coupled rows, all of its batch each time."""
        together = min(self.batch_size, self.num_samples) if self.couples_rows else 1
        return (self.num_epochs + self.extra_row_releases) * together


@dataclass(frozen=True, kw_only=True)
class Charge:
    """Row releases (each of all coordinates) at the unit's rate, and noisy updates of one party each."""

    releases: int
    updates: int = 0


def charge(run: TrainingRun, unit: Unit, accounting: Accounting, adversary: Adversary = SERVER) -> Charge:
    """What counts against a unit. The row that costs most is the one in the first batch."""
    if unit is Unit.PARTY:
        # Every row holds the party's values, so there is nothing that only the strict count would add.
        return Charge(releases=run.total_releases)
    if accounting is Accounting.PAPER:
        return Charge(releases=run.own_releases)
    if run.update is not None:
        parties = adversary.honest_parties(run.event.num_parties) if unit is Unit.RECORD else 1
        return Charge(releases=run.own_releases, updates=run.num_epochs * parties)
    # In its first round only the unit's own release depends on it; then the weights do, and with them every row.
    apart = run.num_epochs > 0 and not run.couples_rows
    untouched = min(run.batch_size, run.num_samples) - 1 if apart else 0
    return Charge(releases=run.total_releases - untouched)


def rdp_curve(
    run: TrainingRun,
    unit: Unit,
    accounting: Accounting,
    adversary: Adversary = SERVER,
    *,
    orders: tuple[float, ...] = ORDERS,
) -> Curve:
    """The run's whole Renyi curve for a unit: composition by addition."""
    counted = charge(run, unit, accounting, adversary)
    release = release_rdp(run.event, unit, adversary, secure_aggregation=run.secure_aggregation, orders=orders)
    parts = [(counted.releases, release)]
    if run.update is not None:
        parts.append((counted.updates, update_rdp(run.update, orders)))
    return composed(*parts)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One upper bound with everything that must be printed beside it."""

    unit: Unit
    accounting: Accounting
    adversary: Adversary
    epsilon: float
    delta: float
    method: Method
    order: float | None
    """The Renyi order that gave epsilon; None for method "pld", and where epsilon is infinite."""
    conditions: tuple[str, ...]

    def to_dict(self) -> dict[str, str | int | float | list[str] | None]:
        """Plain values for JSON; an infinite epsilon stays a float, for the writer to spell."""
        return {
            "unit": self.unit.value,
            "accounting": self.accounting.value,
            "adversary": self.adversary.role,
            "colluding_parties": self.adversary.colluding_parties,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "method": self.method,
            "order": self.order,
            "conditions": list(self.conditions),
        }


def _epsilon_by_losses(
    run: TrainingRun, unit: Unit, counted: Charge, adversary: Adversary, delta: float, largest: float
) -> float:
    shift = 0.0
    if run.update is not None:
        shift = update_shift(run.update) * math.sqrt(counted.updates)
    match run.event:
        case PoissonBinomialRelease() as event if unit is Unit.RECORD:
            bits = event.num_trials * adversary.honest_parties(event.num_parties) * event.embedding_dim
            return record_epsilon_by_losses(
                num_bits=bits * counted.releases,
                beta_16=event.beta_16,
                gaussian_shift=shift,
                delta=delta,
                largest=largest,
            )
        case PoissonBinomialRelease() as event:
            return cell_epsilon_by_losses(
                num_trials=event.num_trials,
                beta_16=event.beta_16,
                noisy_parties=noisy_parties(event, adversary, run.secure_aggregation),
                coordinates=event.embedding_dim * counted.releases,
                gaussian_shift=shift,
                delta=delta,
                largest=largest,
            )
        case LocalGaussianRelease() as event:
            cells = adversary.honest_parties(event.num_parties) if unit is Unit.RECORD else 1
            shift = math.hypot(shift, local_gaussian_shift(event) * math.sqrt(cells * counted.releases))
            return record_epsilon_by_losses(num_bits=0, beta_16=1, gaussian_shift=shift, delta=delta, largest=largest)
        case ExactRelease():
            return math.inf


def _conditions(run: TrainingRun, unit: Unit, accounting: Accounting) -> tuple[str, ...]:
    strict = accounting is Accounting.STRICT
    said = [] if strict or unit is Unit.PARTY else [NOT_A_PROOF]
    match run.event:
        case PoissonBinomialRelease():
            said.append(IDEAL_SUM if run.secure_aggregation else NO_SECURE_SUM)
        case LocalGaussianRelease():
            said.append(CLEAR_FLOATS)
        case ExactRelease():
            said.append(EXACT)
    if not run.couples_rows:
        said.append(OWN_ROW)
    elif unit is not Unit.PARTY:
        said.append(COUPLED_ROWS)
    said += [IDEAL_RANDOMNESS, PUBLIC_SCHEDULE, ROW_ONCE, LABELS_PUBLIC, FIXED_PLAN]
    if run.update is not None and strict and unit is not Unit.PARTY:
        said.append(CLIP_LAST)
    else:
        said.append(WEIGHTS_STAY)
    return tuple(said)


def bound(
    run: TrainingRun,
    unit: Unit,
    accounting: Accounting,
    adversary: Adversary = SERVER,
    *,
    delta: float,
    pld: bool = True,
) -> Bound:
    """The smaller of the two methods' epsilons; with pld=False, RDP alone."""
    check_delta(delta)
    epsilon, order = epsilon_from_rdp(rdp_curve(run, unit, accounting, adversary), delta)
    answer = Bound(
        unit=unit,
        accounting=accounting,
        adversary=adversary,
        epsilon=epsilon,
        delta=delta,
        method="rdp",
        order=order,
        conditions=_conditions(run, unit, accounting),
    )
    if not pld or not 0 < epsilon < math.inf:
        return answer
    counted = charge(run, unit, accounting, adversary)
    by_losses = _epsilon_by_losses(run, unit, counted, adversary, delta, epsilon)
    return replace(answer, epsilon=by_losses, method="pld", order=None) if by_losses < epsilon else answer


def bounds(
    run: TrainingRun,
    *,
    delta: float,
    adversaries: Iterable[Adversary] = (SERVER,),
    units: Iterable[Unit] = tuple(Unit),
    accountings: Iterable[Accounting] = tuple(Accounting),
    pld: bool = True,
) -> tuple[Bound, ...]:
    """The whole table: unit x accounting for each adversary."""
    units, accountings = tuple(units), tuple(accountings)
    return tuple(
        bound(run, unit, accounting, adversary, delta=delta, pld=pld)
        for adversary in adversaries
        for unit in units
        for accounting in accountings
    )
