"""gRPC link at the server: one stream for each party, and the replies that are pending.

Parties dial; the server asks. A broken stream is no event by itself: the party dials again, and the unanswered question
is sent again as it was. A party is lost only if its process ended (the stream ended without a silence before, and no
new one came), or if the patience is over. The newest stream of a party counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from cryptography import x509

from pbmvfl.deploy.link import grpc_stream as streams
from pbmvfl.deploy.link.grpc_stream import Outbox, event_loop, run
from pbmvfl.deploy.link.interface import Channel
from pbmvfl.deploy.link.message_auth import OVERHEAD, PartyChannel, ProcessReplaced, ServerMessageAuth
from pbmvfl.deploy.link.revocation import LOOK_SECONDS, RevocationWatch
from pbmvfl.deploy.link.tls import Credentials
from pbmvfl.errors import LinkError, PartyLost
from pbmvfl.protocol.transport import Answers

#: Invalid messages before a party is given up.
_MOST_FAULTS = 3
#: Largest number of streams of one party that are not authenticated yet.
MOST_JOINING = 4
#: Largest number of connections, whoever opens them: the files of a run need descriptors, too.
MOST_CONNECTIONS = 400
#: Seconds of silence after which the end of a stream is the network's; below what ends an unacknowledged connection.
_SILENT = 2.0
#: Seconds that an earlier process may take to release the port.
PORT_PATIENCE = 15.0
_PAUSE = 0.1
#: Reason for a party whose certificate was revoked.
REVOKED = "its certificate was revoked by the federation's authority; renew it, or remove the party"


@dataclass(eq=False)
class _Stream:
    """Authenticated stream of a party."""

    task: asyncio.Task[Any]
    outbox: Outbox
    #: Serial number of the certificate.
    serial: int
    heard: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class _Peer:
    """State of one party; used in the streams' loop."""

    index: int
    name: str
    channel: PartyChannel | None = None
    stream: _Stream | None = None
    num_joining: int = 0
    #: When the stream was lost, and whether the party's process ended it.
    cut_since: float | None = None
    ended: bool = False
    faults: int = 0
    #: Why the party is lost for good, and why it was last refused; "" if it is not.
    lost_reason: str = ""
    last_refusal: str = ""

    @property
    def is_alive(self) -> bool:
        return self.stream is not None and not self.lost_reason

    def missing_reason(self, seconds: float) -> str:
        words = f"{self.name} did not join within {seconds:g} seconds"
        refused = f"; it was last refused: {self.last_refusal}" if self.last_refusal else ""
        return self.lost_reason or words + refused


@dataclass(eq=False, kw_only=True)
class _PendingReply:
    """Reply of a party that the server waits for.

    Seconds of disconnection count against the patience for the connection, not against the deadline of the reply.
    """

    peer: _Peer
    channel: Channel
    body: bytes
    #: Seconds that the answer may take, and the start of the wait.
    limit: float
    started: float
    #: The question's number, once it was authenticated.
    number: int | None = None
    #: Seconds of disconnections that are over.
    cut: float = 0.0

    def count_cut(self, now: float) -> None:
        if self.peer.cut_since is not None:
            self.cut += now - max(self.peer.cut_since, self.started)

    def until(self, patience: float, ended_after: float) -> float:
        """Return the moment at which a decision is due if nothing happens before."""
        if self.peer.lost_reason:
            return 0.0
        if self.peer.stream is not None:
            return self.started + self.limit + self.cut
        since = self.peer.cut_since if self.peer.cut_since is not None else self.started
        until = since + patience - self.cut
        return min(until, since + ended_after) if self.peer.ended else until

    def timeout_reason(self, now: float, patience: float, ended_after: float) -> str:
        """Return the timeout reason, or ""."""
        if self.peer.lost_reason:
            return self.peer.lost_reason
        if now < self.until(patience, ended_after):
            return ""
        if self.peer.stream is not None:
            return f"no answer within {self.limit:g} seconds"
        return "its process ended" if self.peer.ended else f"no connection within {patience:g} seconds"


class GrpcServerLink:
    """Server's ends of all parties' streams: a `ServerLink`."""

    def __init__(
        self,
        *,
        listen: tuple[str, int],
        credentials: Credentials,
        auth: ServerMessageAuth,
        parties: Sequence[str],
        patience: float,
        revocations: RevocationWatch | None = None,
        ended_after: float = 3.0,
        time_limit: float = streams.TIME_LIMIT,
        message_limit: int = streams.LIMIT,
    ) -> None:
        """Listen for the parties.

        Args:
            listen: Host and port; an empty host means every address, port 0 a free port.
            credentials: The server's certificate and key, and the authority's certificate.
            auth: Message authentication of this process.
            parties: Names of the parties, in the order of their indices.
            patience: Seconds that a disconnection may last.
            revocations: Revocation list, which is checked at connect and every minute; None accepts all certificates.
            ended_after: Seconds after which a party that closed its stream is taken for ended.
            time_limit: Seconds that a new connection has to authenticate.
            message_limit: Longest message in bytes.

        Raises:
            LinkError: If the port cannot be listened on within `PORT_PATIENCE` seconds, or a file cannot be used.
        """
        self._auth, self._patience, self._ended_after = auth, patience, ended_after
        self._revocations = revocations
        self._time_limit, self._message_limit = time_limit, message_limit
        self._peers = [_Peer(index, name) for index, name in enumerate(parties)]
        self._by_name = {peer.name: peer for peer in self._peers}
        self._pending: dict[int, _PendingReply] = {}
        self._received: dict[int, bytes] = {}
        self._ask_lock = threading.Lock()
        self._closed = False
        #: Streams beyond the first of each party.
        self.num_redials = 0
        #: The first party that was lost and has not come back: when a job is ended, the others follow.
        self.first_lost = ""
        self._server, port = run(self._listen(listen, streams.server_credentials(credentials)))
        #: Host and port that the link listens on.
        self.address = (listen[0], port)

    # --- what a link is ---

    @property
    def parties(self) -> Sequence[str]:
        return [peer.name for peer in self._peers]

    @property
    def alive(self) -> Sequence[str]:
        return [peer.name for peer in self._peers if peer.is_alive]

    def join(self, *, timeout: float) -> None:
        with self._ask_lock:
            run(self._join(timeout))

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        questions = dict.fromkeys(range(len(self._peers)), message)
        return self.ask(questions, channel=Channel.PROTOCOL, timeout=timeout)

    def ask(self, questions: Mapping[int, bytes], *, channel: Channel, timeout: float | None = None) -> Answers:
        """Implement `ServerLink.ask`.

        Seconds of disconnection count against the patience, not the timeout. A cut is noticed after three seconds.
        """
        limit = self._patience if timeout is None else timeout
        longest = max(map(len, questions.values()), default=0) + OVERHEAD
        if longest > self._message_limit:
            raise LinkError(f"server: a question of {longest:,} bytes; permitted: at most {self._message_limit:,}")
        with self._ask_lock:
            return run(self._ask(questions, channel, limit))

    def close(self) -> None:
        run(self._close())

    def check_revocations(self) -> None:
        """End the streams of parties whose certificates were revoked since they connected."""
        run(self._check_revocations())

    # --- asking, in the streams' loop ---

    async def _join(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while missing := [peer for peer in self._peers if not peer.is_alive]:
            self._check_open()
            if time.monotonic() >= until or any(peer.lost_reason for peer in missing):
                raise PartyLost({peer.index: peer.missing_reason(timeout) for peer in missing})
            await self._change(until)

    async def _ask(self, questions: Mapping[int, bytes], channel: Channel, limit: float) -> Answers:
        now, lost = time.monotonic(), dict[int, str]()
        self._received = received = dict[int, bytes]()
        self._pending = {
            index: _PendingReply(peer=self._peers[index], channel=channel, body=body, started=now, limit=limit)
            for index, body in questions.items()
        }
        try:
            while self._pending:
                self._check_open()
                for pending in self._pending.values():
                    self._send(pending)
                now = time.monotonic()
                for index, pending in list(self._pending.items()):
                    if reason := pending.timeout_reason(now, self._patience, self._ended_after):
                        lost[index] = reason
                        del self._pending[index]
                if self._pending:
                    due = (each.until(self._patience, self._ended_after) for each in self._pending.values())
                    await self._change(min(due))
        finally:
            self._pending = {}
        return Answers(received, lost)

    def _send(self, pending: _PendingReply) -> None:
        """Send a question, unless it was sent already."""
        peer = pending.peer
        if pending.number is not None or peer.stream is None or peer.channel is None:
            return
        before = peer.channel.asked
        try:
            pending.number, question = peer.channel.question(pending.channel, pending.body)
        except LinkError as error:
            peer.lost_reason = str(error)
            return
        if pending.number > before:
            peer.stream.outbox.put(question)

    async def _change(self, until: float) -> None:
        """Wait until something happened, or until a moment."""
        self._changed.clear()
        timer = event_loop().call_later(max(0.0, until - time.monotonic()), self._changed.set)
        await self._changed.wait()
        timer.cancel()

    # --- streams of parties ---

    async def _talk(self, _: object, context: Any) -> None:
        """Authenticate a stream and read its messages.

        The name is the certificate's; message authentication proves who holds that name's identity.
        """
        properties = context.auth_context()
        name = b"".join(properties.get("x509_common_name", ())).decode(errors="replace")
        peer = self._by_name.get(name)
        try:
            if properties.get("ssl_tls_version") != [b"TLSv1.3"]:
                raise LinkError(f"party={name}: it does not speak TLS 1.3")
            if peer is None:
                raise LinkError(f"party={name}: it is not of this federation, which has {', '.join(self._by_name)}")
            if peer.num_joining >= MOST_JOINING:  # not for good: another holder of the certificate may be at work
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_JOINING} of this name are joining")
            serial = x509.load_pem_x509_certificate(properties["x509_pem_cert"][0]).serial_number
            if self._is_revoked(serial):
                raise LinkError(f"party={name}: {REVOKED}")
            stream = await self._admit(peer, context, serial)
        except (LinkError, TimeoutError) as error:
            if peer is not None and isinstance(error, LinkError):
                peer.last_refusal = str(error)
                if isinstance(error, ProcessReplaced):
                    peer.lost_reason = "its process was replaced"
                self._changed.set()
            code = grpc.StatusCode.PERMISSION_DENIED if str(error) else grpc.StatusCode.DEADLINE_EXCEEDED
            await context.abort(code, str(error)[:400])
            raise
        try:
            while (frame := await context.read()) is not grpc.aio.EOF:
                stream.heard = time.monotonic()
                if frame:
                    self._take(peer, frame)
        except LinkError as error:
            peer.faults += 1
            if peer.faults >= _MOST_FAULTS:
                peer.lost_reason = str(error).removeprefix(f"party={peer.name}: ")
            stream.heard = 0.0  # this side ends it
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:400])
        except asyncio.CancelledError:
            if peer.stream is not stream:
                await context.abort(grpc.StatusCode.ABORTED, "a newer stream of this party is here")
            if self._is_revoked(stream.serial):
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"party={peer.name}: {REVOKED}")
            if not self._closed:  # otherwise it ends with the status OK, by which a party knows an orderly end
                raise
        finally:
            self._lose(peer, stream)

    async def _admit(self, peer: _Peer, context: Any, serial: int) -> _Stream:
        challenge = self._auth.challenge()
        peer.num_joining += 1
        try:
            async with asyncio.timeout(self._time_limit):
                await context.write(challenge)
                join = await context.read()
                admission = self._auth.admit(peer.name, challenge, join if isinstance(join, bytes) else b"")
                await context.write(streams.WELCOME)
        finally:
            peer.num_joining -= 1
        self._check_open()
        again = admission.channel.again(admission.last)  # now: a question may have gone to the old stream meanwhile
        task = asyncio.current_task()
        assert task is not None
        stream, old = _Stream(task, Outbox(context.write), serial), peer.stream
        if old is not None:
            old.task.cancel()
        self.num_redials += peer.channel is not None
        if (pending := self._pending.get(peer.index)) is not None:
            pending.count_cut(time.monotonic())
        peer.channel, peer.stream, peer.cut_since, peer.ended = admission.channel, stream, None, False
        if self.first_lost == peer.name:
            self.first_lost = ""
        for question in again:
            stream.outbox.put(question)
        self._changed.set()
        return stream

    def _take(self, peer: _Peer, frame: bytes) -> None:
        """Verify a message, and keep it if it is the answer that is waited for."""
        assert peer.channel is not None
        answer, pending = peer.channel.answer(frame), self._pending.get(peer.index)
        if answer is not None and pending is not None and answer.number == pending.number:
            peer.faults = 0
            self._received[peer.index] = answer.body
            del self._pending[peer.index]
            if not self._pending:
                self._changed.set()

    def _lose(self, peer: _Peer, stream: _Stream) -> None:
        if peer.stream is stream:
            now = time.monotonic()
            peer.stream, peer.cut_since, peer.ended = None, now, now - stream.heard < _SILENT
            self.first_lost = self.first_lost or peer.name
            self._changed.set()

    def _is_revoked(self, serial: int) -> bool:
        return self._revocations is not None and self._revocations.revokes(serial)

    async def _check_revocations(self) -> None:
        for peer in self._peers:
            if peer.stream is not None and self._is_revoked(peer.stream.serial):
                peer.lost_reason = REVOKED
                peer.stream.task.cancel()
                self._changed.set()

    async def _look_at_revocations(self) -> None:
        while not self._closed:
            await asyncio.sleep(LOOK_SECONDS)
            await self._check_revocations()

    # --- start and end ---

    async def _listen(self, listen: tuple[str, int], credentials: Any) -> tuple[Any, int]:
        self._changed = asyncio.Event()
        host, port = listen
        milliseconds = int(self._time_limit * 1000)
        until = time.monotonic() + PORT_PATIENCE
        method = {streams.NAME: grpc.stream_stream_rpc_method_handler(self._talk)}  # messages are bytes as they are
        while True:
            server = grpc.aio.server(
                handlers=(grpc.method_handlers_generic_handler(streams.SERVICE, method),),
                maximum_concurrent_rpcs=(MOST_JOINING + 2) * len(self._peers),
                options=streams.options(
                    message_limit=self._message_limit,
                    so_reuseport=0,
                    max_concurrent_streams=1,
                    max_allowed_incoming_connections=MOST_CONNECTIONS + len(self._peers),
                    server_handshake_timeout_ms=milliseconds,
                    max_connection_idle_ms=milliseconds,  # without a stream
                ),
            )
            try:
                found = server.add_secure_port(f"{host or '[::]'}:{port}", credentials)
                await server.start()
                self._looking = asyncio.create_task(self._look_at_revocations())
                return server, found
            except RuntimeError:
                if time.monotonic() >= until:
                    raise LinkError(
                        f"server: port={port} of {host or 'this machine'} cannot be listened on: "
                        f"{_bind_error(host, port)}; end whatever has it, or choose another line_port"
                    ) from None
            await asyncio.sleep(_PAUSE)

    async def _close(self) -> None:
        self._closed = True
        self._looking.cancel()
        self._changed.set()
        for peer in self._peers:
            if peer.stream is not None:
                peer.stream.task.cancel()
        await self._server.stop(1.0)

    def _check_open(self) -> None:
        if self._closed:
            raise LinkError("server: the line is closed")


def _bind_error(host: str, port: int) -> str:
    """Return the system's reason, which the library does not tell."""
    with contextlib.suppress(OSError), socket.socket() as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return "no address of this name is here"
