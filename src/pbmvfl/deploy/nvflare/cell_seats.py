"""The parties' places on the server's cell, and the answers that are waited for there."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pbmvfl.deploy.link.message_auth import PartyChannel
from pbmvfl.deploy.link.waiting import Waiting, why_missing
from pbmvfl.deploy.nvflare.cell_channel import Kind

#: Seconds that an answer may come later than its party's last word, which NVFlare may overtake.
_OVERTAKEN = 2.0


@dataclass(eq=False)
class Seat:
    """A party's place at the server."""

    index: int
    name: str
    cell: str
    challenge: bytes
    #: Seconds of silence after which it is taken for cut off.
    cut_after: float
    channel: PartyChannel | None = None
    #: What has come and is not read.
    box: deque[tuple[Kind, bytes]] = field(default_factory=deque)
    challenged_at: float = -1e9
    #: Since when it was told something and has said nothing.
    silent_since: float | None = None
    #: When it said that it leaves.
    left_at: float | None = None
    #: Why it never comes back; and why it or the server last refused.
    gone: str = ""
    refused: str = ""

    def told(self, now: float) -> None:
        if self.silent_since is None:
            self.silent_since = now

    def heard(self, now: float, wait: Wait | None) -> None:
        if self.silent_since is not None and wait is not None and self.is_cut(now):
            wait.count_cut(self.silent_since, now)
        self.silent_since = None

    def is_cut(self, now: float) -> bool:
        since = self.silent_since
        return since is not None and now - since >= self.cut_after

    def is_alive(self, now: float) -> bool:
        return self.channel is not None and not self.gone and self.left_at is None and not self.is_cut(now)

    def why_missing(self, seconds: float) -> str:
        if self.gone:
            return self.gone
        if self.left_at is not None:
            return why_missing(f"{self.name} left before it joined", self.refused)
        return why_missing(f"{self.name} did not join within {seconds:g} seconds", self.refused)


@dataclass(eq=False, kw_only=True)
class Wait(Waiting):
    """One party's answer on the cell."""

    seat: Seat
    #: When something is to be said again.
    next_try: float = 0.0

    def ends(self, patience: float) -> float:
        """When it is not waited for any longer, if nothing more is heard."""
        seat = self.seat
        if seat.gone:
            return 0.0
        if seat.left_at is not None:
            return seat.left_at + _OVERTAKEN
        if seat.silent_since is None:
            return self.deadline
        given_up = max(seat.silent_since, self.started) + patience - self.cut
        is_over_before_cut = self.deadline <= seat.silent_since + seat.cut_after
        return min(self.deadline, given_up) if is_over_before_cut else given_up

    def until(self, patience: float) -> float:
        """When there is something to do, if nothing is heard."""
        return min(self.ends(patience), self.next_try)

    def over(self, now: float, patience: float) -> str:
        """Why it is not waited for any longer; nothing while it is."""
        if now < (ends := self.ends(patience)):
            return ""
        if self.seat.gone:
            return self.seat.gone
        if self.seat.left_at is not None:
            return "it left before it answered"
        if ends < self.deadline or self.seat.is_cut(now):
            return f"no word within {patience:g} seconds: its process ended, or it is cut off"
        return self.no_answer
