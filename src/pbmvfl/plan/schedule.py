"""Rows of each round and what it does with them: public, the same at every role, and exact in its counts.

The schedule is the only counter: rounds, their kinds, epochs, batches, and how often each row was released and updated
between two rounds. A public draw puts every training row into one of two parts: fusion rows, which train no network,
and network rows. Every row of a kind's part is used exactly once in a pass, so the number of releases about a row is a
fact and not an expectation, and a row is never twice in one batch. Each role computes the schedule for itself from the
public seed; a server cannot ask for other rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.crypto.public_streams import SCHEDULE_STREAM, public_permutation
from pbmvfl.errors import PlanError
from pbmvfl.plan.round_kinds import KINDS, RoundKind, Split

#: Rounds of a whole run: their numbers are 32-bit fields of every message.
MOST_ROUNDS = (1 << 32) - 1
#: The index of the permutation that is kept for all passes: no pass has this number.
_KEPT = (1 << 48) - 1
#: Batches of fewer than one row in so many are put in order by sorting.
_SORTED_SHARE = 16
#: The index of the permutation that divides the training rows into their parts, likewise.
_PARTS = (1 << 48) - 2


class Order(StrEnum):
    """Order in which a pass goes through the rows; a batch of all rows of which nothing leaves is in rising order."""

    SHUFFLED = "shuffled"  #: a new public permutation in every pass
    AS_GIVEN = "as-given"  #: as the rows stand
    FIXED = "fixed"  #: one public permutation, the same in every pass of every phase of this order


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Passes over the rows of a kind's part, one after the other."""

    kind: RoundKind
    passes: int
    order: Order = Order.SHUFFLED

    def __post_init__(self) -> None:
        if not isinstance(self.passes, int) or isinstance(self.passes, bool) or self.passes < 1:
            raise PlanError(f"passes={self.passes!r} of {self.kind.name} rounds must be a whole number of at least 1")

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind.name, "passes": self.passes, "order": str(self.order)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Phase:
        try:
            return cls(kind=KINDS[values["kind"]], passes=values["passes"], order=Order(values["order"]))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"phase={values!r} must have kind, passes and order ({', '.join(Order)})") from None


@dataclass(frozen=True, eq=False)
class Round:
    """One round: its number in the run, its kind, and the rows of the kind's split that it uses, read-only."""

    number: int
    kind: RoundKind
    rows: npt.NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @cached_property
    def rising(self) -> npt.NDArray[np.int64]:
        """The rows in rising order, each once, however often it stands in `rows`; in linear time for large batches."""
        if (self.rows[1:] > self.rows[:-1]).all():
            return self.rows
        if self.num_rows * _SORTED_SHARE < int(self.rows.max(initial=0)):
            return _read_only(np.unique(self.rows))
        return _read_only(np.flatnonzero(np.bincount(self.rows)))


@dataclass(frozen=True, kw_only=True)
class RowUses:
    """Uses of the rows in rounds of one kind, between two rounds or over several such spans."""

    kind: RoundKind
    #: The most releases about any one row.
    releases: int
    #: The most updates with any one row.
    updates: int
    #: Releases of all rows together.
    total_releases: int

    def to_dict(self) -> dict[str, int]:
        return {"releases": self.releases, "updates": self.updates, "total_releases": self.total_releases}


def _read_only(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the array, closed for writing: it is kept, and one role that wrote to it would change the rows of all."""
    rows.setflags(write=False)
    return rows


@lru_cache(maxsize=2)  # parties, their ledgers and the server of one process ask for the same epoch, and then the next
def _epoch_permutation(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return _read_only(public_permutation(count, seed=seed, stream=SCHEDULE_STREAM, index=epoch))


@lru_cache(maxsize=2)
def _all_rows(count: int) -> npt.NDArray[np.int64]:
    return _read_only(np.arange(count, dtype=np.int64))


@lru_cache(maxsize=2)
def divided_rows(count: int, num_fusion: int, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the fusion rows and the network rows, each in rising order. Every row is in one of them."""
    drawn = public_permutation(count, seed=seed, stream=SCHEDULE_STREAM, index=_PARTS)
    return _read_only(np.sort(drawn[:num_fusion])), _read_only(np.sort(drawn[num_fusion:]))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All rounds of a run, phase after phase. A value: roles that agree on these numbers agree on every row."""

    num_samples: int
    num_test_samples: int
    batch_size: int
    seed: int
    phases: tuple[Phase, ...]
    #: Training rows that train no network.
    num_fusion_samples: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_fusion_samples < max(1, self.num_samples):
            raise PlanError(
                f"num_fusion_samples={self.num_fusion_samples} must be in 0..{max(1, self.num_samples) - 1}: fusion "
                f"rows are some of num_samples={self.num_samples}, and networks need the others"
            )
        for phase in self.phases:
            if not self.size_of_part(phase.kind):
                which = "fusion_" if phase.kind.fuses else "test_" if phase.kind.split is Split.TEST else ""
                raise PlanError(f"{phase.kind.name} rounds need rows: num_{which}samples must be at least 1")
        if self._num_rounds > MOST_ROUNDS:
            raise PlanError(f"the phases make {self._num_rounds} rounds; at most 2^32-1 can be numbered")

    # --- sizes ---

    def rows_of(self, split: Split) -> int:
        """Return the number of rows of a split, of all its parts together."""
        return self.num_samples if split is Split.TRAIN else self.num_test_samples

    def size_of_part(self, kind: RoundKind) -> int:
        """Return the number of rows that a pass of a kind uses."""
        if kind.fuses:
            return self.num_fusion_samples
        return self.num_test_samples if kind.split is Split.TEST else self.num_samples - self.num_fusion_samples

    def part_of(self, kind: RoundKind) -> npt.NDArray[np.int64]:
        """Return the rows that a pass of a kind uses, in rising order, as numbers of its split's rows."""
        if kind.split is Split.TEST or not self.num_fusion_samples:
            return _all_rows(self.size_of_part(kind))
        return divided_rows(self.num_samples, self.num_fusion_samples, self.seed)[0 if kind.fuses else 1]

    def rows_per_round(self, kind: RoundKind) -> int:
        """Return the number of rows of a full batch."""
        return self.size_of_part(kind) if kind.whole else self.batch_size

    def rounds_per_pass(self, kind: RoundKind) -> int:
        return -(-self.size_of_part(kind) // self.rows_per_round(kind))

    @property
    def largest_batch(self) -> int:
        """Rows in the largest batch that any kind of round could have; keystream slots have this size."""
        return min(self.batch_size, max(self.num_samples, self.num_test_samples))

    def __len__(self) -> int:
        return self._num_rounds

    def num_rounds(self, kind: RoundKind) -> int:
        """Return the number of rounds of one kind in the whole run."""
        return sum(phase.passes for phase in self.phases if phase.kind == kind) * self.rounds_per_pass(kind)

    def batches(self, phase: Phase) -> tuple[tuple[int, int], ...]:
        """(rows, how many rounds of the phase have so many): full batches, and a last one of each pass if short."""
        each = self.rows_per_round(phase.kind)
        whole, rest = divmod(self.size_of_part(phase.kind), each)
        sizes = [(each, whole * phase.passes)] if whole else []
        return (*sizes, (rest, phase.passes)) if rest else tuple(sizes)

    @property
    def kinds(self) -> tuple[RoundKind, ...]:
        """Every kind that occurs, in the order of the first occurrence."""
        return tuple(dict.fromkeys(phase.kind for phase in self.phases))

    # --- one round ---

    def kind(self, number: int) -> RoundKind:
        return self._phase_at(number)[0].kind

    def num_rows(self, number: int) -> int:
        """Return the size of a round's batch, without making the batch."""
        phase, offset, _ = self._phase_at(number)
        each = self.rows_per_round(phase.kind)
        start = offset % self.rounds_per_pass(phase.kind) * each
        return min(each, self.size_of_part(phase.kind) - start)

    def __getitem__(self, number: int) -> Round:
        # All roles of a process ask for one round after the other: the last one is kept.
        last: Round | None = self.__dict__.get("_last")
        if last is None or last.number != number:
            last = self.__dict__["_last"] = self._round(number)
        return last

    def _round(self, number: int) -> Round:
        return Round(number, self.kind(number), self.rows_between(number, number + 1))

    def rows_between(self, first: int, until: int) -> npt.NDArray[np.int64]:
        """Return the rows of rounds first <= r < until of one pass, in their order."""
        phase, offset, earlier = self._phase_at(first)
        # Algorithm 2, line 3: every row once in a pass, in an order that all roles derive from the public seed.
        passed, position = divmod(offset, self.rounds_per_pass(phase.kind))
        count, each = self.size_of_part(phase.kind), self.rows_per_round(phase.kind)
        start, end = position * each, min((position + until - first) * each, count)
        unseen = each >= count and not phase.kind.releases  # all rows at once, and none of them leaves: no order shows
        if phase.order is Order.AS_GIVEN or unseen:
            return self.part_of(phase.kind)[start:end]
        index = _KEPT if phase.order is Order.FIXED else earlier + passed
        places = _epoch_permutation(count, self.seed, index)[start:end]
        divided = self.num_fusion_samples and phase.kind.split is Split.TRAIN
        return _read_only(self.part_of(phase.kind)[places]) if divided else places

    def __iter__(self) -> Iterator[Round]:
        return (self[number] for number in range(len(self)))

    @cached_property
    def _phase_starts(self) -> list[tuple[int, Phase, int]]:
        """(first round, phase, shuffled passes before it) of every phase."""
        starts, first, shuffled = [], 0, 0
        for phase in self.phases:
            starts.append((first, phase, shuffled))
            first += phase.passes * self.rounds_per_pass(phase.kind)
            shuffled += phase.passes if phase.order is Order.SHUFFLED else 0
        return starts

    @cached_property
    def _first_rounds(self) -> list[int]:
        return [first for first, _, _ in self._phase_starts]

    @cached_property
    def _num_rounds(self) -> int:
        return sum(phase.passes * self.rounds_per_pass(phase.kind) for phase in self.phases)

    def _phase_at(self, number: int) -> tuple[Phase, int, int]:
        """The phase of a round, the round's offset in it, and the shuffled passes before it."""
        if not 0 <= number < self._num_rounds:
            raise IndexError(f"round={number} is not in the plan; it has rounds 0 to {self._num_rounds - 1}")
        first, phase, shuffled = self._phase_starts[bisect_right(self._first_rounds, number) - 1]
        return phase, number - first, shuffled

    def pass_of(self, number: int) -> tuple[int, int]:
        """(first round, number of the round after the last) of the pass over the rows that a round belongs to."""
        phase, offset, _ = self._phase_at(number)
        each = self.rounds_per_pass(phase.kind)
        first = number - offset % each
        return first, first + each

    # --- epochs: passes that train ---

    @cached_property
    def num_epochs(self) -> int:
        """Passes over the training rows that move weights."""
        return sum(phase.passes for phase in self.phases if phase.kind.trains)

    def epochs_before(self, number: int) -> float:
        """Return the epochs that rounds 0 <= r < number complete; a part of one counts by its rounds."""
        done = 0.0
        for first, phase, _ in self._phase_starts:
            if phase.kind.trains and number > first:
                each = self.rounds_per_pass(phase.kind)
                done += min(number - first, phase.passes * each) / each
        return done

    def ends_epoch(self, number: int) -> bool:
        """Return whether the round is the last one of an epoch."""
        phase, offset, _ = self._phase_at(number)
        return phase.kind.trains and (offset + 1) % self.rounds_per_pass(phase.kind) == 0

    def end_of_epoch(self, epoch: int) -> int:
        """Return the number of the first round after so many epochs; after the last one, the number of all rounds."""
        if epoch >= self.num_epochs:
            return self._num_rounds
        for first, phase, _ in self._phase_starts:
            if phase.kind.trains:
                if epoch <= phase.passes:
                    return first + epoch * self.rounds_per_pass(phase.kind)
                epoch -= phase.passes
        return self._num_rounds

    @cached_property
    def trained_at(self) -> int:
        """The number of the first round after the last one that moves weights; 0 if none does."""
        return self._after([phase for phase in self.phases if phase.kind.trains])

    def may_keep(self, number: int) -> bool:
        """Return whether roles may keep a checkpoint after the round: it ends an epoch, or is a fusion round."""
        return self.ends_epoch(number) or self.kind(number).fuses

    @cached_property
    def settled_at(self) -> int:
        """The number of the first round after the last one that moves weights or teaches the fusion model."""
        return self._after([phase for phase in self.phases if phase.kind.trains or phase.kind.fuses])

    def _after(self, phases: Sequence[Phase]) -> int:
        """Return the number of the first round after all of these phases; 0 for none."""
        ends = [
            first + phase.passes * self.rounds_per_pass(phase.kind)
            for first, phase, _ in self._phase_starts
            if phase in phases
        ]
        return max(ends, default=0)

    # --- uses of rows ---

    @cached_property
    def steps_between_uses(self) -> int:
        """Smallest number of steps between two uses of a row that move weights; 1 where the order promises no more.

        Where all passes that train have one order that stays, a row has one place in all of them: a pass apart.
        """
        training = [phase for phase in self.phases if phase.kind.trains]
        orders = {phase.order for phase in training}
        if len(orders) != 1 or Order.SHUFFLED in orders:
            return 1
        return min(self.rounds_per_pass(phase.kind) for phase in training)

    def total_uses(self, first: int, until: int) -> dict[RoundKind, int]:
        """Row uses of all rows together in rounds first <= r < until, by kind, without making the batches."""
        uses = dict.fromkeys(self.kinds, 0)
        for start, phase, _ in self._phase_starts:
            end = start + phase.passes * self.rounds_per_pass(phase.kind)
            low, high = max(first, start), min(until, end)
            if low < high:
                uses[phase.kind] += self._rows_before(phase, high - start) - self._rows_before(phase, low - start)
        return uses

    def _rows_before(self, phase: Phase, offset: int) -> int:
        count = self.size_of_part(phase.kind)
        passes, rest = divmod(offset, self.rounds_per_pass(phase.kind))
        return passes * count + min(rest * self.rows_per_round(phase.kind), count)

    def uses(self, spans: Iterable[tuple[int, int]] | None = None) -> tuple[RowUses, ...]:
        """Count uses of rows in rounds first <= r < until of every span, exactly; without spans, in all rounds.

        Whole passes use every row once. Only where a span begins or ends inside a pass are its rows counted one by one.
        """
        spans = [(0, self._num_rounds)] if spans is None else list(spans)
        found = []
        for kind in self.kinds:
            total, whole = 0, 0
            counted: npt.NDArray[np.int64] | None = None
            for first, until in spans:
                total += self.total_uses(first, until)[kind]
                passes, rest = self._whole_passes(kind, first, until)
                whole += passes
                for number in rest:
                    if counted is None:
                        counted = np.zeros(self.rows_of(kind.split), dtype=np.int64)
                    counted[self[number].rows] += 1
            most = whole + (int(counted.max()) if counted is not None else 0)
            found.append(
                RowUses(
                    kind=kind,
                    releases=most if kind.releases else 0,
                    updates=most if kind.updates else 0,
                    total_releases=total if kind.releases else 0,
                )
            )
        return tuple(found)

    def _whole_passes(self, kind: RoundKind, first: int, until: int) -> tuple[int, list[int]]:
        """Whole passes of a kind inside a span, and the rounds of the span that lie in none."""
        whole = 0
        rest: list[int] = []
        each = self.rounds_per_pass(kind)
        for start, phase, _ in self._phase_starts:
            if phase.kind != kind:
                continue
            end = start + phase.passes * each
            low, high = max(first, start), min(until, end)
            if low >= high:
                continue
            first_whole = start + -(-(low - start) // each) * each
            last_whole = start + (high - start) // each * each
            if first_whole >= last_whole:
                rest += range(low, high)
            else:
                whole += (last_whole - first_whole) // each
                rest += [*range(low, first_whole), *range(last_whole, high)]
        return whole, rest

    # --- forms ---

    def to_dict(self) -> dict[str, Any]:
        """Plain values, which a ledger keeps: their meaning is frozen."""
        return {
            "num_samples": self.num_samples,
            "num_test_samples": self.num_test_samples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "phases": [phase.to_dict() for phase in self.phases],
            # Schedules without fusion rows keep the text that they had.
            **({"num_fusion_samples": self.num_fusion_samples} if self.num_fusion_samples else {}),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Schedule:
        phases = tuple(Phase.from_dict(phase) for phase in values["phases"])
        return cls(**{**values, "phases": phases})
