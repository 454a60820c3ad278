"""gRPC link at a party: it dials the server, answers messages, and reconnects.

A party accepts no connections: it only dials its own server, at one address. It gives up when the server cannot be
reached within the patience, when the server sends no question for `idle` seconds, or at once when the server is another
process. While the party works on a question, which may take minutes, a connection that breaks is replaced at once, and
the server does not take the silence for an ended process.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from typing import Any

import grpc

from pbmvfl.deploy.link import grpc_stream as streams
from pbmvfl.deploy.link.grpc_stream import Outbox, event_loop, run
from pbmvfl.deploy.link.interface import Channel, Handler
from pbmvfl.deploy.link.message_auth import MOST_UNANSWERED, OtherJob, PartyMessageAuth
from pbmvfl.deploy.link.revocation import LOOK_SECONDS, RevocationWatch
from pbmvfl.deploy.link.tls import REFUSED_SILENTLY, REVOKED, CertificateRefused, Credentials, HungUp, shake_hands
from pbmvfl.errors import LinkError

_CONNECT_SECONDS = 1.0
#: Seconds between attempts. An unreachable server bears no cost of them, and a mended cable is found soon.
_FIRST_PAUSE, _LONGEST_PAUSE, _LONGEST_PAUSE_UNREACHED = 0.05, 1.0, 0.25
#: Consecutive connections that the server closes on receiving this site's certificate before it is taken for refused.
_MOST_HANG_UPS = 3
#: Seconds after the last answer in which the server may request it again.
_LINGER = 2.0
#: Largest number of questions that wait for the handler; an honest server has `MOST_UNANSWERED`, maybe sent twice.
MOST_WAITING = 2 * MOST_UNANSWERED
#: Consecutive invalid messages before the party gives up.
_MOST_FAULTS = 3
_CLOSED = "server: the line was closed at this side"


class GrpcPartyLink:
    """Party's end of a link: a `PartyLink`. `serve` belongs to one thread; `close` may come from any."""

    def __init__(
        self,
        *,
        address: tuple[str, int],
        credentials: Credentials,
        auth: PartyMessageAuth,
        server_name: str,
        patience: float,
        revocations: RevocationWatch | None = None,
        idle: float | None = None,
        ended_after: float = 5.0,
        message_limit: int = streams.LIMIT,
    ) -> None:
        """Store the parameters; `serve` dials.

        Args:
            address: Host and port of the server.
            credentials: The party's certificate and key, and the authority's certificate.
            auth: Message authentication of this process.
            server_name: Common name that the server's certificate must have.
            patience: Seconds that a disconnection may last.
            revocations: Revocation list, which is checked at connect and every minute; None accepts all certificates.
            idle: Longest silence of the server in seconds; by default three times the patience.
            ended_after: Seconds of refused connections after which the server's process is taken for ended.
            message_limit: Longest message in bytes.

        Raises:
            LinkError: If a file of the credentials cannot be used.
        """
        self._address, self._files, self._auth, self._server_name = address, credentials, auth, server_name
        self._patience, self._ended_after, self._message_limit = patience, ended_after, message_limit
        #: The server is silent while it waits for other parties: for their answers, and for those that are cut off.
        self._idle = 3 * patience if idle is None else idle
        self._credentials = streams.party_credentials(credentials)
        #: Questions of the server, and at last why there are no more.
        self._inbox: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        self._call: Any = None
        self._outbox: Outbox | None = None
        self._was_welcome = False
        self._hang_ups = 0
        self._closed = False
        self._revocations = revocations
        #: Serial number of the server's certificate; None if there was no list to compare it with.
        self._serial: int | None = None

    def serve(self, handle: Handler) -> None:
        """Answer questions until the server ends the work.

        Raises:
            LinkError: If the server is lost.
        """
        connecting = asyncio.run_coroutine_threadsafe(self._stay_connected(), event_loop())
        try:
            self._serve(handle)
        finally:
            connecting.cancel()
            run(self._hang_up())

    def close(self) -> None:
        """End `serve` with an error."""
        self._closed = True
        self._inbox.put(LinkError(_CLOSED))

    def check_revocations(self) -> None:
        """End `serve` with an error if the server's certificate, or another party of the job, was revoked since."""
        if self._revocations is None:
            return
        if self._serial is not None and self._revocations.revokes(self._serial):
            self._inbox.put(LinkError(f"server: {REVOKED}"))
        elif self._revocations.revokes_member():
            self._inbox.put(LinkError("server: an organisation that takes part was revoked; the party lets go"))

    # --- answering ---

    def _serve(self, handle: Handler) -> None:
        heard, faults = time.monotonic(), 0
        while True:
            question = self._next(heard + self._idle)
            try:
                channel, answer = self._auth.respond(question, handle)
            except LinkError:
                faults += 1
                if faults >= _MOST_FAULTS:
                    raise
                run(self._hang_up())
                continue
            # The time that the handler took does not count as silence of the server.
            heard, faults = time.monotonic(), 0
            event_loop().call_soon_threadsafe(self._send, answer)
            if channel is Channel.END:
                self._linger(handle)
                return

    def _next(self, until: float) -> bytes:
        try:
            found = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            found = LinkError(f"server: it asked nothing for {self._idle:g} seconds; the party lets go")
        if self._closed:
            raise LinkError(_CLOSED)
        if isinstance(found, Exception):
            raise found
        return found

    def _linger(self, handle: Handler) -> None:
        """Send the last answer again on request, over a new stream too, until the server closes or time is over."""
        until = time.monotonic() + _LINGER
        with contextlib.suppress(LinkError):
            while True:
                answer = self._auth.respond(self._next(until), handle)[1]
                event_loop().call_soon_threadsafe(self._send, answer)

    # --- the connection, in the streams' loop ---

    def _send(self, frame: bytes) -> None:
        """Send, if there is a stream; on the next one the server asks again."""
        if self._outbox is not None:
            self._outbox.put(frame)

    async def _hang_up(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def _stay_connected(self) -> None:
        try:
            while True:
                async with await self._dial():
                    beating = asyncio.create_task(self._beat())
                    try:
                        await self._read(self._call)
                    finally:
                        beating.cancel()
                        self._call = self._outbox = None
        except Exception as error:  # any error is passed on to the thread that waits
            self._inbox.put(error)

    async def _read(self, call: Any) -> None:
        """Pass on the server's questions until the stream ends."""
        try:
            while (frame := await call.read()) is not grpc.aio.EOF:
                self._inbox.put(frame)
                while self._inbox.qsize() >= MOST_WAITING:  # the library's flow control then holds the server back
                    await asyncio.sleep(streams.HEARTBEAT)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self._inbox.put(LinkError(f"a message is too long: {_printable(error.details())}"))
            return
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return  # `_hang_up` ended the stream alone
        raise LinkError("server: it closed the line before the work was over")

    async def _beat(self) -> None:
        """Send signs of life while there is nothing else to send."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(streams.HEARTBEAT)
            if time.monotonic() - looked >= LOOK_SECONDS:
                looked = time.monotonic()
                self.check_revocations()
            if self._outbox is not None and not self._outbox.is_busy:
                self._outbox.put(b"")

    async def _dial(self) -> Any:
        """Connect until the server accepts this party, or raise."""
        since = time.monotonic()
        refused_since: float | None = None
        pause, longest = _FIRST_PAUSE, _LONGEST_PAUSE
        while True:
            try:
                return await self._dial_once()
            except ConnectionRefusedError:
                reason, longest = "no process listens there", _LONGEST_PAUSE_UNREACHED
                refused_since = refused_since or time.monotonic()
                if self._was_welcome and time.monotonic() - refused_since >= self._ended_after:
                    raise LinkError("server: its process ended") from None
            except OtherJob as error:
                # Before the first welcome an earlier job may still be ending there. Afterwards the port belongs to
                # another job, and this job's server is gone: this party's ledger must not stay locked for the patience.
                reason, longest = str(error), _LONGEST_PAUSE
                refused_since = (refused_since or time.monotonic()) if self._was_welcome else None
                if refused_since is not None and time.monotonic() - refused_since >= self._ended_after:
                    raise LinkError("server: its process ended, and another job is there") from error
            except OSError as error:
                self._count_hang_up(error)
                reason, refused_since, longest = _reason(error), None, _LONGEST_PAUSE_UNREACHED
            except grpc.aio.AioRpcError as error:
                reason, refused_since, longest = await self._failure(error), None, _LONGEST_PAUSE
            if time.monotonic() - since >= self._patience:
                host, port = self._address
                raise LinkError(f"server: not reached at {host}:{port} within {self._patience:g} seconds: {reason}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _dial_once(self) -> Any:
        # The system's own connection tells a closed port from an unreachable machine, which the library does not.
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(*self._address)
        host, port = writer.get_extra_info("peername")[:2]
        writer.close()
        if self._revocations is not None and self._revocations.current() is not None:
            # The library does not show the server's certificate to a party.
            try:
                shown = await asyncio.to_thread(shake_hands, (host, port), self._files, server_name=self._server_name)
            except CertificateRefused as reason:
                raise LinkError(f"server: {reason}") from reason
            self._serial = shown.value.serial_number
            if self._revocations.revokes(self._serial):
                raise LinkError(f"server: {REVOKED}")
        target = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
        channel = grpc.aio.secure_channel(
            target,
            self._credentials,
            options=streams.options(
                message_limit=self._message_limit,
                ssl_target_name_override=self._server_name,
                use_local_subchannel_pool=1,
                enable_http_proxy=0,
                enable_retries=0,
                min_reconnect_backoff_ms=int(streams.TIME_LIMIT * 1000),
            ),
        )
        try:
            async with asyncio.timeout(streams.TIME_LIMIT):
                call = channel.stream_stream(streams.METHOD)()
                await call.write(self._auth.join(await _message(call)))
                await _message(call)
        except BaseException:
            await channel.close()
            raise
        self._call, self._outbox, self._was_welcome, self._hang_ups = call, Outbox(call.write), True, 0
        return channel

    async def _failure(self, error: Any) -> str:
        """Return why the server was not reached, or raise for a refusal: later attempts cannot change it."""
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            raise LinkError(f"server: it refused this site: {_printable(error.details())}")
        if not self._was_welcome:
            try:
                await asyncio.to_thread(shake_hands, self._address, self._files, server_name=self._server_name)
            except CertificateRefused as reason:
                raise LinkError(f"server: {reason}") from reason
            except OSError as reason:
                self._count_hang_up(reason)
                return _reason(reason)
        is_broken = error.code() is grpc.StatusCode.UNAVAILABLE
        return "the connection was closed during the handshake" if is_broken else _printable(error.details())

    def _count_hang_up(self, error: OSError) -> None:
        """Raise for a server that closed several connections on receiving this site's certificate."""
        self._hang_ups += isinstance(error, HungUp) and not self._was_welcome
        if self._hang_ups >= _MOST_HANG_UPS:
            raise LinkError(f"server: {REFUSED_SILENTLY}") from error


async def _message(call: Any) -> bytes:
    found = await call.read()
    if isinstance(found, bytes):
        return found
    raise ConnectionResetError


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionResetError):
        return "the connection was closed during the handshake"
    if isinstance(error, TimeoutError):
        return "no answer"
    return error.strerror or type(error).__name__


def _printable(words: str | None) -> str:
    return "".join(each for each in (words or "")[:400] if each.isprintable())
