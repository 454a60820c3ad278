"""Terms of a session as the ledger keeps them: the public schedule and the events of each kind of round.

A ledger prices sessions by these values alone. They name laws whose meaning is frozen (`privacy.events`), so that a
later version of the program, whose plans may mean something else, cannot price an old release anew.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pbmvfl.mechanisms  # noqa: F401  (each mechanism brings the event that a ledger keeps)
from pbmvfl._settings import check_whole
from pbmvfl.crypto.protocol_version import PROTOCOL_VERSION
from pbmvfl.errors import LedgerError, PbmvflError
from pbmvfl.mechanisms.randomized_response import WEIGHT_ONE, RandomisedResponse
from pbmvfl.plan.groups import Evaluation
from pbmvfl.plan.round_kinds import KINDS, LABELS, RoundKind
from pbmvfl.plan.schedule import Order, Phase, Schedule
from pbmvfl.privacy.events import Event, ReleaseEvent, UpdateEvent, event_from_dict

if TYPE_CHECKING:
    from pbmvfl.plan.plan import Plan


def _words(plan: Plan | LabelDraws) -> str:
    if isinstance(plan, LabelDraws):
        return plan.describe()
    kinds = [kind for kind in plan.schedule.kinds if kind.releases]
    if not kinds:
        return f"nothing leaves a party, M={plan.num_parties}"
    described = dict.fromkeys(plan.mechanism_for(kind).describe() for kind in kinds)
    return f"{', '.join(described)} P={plan.embedding_dim} M={plan.num_parties}"


@dataclass(frozen=True, kw_only=True)
class SessionTerms:
    """The schedule of a run, and what one use of a row in each kind of round is charged for."""

    schedule: Schedule
    events: Mapping[RoundKind, tuple[Event, ...]]
    num_parties: int
    #: Whether a row's embedding depends on its whole batch, so that each use is a release of all of its rows.
    couples_rows: bool
    #: For people: what was released, in a few words.
    words: str
    #: Whether the run's first weights are public. If not, every release of the session may be about any row.
    public_start: bool = True
    #: Datasets of the same ledger whose rows first weights that are not public can know; None for any.
    known_datasets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        known = self.known_datasets
        if known is not None and not (isinstance(known, tuple) and all(isinstance(name, str) for name in known)):
            raise LedgerError(f"known_datasets={known!r} must be a list of names")
        check_whole("num_parties", self.num_parties, least=1)
        for name in ("couples_rows", "public_start"):
            if not isinstance(getattr(self, name), bool):
                raise LedgerError(f"{name}={getattr(self, name)!r} must be true or false")
        for kind in self.schedule.kinds:
            events = self.events.get(kind, ())
            found = [sum(isinstance(event, sort) for event in events) for sort in (ReleaseEvent, UpdateEvent)]
            if found != [kind.releases, kind.updates] or sum(found) != len(events):
                # One that is missing, or a second one, would be priced at nothing.
                raise LedgerError(
                    f"{kind.name} rounds have {len(events)} events ({', '.join(event.name for event in events)}); each "
                    f"has {int(kind.releases)} release and {int(kind.updates)} update"
                )

    @classmethod
    def of(
        cls, plan: Plan | LabelDraws, *, public_start: bool, known_datasets: tuple[str, ...] | None = None
    ) -> SessionTerms:
        return cls(
            schedule=plan.schedule,
            events={kind: plan.events(kind) for kind in plan.schedule.kinds},
            num_parties=plan.num_parties,
            couples_rows=plan.couples_rows,
            words=_words(plan),
            public_start=public_start,
            known_datasets=known_datasets,
        )

    def may_know(self, dataset: str) -> bool:
        """Return whether the first weights may know rows of a dataset without a charge for it."""
        return not self.public_start and (self.known_datasets is None or dataset in self.known_datasets)

    def release(self, kind: RoundKind) -> ReleaseEvent | None:
        return next((event for event in self.events[kind] if isinstance(event, ReleaseEvent)), None)

    def update(self, kind: RoundKind) -> UpdateEvent | None:
        return next((event for event in self.events[kind] if isinstance(event, UpdateEvent)), None)

    @property
    def has_plain_updates(self) -> bool:
        """Return whether weights learn rows without noise, so that later releases of other rows depend on them."""
        updates = (self.update(kind) for kind in self.events)
        return any(update is not None and not update.is_noisy for update in updates)

    def to_json(self) -> str:
        # Terms without names keep the text that they had.
        known = {} if self.known_datasets is None else {"known_datasets": self.known_datasets}
        return json.dumps(
            {
                "schedule": self.schedule.to_dict(),
                "events": {kind.name: [event.to_dict() for event in events] for kind, events in self.events.items()},
                "num_parties": self.num_parties,
                "couples_rows": self.couples_rows,
                "words": self.words,
                "public_start": self.public_start,
                **known,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> SessionTerms:
        """Read what `to_json` wrote, or refuse kinds and events that this version cannot price."""
        try:
            values: dict[str, Any] = json.loads(text)
            known = values.get("known_datasets")
            for name in ("num_samples", "num_test_samples", "batch_size", "seed"):
                check_whole(name, values["schedule"][name], least=0 if name in ("num_test_samples", "seed") else 1)
            return cls(
                schedule=Schedule.from_dict(values["schedule"]),
                events={
                    KINDS[name]: tuple(event_from_dict(event) for event in events)
                    for name, events in values["events"].items()
                },
                num_parties=values["num_parties"],
                couples_rows=values["couples_rows"],
                words=values["words"],
                public_start=values["public_start"],
                known_datasets=tuple(known) if isinstance(known, list) else known,
            )
        except (PbmvflError, AttributeError, KeyError, TypeError, ValueError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else error
            raise LedgerError(
                f"it has releases that this version cannot price ({why}); use the version that wrote them, or put a "
                "copy back"
            ) from error


# --- Draw of labels, as the label holder's ledger is charged for it ---


@dataclass(frozen=True, kw_only=True)
class LabelDraws:
    """Everything that a ledger needs of a plan, for rows whose labels are drawn once by their holder alone."""

    event: RandomisedResponse
    #: Rows whose labels are drawn.
    num_samples: int

    num_test_samples: ClassVar[int] = 0
    #: The label holder, whose noise is all that hides a label.
    num_parties: ClassVar[int] = 1
    couples_rows: ClassVar[bool] = False
    evaluation: ClassVar[Evaluation] = Evaluation.NONE
    model: ClassVar[str] = ""

    @cached_property
    def schedule(self) -> Schedule:
        """One round over all rows."""
        return Schedule(
            num_samples=self.num_samples,
            num_test_samples=0,
            batch_size=self.num_samples,
            seed=0,
            phases=(Phase(kind=LABELS, passes=1, order=Order.AS_GIVEN),),
        )

    def events(self, kind: RoundKind) -> tuple[Event, ...]:
        """Return what one use of a row is charged for."""
        return (self.event,) if kind == LABELS else ()

    def describe(self) -> str:
        """Describe the law, as in a ledger's list of sessions."""
        own = WEIGHT_ONE - (self.event.symbols - 1) * self.event.other_weight
        epsilon = math.log(own / self.event.other_weight)
        return f"randomised response k={self.event.symbols}, epsilon={epsilon:.4g} a label"

    def _values(self) -> dict[str, Any]:
        return {"labels": self.event.to_dict(), "num_samples": self.num_samples}

    def to_json(self) -> str:
        """Return the text that a ledger keeps for people."""
        return json.dumps(self._values())

    @property
    def hash(self) -> bytes:
        """SHA-256 in the form of a plan's, by which a ledger sees that the text was changed."""
        text = json.dumps({"protocol": PROTOCOL_VERSION, **self._values()}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()
