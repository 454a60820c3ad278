"""The parties' places on the server's line, and the answers that are waited for there."""

from __future__ import annotations

from dataclasses import dataclass

from pbmvfl.deploy.link.connection import Connection
from pbmvfl.deploy.link.message_auth import PartyChannel
from pbmvfl.deploy.link.waiting import Waiting, why_missing


@dataclass(eq=False)
class Seat:
    """A party's place at the server."""

    index: int
    name: str
    channel: PartyChannel | None = None
    connection: Connection | None = None
    #: Connected, and not yet taken up by whoever asks.
    newcomer: Connection | None = None
    #: When its connection was missed; and whether the other end closed it.
    cut_since: float | None = None
    ended: bool = False
    faults: int = 0
    #: Why it never comes back; and why it was last refused.
    gone: str = ""
    refused: str = ""

    @property
    def is_alive(self) -> bool:
        newest = self.newcomer or self.connection
        return newest is not None and not self.gone and not newest.has_ended

    def why_missing(self, seconds: float) -> str:
        if self.gone:
            return self.gone
        return why_missing(f"{self.name} did not join within {seconds:g} seconds", self.refused)


@dataclass(eq=False, kw_only=True)
class Wait(Waiting):
    """One party's answer on the line."""

    seat: Seat

    def until(self, patience: float, ended_after: float) -> float:
        """When there is something to decide, if nothing happens before."""
        if self.seat.gone:
            return 0.0
        if self.seat.connection is not None:
            return self.deadline
        since = self.seat.cut_since if self.seat.cut_since is not None else self.started
        until = since + patience - self.cut
        return min(until, since + ended_after) if self.seat.ended else until

    def over(self, now: float, patience: float, ended_after: float) -> str:
        """Why it is not waited for any longer; nothing while it is."""
        if self.seat.gone:
            return self.seat.gone
        if now < self.until(patience, ended_after):
            return ""
        if self.seat.connection is not None:
            return self.no_answer
        if self.seat.ended:
            return "its process ended"
        return f"no connection within {patience:g} seconds"
