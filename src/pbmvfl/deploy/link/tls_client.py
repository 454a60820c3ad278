"""The line at a party: it dials the server, answers what it is asked, and dials again when the connection breaks.

Nothing comes in at a party: it only ever calls its own server, at one address. It gives up when the server cannot be
reached within the patience, when the server asks nothing for `idle` seconds, or at once when the server is another one.
"""

from __future__ import annotations

import ssl
import threading
import time

from pbmvfl.deploy.link import frames
from pbmvfl.deploy.link.interface import Channel, Handler
from pbmvfl.deploy.link.line_dialer import Call, Dialer
from pbmvfl.deploy.link.message_auth import PartySeal
from pbmvfl.errors import LinkError

#: Seconds after the last answer in which the server may ask for it again.
_LINGER = 2.0
#: Frames that are not what they should be, one after the other, before the party lets go.
_MOST_FAULTS = 3

#: Seconds in which what has come already is read.
_LAST_WORD = 0.1


class PartyLine:
    """A party's end: a `PartyLink`. `serve` belongs to one thread; `close` may come from any."""

    def __init__(
        self,
        *,
        address: tuple[str, int],
        tls: ssl.SSLContext,
        seal: PartySeal,
        server_name: str,
        patience: float,
        idle: float | None = None,
        ended_after: float = 5.0,
        frame_limit: int = frames.LIMIT,
    ) -> None:
        self._seal, self._patience, self._frame_limit = seal, patience, frame_limit
        #: The server is silent while it waits for others: for their answers, and for those that are cut off.
        self._idle = 3 * patience if idle is None else idle
        self._choices = {
            "address": address,
            "tls": tls,
            "seal": seal,
            "server_name": server_name,
            "patience": patience,
            "ended_after": ended_after,
            "frame_limit": frame_limit,
        }
        self._lock = threading.Lock()
        self._dialer: Dialer | None = None
        self._closed = False

    def serve(self, handle: Handler) -> None:
        """Answer until the server says that the work is over."""
        dialer = self._start()
        try:
            self._serve(dialer, handle)
        finally:
            dialer.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            dialer = self._dialer
        if dialer is not None:
            dialer.hang_up()

    def _start(self) -> Dialer:
        with self._lock:
            if self._closed:
                raise LinkError("server: the line was closed at this side")
            self._dialer = Dialer(**self._choices)  # type: ignore[arg-type]
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
                    channel, answer = self._seal.respond(question, handle)
                    # The time that the handler took is this side's own, and no silence of the server.
                    heard, faults = time.monotonic(), 0
                    frames.send(call.connection, answer, deadline=heard + self._patience, limit=self._frame_limit)
                    if channel is Channel.END:
                        self._linger(dialer, call, handle)
                        return
                self._hear_goodbye(call)
                dialer.report(call)  # there is another one, or soon will be
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

    def _hear_goodbye(self, call: Call) -> None:
        """A call that was found closed while this side was busy may have had a last word. A question that comes
        instead is asked again on the next call."""
        try:
            frames.receive(call.connection, call.buffer, deadline=time.monotonic() + _LAST_WORD)
        except EOFError:
            raise _Goodbye("server: it closed the line before the work was over") from None
        except OSError:
            return

    def _linger(self, dialer: Dialer, call: Call, handle: Handler) -> None:
        """The last answer may have to be sent again, over a new connection too; a server that says goodbye has it."""
        until = time.monotonic() + _LINGER
        try:
            while True:
                try:
                    question = frames.receive(call.connection, call.buffer, deadline=until)
                    frames.send(call.connection, self._seal.respond(question, handle)[1], deadline=until)
                except OSError:
                    dialer.report(call)
                    call = dialer.call(other_than=call, seconds=max(0.0, until - time.monotonic()))
        except (EOFError, LinkError):
            return


class _Silent(LinkError):
    """The server is there and says nothing."""


class _Goodbye(LinkError):
    """The server left, and said so."""
