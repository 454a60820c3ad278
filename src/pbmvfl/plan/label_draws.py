"""Draw of labels as the label holder's ledger is charged for it: one round over the rows, one release of each."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from pbmvfl.crypto.protocol_version import PROTOCOL_VERSION
from pbmvfl.mechanisms.randomized_response import WEIGHT_ONE, RandomisedResponse
from pbmvfl.plan.groups import Evaluation
from pbmvfl.plan.round_kinds import LABELS, RoundKind
from pbmvfl.plan.schedule import Order, Phase, Schedule
from pbmvfl.privacy.events import Event


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
