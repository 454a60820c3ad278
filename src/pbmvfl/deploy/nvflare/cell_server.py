"""Cell link at the server: asks every party over NVFlare's cell, and probes while an answer is missing."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pbmvfl.deploy.link import connection
from pbmvfl.deploy.link.interface import Channel, PendingReply, missing_reason
from pbmvfl.deploy.link.message_auth import (
    OVERHEAD,
    AuthenticatedAnswer,
    PartyChannel,
    ProcessReplaced,
    ServerMessageAuth,
)
from pbmvfl.deploy.nvflare.cell_channel import AGAIN_AFTER, NUMBER, STATE, CellEndpoint, Kind, printable_text
from pbmvfl.errors import LinkError, PartyLost
from pbmvfl.protocol.transport import Answers

# --- State of each party on the cell, and pending replies ---


#: Seconds that an answer may arrive after its party's BYE: NVFlare does not keep the order of messages.
_OVERTAKEN = 2.0


@dataclass(eq=False)
class PeerState:
    """Connection state of one party."""

    index: int
    name: str
    cell: str
    challenge: bytes
    #: Seconds of silence after which the party is taken for cut off.
    cut_after: float
    channel: PartyChannel | None = None
    #: Received messages that are not handled yet.
    inbox: deque[tuple[Kind, bytes]] = field(default_factory=deque)
    challenged_at: float = -1e9
    #: When the first message without any reply was sent.
    silent_since: float | None = None
    #: When it sent BYE.
    left_at: float | None = None
    #: Why the party is lost for good, and the last refusal by either side; "" if there is none.
    lost_reason: str = ""
    last_refusal: str = ""

    def note_sent(self, now: float) -> None:
        if self.silent_since is None:
            self.silent_since = now

    def note_received(self, now: float, pending: CellPendingReply | None) -> None:
        if self.silent_since is not None and pending is not None and self.is_cut(now):
            pending.count_cut(self.silent_since, now)
        self.silent_since = None

    def is_cut(self, now: float) -> bool:
        since = self.silent_since
        return since is not None and now - since >= self.cut_after

    def is_alive(self, now: float) -> bool:
        return self.channel is not None and not self.lost_reason and self.left_at is None and not self.is_cut(now)

    def has_given_up(self, now: float) -> bool:
        """Return whether it will not join: its BYE may overtake the refusal that says why, so that is waited for."""
        if self.lost_reason:
            return True
        return self.left_at is not None and (bool(self.last_refusal) or now >= self.left_at + _OVERTAKEN)

    def missing_reason(self, seconds: float) -> str:
        if self.lost_reason:
            return self.lost_reason
        if self.left_at is not None:
            return missing_reason(f"{self.name} left before it joined", self.last_refusal)
        return missing_reason(f"{self.name} did not join within {seconds:g} seconds", self.last_refusal)


@dataclass(eq=False, kw_only=True)
class CellPendingReply(PendingReply):
    """Pending reply of one party on the cell."""

    peer: PeerState
    #: When the next message is due.
    next_try: float = 0.0

    def ends(self, patience: float) -> float:
        """Return the moment at which the wait ends if nothing more is received."""
        peer = self.peer
        if peer.lost_reason:
            return 0.0
        if peer.left_at is not None:
            return peer.left_at + _OVERTAKEN
        if peer.silent_since is None:
            return self.deadline
        given_up = max(peer.silent_since, self.started) + patience - self.cut
        is_over_before_cut = self.deadline <= peer.silent_since + peer.cut_after
        return min(self.deadline, given_up) if is_over_before_cut else given_up

    def until(self, patience: float) -> float:
        """Return the moment at which an action is due if nothing is received."""
        return min(self.ends(patience), self.next_try)

    def timeout_reason(self, now: float, patience: float) -> str:
        """Return the timeout reason, or ""."""
        if now < (ends := self.ends(patience)):
            return ""
        if self.peer.lost_reason:
            return self.peer.lost_reason
        if self.peer.left_at is not None:
            return "it left before it answered"
        if ends < self.deadline or self.peer.is_cut(now):
            return f"no word within {patience:g} seconds: its process ended, or it is cut off"
        return self.no_answer


# --- The link itself ---


#: Shortest time between two challenges to one party, in seconds.
_BETWEEN_CHALLENGES = 0.1
#: Largest number of queued messages of one party; more are dropped, and requested again.
_MOST_WAITING = 16


class ServerCell:
    """Server's end of all parties' cell links: a `ServerLink`.

    On the cell a killed process cannot be told from a cut cable: both are silent, and lost when the patience is over.
    Only a party that leaves by itself announces it. `alive` are those that have sent something since they were last
    sent something, or were sent it a few seconds ago.
    """

    def __init__(
        self,
        *,
        core_cell: Any,
        auth: ServerMessageAuth,
        cells: Mapping[str, str],
        patience: float,
        again_after: float = AGAIN_AFTER,
        frame_limit: int = connection.LIMIT,
    ) -> None:
        """Register on the cell. `cells` are the parties' cells by name, in the order of the parties' indices."""
        self._auth, self._patience, self._again_after = auth, patience, again_after
        self._peers = [
            PeerState(index, name, cell, challenge=auth.challenge(), cut_after=3 * again_after)
            for index, (name, cell) in enumerate(cells.items())
        ]
        self._by_cell = {peer.cell: peer for peer in self._peers}
        #: Guards the inboxes; `join` and `ask` are one thread's at a time.
        self._changed = threading.Condition()
        self._ask_lock = threading.Lock()
        self._closed = False
        self._limit = frame_limit - OVERHEAD
        self._endpoint = CellEndpoint(core_cell, peers=self._by_cell, on_message=self._on_message, limit=frame_limit)

    # --- interface of a link ---

    @property
    def parties(self) -> Sequence[str]:
        return [peer.name for peer in self._peers]

    @property
    def alive(self) -> Sequence[str]:
        now = time.monotonic()
        return [peer.name for peer in self._peers if peer.is_alive(now)]

    def join(self, *, timeout: float) -> None:
        until = time.monotonic() + timeout
        with self._ask_lock:
            while missing := [peer for peer in self._peers if peer.channel is None or peer.lost_reason]:
                self._check_open()
                now = time.monotonic()
                if now >= until or any(peer.has_given_up(now) for peer in missing):
                    raise PartyLost({peer.index: peer.missing_reason(timeout) for peer in missing})
                for peer in missing:
                    self._challenge(peer, now, after=self._again_after)
                again = min(peer.challenged_at for peer in missing) + self._again_after
                for peer, kind, body in self._read(min(until, again)):
                    self._handle(peer, kind, body, None)

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        questions = dict.fromkeys(range(len(self._peers)), message)
        return self.ask(questions, channel=Channel.PROTOCOL, timeout=timeout)

    def ask(self, questions: Mapping[int, bytes], *, channel: Channel, timeout: float | None = None) -> Answers:
        """Implement `ServerLink.ask`.

        Seconds of disconnection count against the patience, not the timeout. A party is taken for cut off after three
        probes without an answer.
        """
        for body in questions.values():
            if len(body) > self._limit:
                raise LinkError(f"a question of {len(body):,} bytes; permitted: at most {self._limit:,}; ask for less")
        limit = self._patience if timeout is None else timeout
        received: dict[int, bytes] = {}
        lost: dict[int, str] = {}
        with self._ask_lock:
            now = time.monotonic()
            pending_by_index = {
                index: CellPendingReply(peer=self._peers[index], channel=channel, body=body, started=now, limit=limit)
                for index, body in questions.items()
            }
            while pending_by_index:
                self._check_open()
                now = time.monotonic()
                for index, pending in list(pending_by_index.items()):
                    if reason := pending.timeout_reason(now, self._patience):
                        lost[index] = reason
                        del pending_by_index[index]
                    else:
                        self._send(pending, now)
                if not pending_by_index:
                    break
                for peer, kind, body in self._read(
                    min(pending.until(self._patience) for pending in pending_by_index.values())
                ):
                    answer = self._handle(peer, kind, body, pending_by_index.get(peer.index))
                    if (
                        answer is not None
                        and peer.index in pending_by_index
                        and answer.number == pending_by_index[peer.index].number
                    ):
                        received[peer.index] = answer.body
                        del pending_by_index[peer.index]
        return Answers(received, lost)

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        for peer in self._peers:
            self._endpoint.send(peer.cell, Kind.BYE)
        self._endpoint.close()

    # --- sending ---

    def _send_to(self, peer: PeerState, kind: Kind, body: bytes, now: float) -> None:
        peer.note_sent(now)
        self._endpoint.send(peer.cell, kind, body)

    def _challenge(self, peer: PeerState, now: float, *, after: float) -> None:
        """Send the challenge, unless it was sent just before."""
        if now >= peer.challenged_at + after:
            peer.challenged_at = now
            self._send_to(peer, Kind.CHALLENGE, peer.challenge, now)

    def _send(self, pending: CellPendingReply, now: float) -> None:
        """Send what is due: the question once, then probes."""
        peer = pending.peer
        if peer.channel is None:
            self._challenge(peer, now, after=self._again_after)
            pending.next_try = peer.challenged_at + self._again_after
        elif pending.number is None:
            try:
                pending.number, question = peer.channel.question(pending.channel, pending.body)
            except LinkError as error:
                peer.lost_reason = str(error).removeprefix(f"party={peer.name}: ")
                return
            pending.next_try = now + self._again_after
            self._send_to(peer, Kind.QUESTION, question, now)
        elif now >= pending.next_try:
            pending.next_try = now + self._again_after
            self._send_to(peer, Kind.PROBE, NUMBER.pack(pending.number), now)

    # --- receiving ---

    def _on_message(self, cell: str, kind: Kind, body: bytes) -> None:
        """Queue a message; called in NVFlare's threads."""
        peer = self._by_cell[cell]
        with self._changed:
            if len(peer.inbox) < _MOST_WAITING:
                peer.inbox.append((kind, body))
                self._changed.notify_all()

    def _read(self, until: float) -> list[tuple[PeerState, Kind, bytes]]:
        """Return the received messages; none if the time is over first, or the link was closed."""
        with self._changed:
            while not self._closed:
                found = [(peer, *message) for peer in self._peers for message in peer.inbox]
                if found:
                    for peer in self._peers:
                        peer.inbox.clear()
                    return found
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
        return []

    def _handle(
        self, peer: PeerState, kind: Kind, body: bytes, pending: CellPendingReply | None
    ) -> AuthenticatedAnswer | None:
        """Handle one message, and return the answer in it, if any. A message that is not the party's has no effect."""
        try:
            match kind:
                case Kind.HELLO:  # also after a JOIN: another process has another key, and is detected
                    self._challenge(peer, time.monotonic(), after=_BETWEEN_CHALLENGES)
                case Kind.JOIN:
                    self._admit(peer, body)
                case Kind.STATE:
                    self._send_again(peer, body, pending)
                case Kind.ANSWER if peer.channel is not None:
                    answer = peer.channel.answer(body)
                    peer.note_received(time.monotonic(), pending)
                    return answer
                case Kind.REFUSED:
                    peer.last_refusal = printable_text(body)
                case Kind.BYE:
                    peer.left_at = time.monotonic()
                    return None
        except LinkError as error:
            self._endpoint.dropped(str(error))
            return None
        peer.note_received(time.monotonic(), pending)
        return None

    def _admit(self, peer: PeerState, join: bytes) -> None:
        try:
            peer.channel = self._auth.admit(peer.name, peer.challenge, join).channel
            peer.last_refusal = ""
        except ProcessReplaced:
            peer.lost_reason = "its process was replaced"
        except LinkError as error:
            peer.last_refusal = str(error)
            self._endpoint.send(peer.cell, Kind.REFUSED, str(error).encode()[:400])
            raise

    def _send_again(self, peer: PeerState, body: bytes, pending: CellPendingReply | None) -> None:
        """Send again what the party's STATE shows that it did not receive."""
        if len(body) != STATE.size or pending is None or pending.number is None or peer.channel is None:
            return
        last, working_on = STATE.unpack(body)
        if not working_on and last < pending.number:
            for question in peer.channel.again(last):
                self._endpoint.send(peer.cell, Kind.QUESTION, question)

    def _check_open(self) -> None:
        if self._closed:
            raise LinkError("server: the link is closed")
