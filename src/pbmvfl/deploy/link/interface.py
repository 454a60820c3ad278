"""Interface of all links between the server and its parties.

A link is request and reply: the server asks, a party answers every question once, and a repeated question gets the same
bytes again. Questions travel on channels, so that set-up and alignment, which precede a session, need no message of the
protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

    @property
    def first_lost(self) -> str:
        """Name of the first party that was lost and has not come back, or "".

        When a job is ended, the others follow.
        """

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
