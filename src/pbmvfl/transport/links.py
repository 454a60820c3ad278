"""How a driver reaches a party: in the same process, or in a process of its own.

Both carry the same bytes to the same state machine. Beside the protocol a link also fetches what only a simulator or
the party's own checkpoint may have: exact embeddings and the party's state.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from pbmvfl.encoders import build_encoder
from pbmvfl.errors import PbmvflError, ProtocolError
from pbmvfl.ledger.charging import Charging
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.party import Party
from pbmvfl.plan import Plan
from pbmvfl.randomness.secret import Entropy, known_entropy
from pbmvfl.secagg.keys import Identity, Session

#: Rounds that a party of a simulation has charged in one transaction. One by one a charge takes a tenth of a round, and
#: all that a killed process can lose by more is some rounds that are charged and were not sent.
ROUNDS_AHEAD = 16
#: Rows that are evaluated together.
_EVALUATION_ROWS = 1000


@dataclass(frozen=True, eq=False, kw_only=True)
class PartyInputs:
    """What makes a party, wherever it runs."""

    plan: Plan
    index: int
    identity: bytes
    identities: tuple[bytes, ...]
    train_features: npt.NDArray[np.float32] | npt.NDArray[np.uint8]
    test_features: npt.NDArray[np.float32] | npt.NDArray[np.uint8] | None
    first_round: int = 0
    #: This party's own ledger, and its names for the data and for each row in it; None: rows by their position.
    ledger: Path | None = None
    dataset: str = ""
    train_ids: tuple[str, ...] | None = None
    test_ids: tuple[str, ...] | None = None
    #: The tests' private door; a run with it claims no privacy.
    known_randomness: bytes | None = None

    def build(self, encoder: nn.Module | None = None) -> Party:
        if encoder is None:
            encoder = build_encoder(self.plan, index=self.index, input_shape=self.train_features.shape[1:])
        party = Party(
            self.plan,
            index=self.index,
            train_features=self.train_features,
            test_features=self.test_features,
            encoder=encoder,
            identity=Identity.from_private_bytes(self.identity),
            identities=self.identities,
            first_round=self.first_round,
            open_guard=self._open_ledger if self.ledger is not None else None,
        )
        if self.known_randomness is not None:
            known = hashlib.sha256(self.known_randomness + self.index.to_bytes(2, "big")).digest()
            noise, secrets = (known_entropy(hashlib.sha256(use + known).digest()) for use in (b"noise", b"secret"))
            party._use_known_randomness(noise, _known_secret(secrets))
        return party

    def _open_ledger(self, session: Session) -> Charging:
        assert self.ledger is not None
        book = Ledger(self.ledger)
        try:
            return book.open_session(
                dataset=self.dataset,
                plan=self.plan,
                run=session.run_id.hex(),
                session=session.id.hex(),
                first_round=self.first_round,
                rounds_ahead=ROUNDS_AHEAD,
                fingerprint=self._fingerprint(),
                train_ids=self.train_ids,
                test_ids=self.test_ids,
            )
        except BaseException:
            book.close()
            raise

    def _fingerprint(self) -> str:
        """Of the values, to notice that they changed; rows with ids in the ids' order, so that a split changes none."""
        rows: npt.NDArray[np.float32] | npt.NDArray[np.uint8] = self.train_features
        if self.train_ids is not None:
            ids = self.train_ids
            if self.test_features is not None and self.test_ids is not None:
                ids += self.test_ids
                rows = np.concatenate([rows, self.test_features])
            rows = rows[np.argsort(np.array(ids))]
        return hashlib.sha256(np.ascontiguousarray(rows).data).hexdigest()


def _known_secret(entropy: Entropy) -> Callable[[int], bytes]:
    def draw(count: int) -> bytes:
        buffer = np.empty(count, dtype=np.uint8)
        entropy.fill(buffer)
        return buffer.tobytes()

    return draw


class PartyLink(Protocol):
    """A driver's end of the line to one party. `send` starts the work; `answer` waits for it."""

    def hello(self) -> None: ...

    def send(self, message: bytes) -> None: ...

    def answer(self) -> bytes: ...

    def exact_embeddings(self, split: str) -> npt.NDArray[np.float32]: ...

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, state: dict[str, Tensor]) -> None: ...

    def close(self) -> None: ...


class InProcessLink:
    """The party is an object of this process."""

    def __init__(self, inputs: PartyInputs, encoder: nn.Module | None = None) -> None:
        self.party = inputs.build(encoder)
        self._inputs = inputs
        self._answer = b""
        self._refusal: PbmvflError | None = None  # raised when asked for, as from a process of its own

    def hello(self) -> None:
        self._answer = self.party.hello()

    def send(self, message: bytes) -> None:
        try:
            self._answer, self._refusal = self.party.receive(message), None
        except PbmvflError as error:
            self._refusal = error

    def answer(self) -> bytes:
        if self._refusal is not None:
            raise self._refusal
        return self._answer

    def exact_embeddings(self, split: str) -> npt.NDArray[np.float32]:
        return exact_embeddings(self.party, self._inputs, split)

    def state(self) -> dict[str, Tensor]:
        return self.party.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.party.load_state(state)

    def close(self) -> None:
        self.party.close()


def exact_embeddings(party: Party, inputs: PartyInputs, split: str) -> npt.NDArray[np.float32]:
    features = inputs.train_features if split == "train" else inputs.test_features
    assert features is not None
    whole = torch.from_numpy(features)
    parts = [
        party.exact_embeddings(whole[start : start + _EVALUATION_ROWS]).numpy()
        for start in range(0, len(whole), _EVALUATION_ROWS)
    ]
    return np.concatenate(parts) if parts else np.empty((0, party.plan.embedding_dim), dtype=np.float32)


# --- a process of its own ---

_HELLO, _MESSAGE, _EMBEDDINGS, _STATE, _LOAD, _STOP = (bytes([code]) for code in range(6))
_OK, _REFUSED = b"\0", b"\1"
#: Seconds that a party has to finish what it is doing and close its ledger, once nobody listens any more.
_PATIENCE = 10


class ProcessLink:
    """The party runs in a spawned process. Its inputs are pickled once, to start it; from then on both ends exchange
    bytes over a pipe, and nothing that arrives there is unpickled."""

    def __init__(self, inputs: PartyInputs) -> None:
        context = multiprocessing.get_context("spawn")
        self._index = inputs.index
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, inputs), daemon=True)
        with _interrupts_held_back():
            self._process.start()
            other.close()

    def hello(self) -> None:
        self._request(_HELLO)

    def send(self, message: bytes) -> None:
        self._request(_MESSAGE + message)

    def answer(self) -> bytes:
        # Waiting for the pipe alone could last for ever if the process dies while starting.
        ready = connection.wait([self._pipe, self._process.sentinel])
        try:
            reply = self._pipe.recv_bytes() if self._pipe in ready or self._pipe.poll() else b""
        except (EOFError, OSError):
            reply = b""
        if not reply:
            raise self._ended()
        if reply[:1] != _OK:
            raise _rebuilt(reply[1:])
        return reply[1:]

    def exact_embeddings(self, split: str) -> npt.NDArray[np.float32]:
        self._request(_EMBEDDINGS + split.encode())
        return np.asarray(load(self.answer())["embeddings"].numpy(), dtype=np.float32)

    def state(self) -> dict[str, Tensor]:
        self._request(_STATE)
        return load(self.answer())

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._request(_LOAD + save(state))
        self.answer()

    def close(self) -> None:
        """Tell the party to stop. The closed pipe tells it too, also while it waits to get rid of a long answer."""
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(_STOP)
        self._pipe.close()
        self._process.join(timeout=_PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _request(self, request: bytes) -> None:
        try:
            self._pipe.send_bytes(request)
        except OSError as error:
            raise self._ended() from error

    def _ended(self) -> ProtocolError:
        return ProtocolError(
            f"party={self._index}: its process ended without an answer; a run with checkpoints can be continued from "
            "its last one"
        )


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal. A new one inherits that it is held back, and so outlives one that
    comes while it still starts; here it is delivered at the end of the block."""
    resource_tracker.ensure_running()  # started by the first spawn otherwise, and that lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _rebuilt(text: bytes) -> PbmvflError:
    """The error that the party raised, as its own type."""
    name, message = json.loads(text)
    known = {kind.__name__: kind for kind in _all_errors(PbmvflError)}
    return known.get(name, ProtocolError)(message)


def _all_errors(kind: type[PbmvflError]) -> Sequence[type[PbmvflError]]:
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in _all_errors(child))]


def _serve(pipe: Connection, inputs: PartyInputs) -> None:
    """The party's process: handle one request after the other until told to stop or the other end goes away."""
    # Ctrl-C is the parent's to handle: it closes the pipe, and the ledger gets back what was charged ahead.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # several parties share the machine; threads of each would fight
    party: Party | None = None
    try:
        while (request := _received(pipe)) is not None:
            try:
                party = party or inputs.build()
                reply = _OK + _handle(party, inputs, request[:1], request[1:])
            except PbmvflError as error:
                reply = _REFUSED + json.dumps([type(error).__name__, str(error)]).encode()
            with contextlib.suppress(OSError):  # nobody listens any more; the next look at the pipe says so
                pipe.send_bytes(reply)
    finally:
        if party is not None:
            party.close()


def _received(pipe: Connection) -> bytes | None:
    """The next request; None when there will be none."""
    try:
        request = pipe.recv_bytes()
    except (EOFError, OSError):
        return None
    return None if request[:1] == _STOP else request


def _handle(party: Party, inputs: PartyInputs, command: bytes, body: bytes) -> bytes:
    if command == _HELLO:
        return party.hello()
    if command == _MESSAGE:
        return party.receive(body)
    if command == _EMBEDDINGS:
        return save({"embeddings": torch.from_numpy(exact_embeddings(party, inputs, body.decode()))})
    if command == _STATE:
        return save(party.state())
    party.load_state(load(body))
    return b""
