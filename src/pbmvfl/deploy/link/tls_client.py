"""TLS link at a party: it dials the server, answers messages, and reconnects."""

from __future__ import annotations

import functools
import select
import socket
import ssl
import threading
import time

from pbmvfl.deploy.link import connection as frames
from pbmvfl.deploy.link.interface import Channel, Handler
from pbmvfl.deploy.link.message_auth import OtherJob, PartyMessageAuth
from pbmvfl.deploy.link.tls import common_name, drop, hang_up, prepare, wrap
from pbmvfl.errors import LinkError

# --- Dialer: a thread that connects to the server, watches the connection, and reconnects ---
# It also watches while the party works on a question, which may take minutes: a connection that breaks meanwhile is
# replaced at once, and the server does not take the silence for an ended process.


#: First byte of the server's messages before a party is admitted.
CHALLENGE, WELCOME, REFUSED = b"C", b"W", b"R"
#: Seconds that both ends have to authenticate.
TIME_LIMIT = 10.0
_CONNECT_SECONDS = 1.0
#: Seconds between attempts. An unreachable server bears no cost of them, and a mended cable is found soon.
_FIRST_PAUSE, _LONGEST_PAUSE, _LONGEST_PAUSE_UNREACHED = 0.05, 1.0, 0.25
_LOOK_SECONDS = 0.5


class Call:
    """Authenticated connection to the server, and its unread bytes."""

    def __init__(self, connection: ssl.SSLSocket, buffer: frames.FrameBuffer) -> None:
        self.connection, self.buffer = connection, buffer


class Dialer:
    """Thread that keeps one call open until it is closed, or fails with a reason for all who wait."""

    def __init__(
        self,
        *,
        address: tuple[str, int],
        tls: ssl.SSLContext,
        auth: PartyMessageAuth,
        server_name: str,
        patience: float,
        ended_after: float,
        frame_limit: int,
    ) -> None:
        self._address, self._tls, self._auth, self._server_name = address, tls, auth, server_name
        self._patience, self._ended_after, self._frame_limit = patience, ended_after, frame_limit
        #: Guards the fields below; notified when a call opens or ends.
        self._changed = threading.Condition()
        self._call: Call | None = None
        #: All calls that are not closed yet; the thread that reads them closes them.
        self._calls: list[Call] = []
        self._connecting: socket.socket | None = None
        self._failure: Exception | None = None
        self._was_welcome = False
        self._reached = False
        self._closed = False
        self._hung_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pbmvfl-dialer", daemon=True)
        self._thread.start()

    def call(self, *, other_than: Call | None = None, seconds: float | None = None) -> Call:
        """Return the open call.

        Args:
            other_than: A call that the caller is done with.
            seconds: Longest wait; None for as long as the dialer tries (its patience and one attempt).

        Raises:
            LinkError: If the dialer gave up, or the time is over.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or self._call not in (None, other_than), timeout=seconds
            )
            if self._call is not None and self._call is not other_than:
                return self._call
            raise self._failure or LinkError(f"server: not reached within {seconds:g} seconds")

    def is_open(self, call: Call) -> bool:
        """Return whether this is still the current call."""
        with self._changed:
            return self._call is call

    def report(self, call: Call) -> None:
        """Close a call that the caller found broken or finished."""
        with self._changed:
            if self._call is call:
                self._call = None
                self._changed.notify_all()
            if call in self._calls:
                self._calls.remove(call)
        drop(call.connection)

    def hang_up(self) -> None:
        """End every connection and any wait for one; may be called from any thread."""
        with self._changed:
            self._closed = True
            self._failure = self._failure or LinkError("server: the line was closed at this side")
            hang_up(self._connecting)
            for call in self._calls:
                hang_up(call.connection)
            self._call = None
            self._changed.notify_all()
        self._hung_up.set()

    def close(self) -> None:
        """Hang up, and close all calls; must be called in the thread that reads them."""
        self.hang_up()
        with self._changed:
            calls, self._calls = self._calls, []
        for call in calls:
            drop(call.connection)
        self._thread.join(timeout=5)

    # --- in the dialer's own thread ---

    def _run(self) -> None:
        try:
            while True:
                call = self._dial()
                with self._changed:
                    if self._closed:
                        drop(call.connection)
                    self._check_open()
                    self._call, self._connecting = call, None
                    self._calls.append(call)
                    self._changed.notify_all()
                self._watch(call)
        except Exception as error:  # any error is passed on to the thread that waits
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _watch(self, call: Call) -> None:
        """Return when the call is no longer usable."""
        poll = select.poll()
        descriptor = call.connection.fileno()
        if descriptor >= 0:
            poll.register(descriptor, select.POLLRDHUP)
        while True:
            found = poll.poll(_LOOK_SECONDS * 1000)
            with self._changed:
                self._check_open()
                if self._call is not call:  # reported
                    return
                if found:
                    self._call = None  # its reader may still consume the bytes received
                    return

    def _dial(self) -> Call:
        """Connect until the server accepts this party, or raise."""
        since = time.monotonic()
        refused_since: float | None = None
        pause = _FIRST_PAUSE
        while True:
            try:
                return self._dial_once()
            except ConnectionRefusedError as error:
                reason = "no process listens there"
                refused_since = refused_since or time.monotonic()
                if self._was_welcome and time.monotonic() - refused_since >= self._ended_after:
                    raise LinkError("server: its process ended") from error
            except OtherJob as error:
                # Before the first welcome an earlier job may still be ending there. Afterwards the port belongs to
                # another job, and this job's server is gone: this party's ledger must not stay locked for the patience.
                reason = str(error)
                refused_since = (refused_since or time.monotonic()) if self._was_welcome else None
                if refused_since is not None and time.monotonic() - refused_since >= self._ended_after:
                    raise LinkError("server: its process ended, and another job is there") from error
            except (OSError, EOFError) as error:
                self._check_certificates(error)
                reason, refused_since = _failure_reason(error), None
            if time.monotonic() - since >= self._patience:
                host, port = self._address
                raise LinkError(f"server: not reached at {host}:{port} within {self._patience:g} seconds: {reason}")
            self._hung_up.wait(pause)
            self._check_open()
            pause = min(2 * pause, _LONGEST_PAUSE if self._reached else _LONGEST_PAUSE_UNREACHED)

    def _dial_once(self) -> Call:
        self._reached = False
        raw = socket.create_connection(self._address, timeout=_CONNECT_SECONDS)
        self._reached = True
        connection: socket.socket = raw
        try:
            prepare(raw)
            raw.settimeout(TIME_LIMIT)
            deadline = time.monotonic() + TIME_LIMIT
            connection = guest = wrap(self._tls, raw, server_side=False)
            with self._changed:
                self._check_open()
                self._connecting = guest
            guest.do_handshake()
            name = common_name(guest)
            if name != self._server_name:
                raise LinkError(f"server: it has the certificate of {name}; permitted: {self._server_name}")
            buffer = frames.FrameBuffer(limit=self._frame_limit)
            challenge = _expect(frames.receive(guest, buffer, deadline=deadline), CHALLENGE)
            frames.send(guest, self._auth.join(challenge), deadline=deadline)
            _expect(frames.receive(guest, buffer, deadline=deadline), WELCOME)
        except BaseException:
            with self._changed:
                self._connecting = None  # before it is closed: the descriptor may be another file's afterwards
            drop(connection)
            raise
        self._was_welcome = True
        return Call(guest, buffer)

    def _check_certificates(self, error: Exception) -> None:
        """Raise for a refused certificate, unless it was accepted before: later attempts cannot change a refusal."""
        if self._was_welcome or not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
            return
        if isinstance(error, ssl.SSLCertVerificationError):
            raise LinkError(f"server: its certificate is not accepted here: {error.verify_message}") from error
        if "ALERT" in (error.reason or ""):
            words = error.reason.lower().replace("_", " ")
            raise LinkError(
                f"server: it does not accept this site's certificate ({words}); check its dates, and that it is of "
                "this federation"
            ) from error

    def _check_open(self) -> None:
        if self._closed:
            raise LinkError("server: the line was closed at this side")


def _expect(frame: bytes, expected: bytes) -> bytes:
    kind, rest = frame[:1], frame[1:]
    if kind == REFUSED:
        words = "".join(each for each in rest[:400].decode(errors="replace") if each.isprintable())
        raise LinkError(f"server: it refused this site: {words}")
    if kind != expected:
        raise LinkError(f"server: it said {kind!r}; permitted: {expected!r}")
    return rest


def _failure_reason(error: Exception) -> str:
    if isinstance(error, EOFError | ssl.SSLEOFError | ConnectionResetError):
        return "the connection was closed during the handshake"
    if isinstance(error, TimeoutError):
        return "no answer"
    return getattr(error, "strerror", None) or type(error).__name__


# --- The link itself ---
# A party accepts no connections: it only dials its own server, at one address. It gives up when the server cannot be
# reached within the patience, when the server sends no question for `idle` seconds, or at once when the server is
# another process.


#: Seconds after the last answer in which the server may request it again.
_LINGER = 2.0
#: Consecutive invalid frames before the party gives up.
_MOST_FAULTS = 3

#: Seconds for reading bytes that have arrived already.
_LAST_WORD = 0.1


class TlsPartyLink:
    """Party's end of a TLS link: a `PartyLink`. `serve` belongs to one thread; `close` may come from any."""

    def __init__(
        self,
        *,
        address: tuple[str, int],
        tls: ssl.SSLContext,
        auth: PartyMessageAuth,
        server_name: str,
        patience: float,
        idle: float | None = None,
        ended_after: float = 5.0,
        frame_limit: int = frames.LIMIT,
    ) -> None:
        """Store the parameters; `serve` dials.

        Args:
            address: Host and port of the server.
            tls: Client-side TLS context.
            auth: Message authentication of this process.
            server_name: Common name that the server's certificate must have.
            patience: Seconds that a disconnection may last.
            idle: Longest silence of the server in seconds; by default three times the patience.
            ended_after: Seconds of refused connections after which the server's process is taken for ended.
            frame_limit: Longest frame in bytes.
        """
        self._auth, self._patience, self._frame_limit = auth, patience, frame_limit
        #: The server is silent while it waits for other parties: for their answers, and for those that are cut off.
        self._idle = 3 * patience if idle is None else idle
        self._new_dialer = functools.partial(
            Dialer,
            address=address,
            tls=tls,
            auth=auth,
            server_name=server_name,
            patience=patience,
            ended_after=ended_after,
            frame_limit=frame_limit,
        )
        self._lock = threading.Lock()
        self._dialer: Dialer | None = None
        self._closed = False

    def serve(self, handle: Handler) -> None:
        """Answer questions until the server ends the work.

        Raises:
            LinkError: If the server is lost.
        """
        dialer = self._start()
        try:
            self._serve(dialer, handle)
        finally:
            dialer.close()

    def close(self) -> None:
        """End `serve` with an error."""
        with self._lock:
            self._closed = True
            dialer = self._dialer
        if dialer is not None:
            dialer.hang_up()

    def _start(self) -> Dialer:
        with self._lock:
            if self._closed:
                raise LinkError("server: the line was closed at this side")
            self._dialer = self._new_dialer()
            return self._dialer

    def _serve(self, dialer: Dialer, handle: Handler) -> None:
        heard = time.monotonic()
        faults = 0
        call: Call | None = None
        while True:
            call = dialer.call(other_than=call)
            try:
                while dialer.is_open(call) or len(call.buffer):
                    question = self._next(call, until=heard + self._idle)
                    channel, answer = self._auth.respond(question, handle)
                    # The time that the handler took does not count as silence of the server.
                    heard, faults = time.monotonic(), 0
                    frames.send(call.connection, answer, deadline=heard + self._patience, limit=self._frame_limit)
                    if channel is Channel.END:
                        self._linger(dialer, call, handle)
                        return
                self._check_goodbye(call)
                dialer.report(call)  # the dialer has another call, or soon will
            except (_Silent, _Goodbye):
                raise
            except LinkError:
                faults += 1
                if faults >= _MOST_FAULTS:
                    raise
                dialer.report(call)
            except OSError:
                dialer.report(call)

    def _next(self, call: Call, *, until: float) -> bytes:
        try:
            return frames.receive(call.connection, call.buffer, deadline=until)
        except TimeoutError:
            raise _Silent(f"server: it asked nothing for {self._idle:g} seconds; the party lets go") from None
        except EOFError:
            raise _Goodbye("server: it closed the line before the work was over") from None

    def _check_goodbye(self, call: Call) -> None:
        """Raise if a call that was closed while this side was busy ended in an orderly way.

        A question that is found instead is sent again on the next call.
        """
        try:
            frames.receive(call.connection, call.buffer, deadline=time.monotonic() + _LAST_WORD)
        except EOFError:
            raise _Goodbye("server: it closed the line before the work was over") from None
        except OSError:
            return

    def _linger(self, dialer: Dialer, call: Call, handle: Handler) -> None:
        """Send the last answer again on request, over a new connection too, until the server closes or time is over."""
        until = time.monotonic() + _LINGER
        try:
            while True:
                try:
                    question = frames.receive(call.connection, call.buffer, deadline=until)
                    frames.send(call.connection, self._auth.respond(question, handle)[1], deadline=until)
                except OSError:
                    dialer.report(call)
                    call = dialer.call(other_than=call, seconds=max(0.0, until - time.monotonic()))
        except (EOFError, LinkError):
            return


class _Silent(LinkError):
    """The server is connected and sends nothing."""


class _Goodbye(LinkError):
    """The server closed the link in an orderly way."""
