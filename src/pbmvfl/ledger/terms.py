"""What a session may release, as the ledger keeps it: the public schedule and the events of each kind of round.

A ledger prices sessions by these values alone. They name laws whose meaning is frozen (`privacy.events`), so that a
later version of the program, whose plans may mean something else, cannot price an old release anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pbmvfl.errors import LedgerError, PlanError
from pbmvfl.privacy.events import Event, ReleaseEvent, UpdateEvent, event_from_dict
from pbmvfl.schedule import KINDS, RoundKind, Schedule

if TYPE_CHECKING:
    from pbmvfl.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The schedule of a run, and what one use of a row in each kind of round is charged for."""

    schedule: Schedule
    events: Mapping[RoundKind, tuple[Event, ...]]
    num_parties: int
    #: Whether a row's embedding depends on its whole batch, so that each use is a release of all of its rows.
    couples_rows: bool
    #: For people: what was released, in a few words.
    words: str

    @classmethod
    def of(cls, plan: Plan) -> Terms:
        return cls(
            schedule=plan.schedule,
            events={kind: plan.events(kind) for kind in plan.schedule.kinds},
            num_parties=plan.num_parties,
            couples_rows=plan.couples_rows,
            words=f"{plan.release.describe()} P={plan.embedding_dim} M={plan.num_parties}",
        )

    def release(self, kind: RoundKind) -> ReleaseEvent | None:
        return next((event for event in self.events[kind] if isinstance(event, ReleaseEvent)), None)

    def update(self, kind: RoundKind) -> UpdateEvent | None:
        return next((event for event in self.events[kind] if isinstance(event, UpdateEvent)), None)

    @property
    def has_plain_updates(self) -> bool:
        """Whether weights learn rows without noise, so that later releases of other rows depend on them."""
        updates = (self.update(kind) for kind in self.events)
        return any(update is not None and not update.is_noisy for update in updates)

    def to_json(self) -> str:
        return json.dumps(
            {
                "schedule": self.schedule.to_dict(),
                "events": {kind.name: [event.to_dict() for event in events] for kind, events in self.events.items()},
                "num_parties": self.num_parties,
                "couples_rows": self.couples_rows,
                "words": self.words,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Terms:
        """What `to_json` wrote. Kinds and events that this version does not know cannot be priced, and are refused."""
        try:
            values: dict[str, Any] = json.loads(text)
            return cls(
                schedule=Schedule.from_dict(values["schedule"]),
                events={
                    KINDS[name]: tuple(event_from_dict(event) for event in events)
                    for name, events in values["events"].items()
                },
                num_parties=values["num_parties"],
                couples_rows=values["couples_rows"],
                words=values["words"],
            )
        except (LedgerError, PlanError, KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                f"the ledger has releases that this version cannot price ({error}); use the version that wrote them"
            ) from error
