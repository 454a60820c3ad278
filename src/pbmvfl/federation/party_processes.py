"""A process for each party, on this machine."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from enum import Enum
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import assert_never

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load, save

from pbmvfl import errors
from pbmvfl.errors import PartyLost, PbmvflError
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.plan.round_kinds import Split
from pbmvfl.protocol.party import Party
from pbmvfl.protocol.transport import Answers

#: Seconds that a party has to finish its work and close its ledger, once the parent has closed the pipe.
_PATIENCE = 10
_ENDED = "its process ended without an answer"
_NOT_STARTED = (
    "its process could not be started; a program that starts some is a file, and its own work stands below "
    "`if __name__ == '__main__':`"
)


class _Command(Enum):
    """Commands of the parent to a child; the first byte of every request."""

    MESSAGE = b"m"
    EMBEDDINGS = b"e"
    LAST_ERROR = b"l"
    PUBLIC_START = b"p"
    STOP = b"s"


class Processes:
    """Transport to parties in processes of their own.

    A party's setup is pickled once, to start it; from then on both ends exchange bytes over a pipe, and nothing that
    arrives there is unpickled.
    """

    def __init__(self, setups: Sequence[PartySetup]) -> None:
        self._children: list[_Child] = []
        try:
            for index, setup in enumerate(setups):
                try:
                    self._children.append(_Child(setup))
                except OSError as broken:
                    raise PartyLost({index: _NOT_STARTED}) from broken
            for child in self._children:  # A faulty setup is reported now, not in the first exchange.
                child.request(_Command.LAST_ERROR)
            for index in range(len(setups)):
                if (error := _error_from(self._must_answer(index))) is not None:
                    raise error
        except BaseException:
            self.close()
            raise

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        received: dict[int, bytes] = {}
        lost: dict[int, str] = {}
        for index, child in enumerate(self._children):
            if not child.request(_Command.MESSAGE, message):
                lost[index] = _ENDED
        deadline = None if timeout is None else time.monotonic() + timeout
        for index, child in enumerate(self._children):
            if index in lost:
                continue
            answer = child.answer(deadline)
            if answer is None:
                lost[index] = _ENDED if child.has_ended else f"no answer within {timeout:g} seconds"
            else:
                received[index] = answer
        return Answers(received, lost)

    def close(self) -> None:
        children, self._children = self._children, []
        for child in children:  # all are told before any is waited for
            child.tell_to_stop()
        for child in children:
            child.join()

    # --- inspection, for a simulator ---

    def exact_embeddings(self, split: Split) -> list[npt.NDArray[np.float32]]:
        for child in self._children:
            child.request(_Command.EMBEDDINGS, split.encode())
        found = [self._must_answer(index) for index in range(len(self._children))]
        return [np.asarray(load(each)["embeddings"].numpy(), dtype=np.float32) for each in found]

    def public_starts(self) -> list[bool]:
        for child in self._children:
            child.request(_Command.PUBLIC_START)
        return [self._must_answer(index) == b"\1" for index in range(len(self._children))]

    def owner_error(self, party: int) -> Exception | None:
        self._children[party].request(_Command.LAST_ERROR)
        return _error_from(self._must_answer(party))

    def _must_answer(self, party: int) -> bytes:
        answer = self._children[party].answer(None)
        if answer is None:
            raise PartyLost({party: _ENDED})
        return answer


class _Child:
    """The parent's end of one party's pipe."""

    def __init__(self, setup: PartySetup) -> None:
        context = _context()
        self._pipe, other = context.Pipe()
        # A template has the environment of the moment when it was made; a party is given that of now.
        self._process = context.Process(target=_serve, args=(other, setup, dict(os.environ)), daemon=True)
        with _interrupts_held_back():
            self._process.start()
            other.close()

    @property
    def has_ended(self) -> bool:
        return not self._process.is_alive()

    def request(self, command: _Command, body: bytes = b"") -> bool:
        """Send a command; return False if the child has ended."""
        try:
            self._pipe.send_bytes(command.value + body)
        except OSError:
            return False
        return True

    def answer(self, deadline: float | None) -> bytes | None:
        """Return the child's answer, or None if it has ended or the deadline has passed."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        # Waiting for the pipe alone could last for ever if the process dies while it starts.
        ready = connection.wait([self._pipe, self._process.sentinel], left)
        try:
            return self._pipe.recv_bytes() if self._pipe in ready or self._pipe.poll() else None
        except (EOFError, OSError):
            return None

    def tell_to_stop(self) -> None:
        """Tell the child to stop. The closed pipe does so too, also while it waits to send a long answer."""
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(_Command.STOP.value)
        self._pipe.close()

    def join(self) -> None:
        self._process.join(timeout=_PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _context() -> SpawnContext | ForkServerContext:
    """Return the way to start processes.

    On Linux every party is forked from a template, a process that has loaded the code and never had a party: loading
    takes seconds, forking none. On other systems a forked process is not safe to use, and each loads for itself.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "pbmvfl.federation.party_template"])
    return context


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Hold back Ctrl-C until the end of the block.

    Ctrl-C reaches every process of a terminal. A new one inherits that it is held back, and so survives one that comes
    while it still starts.
    """
    resource_tracker.ensure_running()  # started by the first spawn otherwise, and that lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _error_from(text: bytes) -> PbmvflError | None:
    """Return the error that the party raised, as its own type."""
    if not text:
        return None
    name, message = json.loads(text)
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, PbmvflError) and _takes_message(kind):
        return kind(message)
    return PbmvflError(message)


def _takes_message(kind: type[PbmvflError]) -> bool:
    """Return whether a message alone makes such an error: no class of this package above it has other arguments."""
    return not any("__init__" in vars(each) for each in kind.__mro__ if issubclass(each, PbmvflError))


# --- the child ---


def _serve(pipe: Connection, setup: PartySetup, environment: dict[str, str]) -> None:
    """Run a party's process: handle requests until told to stop or the pipe is closed."""
    os.environ.clear()
    os.environ.update(environment)
    # The parent handles Ctrl-C: it closes the pipe, and the ledger gets back what was charged ahead.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # several parties share the machine; threads of each would fight
    # Arithmetic with denormal numbers is slower by a factor of ten and more: time would reveal values.
    torch.set_flush_denormal(True)
    party: Party | None = None
    failure: Exception | None = None
    try:
        try:
            party = setup.build()
        except PbmvflError as error:
            failure = error
        while (request := _received(pipe)) is not None:
            reply = _handle(party, failure, _Command(request[:1]), request[1:])
            with contextlib.suppress(OSError):  # The parent has closed the pipe; the next read finds that.
                pipe.send_bytes(reply)
    finally:
        if party is not None:
            party.close()


def _received(pipe: Connection) -> bytes | None:
    """Return the next request, or None when there will be none."""
    try:
        request = pipe.recv_bytes()
    except (EOFError, OSError):
        return None
    return None if request[:1] == _Command.STOP.value else request


def _handle(party: Party | None, failure: Exception | None, command: _Command, body: bytes) -> bytes:
    if party is None:
        return _error_text(failure)
    match command:
        case _Command.MESSAGE:
            return party.receive(body)
        case _Command.EMBEDDINGS:
            return save({"embeddings": torch.from_numpy(party.exact_embeddings(Split(body.decode())))})
        case _Command.LAST_ERROR:
            return _error_text(party.last_error or party.fault)
        case _Command.PUBLIC_START:
            return b"\1" if party.public_start else b"\0"
        case _Command.STOP:
            raise AssertionError("ends the loop before it gets here")
        case _:
            assert_never(command)


def _error_text(error: Exception | None) -> bytes:
    return b"" if error is None else json.dumps([type(error).__name__, str(error)]).encode()
