"""A malicious server against a party: nothing that leaves may depend on columns but what is charged.

Two worlds differ in one cell of one party. Both have the same noise and the same keys, and get the same messages. Then
everything but the numbers inside an embedding must be equal: which messages are answered, with how many bytes, every
header, every refusal to the byte, what is charged and when, and which files are written. The numbers inside are the
mechanism's, which clips them into its range whatever they are: that is checked beside it.
"""

from __future__ import annotations

import copy
import itertools
import logging
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.errors import OutOfOrder
from pbmvfl.mechanisms import MECHANISMS, PoissonBinomial
from pbmvfl.plan.plan import Plan
from pbmvfl.protocol.server import Server
from pbmvfl.training.encoders import Bounded
from pbmvfl.wire.gradient_codecs import codec_for
from support.cohorts import small_data, small_plan
from support.known_randomness import KnownParty, SeededEntropy, TwinSetup

HEADER = 44
HELLO, NONCES, KEY, KEYS, ROUND, EMBEDDING, UPDATE, START, STOP, REFUSAL = range(1, 11)
#: (offset, bytes) of the header's fields after the version.
FIELDS = ((5, 1), (6, 2), (8, 8), (16, 16), (32, 4), (36, 4), (40, 1), (41, 1))
DATA = small_data(num_parties=3, num_samples=24, num_test_samples=5)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A hundred thousand refusals would fill the owner's log."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Account:
    """A guard that keeps what it was asked to charge."""

    def __init__(self) -> None:
        self.charged: list[tuple[int, tuple[str, ...]]] = []

    def charge(self, current: Any, events: Any) -> None:
        self.charged.append((current.number, tuple(event.name for event in events)))

    def close(self) -> None: ...


class World:
    """One party of three in the hands of a server that may send anything. The other two are honest."""

    def __init__(self, plan: Plan, columns: np.ndarray | None = None, encoder: torch.nn.Module | None = None) -> None:
        identities = [Identity.from_private_bytes(bytes([50 + index]) * 32) for index in range(3)]
        pinned = tuple(identity.public for identity in identities)
        self.plan = plan
        self.account = Account()
        self.parties = []
        for index, identity in enumerate(identities):
            own = index == 0 and columns is not None
            setup = TwinSetup(
                plan=plan,
                index=index,
                identity=identity.private_bytes(),
                identities=pinned,
                train_features=columns if own else DATA.train_features[index],
                test_features=DATA.test_features[index],
            )
            self.parties.append(setup.build(encoder if index == 0 else None))
        self.parties[0].guard_with(self.account)
        self.server = Server(plan, train_labels=DATA.train_labels, run_id=b"run-0001")

    @property
    def party(self) -> KnownParty:
        return self.parties[0]

    def shake_hands(self) -> None:
        """Up to where the first round is asked for."""
        for _ in range(3):
            message = self.server.advance()
            assert message is not None
            for index, party in enumerate(self.parties):
                if answer := party.receive(message):
                    self.server.receive(answer, sender=index)

    def request(self, number: int, gradient: np.ndarray | None, *, update: bool = False) -> bytes:
        """A message of the server for a round, with any gradient."""
        kind = self.plan.schedule.kind(number)
        payload = b"" if gradient is None else gradient.astype("<f4").tobytes()
        session = self.server.session
        assert session is not None
        return (
            struct.pack(
                "<4sBBH8s16sIIBBH",
                b"PBMV",
                2,
                UPDATE if update else ROUND,
                0xFFFF,
                b"run-0001",
                session.id,
                number,
                len(payload),
                kind.code,
                0 if gradient is None else 1,
                0,
            )
            + payload
        )


def neighbour(columns: np.ndarray, *, cell: tuple[int, int], value: float) -> np.ndarray:
    changed = columns.copy()
    changed[cell] = value
    return changed


SCALES = (0.0, 1e-45, 1e-38, 1e-20, 1.0, 999.0, 1e3, 1e10, 1e22, 1.7e38, 3.4e38)


def families(rows: int, columns: int) -> Iterator[tuple[str, np.ndarray]]:
    """Gradients that a server may send and no training has."""
    for scale in SCALES:
        one_row = np.zeros((rows, columns), dtype=np.float32)
        one_row[0] = scale
        yield f"one row of {scale:g}", one_row
        yield f"all rows of {scale:g}", np.full((rows, columns), scale, dtype=np.float32)
        signs = np.where((np.arange(rows * columns) % 2).reshape(rows, columns), -1, 1)
        yield f"alternating signs of {scale:g}", (signs * np.float32(scale)).astype(np.float32)
    yield "denormals", np.full((rows, columns), 1e-42, dtype=np.float32)
    yield "NaN", np.full((rows, columns), np.nan, dtype=np.float32)
    yield "infinity", np.full((rows, columns), np.inf, dtype=np.float32)


def seen(answer: bytes) -> tuple[Any, ...]:
    """All of an answer that no epsilon counts: of an embedding its header, of anything else every byte."""
    if len(answer) > 5 and answer[5] == EMBEDDING:
        return ("embedding", answer[:HEADER], len(answer))
    return ("bytes", answer)


def attack(world: World, gradient: np.ndarray, rounds: int) -> list[tuple[Any, ...]]:
    """The same gradient in every round; what comes out, message by message."""
    world.shake_hands()
    out = [seen(world.party.receive(world.request(0, None)))]
    for number in range(1, rounds):
        sized = np.resize(gradient, (world.plan.schedule.num_rows(number - 1), world.plan.embedding_dim))
        ends = world.plan.schedule.ends_epoch(number - 1)
        if ends:
            out.append(seen(world.party.receive(world.request(number - 1, sized, update=True))))
        out.append(seen(world.party.receive(world.request(number, None if ends else sized))))
    return out


OPTIMISERS = [
    {"optimizer": "sgd", "learning_rate": 0.5},
    {"optimizer": "sgd", "learning_rate": 1e30},
    {"optimizer": "sgd", "learning_rate": 0.5, "momentum": 0.9},
    {"optimizer": "adam", "learning_rate": 0.5},
    {"optimizer": "adam", "learning_rate": 1e30},
]
#: The cell of the neighbouring world: small steps, and the ends of what a column may be.
VALUES = (0.0, 1e-38, 3.0, 1e9, -1e9)


@pytest.mark.parametrize("encoder", ["linear", "mlp"])
@pytest.mark.parametrize("choices", OPTIMISERS, ids=str)
def test_what_leaves_is_the_same_in_neighbouring_worlds_for_every_gradient(encoder, choices, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = small_plan(DATA, encoder=encoder, batch_size=8, num_epochs=2, evaluation="released", **choices)
    answered = 0
    for (what, gradient), value in zip(families(8, plan.embedding_dim), itertools.cycle(VALUES), strict=False):
        worlds = []
        for columns in (DATA.train_features[0], neighbour(DATA.train_features[0], cell=(5, 1), value=value)):
            world = World(plan, columns)
            worlds.append((attack(world, gradient, rounds=6), world.account.charged))
        assert worlds[0] == worlds[1], what
        answered += sum(entry[0] == "embedding" for entry in worlds[0][0])
        finite = bool(np.isfinite(gradient).all())
        assert len(worlds[0][1]) == (6 if finite else 1), what  # NaN is refused, in both worlds alike
    assert answered > 150
    assert not list(tmp_path.iterdir())


class Fragile(torch.nn.Module):
    """A network of somebody's own that fails on some values, and gives another shape on others."""

    def __init__(self, embedding_dim: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, embedding_dim)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if (rows == 77).any():
            raise RuntimeError("cannot take 77")
        return self.linear(rows)[:, : 1 if (rows == 78).any() else None]


@pytest.mark.parametrize("value", [77.0, 78.0, np.float32(1e9)])
def test_a_network_that_fails_on_a_cell_is_answered_for(value):
    plan = small_plan(DATA, batch_size=8, num_epochs=1)
    gradient = np.ones((8, plan.embedding_dim), dtype=np.float32)
    row = int(plan.schedule[0].rows[-1])
    worlds = []
    for columns in (DATA.train_features[0], neighbour(DATA.train_features[0], cell=(row, 1), value=value)):
        torch.manual_seed(3)
        world = World(plan, columns, Bounded(Fragile(plan.embedding_dim)))
        worlds.append((attack(world, gradient, rounds=3), world.account.charged, world.party.fault))
    assert worlds[0][:2] == worlds[1][:2]
    assert worlds[0][2] is None
    assert (worlds[1][2] is not None) == (value in (77.0, 78.0))  # the owner is told


@pytest.mark.parametrize("value", [77.0, 78.0])
def test_a_row_on_which_a_network_fails_moves_no_other_row(value):
    """In exact embeddings, where nothing hides a difference."""
    plan = small_plan(DATA, mechanism="none", batch_size=8, num_epochs=1)
    position, row = 5, int(plan.schedule[0].rows[5])
    sent = []
    for columns in (DATA.train_features[0], neighbour(DATA.train_features[0], cell=(row, 1), value=value)):
        torch.manual_seed(3)
        world = World(plan, columns, Bounded(Fragile(plan.embedding_dim)))
        world.shake_hands()
        payload = world.party.receive(world.request(0, None))[HEADER:]
        sent.append(np.frombuffer(payload, dtype="<f4").reshape(8, plan.embedding_dim))
    others = np.arange(8) != position
    assert np.allclose(sent[0][others], sent[1][others], atol=1e-6)
    assert not sent[1][position].any()


# --- odd values inside the mechanisms ---


class Words:
    """Entropy that is every 16-bit word once, for one value of one trial each."""

    seeded = True

    def fill(self, buffer: np.ndarray) -> None:
        buffer[:] = np.arange(buffer.size, dtype=np.uint64).astype(buffer.dtype)


@pytest.mark.parametrize(
    ("value", "same_as"), [(np.nan, 0.0), (np.inf, 1.0), (-np.inf, -1.0), (3e38, 1.0), (-5.0, -1.0), (1e-45, 0.0)]
)
def test_odd_values_have_the_law_of_a_permitted_one(value, same_as):
    pbm = PoissonBinomial(num_trials=1, beta=0.125, num_parties=3, embedding_dim=1, secure_aggregation=True)
    counts = [int(pbm.randomize(np.full(65536, each, dtype=np.float32), Words()).sum()) for each in (value, same_as)]
    assert counts[0] == counts[1] == round(65536 * (0.5 + 0.125 * same_as))


@pytest.mark.parametrize("name", sorted(MECHANISMS))
def test_no_value_makes_a_mechanism_raise_or_release_what_is_no_number(name):
    mechanism = MECHANISMS[name](num_parties=3, embedding_dim=2, bound=2.0)
    odd = np.array([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -0.0, 0.5], dtype=np.float32)
    released = mechanism.randomize(odd, SeededEntropy(b"odd"))
    assert np.isfinite(released.astype(np.float64)).all()


def test_gradients_are_clipped_to_the_plan_s_bound_by_every_codec():
    gradient = np.array([[3.0, -5000.0], [1e30, 0.25]], dtype=np.float32)
    for name in ("float32", "bfloat16", "int8"):
        codec = codec_for(name)  # type: ignore[arg-type]
        decoded = codec.decode(codec.encode(gradient, seed=0, round_number=0), 2, 2, bound=1000.0)
        assert np.abs(decoded).max() <= 1000
        assert decoded[0, 1] == -1000
        assert decoded[1, 0] == 1000


# --- threads ---


def test_threads_that_ask_for_the_same_round_get_one_answer_and_one_charge():
    plan = small_plan(DATA, batch_size=4, num_epochs=4)
    world = World(plan)
    world.shake_hands()
    gradient = np.full((4, plan.embedding_dim), 0.01, dtype=np.float32)
    for number in range(12):
        ends = number > 0 and plan.schedule.ends_epoch(number - 1)
        if ends:
            world.party.receive(world.request(number - 1, gradient, update=True))
        request = world.request(number, None if ends or number == 0 else gradient)
        answers: list[bytes] = []
        ready = threading.Barrier(6)

        def ask(request: bytes = request, answers: list[bytes] = answers, ready: threading.Barrier = ready) -> None:
            ready.wait()
            answers.append(world.party.receive(request))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 6
        assert len(set(answers)) == 1
        assert answers[0][5] == EMBEDDING
        assert [charged for charged, _ in world.account.charged] == list(range(number + 1))


class Meeting:
    """A guard in which two threads would meet if a party let them: the first waits a while for the second."""

    def __init__(self) -> None:
        self.entered = 0
        self.second = threading.Event()
        self.first = threading.Event()

    def charge(self, current: Any, events: Any) -> None:
        del current, events
        self.entered += 1
        if self.entered > 1:
            self.second.set()
        self.first.set()
        self.second.wait(0.5)  # nobody comes: the other thread waits outside

    def close(self) -> None: ...


def test_a_second_thread_waits_outside_until_the_first_is_answered():
    """Without the lock both would draw noise for one round under one mask, and the difference would have none."""
    plan = small_plan(DATA, batch_size=8, num_epochs=1)
    world, meeting = World(plan), Meeting()
    world.party.guard_with(meeting)
    world.shake_hands()
    request = world.request(0, None)
    answers: list[bytes] = []
    threads = [threading.Thread(target=lambda: answers.append(world.party.receive(request))) for _ in range(2)]
    threads[0].start()
    meeting.first.wait()
    threads[1].start()
    for thread in threads:
        thread.join()
    assert meeting.entered == 1
    assert len(answers) == 2
    assert len(set(answers)) == 1


def test_threads_that_ask_for_different_things_at_once_never_get_two_answers_of_one_round():
    plan = small_plan(DATA, batch_size=4, num_epochs=2)
    world = World(plan)
    world.shake_hands()
    answers: list[bytes] = []
    gradients = [np.full((4, plan.embedding_dim), scale, dtype=np.float32) for scale in (0.1, 0.2, 0.3)]
    first = world.party.receive(world.request(0, None))
    requests = [world.request(number, gradient) for number in (1, 2, 3) for gradient in gradients]

    def ask(request: bytes) -> None:
        for _ in range(50):
            answers.append(world.party.receive(request))

    threads = [threading.Thread(target=ask, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    embeddings = {answer for answer in (first, *answers) if answer[5] == EMBEDDING}
    numbers = [int.from_bytes(answer[32:36], "little") for answer in embeddings]
    assert len(numbers) == len(set(numbers))
    assert sorted(numbers) == sorted(number for number, _ in world.account.charged)


# --- mutated messages in every state ---


def states() -> Iterator[tuple[str, Callable[[World], list[bytes]]]]:
    """How far a session has come, and the honest messages that could follow or have been."""

    def driven(messages: int) -> Callable[[World], list[bytes]]:
        def drive(world: World) -> list[bytes]:
            known = []
            for _ in range(messages):
                message = world.server.advance()
                if message is None:
                    break
                known.append(message)
                for index, party in enumerate(world.parties):
                    if answer := party.receive(message):
                        world.server.receive(answer, sender=index)
            following = world.server.advance()
            if following is not None:
                known.append(following)
            if world.server.session is not None:
                known.append(world.server.stop())
            return known

        return drive

    for messages in (0, 1, 2, 3, 4, 6, 7, 8, 11, 14):
        yield f"after {messages} messages", driven(messages)


@pytest.mark.parametrize(("name", "drive"), list(states()), ids=lambda value: value if isinstance(value, str) else "")
def test_ten_thousand_mutated_messages_get_refusals_or_what_is_charged(name, drive):
    """Ten states, ten thousand messages each: bits flipped, fields exchanged, cut, glued, of other states."""
    plan = small_plan(DATA, batch_size=8, num_epochs=2, evaluation="released")
    world = World(plan)
    honest = drive(world)
    random = np.random.default_rng(sum(name.encode()))
    before = len(world.account.charged)
    embeddings: set[bytes] = set()
    for _ in range(10_000):
        message = bytearray(honest[random.integers(len(honest))])
        match random.integers(5):
            case 0:
                for _ in range(random.integers(1, 4)):
                    message[random.integers(len(message))] ^= 1 << random.integers(8)
            case 1:
                message = message[: random.integers(len(message) + 1)]
            case 2:
                other = honest[random.integers(len(honest))]
                cut = random.integers(min(len(message), len(other)) + 1)
                message = message[:cut] + other[cut:]
            case 3 if len(message) > HEADER:
                size = len(message) - HEADER
                message[HEADER:] = random.integers(0, 256, size, dtype=np.uint8).tobytes()
            case _:
                offset, size = [(5, 1), (6, 2), (8, 8), (16, 16), (32, 4), (36, 4), (40, 1), (41, 1)][
                    random.integers(8)
                ]
                if len(message) >= offset + size:
                    message[offset : offset + size] = random.integers(0, 256, size, dtype=np.uint8).tobytes()
        answer = world.party.receive(bytes(message))
        assert isinstance(answer, bytes)
        if answer and answer[5] == EMBEDDING:
            embeddings.add(answer)
        elif answer:
            assert answer[5] in (REFUSAL, HELLO, KEY), answer[5]
            if answer[5] == REFUSAL:
                assert len(answer) <= HEADER + 402
                assert b"/" not in answer[HEADER + 2 :]  # no path
    numbers = [int.from_bytes(answer[32:36], "little") for answer in embeddings]
    charged = [number for number, _ in world.account.charged[before:]]
    resent = {number for number in numbers if number not in charged}
    assert len(numbers) == len(set(numbers))  # one answer a round, whatever was sent
    assert len(resent) <= 1  # the last round before may be asked for again, and costs nothing


class Forgetful(KnownParty):
    """A party that can be made to forget its first answer."""

    def forgets_next_answer(self) -> None:
        self._masks_before = {kind: copy.copy(masks) for kind, masks in self._masks.items()}

    def forget(self) -> None:
        self._last = self._last_round = self._answered = None
        self._next_round, self._masks = 0, self._masks_before


@pytest.mark.releases_uncharged
def test_the_mutations_find_a_party_that_answers_twice():
    """The control: without the memory of the last request the same round would be answered with fresh noise."""
    plan = small_plan(DATA, batch_size=8, num_epochs=2)
    world = World(plan)
    world.shake_hands()
    request = world.request(0, None)
    world.party.__class__ = Forgetful
    world.party.forgets_next_answer()
    first = world.party.receive(request)
    assert world.party.receive(request) == first
    world.party.forget()
    assert world.party.receive(request) != first


def test_refusals_say_no_path_and_no_value(tmp_path):
    """Whatever fails inside a party, what leaves is one of a few sentences."""
    plan = small_plan(DATA, batch_size=8, num_epochs=1)
    for failure in (OSError(f"no space left on {tmp_path}"), ValueError("cell 0.123"), OutOfOrder("round=3")):
        world = World(plan)

        def fails(*_: object, failure: Exception = failure) -> Account:
            raise failure

        world.party.open_guard_with(fails)
        with pytest.raises(Exception, match="party=0 refused") as refused:
            world.shake_hands()
        said = str(refused.value)
        assert str(tmp_path) not in said
        assert "0.123" not in said
        assert Path(said) != tmp_path
