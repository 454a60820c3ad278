"""TLS link at the server: one connection for each party, and the replies that are pending."""

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
from pbmvfl.deploy.link.acceptor import Acceptor
from pbmvfl.deploy.link.connection import Broken, Connection
from pbmvfl.deploy.link.interface import Channel, PendingReply, missing_reason
from pbmvfl.deploy.link.message_auth import (
    JOIN_BYTES,
    OVERHEAD,
    Admission,
    PartyChannel,
    ProcessReplaced,
    ServerMessageAuth,
)
from pbmvfl.deploy.link.tls import common_name
from pbmvfl.deploy.link.tls_client import CHALLENGE, REFUSED, TIME_LIMIT, WELCOME
from pbmvfl.errors import LinkError, PartyLost
from pbmvfl.protocol.transport import Answers

# --- State of each party's connection, and pending replies ---


@dataclass(eq=False)
class PeerState:
    """Connection state of one party."""

    index: int
    name: str
    channel: PartyChannel | None = None
    connection: Connection | None = None
    #: Authenticated connection that `ask` has not switched to yet.
    new_connection: Connection | None = None
    #: When the connection was lost, and whether the other end closed it.
    cut_since: float | None = None
    ended: bool = False
    faults: int = 0
    #: Why the party is lost for good, and why it was last refused; "" if it is not.
    lost_reason: str = ""
    last_refusal: str = ""

    @property
    def is_alive(self) -> bool:
        newest = self.new_connection or self.connection
        return newest is not None and not self.lost_reason and not newest.has_ended

    def missing_reason(self, seconds: float) -> str:
        if self.lost_reason:
            return self.lost_reason
        return missing_reason(f"{self.name} did not join within {seconds:g} seconds", self.last_refusal)


@dataclass(eq=False, kw_only=True)
class TlsPendingReply(PendingReply):
    """Pending reply of one party on the TLS link."""

    peer: PeerState

    def until(self, patience: float, ended_after: float) -> float:
        """Return the moment at which a decision is due if nothing happens before."""
        if self.peer.lost_reason:
            return 0.0
        if self.peer.connection is not None:
            return self.deadline
        since = self.peer.cut_since if self.peer.cut_since is not None else self.started
        until = since + patience - self.cut
        return min(until, since + ended_after) if self.peer.ended else until

    def timeout_reason(self, now: float, patience: float, ended_after: float) -> str:
        """Return the timeout reason, or ""."""
        if self.peer.lost_reason:
            return self.peer.lost_reason
        if now < self.until(patience, ended_after):
            return ""
        if self.peer.connection is not None:
            return self.no_answer
        if self.peer.ended:
            return "its process ended"
        return f"no connection within {patience:g} seconds"


# --- The link itself: one TLS 1.3 connection for each party ---
# Parties dial; the server asks. A broken connection is no event by itself: the party dials again, and the unanswered
# question is sent again as it was. A party is lost only if its process ended (the connection was closed, and no new one
# came), or if the patience is over. The newest connection of a party counts.


#: Invalid frames before a party is given up.
_MOST_FAULTS = 3


@dataclass(frozen=True, kw_only=True)
class TlsTraffic:
    """Bytes since the link was opened: of messages alone, and on the sockets including TLS and framing."""

    messages_down: int
    messages_up: int
    socket_down: int
    socket_up: int
    #: Connections beyond the first of each party.
    redials: int


class TlsServerLink:
    """Server's ends of all parties' TLS links: a `ServerLink`."""

    def __init__(
        self,
        *,
        listen: tuple[str, int],
        tls: ssl.SSLContext,
        auth: ServerMessageAuth,
        parties: Sequence[str],
        patience: float,
        ended_after: float = 3.0,
        time_limit: float = TIME_LIMIT,
        frame_limit: int = frames.LIMIT,
    ) -> None:
        """Listen for the parties.

        Args:
            listen: Host and port; an empty host means every address, port 0 a free port.
            tls: Server-side TLS context.
            auth: Message authentication of this process.
            parties: Names of the parties, in the order of their indices.
            patience: Seconds that a disconnection may last.
            ended_after: Seconds after which a party that closed its connection is taken for ended.
            time_limit: Seconds that a new connection has to authenticate.
            frame_limit: Longest frame in bytes.

        Raises:
            LinkError: If the port cannot be listened on.
        """
        self._auth, self._patience, self._ended_after, self._frame_limit = auth, patience, ended_after, frame_limit
        self._peers = [PeerState(index, name) for index, name in enumerate(parties)]
        self._by_name = {peer.name: peer for peer in self._peers}
        #: Guards peer states; notified of new connections. `ask` is one thread's at a time.
        self._changed = threading.Condition()
        self._ask_lock = threading.Lock()
        self._closed = False
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._messages_down = self._messages_up = self._redials = 0
        self._closed_sockets = (0, 0)
        #: The first party that was lost and has not come back: when a job is ended, the others follow.
        self.first_lost = ""
        try:
            self._acceptor = Acceptor(listen=listen, tls=tls, on_connection=self._on_connection, time_limit=time_limit)
        except BaseException:
            self._wakes.close()
            self._waker.close()
            raise

    # --- what a link is ---

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that the link listens on."""
        return self._acceptor.address

    @property
    def parties(self) -> Sequence[str]:
        return [peer.name for peer in self._peers]

    @property
    def alive(self) -> Sequence[str]:
        with self._changed:
            return [peer.name for peer in self._peers if peer.is_alive]

    @property
    def traffic(self) -> TlsTraffic:
        with self._changed:
            down, up = self._closed_sockets
            for connection in self._connections():
                sent, received = connection.bytes_on_socket()
                down, up = down + sent, up + received
            return TlsTraffic(
                messages_down=self._messages_down,
                messages_up=self._messages_up,
                socket_down=down,
                socket_up=up,
                redials=self._redials,
            )

    def join(self, *, timeout: float) -> None:
        until = time.monotonic() + timeout
        with self._changed:
            while missing := [peer for peer in self._peers if not peer.is_alive]:
                self._check_open()
                left = until - time.monotonic()
                if left <= 0 or any(peer.lost_reason for peer in missing):
                    raise PartyLost({peer.index: peer.missing_reason(timeout) for peer in missing})
                self._changed.wait(min(left, 0.5))  # a party that leaves again does not notify

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        questions = dict.fromkeys(range(len(self._peers)), message)
        return self.ask(questions, channel=Channel.PROTOCOL, timeout=timeout)

    def ask(self, questions: Mapping[int, bytes], *, channel: Channel, timeout: float | None = None) -> Answers:
        """Implement `ServerLink.ask`.

        Seconds of disconnection count against the patience, not the timeout. A cut is noticed after three to five
        seconds.
        """
        limit = self._patience if timeout is None else timeout
        longest = max(map(len, questions.values()), default=0) + OVERHEAD
        if longest > self._frame_limit:
            raise LinkError(f"server: a question of {longest:,} bytes; permitted: at most {self._frame_limit:,}")
        received: dict[int, bytes] = {}
        lost: dict[int, str] = {}
        with self._ask_lock:
            now = time.monotonic()
            pending_by_index = {
                index: TlsPendingReply(peer=self._peers[index], channel=channel, body=body, started=now, limit=limit)
                for index, body in questions.items()
            }
            while pending_by_index:
                self._check_open()
                self._send(pending_by_index)
                for index, reason in self._timed_out(pending_by_index):
                    lost[index] = reason
                    del pending_by_index[index]
                for index in self._await(pending_by_index):
                    answer = self._read(pending_by_index[index])
                    if answer is not None:
                        received[index] = answer
                        del pending_by_index[index]
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
        with self._ask_lock, self._changed:  # `ask` has returned
            for connection in self._connections():
                connection.close_notify()
                self._count_out(connection)
            for peer in self._peers:
                peer.connection = peer.new_connection = None
            self._wakes.close()
            self._waker.close()
        self._acceptor.close()  # last: every admitted party gets its close_notify first

    # --- asking ---

    def _send(self, pending_by_index: Mapping[int, TlsPendingReply]) -> None:
        """Send all that can be sent now, taking over new connections first."""
        for pending in pending_by_index.values():
            peer = pending.peer
            try:
                if peer.new_connection is not None:
                    self._switch_connection(peer, pending)
                if peer.connection is None or peer.channel is None:
                    continue
                if pending.number is None:
                    self._send_question(peer, peer.channel, pending)
                peer.connection.write()
            except Broken as broken:
                self._lose_connection(peer, ended=broken.ended)
            except LinkError as error:
                self._note_fault(peer, error)

    def _send_question(self, peer: PeerState, channel: PartyChannel, pending: TlsPendingReply) -> None:
        before = channel.asked
        try:
            pending.number, question = channel.question(pending.channel, pending.body)
        except LinkError as error:
            peer.lost_reason = str(error)
            return
        if pending.number > before and peer.connection is not None:  # otherwise it was sent already
            peer.connection.put(question)

    def _switch_connection(self, peer: PeerState, pending: TlsPendingReply) -> None:
        """Replace a party's connection by its new one, and send again what has no answer."""
        with self._changed:
            self._count_out(peer.connection)
            peer.connection, peer.new_connection = peer.new_connection, None
        now = time.monotonic()
        if peer.cut_since is not None:
            pending.count_cut(peer.cut_since, now)
        peer.cut_since, peer.ended = None, False
        if self.first_lost == peer.name:
            self.first_lost = ""
        assert peer.connection is not None
        assert peer.channel is not None
        for question in peer.channel.again(peer.connection.last):
            peer.connection.put(question)

    def _timed_out(self, pending_by_index: Mapping[int, TlsPendingReply]) -> list[tuple[int, str]]:
        now = time.monotonic()
        found = (
            (index, pending.timeout_reason(now, self._patience, self._ended_after))
            for index, pending in pending_by_index.items()
        )
        return [(index, reason) for index, reason in found if reason]

    def _await(self, pending_by_index: Mapping[int, TlsPendingReply]) -> list[int]:
        """Return the parties with readable data; none if a deadline comes first or a new connection is there."""
        if not pending_by_index:
            return []
        poll = select.poll()
        poll.register(self._wakes, select.POLLIN)
        found: dict[int, int] = {}
        ready: set[int] = set()
        for index, pending in pending_by_index.items():
            if (connection := pending.peer.connection) is not None:
                poll.register(connection.fileno(), connection.events)
                found[connection.fileno()] = index
                if connection.must_read:
                    ready.add(index)
        until = min(pending.until(self._patience, self._ended_after) for pending in pending_by_index.values())
        left = 0.0 if ready else max(0.0, until - time.monotonic())
        # Rounded up to a millisecond, so that a deadline has passed when it wakes.
        for descriptor, events in poll.poll(int(left * 1000) + bool(left)):
            if descriptor == self._wakes.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._wakes.recv(1 << 12)
            elif events != select.POLLOUT:
                ready.add(found[descriptor])
        return sorted(ready)

    def _read(self, pending: TlsPendingReply) -> bytes | None:
        """Return the pending answer, or None if it is not there yet."""
        peer = pending.peer
        assert peer.connection is not None
        assert peer.channel is not None
        try:
            for frame in peer.connection.read():
                answer = peer.channel.answer(frame)
                if answer is not None and answer.number == pending.number:
                    peer.faults = 0
                    return answer.body
        except Broken as broken:
            self._lose_connection(peer, ended=broken.ended)
        except LinkError as error:
            self._note_fault(peer, error)
        return None

    def _note_fault(self, peer: PeerState, error: LinkError) -> None:
        """Drop a party's connection for an invalid frame; after `_MOST_FAULTS` of them the party is lost."""
        peer.faults += 1
        if peer.faults >= _MOST_FAULTS:
            peer.lost_reason = str(error).removeprefix(f"party={peer.name}: ")
        self._lose_connection(peer, ended=False)

    def _lose_connection(self, peer: PeerState, *, ended: bool) -> None:
        with self._changed:
            self._drop(peer)
        peer.cut_since, peer.ended = time.monotonic(), ended
        self.first_lost = self.first_lost or peer.name

    # --- new connections: in threads of the acceptor ---

    def _on_connection(self, connection: ssl.SSLSocket, deadline: float) -> None:
        """Authenticate a new connection, in a thread of the acceptor.

        The name is the certificate's; message authentication proves who holds that name's identity.
        """
        name = common_name(connection)
        peer = self._by_name.get(name)
        try:
            if peer is None:
                raise LinkError(f"party={name}: it is not of this federation, which has {', '.join(self._by_name)}")
            challenge = self._auth.challenge()
            frames.send(connection, CHALLENGE + challenge, deadline=deadline)
            buffer = frames.FrameBuffer(limit=JOIN_BYTES)
            join = frames.receive(connection, buffer, deadline=deadline)
            if len(buffer):
                raise LinkError(f"party={name}: it said more than its join")
            admission = self._auth.admit(name, challenge, join)
        except LinkError as error:
            if peer is not None:
                with self._changed:
                    peer.last_refusal = str(error)
                    if isinstance(error, ProcessReplaced):
                        peer.lost_reason = "its process was replaced"
                    self._changed.notify_all()
                self._wake()
            with contextlib.suppress(OSError):
                frames.send(connection, REFUSED + str(error).encode()[:400], deadline=deadline)
            raise
        frames.send(connection, WELCOME, deadline=deadline)
        self._register(peer, connection, admission)

    def _register(self, peer: PeerState, connection: ssl.SSLSocket, admission: Admission) -> None:
        with self._changed:
            self._check_open()
            self._redials += peer.channel is not None
            peer.channel = admission.channel
            if peer.new_connection is not None:
                self._count_out(peer.new_connection)
            peer.new_connection = Connection(connection, last=admission.last, limit=self._frame_limit)
            self._changed.notify_all()
        self._wake()

    # --- small parts ---

    def _connections(self) -> list[Connection]:
        both = [each for peer in self._peers for each in (peer.connection, peer.new_connection)]
        return [each for each in both if each is not None]

    def _drop(self, peer: PeerState) -> None:
        self._count_out(peer.connection)
        peer.connection = None

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
