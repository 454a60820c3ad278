"""The cell at the server: asks every party over NVFlare's cell, and asks again while an answer is missing."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pbmvfl.deploy.link import connection
from pbmvfl.deploy.link.interface import Channel, Waiting, why_missing
from pbmvfl.deploy.link.message_auth import OVERHEAD, PartyChannel, ProcessReplaced, SealedAnswer, ServerSeal
from pbmvfl.deploy.nvflare.cell_channel import AGAIN_AFTER, NUMBER, STATE, Door, Kind, words_of
from pbmvfl.errors import LinkError, PartyLost
from pbmvfl.protocol.transport import Answers

# --- The parties' places on the server's cell, and the answers that are waited for there ---


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


# --- cell server ---


#: Seconds between two challenges of one party, whatever it says.
_BETWEEN_CHALLENGES = 0.1
#: Messages of one party that wait to be read; more are dropped, and asked for again.
_MOST_WAITING = 16


class ServerCell:
    """The server's end towards all parties: a `ServerLink`.

    On the cell a party whose process was killed cannot be told from one that is cut off: both are silent, and lost when
    the patience is over. Only a party that leaves by itself says so. `alive` are those that have said something since
    they were last told something, or were told it a few seconds ago.
    """

    def __init__(
        self,
        *,
        core_cell: Any,
        seal: ServerSeal,
        cells: Mapping[str, str],
        patience: float,
        again_after: float = AGAIN_AFTER,
        frame_limit: int = connection.LIMIT,
    ) -> None:
        """`cells` are the parties' cells by their names, in the order of the parties' indices."""
        self._seal, self._patience, self._again_after = seal, patience, again_after
        self._seats = [
            Seat(index, name, cell, challenge=seal.challenge(), cut_after=3 * again_after)
            for index, (name, cell) in enumerate(cells.items())
        ]
        self._by_cell = {seat.cell: seat for seat in self._seats}
        #: Guards what has come and is not read; `join` and `ask` are one thread's at a time.
        self._came = threading.Condition()
        self._asking = threading.Lock()
        self._closed = False
        self._limit = frame_limit - OVERHEAD
        self._door = Door(core_cell, peers=self._by_cell, hear=self._hear, limit=frame_limit)

    # --- what a link is ---

    @property
    def parties(self) -> Sequence[str]:
        return [seat.name for seat in self._seats]

    @property
    def alive(self) -> Sequence[str]:
        now = time.monotonic()
        return [seat.name for seat in self._seats if seat.is_alive(now)]

    def join(self, *, timeout: float) -> None:
        until = time.monotonic() + timeout
        with self._asking:
            while missing := [seat for seat in self._seats if seat.channel is None or seat.gone]:
                self._check_open()
                now = time.monotonic()
                if now >= until or any(seat.gone or seat.left_at is not None for seat in missing):
                    raise PartyLost({seat.index: seat.why_missing(timeout) for seat in missing})
                for seat in missing:
                    self._challenge(seat, now, after=self._again_after)
                again = min(seat.challenged_at for seat in missing) + self._again_after
                for seat, kind, body in self._read(min(until, again)):
                    self._take(seat, kind, body, None)

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        questions = dict.fromkeys(range(len(self._seats)), message)
        return self.ask(questions, channel=Channel.PROTOCOL, timeout=timeout)

    def ask(self, questions: Mapping[int, bytes], *, channel: Channel, timeout: float | None = None) -> Answers:
        """As the link promises. Seconds in which a party is cut off count against the patience, not the timeout; it is
        taken for cut off after three questions without a word."""
        for body in questions.values():
            if len(body) > self._limit:
                raise LinkError(f"a question of {len(body):,} bytes; permitted: at most {self._limit:,}; ask for less")
        limit = self._patience if timeout is None else timeout
        received: dict[int, bytes] = {}
        lost: dict[int, str] = {}
        with self._asking:
            now = time.monotonic()
            waits = {
                index: Wait(seat=self._seats[index], channel=channel, body=body, started=now, limit=limit)
                for index, body in questions.items()
            }
            while waits:
                self._check_open()
                now = time.monotonic()
                for index, wait in list(waits.items()):
                    if reason := wait.over(now, self._patience):
                        lost[index] = reason
                        del waits[index]
                    else:
                        self._send(wait, now)
                if not waits:
                    break
                for seat, kind, body in self._read(min(wait.until(self._patience) for wait in waits.values())):
                    answer = self._take(seat, kind, body, waits.get(seat.index))
                    if answer is not None and seat.index in waits and answer.number == waits[seat.index].number:
                        received[seat.index] = answer.body
                        del waits[seat.index]
        return Answers(received, lost)

    def close(self) -> None:
        with self._came:
            if self._closed:
                return
            self._closed = True
            self._came.notify_all()
        for seat in self._seats:
            self._door.say(seat.cell, Kind.BYE)
        self._door.close()

    # --- saying ---

    def _say(self, seat: Seat, kind: Kind, body: bytes, now: float) -> None:
        seat.told(now)
        self._door.say(seat.cell, kind, body)

    def _challenge(self, seat: Seat, now: float, *, after: float) -> None:
        """Unless it was challenged just before."""
        if now >= seat.challenged_at + after:
            seat.challenged_at = now
            self._say(seat, Kind.CHALLENGE, seat.challenge, now)

    def _send(self, wait: Wait, now: float) -> None:
        """Whatever is due: the question once, then whether it has come."""
        seat = wait.seat
        if seat.channel is None:
            self._challenge(seat, now, after=self._again_after)
            wait.next_try = seat.challenged_at + self._again_after
        elif wait.number is None:
            try:
                wait.number, question = seat.channel.question(wait.channel, wait.body)
            except LinkError as error:
                seat.gone = str(error).removeprefix(f"party={seat.name}: ")
                return
            wait.next_try = now + self._again_after
            self._say(seat, Kind.QUESTION, question, now)
        elif now >= wait.next_try:
            wait.next_try = now + self._again_after
            self._say(seat, Kind.PROBE, NUMBER.pack(wait.number), now)

    # --- hearing ---

    def _hear(self, cell: str, kind: Kind, body: bytes) -> None:
        """In NVFlare's threads."""
        seat = self._by_cell[cell]
        with self._came:
            if len(seat.box) < _MOST_WAITING:
                seat.box.append((kind, body))
                self._came.notify_all()

    def _read(self, until: float) -> list[tuple[Seat, Kind, bytes]]:
        """What has come; nothing if the time is over first, or the link was closed."""
        with self._came:
            while not self._closed:
                found = [(seat, *message) for seat in self._seats for message in seat.box]
                if found:
                    for seat in self._seats:
                        seat.box.clear()
                    return found
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._came.wait(left)
        return []

    def _take(self, seat: Seat, kind: Kind, body: bytes, wait: Wait | None) -> SealedAnswer | None:
        """Act on one message; its answer, if it is one. What is not the party's has no effect."""
        try:
            match kind:
                case Kind.HELLO:  # one that has joined too: another process has another key, and is found out
                    self._challenge(seat, time.monotonic(), after=_BETWEEN_CHALLENGES)
                case Kind.JOIN:
                    self._admit(seat, body)
                case Kind.STATE:
                    self._send_again(seat, body, wait)
                case Kind.ANSWER if seat.channel is not None:
                    answer = seat.channel.answer(body)
                    seat.heard(time.monotonic(), wait)
                    return answer
                case Kind.REFUSED:
                    seat.refused = words_of(body)
                case Kind.BYE:
                    seat.left_at = time.monotonic()
                    return None
        except LinkError as error:
            self._door.dropped(str(error))
            return None
        seat.heard(time.monotonic(), wait)
        return None

    def _admit(self, seat: Seat, join: bytes) -> None:
        try:
            seat.channel = self._seal.admit(seat.name, seat.challenge, join).channel
            seat.refused = ""
        except ProcessReplaced:
            seat.gone = "its process was replaced"
        except LinkError as error:
            seat.refused = str(error)
            self._door.say(seat.cell, Kind.REFUSED, str(error).encode()[:400])
            raise

    def _send_again(self, seat: Seat, body: bytes, wait: Wait | None) -> None:
        """The party says where it stands; it hears again what it has not heard."""
        if len(body) != STATE.size or wait is None or wait.number is None or seat.channel is None:
            return
        last, working_on = STATE.unpack(body)
        if not working_on and last < wait.number:
            for question in seat.channel.again(last):
                self._door.say(seat.cell, Kind.QUESTION, question)

    def _check_open(self) -> None:
        if self._closed:
            raise LinkError("server: the link is closed")
