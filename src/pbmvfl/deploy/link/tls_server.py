"""The TLS link at the server: a connection of each party, and the replies that are pending."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pbmvfl.deploy.link import connection as frames
from pbmvfl.deploy.link.acceptor import Door
from pbmvfl.deploy.link.connection import Broken, Connection
from pbmvfl.deploy.link.interface import Channel, Waiting, why_missing
from pbmvfl.deploy.link.message_auth import JOIN_BYTES, OVERHEAD, Admission, PartyChannel, ProcessReplaced, ServerSeal
from pbmvfl.deploy.link.tls import common_name
from pbmvfl.deploy.link.tls_client import CHALLENGE, REFUSED, TIME_LIMIT, WELCOME
from pbmvfl.errors import LinkError, PartyLost
from pbmvfl.protocol.transport import Answers

# --- The parties' places on the server's line, and the answers that are waited for there ---


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


# ---
# The line at the server: a TLS 1.3 connection of each party, of our own, that carries everything that is said.
#
# Parties dial; the server asks. A connection that breaks is no event by itself: the party dials again, and the question
# that has no answer is sent again as it was. Only two things lose a party: its process ended (the connection was closed
# and nobody comes back), or its patience is over. The newest connection of a party counts.


#: Frames that are not what they should be, before a party is given up.
_MOST_FAULTS = 3


@dataclass(frozen=True, kw_only=True)
class LineTraffic:
    """Bytes since the line is open: of the messages alone, and on the sockets with everything around them."""

    messages_down: int
    messages_up: int
    socket_down: int
    socket_up: int
    #: Connections beyond the first of each party.
    redials: int


class Line:
    """The server's ends of all parties' lines: a `ServerLink`."""

    def __init__(
        self,
        *,
        listen: tuple[str, int],
        tls: ssl.SSLContext,
        seal: ServerSeal,
        parties: Sequence[str],
        patience: float,
        ended_after: float = 3.0,
        time_limit: float = TIME_LIMIT,
        frame_limit: int = frames.LIMIT,
    ) -> None:
        self._seal, self._patience, self._ended_after, self._frame_limit = seal, patience, ended_after, frame_limit
        self._seats = [Seat(index, name) for index, name in enumerate(parties)]
        self._by_name = {seat.name: seat for seat in self._seats}
        #: Guards seats; whoever sits down tells it. `ask` is one thread's at a time.
        self._changed = threading.Condition()
        self._asking = threading.Lock()
        self._closed = False
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._messages_down = self._messages_up = self._redials = 0
        self._closed_sockets = (0, 0)
        #: The party that went first and has not come back: when a job is ended, the others follow.
        self.first_gone = ""
        try:
            self._door = Door(listen=listen, tls=tls, greet=self._greet, time_limit=time_limit)
        except BaseException:
            self._wakes.close()
            self._waker.close()
            raise

    # --- what a link is ---

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return self._door.address

    @property
    def parties(self) -> Sequence[str]:
        return [seat.name for seat in self._seats]

    @property
    def alive(self) -> Sequence[str]:
        with self._changed:
            return [seat.name for seat in self._seats if seat.is_alive]

    @property
    def traffic(self) -> LineTraffic:
        with self._changed:
            down, up = self._closed_sockets
            for connection in self._connections():
                sent, received = connection.bytes_on_socket()
                down, up = down + sent, up + received
            return LineTraffic(
                messages_down=self._messages_down,
                messages_up=self._messages_up,
                socket_down=down,
                socket_up=up,
                redials=self._redials,
            )

    def join(self, *, timeout: float) -> None:
        until = time.monotonic() + timeout
        with self._changed:
            while missing := [seat for seat in self._seats if not seat.is_alive]:
                self._check_open()
                left = until - time.monotonic()
                if left <= 0 or any(seat.gone for seat in missing):
                    raise PartyLost({seat.index: seat.why_missing(timeout) for seat in missing})
                self._changed.wait(min(left, 0.5))  # one that leaves again tells nobody

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        questions = dict.fromkeys(range(len(self._seats)), message)
        return self.ask(questions, channel=Channel.PROTOCOL, timeout=timeout)

    def ask(self, questions: Mapping[int, bytes], *, channel: Channel, timeout: float | None = None) -> Answers:
        """As the link promises. Seconds in which a party is cut off count against the patience, not the timeout; a cut
        is noticed after three to five seconds."""
        limit = self._patience if timeout is None else timeout
        longest = max(map(len, questions.values()), default=0) + OVERHEAD
        if longest > self._frame_limit:
            raise LinkError(f"server: a question of {longest:,} bytes; permitted: at most {self._frame_limit:,}")
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
                self._send(waits)
                for index, reason in self._given_up(waits):
                    lost[index] = reason
                    del waits[index]
                for index in self._await(waits):
                    answer = self._read(waits[index])
                    if answer is not None:
                        received[index] = answer
                        del waits[index]
            self._messages_down += sum(map(len, questions.values()))
            self._messages_up += sum(map(len, received.values()))
        return Answers(received, lost)

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._wake()
        with self._asking, self._changed:  # whoever asks has noticed
            for connection in self._connections():
                connection.say_goodbye()
                self._count_out(connection)
            for seat in self._seats:
                seat.connection = seat.newcomer = None
            self._wakes.close()
            self._waker.close()
        self._door.close()  # last, so that nobody who is in is taken for a newcomer, and all hear the goodbye

    # --- asking ---

    def _send(self, waits: Mapping[int, Wait]) -> None:
        """Whatever can be sent now to those who are there, newcomers first of all."""
        for wait in waits.values():
            seat = wait.seat
            try:
                if seat.newcomer is not None:
                    self._sit_down(seat, wait)
                if seat.connection is None or seat.channel is None:
                    continue
                if wait.number is None:
                    self._ask_first(seat, seat.channel, wait)
                seat.connection.write()
            except Broken as broken:
                self._lose_connection(seat, ended=broken.ended)
            except LinkError as error:
                self._note_fault(seat, error)

    def _ask_first(self, seat: Seat, channel: PartyChannel, wait: Wait) -> None:
        before = channel.asked
        try:
            wait.number, question = channel.question(wait.channel, wait.body)
        except LinkError as error:
            seat.gone = str(error)
            return
        if wait.number > before and seat.connection is not None:  # otherwise it is on its way already
            seat.connection.put(question)

    def _sit_down(self, seat: Seat, wait: Wait) -> None:
        """A party's new connection takes the place of the old one, and hears again what it has not answered."""
        with self._changed:
            self._count_out(seat.connection)
            seat.connection, seat.newcomer = seat.newcomer, None
        now = time.monotonic()
        if seat.cut_since is not None:
            wait.count_cut(seat.cut_since, now)
        seat.cut_since, seat.ended = None, False
        if self.first_gone == seat.name:
            self.first_gone = ""
        assert seat.connection is not None
        assert seat.channel is not None
        for question in seat.channel.again(seat.connection.last):
            seat.connection.put(question)

    def _given_up(self, waits: Mapping[int, Wait]) -> list[tuple[int, str]]:
        now = time.monotonic()
        found = ((index, wait.over(now, self._patience, self._ended_after)) for index, wait in waits.items())
        return [(index, reason) for index, reason in found if reason]

    def _await(self, waits: Mapping[int, Wait]) -> list[int]:
        """Those of whom something can be read; nobody when a deadline comes first, or somebody sits down."""
        if not waits:
            return []
        poll = select.poll()
        poll.register(self._wakes, select.POLLIN)
        found: dict[int, int] = {}
        ready: set[int] = set()
        for index, wait in waits.items():
            if (connection := wait.seat.connection) is not None:
                poll.register(connection.fileno(), connection.events)
                found[connection.fileno()] = index
                if connection.must_read:
                    ready.add(index)
        until = min(wait.until(self._patience, self._ended_after) for wait in waits.values())
        left = 0.0 if ready else max(0.0, until - time.monotonic())
        # Rounded up to a millisecond, so that a deadline has passed when it wakes.
        for descriptor, events in poll.poll(int(left * 1000) + bool(left)):
            if descriptor == self._wakes.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._wakes.recv(1 << 12)
            elif events != select.POLLOUT:
                ready.add(found[descriptor])
        return sorted(ready)

    def _read(self, wait: Wait) -> bytes | None:
        """The answer that is waited for, if it is there."""
        seat = wait.seat
        assert seat.connection is not None
        assert seat.channel is not None
        try:
            for frame in seat.connection.read():
                answer = seat.channel.answer(frame)
                if answer is not None and answer.number == wait.number:
                    seat.faults = 0
                    return answer.body
        except Broken as broken:
            self._lose_connection(seat, ended=broken.ended)
        except LinkError as error:
            self._note_fault(seat, error)
        return None

    def _note_fault(self, seat: Seat, error: LinkError) -> None:
        """A frame that is not what it should be costs the connection; the party may dial again, not for ever."""
        seat.faults += 1
        if seat.faults >= _MOST_FAULTS:
            seat.gone = str(error).removeprefix(f"party={seat.name}: ")
        self._lose_connection(seat, ended=False)

    def _lose_connection(self, seat: Seat, *, ended: bool) -> None:
        with self._changed:
            self._drop(seat)
        seat.cut_since, seat.ended = time.monotonic(), ended
        self.first_gone = self.first_gone or seat.name

    # --- newcomers: in threads of the door ---

    def _greet(self, guest: ssl.SSLSocket, deadline: float) -> None:
        """Hear who it is. The name is the certificate's; who holds its identity, the seal knows."""
        name = common_name(guest)
        seat = self._by_name.get(name)
        try:
            if seat is None:
                raise LinkError(f"party={name}: it is not of this federation, which has {', '.join(self._by_name)}")
            challenge = self._seal.challenge()
            frames.send(guest, CHALLENGE + challenge, deadline=deadline)
            buffer = frames.FrameBuffer(limit=JOIN_BYTES)
            join = frames.receive(guest, buffer, deadline=deadline)
            if len(buffer):
                raise LinkError(f"party={name}: it said more than its join")
            admission = self._seal.admit(name, challenge, join)
        except LinkError as error:
            if seat is not None:
                with self._changed:
                    seat.refused = str(error)
                    if isinstance(error, ProcessReplaced):
                        seat.gone = "its process was replaced"
                    self._changed.notify_all()
                self._wake()
            with contextlib.suppress(OSError):
                frames.send(guest, REFUSED + str(error).encode()[:400], deadline=deadline)
            raise
        frames.send(guest, WELCOME, deadline=deadline)
        self._seat(seat, guest, admission)

    def _seat(self, seat: Seat, guest: ssl.SSLSocket, admission: Admission) -> None:
        with self._changed:
            self._check_open()
            self._redials += seat.channel is not None
            seat.channel = admission.channel
            if seat.newcomer is not None:
                self._count_out(seat.newcomer)
            seat.newcomer = Connection(guest, last=admission.last, limit=self._frame_limit)
            self._changed.notify_all()
        self._wake()

    # --- small parts ---

    def _connections(self) -> list[Connection]:
        both = [each for seat in self._seats for each in (seat.connection, seat.newcomer)]
        return [each for each in both if each is not None]

    def _drop(self, seat: Seat) -> None:
        self._count_out(seat.connection)
        seat.connection = None

    def _count_out(self, connection: Connection | None) -> None:
        if connection is not None:
            sent, received = connection.bytes_on_socket()
            self._closed_sockets = (self._closed_sockets[0] + sent, self._closed_sockets[1] + received)
            connection.close()

    def _check_open(self) -> None:
        if self._closed:
            raise LinkError("server: the line is closed")

    def _wake(self) -> None:
        with self._changed, contextlib.suppress(OSError):  # `close` may be closing it
            self._waker.send(b"\0")
