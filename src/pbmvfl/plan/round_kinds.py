"""Kinds of rounds: what a round does with its rows, as properties that every role acts on.

A kind is a value in a registry, and its code travels in the header of every message. A kind that is not here is refused
everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pbmvfl._settings import Registry
from pbmvfl.errors import PlanError


class Split(StrEnum):
    """Rows that a round uses."""

    TRAIN = "train"
    TEST = "test"


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundKind:
    """Properties of one kind of round. Roles act on these and never compare names."""

    name: str
    #: The number that travels in the header of a message.
    code: int
    split: Split = Split.TRAIN
    #: Every party sends a release of every row, and is charged for it.
    releases: bool = False
    #: The rows move what every party keeps: its weights, or numbers that prepare its columns. Charged as updates.
    updates: bool = False
    #: Parties answer the request for the round.
    answered: bool = True
    #: The server sends the gradient of the round's sums back.
    carries_gradient: bool = False
    #: Every party computes with labels that it holds itself.
    needs_labels: bool = False
    #: Which noisy statistic of its rows every party takes, instead of moving weights; "" for none.
    statistic: str = ""
    #: A pass is one round over all rows, whatever the batch size is.
    whole: bool = False
    #: The statistic is told to the server. All others stay with their party.
    told: bool = False
    #: The rows are the fusion rows, which train no network. Those of other kinds are the network rows.
    fuses: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.code <= 255:
            raise PlanError(f"code={self.code} of round kind {self.name!r} must be in 1..255: it is one byte")
        if self.releases and not self.answered:
            raise PlanError(f"round kind {self.name!r}: a release is an answer, so releases=True needs answered=True")
        if self.carries_gradient and not (self.releases and self.updates):
            raise PlanError(f"round kind {self.name!r}: a gradient belongs to a release and moves weights")
        if self.statistic and not self.updates:
            raise PlanError(f"round kind {self.name!r}: a statistic is charged as an update; it needs updates=True")
        if self.told and not (self.statistic and self.answered):
            raise PlanError(f"round kind {self.name!r}: told=True is about a statistic, and is an answer")
        if self.fuses and (self.updates or self.split is not Split.TRAIN):
            raise PlanError(f"round kind {self.name!r}: fusion rows are training rows, and move no weights")

    # Written out, because every role asks several times a round: different codes decide at once.
    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, RoundKind) and self.code == other.code and vars(self) == vars(other)

    def __hash__(self) -> int:
        return self.code

    @property
    def trains(self) -> bool:
        """True if the rows move weights."""
        return self.updates and not self.statistic

    @property
    def part(self) -> str:
        """Part of the training rows that it uses; no row is in two. Test rows are not divided."""
        if self.split is Split.TEST:
            return ""
        return "fusion" if self.fuses else "network"


KINDS: Registry[RoundKind] = Registry("round kind", PlanError)


def register_kind(kind: RoundKind) -> RoundKind:
    """Add a kind of round; its name and its code must be new."""
    if any(other.code == kind.code for other in KINDS.values()):
        raise PlanError(f"code={kind.code} of round kind {kind.name!r} is taken; choose another")
    return KINDS.add(kind.name, kind)


#: Embeddings up, gradient down, every network takes a step.
JOINT = register_kind(RoundKind(name="joint", code=1, releases=True, updates=True, carries_gradient=True))
#: Embeddings of test rows up, nothing down: an evaluation that is released and charged.
PREDICTION = register_kind(RoundKind(name="prediction", code=2, split=Split.TEST, releases=True))
#: Every network takes a step with labels that its party holds; nothing about any row leaves.
LOCAL = register_kind(RoundKind(name="local", code=3, updates=True, needs_labels=True))
#: Every party takes the noisy mean of its own columns, over all rows at once; nothing about any row leaves.
MEAN = register_kind(RoundKind(name="mean", code=4, updates=True, statistic="mean", whole=True))
#: Likewise the Gram matrix of its columns, with the mean taken off.
GRAM = register_kind(RoundKind(name="gram", code=5, updates=True, statistic="gram", whole=True))
#: Every party told noisy counts of its votes by class. Ledgers of earlier versions have such rounds, and no plan does.
COUNTS = register_kind(
    RoundKind(name="counts", code=6, updates=True, needs_labels=True, statistic="counts", whole=True, told=True)
)
#: Every party released a symbol of each training row. Ledgers of earlier versions have such rounds, and no plan does.
SYMBOLS = register_kind(RoundKind(name="symbols", code=7, releases=True))
#: The label holder draws labels of training rows, all at once. Only its own ledger has such rounds, and no plan does.
LABELS = register_kind(RoundKind(name="labels", code=8, releases=True, whole=True))
#: Embeddings of fusion rows up, as predictions release them: the label holder's fusion model learns from them.
FUSION = register_kind(RoundKind(name="fusion", code=9, releases=True, fuses=True))
