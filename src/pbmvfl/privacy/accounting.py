"""Charges of a run against a unit, and the table of bounds that follows.

The only place where counts meet curves. A `TrainingRun` says what happens; `charges` says how much of it counts;
`epsilon_bounds` says what that costs. Nothing here trains or imports anything that does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pbmvfl.errors import PlanError
from pbmvfl.privacy.advantage import (
    FALSE_ALARM_RATE,
    NO_PROTECTION,
    Attack,
    attack_from_rdp,
    attack_on,
    largest,
    least,
)
from pbmvfl.privacy.composition import AtomLosses, bounds_by_losses
from pbmvfl.privacy.conversion import check_delta, epsilon_from_rdp
from pbmvfl.privacy.events import WEIGHTS_STAY, Event, ExactRelease, ReleaseEvent, UpdateEvent
from pbmvfl.privacy.orders import ORDERS, Curve
from pbmvfl.privacy.renyi import composed
from pbmvfl.privacy.units import COLUMN_UNITS, SERVER, Accounting, Adversary, Unit

Method = Literal["rdp", "pld", "pure"]

NOT_A_PROOF = (
    "not a proof: counts only the unit's own releases, although weights trained on it carry it into other rows"
)
LABELS_PUBLIC = "labels are the same in both data sets: they are not protected"
LABELS_APART = "labels are the same in both data sets: they have an epsilon of their own"
LABELS_DRAWN = "each training label is drawn once and kept, and all that a party can see is computed from drawn labels"
LABELS_IN_CLEAR = "training labels are used in clear: parties receive them, or can read them off the gradients"
PUBLIC_SCHEDULE = (
    "batches, their order, the number of rows, initial weights and scaling do not depend on private columns"
)
OWN_START = (
    "batches, their order, the number of rows and scaling do not depend on private columns; initial weights may, so "
    "the strict count charges every release to everybody"
)
PARTS_APART = (
    "a public draw puts each training row into one part: fusion rows are released once and train no network, the "
    "others train networks and are not released; a row has the epsilon of its own part, and the larger one is stated"
)
ROW_ONCE = "a row is at most once in a batch and exactly once in an epoch"
IDEAL_RANDOMNESS = "randomness is ideal: the program's guarantee is computational"
FIXED_PLAN = "the plan was fixed before the first release"
OWN_ROW = "a row's embedding depends on that row and on its party's own weights alone"
COUPLED_ROWS = "rows of a batch are coupled by the encoder: each use of a row is charged as its whole batch"


@dataclass(frozen=True, kw_only=True)
class Activity:
    """Rounds of one kind with the rows of one split, over a whole run."""

    split: str
    """Rows of different splits are different rows."""
    release: ReleaseEvent | None
    update: UpdateEvent | None
    row_releases: int
    """The most releases about any one row."""
    row_updates: int
    """The most updates with any one row."""
    total_releases: int
    """Releases of all rows together; at least row_releases."""
    part: str = ""
    """Rows of different parts of one split are different rows; "" for rounds that use rows of every part."""

    def __post_init__(self) -> None:
        for name in ("row_releases", "row_updates", "total_releases"):
            if getattr(self, name) < 0:
                raise PlanError(f"{name}={getattr(self, name)}; permitted: 0 or more.")
        if self.total_releases < self.row_releases:
            raise PlanError(
                f"total_releases={self.total_releases} with row_releases={self.row_releases}; permitted: at least as "
                "many over all rows as for one."
            )


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Releases and updates of a run, kind by kind."""

    activities: tuple[Activity, ...]
    num_parties: int
    first_batch: int = 1
    """Rows of the run's first round if its weights are public until then; 1 if they may know rows already."""
    public_start: bool = True
    """Whether the weights are public before the first round. If not, every release may be about any row."""
    rows_together: int = 1
    """How many rows of a batch a row's embedding depends on: 1, or the whole batch with batch normalisation."""
    label: ReleaseEvent | None = None
    """The release of each training label; None if nothing is computed from labels."""

    def __post_init__(self) -> None:
        for name in ("num_parties", "first_batch", "rows_together"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)}; permitted: 1 or more.")
        if self.rows_together > 1 and any(part.update is not None and part.update.is_noisy for part in self.activities):
            # The noise hides one clipped gradient that moves by 2c. Here all of the batch move, by up to 2c each, and
            # batch statistics that are kept are a state that no update covers.
            raise PlanError(
                "noisy updates with an encoder that couples the rows of a batch (resnet18-batchnorm): one row moves "
                "every clipped gradient of its batch, and the noise is for one; use encoder=resnet18, which "
                "normalises by groups, or noise_multiplier=0."
            )

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits whose rows are used."""
        return tuple(dict.fromkeys(part.split for part in self.activities))

    @property
    def sorts_of_rows(self) -> tuple[tuple[str, str], ...]:
        """Pairs of split and part: a row is of one sort, and is charged for what is done with that sort alone."""
        found = dict.fromkeys((each.split, each.part) for each in self.activities)
        return tuple((split, part) for split, part in found if part or not any(of == split and p for of, p in found))

    @property
    def has_joint_rounds(self) -> bool:
        """Return whether rounds both release rows and learn from them: only there the paper's count is another one."""
        return any(part.release is not None and part.update is not None for part in self.activities)

    @property
    def charges_by_split(self) -> bool:
        """Return whether rows of one split are charged for nothing that is done with rows of another."""
        return self.public_start and not self.has_plain_updates

    def of_split(self, split: str) -> TrainingRun:
        """Return the part of the run that is charged to the rows of one split.

        The rows of other splits are charged for themselves.
        """
        if not self.charges_by_split:
            return self
        chosen = tuple(part for part in self.activities if part.split == split)
        uses_labels = any(part.update is not None for part in chosen)
        return replace(self, activities=chosen, label=self.label if uses_labels else None)

    def of_one_row(self) -> TrainingRun:
        """Return the run as it is charged to a row that is in every split: all that is done with its part of each."""
        return replace(self, activities=tuple(replace(part, split=self.splits[0]) for part in self.activities))

    @property
    def releases(self) -> tuple[ReleaseEvent, ...]:
        """Laws by which something is released, each once."""
        return tuple(dict.fromkeys(part.release for part in self.activities if part.release is not None))

    @property
    def has_plain_updates(self) -> bool:
        """Return whether weights learn rows without noise, so that later releases of other rows depend on them."""
        return any(part.update is not None and not part.update.is_noisy for part in self.activities)


#: Events with how often each is charged.
Charges = tuple[tuple[int, Event], ...]


def charges(run: TrainingRun, unit: Unit, accounting: Accounting, adversary: Adversary = SERVER) -> tuple[Charges, ...]:
    """Return what counts against a unit.

    Args:
        run: The releases and updates.
        unit: What may be replaced.
        accounting: Which releases are charged to the unit.
        adversary: The reader of what leaves the parties.

    Returns:
        The charges of each sort of row; the one that costs most is the unit's bound.
    """
    if unit is Unit.PARTY:
        # Every row holds the party's values, so there is nothing that only the strict count would add.
        return (_all_releases(run, untouched=0),)
    if accounting is Accounting.STRICT and not run.public_start:
        # The weights may know every row from the beginning, and noise on later updates cannot change that.
        return (_all_releases(run, untouched=0),)
    if accounting is Accounting.STRICT and run.has_plain_updates:
        # In its first round only the unit's own release depends on it; then the weights do, and with them every row.
        untouched = run.first_batch - 1 if run.rows_together == 1 else 0
        return (_all_releases(run, untouched=untouched),)
    return tuple(_own_charges(run, sort, unit, accounting, adversary) for sort in run.sorts_of_rows)


def _all_releases(run: TrainingRun, *, untouched: int) -> Charges:
    """Return every release of every row, but those of the first round that cannot depend on the unit yet."""
    counted: list[tuple[int, Event]] = []
    for part in run.activities:
        if part.release is not None:
            left_out = min(untouched, part.total_releases)
            counted.append((part.total_releases - left_out, part.release))
            untouched -= left_out
    return tuple(counted)


def _own_charges(
    run: TrainingRun, sort: tuple[str, str], unit: Unit, accounting: Accounting, adversary: Adversary
) -> Charges:
    """Return releases that depend on the row with the most of them, and its updates at every party it stands for."""
    counted: list[tuple[int, Event]] = []
    parties = adversary.honest_parties(run.num_parties) if unit is Unit.RECORD else 1
    for part in run.activities:
        if part.split != sort[0] or part.part not in ("", sort[1]):
            continue
        if part.release is not None:
            counted.append((part.row_releases * run.rows_together, part.release))
        # The paper counts releases alone. Rounds that release nothing are not the paper's, and count with all they do;
        # a step without noise has no count of its own anywhere: what it costs is in the releases that follow.
        plain = part.update is not None and not part.update.is_noisy
        counts = accounting is Accounting.STRICT or (part.release is None and not plain)
        if part.update is not None and counts:
            counted.append((part.row_updates * parties, part.update))
    return tuple(counted)


def _curve(counted: Charges, unit: Unit, adversary: Adversary, orders: tuple[float, ...]) -> Curve:
    parts = [
        (count, event.rdp(unit, adversary, orders) if isinstance(event, ReleaseEvent) else _update(event).rdp(orders))
        for count, event in counted
    ]
    return composed(*parts) if parts else np.zeros(len(orders))


def _update(event: Event) -> UpdateEvent:
    if not isinstance(event, UpdateEvent):
        raise PlanError(f"event={event.name!r} is neither a release nor an update, and has no account")
    return event


def rdp_curve(
    run: TrainingRun,
    unit: Unit,
    accounting: Accounting,
    adversary: Adversary = SERVER,
    *,
    orders: tuple[float, ...] = ORDERS,
) -> Curve:
    """Return the run's whole Renyi curve for a unit.

    Composition is by addition; the costliest sort of row counts at each order.

    Args:
        run: The releases and updates.
        unit: What may be replaced.
        accounting: Which releases are charged to the unit.
        adversary: The reader of what leaves the parties.
        orders: Renyi orders, above 1.

    Returns:
        The divergence at each order.
    """
    found = [_curve(counted, unit, adversary, orders) for counted in charges(run, unit, accounting, adversary)]
    return np.maximum.reduce(found) if found else np.zeros(len(orders))


@dataclass(frozen=True, kw_only=True)
class EpsilonBound:
    """Upper bound with everything that must be printed beside it."""

    unit: Unit
    accounting: Accounting
    adversary: Adversary
    epsilon: float
    delta: float
    method: Method
    order: float | None
    """The Renyi order that gave epsilon; None for method "pld", and where epsilon is infinite."""
    conditions: tuple[str, ...]
    advantage_upper_bound: float
    """True alarms minus false ones of the best attack that tells two neighbouring data sets apart: 0 to 1."""
    detection_upper_bound: float
    """Its true alarms if one in 1,000 is false."""

    @property
    def odds_upper_bound(self) -> float:
        """Return how many times as often as a blind guess with as many false alarms the best attack is right.

        1 to 1,000.
        """
        return self.detection_upper_bound / FALSE_ALARM_RATE

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
            "advantage_upper_bound": self.advantage_upper_bound,
            "detection_upper_bound": self.detection_upper_bound,
            "false_alarm_rate": FALSE_ALARM_RATE,
            "odds_upper_bound": self.odds_upper_bound,
            "conditions": list(self.conditions),
        }


@dataclass(frozen=True)
class _RowBound:
    """Cost of one sort of row: the smaller of the two methods' epsilons, and likewise for attacks."""

    epsilon: float
    method: Method
    order: float | None
    attack: Attack


def _row_bound(counted: Charges, unit: Unit, adversary: Adversary, delta: float, pld: bool) -> _RowBound:
    curve = _curve(counted, unit, adversary, ORDERS)
    epsilon, order = epsilon_from_rdp(curve, delta)
    found = _RowBound(epsilon, "rdp", order, attack_from_rdp(curve))
    if not pld or not epsilon < math.inf:
        return found
    parts = [
        (count, event.losses(unit, adversary) if isinstance(event, ReleaseEvent) else _update(event).losses())
        for count, event in counted
    ]
    by_losses, attack = bounds_by_losses(parts, delta, epsilon)
    attack = least((found.attack, attack))
    return _RowBound(by_losses, "pld", None, attack) if by_losses < epsilon else replace(found, attack=attack)


def _conditions(run: TrainingRun, unit: Unit, accounting: Accounting) -> tuple[str, ...]:
    strict = accounting is Accounting.STRICT
    said = [] if strict or unit is Unit.PARTY else [NOT_A_PROOF]
    for event in run.releases:
        said += event.conditions
    if run.rows_together == 1:
        said.append(OWN_ROW)
    elif unit is not Unit.PARTY:
        said.append(COUPLED_ROWS)
    if len(run.sorts_of_rows) > len(run.splits) and run.charges_by_split and unit is not Unit.PARTY:
        said.append(PARTS_APART)
    start = PUBLIC_SCHEDULE if run.public_start else OWN_START
    labels = LABELS_PUBLIC if run.label is None or isinstance(run.label, ExactRelease) else LABELS_APART
    said += [IDEAL_RANDOMNESS, start, ROW_ONCE, labels, FIXED_PLAN]
    noisy = [part.update for part in run.activities if part.update is not None and part.update.is_noisy]
    if noisy and strict and unit is not Unit.PARTY and run.public_start:
        said += [condition for update in noisy for condition in update.conditions]
    else:
        said.append(WEIGHTS_STAY)
    return tuple(dict.fromkeys(said))


def epsilon_bound(
    run: TrainingRun,
    unit: Unit,
    accounting: Accounting,
    adversary: Adversary = SERVER,
    *,
    delta: float,
    pld: bool = True,
) -> EpsilonBound:
    """Return the upper bound for one unit: of the costliest sort of row, by the smaller of two methods.

    Args:
        run: The releases and updates.
        unit: What may be replaced.
        accounting: Which releases are charged to the unit.
        adversary: The reader of what leaves the parties.
        delta: Above 0 and below 1.
        pld: False leaves out privacy loss distributions and takes Renyi divergences alone, which is faster.

    Raises:
        PlanError: delta is out of range.
    """
    check_delta(delta)
    rows = [_row_bound(counted, unit, adversary, delta, pld) for counted in charges(run, unit, accounting, adversary)]
    worst = max(rows, key=lambda row: row.epsilon)
    attack = largest(row.attack for row in rows)
    return EpsilonBound(
        unit=unit,
        accounting=accounting,
        adversary=adversary,
        epsilon=worst.epsilon,
        delta=delta,
        method=worst.method,
        order=worst.order,
        conditions=_conditions(run, unit, accounting),
        advantage_upper_bound=attack.advantage,
        detection_upper_bound=attack.detection,
    )


def label_bound(run: TrainingRun) -> EpsilonBound | None:
    """Return the bound of one training label against all parties together; None if the run uses no labels.

    A drawn label has a pure epsilon, so it holds at delta 0 and whatever is computed from it.
    """
    if run.label is None:
        return None
    epsilon, attack = math.inf, NO_PROTECTION
    losses = run.label.losses(Unit.LABEL)
    drawn = isinstance(losses, AtomLosses)
    if isinstance(losses, AtomLosses):
        epsilon, attack = float(losses.atoms.losses.max()), attack_on(losses.atoms, 0.0)
    return EpsilonBound(
        unit=Unit.LABEL,
        accounting=Accounting.STRICT,
        adversary=Adversary(server=False, colluding_parties=run.num_parties),
        epsilon=epsilon,
        delta=0.0,
        method="pure",
        order=None,
        conditions=(LABELS_DRAWN, IDEAL_RANDOMNESS, FIXED_PLAN) if drawn else (LABELS_IN_CLEAR,),
        advantage_upper_bound=attack.advantage,
        detection_upper_bound=attack.detection,
    )


def epsilon_bounds(
    run: TrainingRun,
    *,
    delta: float,
    adversaries: Iterable[Adversary] = (SERVER,),
    pld: bool = True,
) -> tuple[EpsilonBound, ...]:
    """Return the whole table: unit x accounting for each adversary.

    Args:
        run: The releases and updates.
        delta: Above 0 and below 1.
        adversaries: The readers of what leaves the parties.
        pld: False takes Renyi divergences alone.
    """
    return tuple(
        epsilon_bound(run, unit, accounting, adversary, delta=delta, pld=pld)
        for adversary in adversaries
        for unit in COLUMN_UNITS
        for accounting in Accounting
    )
