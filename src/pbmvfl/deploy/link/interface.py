"""Interface of all links between the server and its parties.

A link is request and reply: the server asks, a party answers every question once, and a repeated question gets the same
bytes again. Questions travel on channels, so that set-up and alignment, which precede a session, need no message of the
protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from pbmvfl.protocol.transport import Answers


class Channel(IntEnum):
    """Subject of a question. The numbers travel, and keep their meaning."""

    SETUP = 1  #: before a session: version, plan, order of rows
    PROTOCOL = 2  #: messages of the protocol, as they are
    ALIGN = 3  #: private alignment of rows
    END = 4  #: the work is over, and why; a party answers and leaves


#: Handler of a party's questions: bytes in, bytes out; it never raises.
Handler = Callable[[Channel, bytes], bytes]


class ServerLink(Protocol):
    """Server's ends of all parties' links; also a `protocol.transport.Transport`."""

    @property
    def parties(self) -> Sequence[str]:
        """Names of the parties, in the order of their indices."""

    @property
    def alive(self) -> Sequence[str]:
        """Names of the parties that are connected now."""

    def join(self, *, timeout: float) -> None:
        """Wait until every party is connected.

        Args:
            timeout: Longest wait in seconds.

        Raises:
            PartyLost: If a party is missing when the time is over, with a reason for each.
        """

    def ask(self, questions: Mapping[int, bytes], *, channel: Channel, timeout: float | None = None) -> Answers:
        """Send parties, by their indices, one question each, and wait for the answers.

        A disconnection that ends within the link's patience is not visible here. A party whose process ended is lost at
        once.

        Args:
            questions: Body for each party index.
            channel: Channel of the questions.
            timeout: Longest time for the answers in seconds; None for the link's patience.

        Returns:
            The answers, and a reason for each lost party.
        """

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        """Send one message of the protocol to every party, and wait for the answers."""

    def close(self) -> None: ...


class PartyLink(Protocol):
    """Party's end of a link."""

    def serve(self, handle: Handler) -> None:
        """Answer questions until one on the channel END is answered.

        Raises:
            LinkError: If the server is lost.
        """

    def close(self) -> None: ...


# --- Pending replies, common to all links ---


@dataclass(eq=False, kw_only=True)
class PendingReply:
    """Reply that the server waits for, whatever link carries it.

    Seconds of disconnection count against the patience for the connection, not against the deadline of the reply.
    """

    channel: Channel
    body: bytes
    #: Seconds that the answer may take, and the start of the wait.
    limit: float
    started: float
    #: The question's number, once it was authenticated.
    number: int | None = None
    #: Seconds of disconnections that are over.
    cut: float = 0.0
    #: End of the wait while the party is connected.
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = self.started + self.limit

    def count_cut(self, since: float, now: float) -> None:
        """Extend the deadline by a disconnection that is over."""
        seconds = now - max(since, self.started)
        self.cut += seconds
        self.deadline += seconds

    @property
    def no_answer(self) -> str:
        return f"no answer within {self.limit:g} seconds"


def missing_reason(words: str, refused: str) -> str:
    """Return why a party did not join, with its last refusal if there was one."""
    return f"{words}; it was last refused: {refused}" if refused else words
