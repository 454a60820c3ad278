"""A party with ledger, checkpoints and stored answers, in the hands of a server that may send anything in any order.

A Hypothesis state machine sends valid, replayed, reordered, truncated, changed and foreign messages of all kinds,
restarts the party, resumes from its checkpoints, stops sessions, sends one message from several threads, and changes
the owner's limit. It does so in two worlds that differ in one cell of one row, with the same seeded noise and keys.
After every step:

1. one payload a round and session, and none for a round that the ledger has not charged, unless it is a stored answer;
2. a refusal changes neither weights nor charges, but for the step that comes before a limit refuses its round;
3. everything but the numbers inside an embedding is equal in both worlds: replies, refusals, charges, files' sizes.

PBMVFL_STATE_MACHINE_SECONDS has it search for that long, with new sequences; with -s a run prints how many it made.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pbmvfl.crypto.key_exchange import NONCE_BYTES, Identity, KeyExchange, Session
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.plan.plan import Plan
from pbmvfl.protocol.party import Party
from pbmvfl.wire.messages import SERVER, Hello, Message, MessageKind
from support import release_monitor
from support.cohorts import small_data, small_plan
from support.known_randomness import KnownParty, KnownSetup
from support.local_plans import voting_plan

DATA = small_data(num_samples=12, num_test_samples=6)
SECONDS = float(os.environ.get("PBMVFL_STATE_MACHINE_SECONDS", "0"))
EXAMPLES, STEPS = 40, 40
RUN = b"run-0001"
KIND_AT, HEADER = 5, 44
EMBEDDING, REFUSAL = int(MessageKind.EMBEDDING), int(MessageKind.REFUSAL)
#: Refusals of the owner's limit, which come after the step by the gradient that a request carries.
BUDGET = 4
PLANS: dict[str, Callable[[], Plan]] = {
    "staged": lambda: voting_plan(DATA, batch_size=5, num_epochs=2),
    "in clear": lambda: small_plan(DATA, batch_size=5, secure_aggregation=False, evaluation="released"),
    "masked": lambda: small_plan(DATA, batch_size=5, evaluation="released"),
    "noisy updates": lambda: small_plan(DATA, batch_size=5, noise_multiplier=3.0, secure_aggregation=False),
}
IDENTITIES = [Identity.from_private_bytes(bytes([60 + index]) * 32) for index in range(3)]
PINNED = tuple(identity.public for identity in IDENTITIES)
counted = {"sequences": 0, "steps": 0}


class World:
    """One party's folder: its ledger, its checkpoints, its stored answers, and the party that has them open."""

    def __init__(self, plan: Plan, folder: Path, columns: np.ndarray, epsilon: float, kind: type[Party] | None) -> None:
        self.plan, self.folder, self.columns, self.kind = plan, folder, columns, kind
        folder.mkdir()
        self.party: Party | None = None
        self.set_limit(epsilon)

    def _changes(self) -> None:
        """Forget what was read of the ledger and of the weights: a message, a restart or a limit may change it."""
        self._charges: list[tuple[str, int, int]] | None = None
        self._state: dict[str, torch.Tensor] | None = None

    def receive(self, message: bytes) -> bytes:
        assert self.party is not None
        self._changes()
        return self.party.receive(message)

    def set_limit(self, epsilon: float) -> None:
        self._changes()
        ledger = Ledger(self.folder / "party-0.sqlite", owner="party-0")
        limit = Limit.choose(unit="cell", accounting="strict", epsilon=epsilon, delta=1e-5, counting="renyi", order=4)
        ledger.set_limit(DATA.name, limit)
        ledger.close()

    def restart(self, number: int) -> None:
        self._changes()
        if self.party is not None:
            self.party.close()
        setup = KnownSetup(
            plan=self.plan,
            index=0,
            identity=IDENTITIES[0].private_bytes(),
            identities=PINNED,
            train_features=self.columns,
            test_features=DATA.test_features[0],
            checkpoints=self.folder / "checkpoints",
            answers=self.folder / "answers",
            ledger=self.folder / "party-0.sqlite",
            owner="party-0",
            dataset=DATA.name,
        )
        party = setup.build()
        party.seed_with(f"session {number}".encode())  # other keys and noise in every session, equal in both worlds
        if self.kind is not None:
            party.__class__ = self.kind
        self.party = party

    def charges(self) -> list[tuple[str, int, int]]:
        """(session, first round, charged until), read from the file without the ledger's own code."""
        if self._charges is None:
            with contextlib.closing(sqlite3.connect(f"file:{self.folder / 'party-0.sqlite'}?mode=ro", uri=True)) as db:
                self._charges = db.execute(
                    "SELECT sessions.session, first_round, charged_until "
                    "FROM sessions JOIN charged ON id = charged.session"
                ).fetchall()
        return self._charges

    def files(self) -> dict[str, int]:
        """Files and sizes; weights differ between worlds, and the name of a checkpoint has their digest."""
        found = sorted(path for name in ("checkpoints", "answers") for path in (self.folder / name).glob("*"))
        return {f"{path.parent.name}/{path.name[:13]}": path.stat().st_size for path in found}

    def state(self) -> dict[str, torch.Tensor]:
        assert self.party is not None
        if self._state is None:
            self._state = {name: value.clone() for name, value in self.party.part_state().items()}
        return self._state


class PartyMachine(RuleBasedStateMachine):
    """The server's side. Subclasses name another kind of party."""

    kind: type[Party] | None = None

    @initialize(
        name=st.sampled_from(sorted(PLANS)),
        epsilon=st.sampled_from([3.5, 8.0, 50.0, 1e6]),
        row=st.integers(0, 11),
        cell=st.sampled_from([-1e6, 0.0, 3.0]),
    )
    def begin(self, name: str, epsilon: float, row: int, cell: float) -> None:
        counted["sequences"] += 1
        self.plan = PLANS[name]()
        self.folder = Path(tempfile.mkdtemp(prefix="pbmvfl-machine-"))
        other = DATA.train_features[0].copy()
        other[row, 0] = cell
        self.worlds = [
            World(self.plan, self.folder / f"world-{number}", columns, epsilon, self.kind)
            for number, columns in enumerate((DATA.train_features[0], other))
        ]
        self.sessions = 0
        self.session: Session | None = None
        self.first_round = 0
        self.known_rounds: tuple[int, ...] = ()
        #: Every message of the server so far, of whatever session.
        self.sent: list[bytes] = []
        #: By world: (session, round) -> payload; and every payload that a charged round sent, by its number.
        self.payloads: list[dict[tuple[str, int], bytes]] = [{}, {}]
        self.start(first=0, labels=True)

    def teardown(self) -> None:
        for world in getattr(self, "worlds", ()):
            if world.party is not None:
                world.party.close()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)
        release_monitor.violations()  # what a sequence that failed left must not end the next one at its first step

    # --- messages ---

    def deliver(self, message: bytes) -> bytes:
        """Send to the party of both worlds, check what comes back, and return what the first one said."""
        counted["steps"] += 1
        self.sent.append(message)
        before = [(world.state(), world.charges()) for world in self.worlds]
        replies = [world.receive(message) for world in self.worlds]
        self.check(replies, before)
        return replies[0]

    def check(self, replies: list[bytes], before: list[tuple[dict[str, torch.Tensor], Any]]) -> None:
        one, other = replies
        assert len(one) == len(other)
        assert one[:HEADER] == other[:HEADER]
        if not one or one[KIND_AT] != EMBEDDING:
            assert one == other
        for number, (world, reply) in enumerate(zip(self.worlds, replies, strict=True)):
            if reply and reply[KIND_AT] == EMBEDDING:
                self.check_payload(number, reply)
            if reply and reply[KIND_AT] == REFUSAL and reply[HEADER] != BUDGET:
                state, charges = before[number]
                after = world.state()
                assert world.charges() == charges
                assert state.keys() == after.keys()
                assert all(torch.equal(value, after[name]) for name, value in state.items())

    def check_payload(self, number: int, reply: bytes) -> None:
        message = Message.from_bytes(reply)
        key, payload = (message.session_id.hex(), message.round_number), bytes(message.payload)
        known = self.payloads[number]
        assert known.setdefault(key, payload) == payload, f"round {key[1]}: two payloads in one session"
        charged = any(
            session == key[0] and first <= key[1] < until for session, first, until in self.worlds[number].charges()
        )
        if not charged:  # then it is what the same round of an earlier session was charged for
            assert payload in [each for (session, at), each in known.items() if at == key[1] and session != key[0]]

    def message(self, kind: MessageKind, *, number: int = 0, payload: bytes = b"", gradient: bool = False) -> bytes:
        assert self.session is not None
        at = min(number, len(self.plan.schedule) - 1)
        is_round = kind in (MessageKind.ROUND, MessageKind.UPDATE)
        return Message(
            kind,
            SERVER,
            run_id=RUN,
            session_id=self.session.id,
            round_number=number,
            round_kind=self.plan.schedule.kind(at).code if is_round else 0,
            carries_gradient=gradient,
            payload=payload,
        ).to_bytes()

    @property
    def expected(self) -> int:
        """The round that the party waits for, as far as its replies tell."""
        assert self.session is not None
        answered = [at for session, at in self.payloads[0] if session == self.session.id.hex()]
        return max(answered, default=self.first_round - 1) + 1

    # --- rules ---

    @rule(first=st.sampled_from([0, 0, 1]), labels=st.booleans())
    def start(self, first: int, labels: bool) -> None:
        """Restart the party and shake hands, from round 0 or from a checkpoint that it says it has."""
        for world in self.worlds:
            world.restart(self.sessions)
        self.sessions += 1
        self.session = None
        hello = self.deliver(Message(MessageKind.START, SERVER, run_id=RUN, payload=self.plan.hash).to_bytes())
        said = Hello.from_bytes(hello[HEADER:])
        self.known_rounds = said.rounds
        first_round = said.rounds[-1] if first and said.rounds else 0
        nonces = [said.nonce, *(bytes([number]) * NONCE_BYTES for number in (1, 2))]
        session = Session.open(plan_hash=self.plan.hash, run_id=RUN, nonces=nonces, first_round=first_round)
        key = self.deliver(
            Message(
                MessageKind.NONCES,
                SERVER,
                run_id=RUN,
                session_id=session.id,
                round_number=first_round,
                payload=self.plan.hash + b"".join(nonces),
            ).to_bytes()
        )
        if key[KIND_AT] == REFUSAL:
            return
        self.session, self.first_round = session, first_round
        exchanges = [
            KeyExchange(
                session=session, index=index, identity=IDENTITIES[index], secret=lambda count: bytes(count - 1) + b"\1"
            )
            for index in (1, 2)
        ]
        signed = key[HEADER:] + b"".join(exchange.signed_key.to_bytes() for exchange in exchanges)
        self.deliver(self.message(MessageKind.KEYS, payload=signed))
        if labels:
            self.give_labels()

    @precondition(lambda self: self.session is not None)
    @rule()
    def give_labels(self) -> None:
        self.deliver(self.message(MessageKind.LABELS, payload=DATA.train_labels.astype("u1").tobytes()))

    @precondition(lambda self: self.session is not None)
    @rule(
        offset=st.sampled_from([0, 0, 0, 0, 0, -1, 1, -2, 5]),
        gradient=st.sampled_from(["as expected", "as expected", "as expected", "none", "zeros"]),
        scale=st.sampled_from([0.0, 0.1, 1e30, float("nan")]),
        update=st.sampled_from([False, False, False, True]),
    )
    def request(self, offset: int, gradient: str, scale: float, update: bool) -> None:
        """A round or the end of an epoch, with any gradient."""
        self.deliver(self.round_message(offset, gradient, scale, update))

    def round_message(self, offset: int, gradient: str, scale: float, update: bool) -> bytes:
        number = max(0, self.expected + offset - update)
        rows = 0
        if 0 < self.expected <= len(self.plan.schedule):
            before = self.plan.schedule[self.expected - 1]
            rows = before.num_rows if before.kind.carries_gradient else 0
        carries = bool(rows) and gradient != "none" if gradient != "zeros" else True
        values = np.full((rows or 3, self.plan.embedding_dim), scale, dtype="<f4")
        kind = MessageKind.UPDATE if update else MessageKind.ROUND
        return self.message(kind, number=number, payload=values.tobytes() if carries else b"", gradient=carries)

    @precondition(lambda self: self.session is not None)
    @rule(count=st.integers(1, 6))
    def honest_rounds(self, count: int) -> None:
        """Several rounds as an honest server asks for them."""
        for _ in range(count):
            if self.expected < len(self.plan.schedule):
                self.request(0, "as expected", 0.1, False)

    @precondition(lambda self: self.session is not None)
    @rule(offset=st.sampled_from([-1, 0, 0, 1]))
    def stop(self, offset: int) -> None:
        self.deliver(self.message(MessageKind.STOP, number=max(0, self.expected + offset)))

    @precondition(lambda self: self.session is not None)
    @rule(offset=st.sampled_from([-1, 0]))
    def stop_and_ask_again(self, offset: int) -> None:
        """The attack of `test_one_release_one_charge`, at whatever point the session has reached."""
        asked = [each for each in self.sent if each[KIND_AT : KIND_AT + 1] == bytes([MessageKind.ROUND])]
        self.stop(offset)
        if asked:
            self.deliver(asked[-1])

    @rule(back=st.integers(1, 30))
    def replay(self, back: int) -> None:
        """A message of before, of this session or of an earlier one."""
        self.deliver(self.sent[-min(back, len(self.sent))])

    @rule(back=st.integers(1, 12), at=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
    def mutate(self, back: int, at: int, bit: int, cut: bool) -> None:
        message = bytearray(self.sent[-min(back, len(self.sent))])
        if not message:
            return
        position = at % len(message)
        if cut:
            message = message[:position]
        else:
            message[position] ^= 1 << bit
        self.deliver(bytes(message))

    @precondition(lambda self: self.session is not None)
    @rule(threads=st.integers(2, 4), new=st.booleans())
    def from_several_threads(self, threads: int, new: bool) -> None:
        """One message at the same time from several threads: one draw, and the same bytes for all."""
        message = self.round_message(0, "as expected", 0.1, False) if new else self.sent[-1]
        self.sent.append(message)
        counted["steps"] += 1
        before = [(world.state(), world.charges()) for world in self.worlds]
        found: list[list[bytes]] = [[], []]
        for number, world in enumerate(self.worlds):
            begun = threading.Barrier(threads)

            def send(world: World = world, into: list[bytes] = found[number], begun: Any = begun) -> None:
                begun.wait()
                into.append(world.receive(message))

            workers = [threading.Thread(target=send) for _ in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        for answers in found:
            assert len({answer for answer in answers if answer and answer[KIND_AT] == EMBEDDING}) <= 1
            answers.sort(key=lambda answer: not answer or answer[KIND_AT] != EMBEDDING)
        if found[0][0] and found[0][0][KIND_AT] == EMBEDDING:
            self.check([answers[0] for answers in found], before)

    @rule(epsilon=st.sampled_from([3.5, 8.0, 50.0, 1e6]))
    def change_limit(self, epsilon: float) -> None:
        for world in self.worlds:
            world.set_limit(epsilon)

    @invariant()
    def worlds_look_alike(self) -> None:
        if hasattr(self, "worlds"):
            one, other = self.worlds
            assert [charge[1:] for charge in one.charges()] == [charge[1:] for charge in other.charges()]
            assert one.files() == other.files()

    @invariant()
    def the_monitor_agrees(self) -> None:
        assert release_monitor.violations() == []


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of refusals would fill the owner's log."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_no_sequence_of_messages_gets_more_than_is_charged() -> None:
    counted.update(sequences=0, steps=0)
    # A failing sequence is printed whole; looking for a smaller one takes minutes.
    search = settings(max_examples=EXAMPLES, stateful_step_count=STEPS, phases=[Phase.reuse, Phase.generate])
    deadline = time.monotonic() + SECONDS
    run_state_machine_as_test(PartyMachine, settings=search)
    while time.monotonic() < deadline:
        run_state_machine_as_test(PartyMachine, settings=settings(search, derandomize=False))
    assert counted["sequences"] >= EXAMPLES
    print(f"{counted['sequences']} sequences, {counted['steps']} messages")


class Forgetful(KnownParty):
    """A party as it was: one remembered message, and no check of a request whose gradient was used."""

    def _answer(self, data: bytes) -> bytes:
        self._last_round, self._stopped = None, False
        if data == self._stepped_for and data[KIND_AT] == MessageKind.ROUND and self._last and data != self._last[0]:
            self._next_round = Message.from_bytes(data).round_number
            self._answered, self._guard = None, None
        return super()._answer(data)


class ForgetfulMachine(PartyMachine):
    """Without threads, because Hypothesis wants a sequence to fail at the same step twice; and without limits, because
    a party that forgets its guard after a limit's refusal is found sooner."""

    kind = Forgetful
    from_several_threads = change_limit = None

    @initialize(name=st.sampled_from(sorted(PLANS)), row=st.integers(0, 11))
    def begin(self, name: str, row: int) -> None:
        super().begin(name, 1e6, row, 3.0)


@pytest.mark.releases_uncharged
def test_the_machine_finds_a_party_that_draws_a_round_twice() -> None:
    """The control. Generation alone, because the failure needs no smallest form; from a seed that finds it soon.

    Such a party also releases without a charge. A seed that comes to that first is not the one, and the next is tried.
    """
    search = settings(max_examples=40, stateful_step_count=STEPS, phases=[Phase.generate], database=None)
    for number in range(5, 25):
        try:
            run_state_machine_as_test(seed(number)(type("Seeded", (ForgetfulMachine,), {})), settings=search)
        except (AssertionError, ExceptionGroup) as found:
            if "in one session" in "".join(traceback.format_exception(found)):
                return
    pytest.fail("no sequence made the party draw a round twice")
