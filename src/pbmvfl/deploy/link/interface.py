"""What carries messages between a server and its parties, whatever lies between them.

A link asks and answers: the server asks, a party answers every question once, and the same question again gets the same
bytes again. Questions come on channels, so that what comes before a session (who are you, which rows in which order)
needs no message of the protocol. Two links are there: the line (`deploy.link.tls_server`), and NVFlare's cell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from pbmvfl.protocol.transport import Answers


class Channel(IntEnum):
    """What a question is about. The numbers travel, and keep their meaning."""

    SETUP = 1  #: before a session: version, plan, order of rows
    PROTOCOL = 2  #: messages of the protocol, as they are
    ALIGN = 3  #: private alignment of rows
    END = 4  #: the work is over, and why; a party answers and leaves


#: What a party does with a question: bytes in, bytes out; it never raises.
Handler = Callable[[Channel, bytes], bytes]


class ServerLink(Protocol):
    """The server's ends of all parties' links. It is also a `protocol.transport.Transport`."""

    @property
    def parties(self) -> Sequence[str]:
        """Names of the parties, in the order of their indices."""

    @property
    def alive(self) -> Sequence[str]:
        """Names of those that are connected now."""

    def join(self, *, timeout: float) -> None:
        """Wait until every party is there; `PartyLost` names those that are not when the time is over."""

    def ask(self, questions: Mapping[int, bytes], *, channel: Channel, timeout: float | None = None) -> Answers:
        """Ask parties by their indices, each its own question, all at the same time.

        `timeout` is how long the answers may take; None: as long as the link has patience. A cut that is mended within
        the patience is not seen here. A party whose process has ended is lost at once.
        """

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        """One message of the protocol to every party."""

    def close(self) -> None: ...


class PartyLink(Protocol):
    """A party's end."""

    def serve(self, handle: Handler) -> None:
        """Answer questions until one on the channel END is answered. Raises `LinkError` if the server is lost."""

    def close(self) -> None: ...


# --- What every link knows of an answer that it waits for, whatever carries it ---


@dataclass(eq=False, kw_only=True)
class PendingReply:
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


def missing_reason(words: str, refused: str) -> str:
    """Why a party did not join; `refused` says why it was last refused, if it was."""
    return f"{words}; it was last refused: {refused}" if refused else words
