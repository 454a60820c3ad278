"""What every link knows of an answer that it waits for, whatever carries it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pbmvfl.deploy.link.interface import Channel


@dataclass(eq=False, kw_only=True)
class Waiting:
    """Seconds in which a party is cut off count against the patience with its connection, not against the deadline of
    its answer."""

    channel: Channel
    body: bytes
    #: Seconds that the answer may take; and since when it is waited for.
    limit: float
    started: float
    #: The question's number, once it could be sealed.
    number: int | None = None
    #: Seconds in which the party was cut off, those of cuts that are over.
    cut: float = 0.0
    #: Until when it is waited for while the party is there.
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = self.started + self.limit

    def count_cut(self, since: float, now: float) -> None:
        """A cut is over: the answer may take so much longer."""
        seconds = now - max(since, self.started)
        self.cut += seconds
        self.deadline += seconds

    @property
    def no_answer(self) -> str:
        return f"no answer within {self.limit:g} seconds"


def why_missing(words: str, refused: str) -> str:
    """Why a party did not join; `refused` says why it was last refused, if it was."""
    return f"{words}; it was last refused: {refused}" if refused else words
