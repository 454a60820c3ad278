"""Cell link at a party: answers the server's job, one question at a time, from NVFlare's threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from pbmvfl.deploy.link import connection
from pbmvfl.deploy.link.interface import Channel, Handler
from pbmvfl.deploy.link.message_auth import MAC_BYTES, MOST_UNANSWERED, OtherJob, PartyMessageAuth, ProcessReplaced
from pbmvfl.deploy.nvflare.cell_channel import AGAIN_AFTER, NUMBER, STATE, CellEndpoint, Kind, printable_text
from pbmvfl.errors import LinkError

#: Seconds after the last answer in which the server may request it again; a server that leaves has it.
_LINGER = 6.0


class PartyCell:
    """Party's end of a cell link: a `PartyLink`. `serve` belongs to one thread; `close` may come from any.

    A silent server may be cut off, ended, or waiting for others: the cell cannot tell. It is given up after `patience`
    seconds before it has joined, and after `idle` seconds without a question later.
    """

    def __init__(
        self,
        *,
        core_cell: Any,
        auth: PartyMessageAuth,
        server: str,
        patience: float,
        idle: float | None = None,
        again_after: float = AGAIN_AFTER,
        linger: float = _LINGER,
        frame_limit: int = connection.LIMIT,
    ) -> None:
        """Register on the cell. `server` is the cell of the server's job, the only one that is accepted."""
        self._auth, self._server, self._patience, self._again_after = auth, server, patience, again_after
        self._idle = 3 * patience if idle is None else idle
        self._linger, self._limit = linger, frame_limit
        #: Guards the fields below, which NVFlare's threads use too.
        self._changed = threading.Condition()
        self._inbox: deque[tuple[Kind, bytes]] = deque()
        self._received_at = time.monotonic()
        self._hello_at = 0.0
        self._has_joined = self._server_left = self._closed = False
        self._refused = ""
        #: Frame of the question in work; number of the last answered question, and the frame of its answer.
        self._working_on = b""
        self._last = 0
        self._last_answer = b""
        self._endpoint = CellEndpoint(core_cell, peers=(server,), on_message=self._on_message, limit=frame_limit)

    def serve(self, handle: Handler) -> None:
        """Answer questions until the server ends the work.

        Raises:
            LinkError: If the server is lost.
        """
        with self._changed:
            self._received_at = time.monotonic()
        leaves_at: float | None = None
        while (message := self._next(leaves_at)) is not None:
            kind, body = message
            if kind is Kind.CHALLENGE:
                self._join(body)
            elif self._answer(body, handle) is Channel.END and leaves_at is None:
                leaves_at = time.monotonic() + self._linger

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._endpoint.send(self._server, Kind.BYE)
        self._endpoint.close()

    # --- in the thread that serves ---

    def _next(self, leaves_at: float | None) -> tuple[Kind, bytes] | None:
        """Return the next message to handle; None when the work is over and the last answer is not requested again."""
        while True:
            now = time.monotonic()
            with self._changed:
                if self._closed:
                    raise LinkError("server: the link was closed at this side")
                if self._inbox:
                    kind, body = self._inbox.popleft()
                    self._working_on = body if kind is Kind.QUESTION else b""
                    return kind, body
                if leaves_at is not None and (self._server_left or now >= leaves_at):
                    return None
                patience = self._idle if self._has_joined else self._patience
                until = self._received_at + patience if leaves_at is None else leaves_at
                if self._server_left or now >= until:
                    raise LinkError(self._why_lost(patience))
                says_hello = not self._has_joined and now >= self._hello_at
                if not says_hello:
                    self._changed.wait(min(until, until if self._has_joined else self._hello_at) - now)
            if says_hello:
                self._hello_at = now + self._again_after
                self._endpoint.send(self._server, Kind.HELLO)

    def _why_lost(self, patience: float) -> str:
        last = f"; last refused: {self._refused}" if self._refused else ""
        if self._server_left:
            return f"server: it left before the work was over{last}"
        said = "asked nothing" if self._has_joined else "did not take this party in"
        return f"server: it {said} for {patience:g} seconds; the party lets go{last}"

    def _join(self, challenge: bytes) -> None:
        try:
            join = self._auth.join(challenge)
        except LinkError as error:
            self._refused = str(error)
            self._endpoint.send(self._server, Kind.REFUSED, str(error).encode()[:400])
            if isinstance(error, OtherJob | ProcessReplaced):  # signed by the server: retrying cannot help
                raise
            self._endpoint.dropped(str(error))
            return
        self._endpoint.send(self._server, Kind.JOIN, join)

    def _answer(self, question: bytes, handle: Handler) -> Channel | None:
        """Answer a question, and return its channel; None if it is not a question of the server."""
        answer = b""
        try:
            channel, answer = self._auth.respond(question, handle)
        except LinkError as error:
            self._endpoint.dropped(str(error))
            return None
        finally:
            with self._changed:
                self._working_on = b""
                self._received_at = time.monotonic()  # the handler's time is no silence of the server
                if answer:
                    self._has_joined = True
                    self._last, self._last_answer = _number(question), answer
        if len(answer) > self._limit:
            raise LinkError(f"an answer of {len(answer):,} bytes; permitted: at most {self._limit:,}")
        self._endpoint.send(self._server, Kind.ANSWER, answer)
        return channel

    # --- in NVFlare's threads ---

    def _on_message(self, cell: str, kind: Kind, body: bytes) -> None:
        del cell  # the endpoint accepts the server's only
        state, again = b"", b""
        with self._changed:
            self._received_at = time.monotonic()
            match kind:
                case Kind.QUESTION if not self._has_already(body):
                    self._put(kind, body)
                case Kind.CHALLENGE:
                    self._put(kind, body)
                case Kind.PROBE if len(body) == NUMBER.size:
                    state = STATE.pack(self._last, self._number_in_work())
                    again = self._last_answer if NUMBER.unpack(body)[0] == self._last else b""
                case Kind.REFUSED:
                    self._refused = printable_text(body)
                case Kind.BYE:
                    self._server_left = True
            self._changed.notify_all()
        if again:
            self._endpoint.send(self._server, Kind.ANSWER, again)
        elif state:
            self._endpoint.send(self._server, Kind.STATE, state)

    def _has_already(self, question: bytes) -> bool:
        """Return whether a question is queued or in work, so that a second delivery is not handled twice."""
        mac = question[-MAC_BYTES:]
        return any(each[-MAC_BYTES:] == mac for each in (self._working_on, *(body for _, body in self._inbox)))

    def _put(self, kind: Kind, body: bytes) -> None:
        """Queue a message, or drop more than an honest server has under way; it asks again."""
        if len(self._inbox) <= MOST_UNANSWERED:
            self._inbox.append((kind, body))

    def _number_in_work(self) -> int:
        waiting = [body for kind, body in self._inbox if kind is Kind.QUESTION]
        return _number(self._working_on or (waiting[0] if waiting else b""))


def _number(question: bytes) -> int:
    """Return a question's own number; 0 for no question."""
    return int.from_bytes(question[: NUMBER.size]) if len(question) >= NUMBER.size else 0
