"""What every transport must do. A transport's own test file inherits this suite and says how to open one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.errors import PartyLost, PartyRefused
from pbmvfl.federation.in_process import InProcess
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.plan.plan import Plan
from pbmvfl.protocol.server import Server
from pbmvfl.protocol.session import Meter, drive
from pbmvfl.protocol.transport import Transport
from pbmvfl.wire.messages import Message, MessageKind
from support.cohorts import small_data, small_plan
from support.known_randomness import TwinSetup
from support.ledger_books import opening

DATA = small_data(num_samples=23, num_test_samples=7)


def setups(plan: Plan, folder: Path | None = None) -> list[PartySetup]:
    """Three parties whose bytes are known; with a folder, each with a ledger there."""
    identities = [Identity.from_private_bytes(bytes([100 + index]) * 32) for index in range(plan.num_parties)]
    return [
        TwinSetup(
            plan=plan,
            index=index,
            identity=identity.private_bytes(),
            identities=tuple(each.public for each in identities),
            train_features=DATA.train_features[index],
            test_features=DATA.test_features[index],
            ledger=None if folder is None else folder / f"party-{index}.sqlite",
            dataset="people",
        )
        for index, identity in enumerate(identities)
    ]


def server_of(plan: Plan) -> Server:
    return Server(plan, train_labels=DATA.train_labels, run_id=b"run-0001")


def driven(server: Server, transport: Transport) -> list[tuple[str, int, bytes]]:
    """Everything that crosses the transport in a whole run."""
    heard: list[tuple[str, int, bytes]] = []
    meter = Meter(taps=[lambda *message: heard.append(message)])

    def nothing() -> None: ...

    drive(server, transport, meter, on_open=nothing, on_round=nothing, on_epoch_end=nothing, timeout=600)
    return heard


class TransportConformance:
    """Inherited by one class for each transport."""

    #: Whether a party can be lost: it has a life of its own.
    parties_can_be_lost: ClassVar[bool] = True
    #: Whether an exchange can end before all parties have answered.
    can_time_out: ClassVar[bool] = True

    def open(self, parties: Sequence[PartySetup]) -> Transport:
        """A transport to these parties, ready for the first message."""
        raise NotImplementedError

    def lose(self, transport: Transport, party: int) -> None:
        """Make a party vanish without a word."""
        raise NotImplementedError

    def hold(self, transport: Transport, party: int) -> None:
        """Make a party stop answering while it lives on."""
        raise NotImplementedError

    def release(self, transport: Transport, party: int) -> None:
        """Let it go on."""
        raise NotImplementedError

    @pytest.fixture
    def plan(self) -> Plan:
        return small_plan(DATA, evaluation="released", gradient_codec="int8", momentum=0.5)

    def test_a_whole_run_has_the_bytes_of_parties_in_one_process(self, plan):
        reference = InProcess(setups(plan))
        transport = self.open(setups(plan))
        try:
            assert driven(server_of(plan), transport) == driven(server_of(plan), reference)
        finally:
            transport.close()
            reference.close()

    def test_the_same_message_again_gets_the_same_answers(self, plan):
        server = server_of(plan)
        transport = self.open(setups(plan))
        try:
            for _ in range(6):
                message = server.advance()
                assert message is not None
                answers = transport.exchange(message)
                assert set(answers.received) == {0, 1, 2}
                for _ in range(2):
                    assert transport.exchange(message) == answers
                for party, answer in answers.received.items():
                    if answer:
                        server.receive(answer, sender=party)
        finally:
            transport.close()

    def test_what_a_party_refuses_comes_back_as_its_refusal_and_the_others_answer(self, plan, tmp_path):
        parties = setups(plan, tmp_path)
        ledger = Ledger(tmp_path / "party-1.sqlite")
        ledger.set_limit("people", Limit.choose(unit="cell", accounting="paper", epsilon=0.2, delta=0.1))
        ledger.close()
        transport = self.open(parties)
        server = server_of(plan)
        try:
            with pytest.raises(PartyRefused, match="party=1 refused: a limit that its owner set") as refusal:
                driven(server, transport)
            assert refusal.value.party == 1
            answers = transport.exchange(server.stop())
            assert dict(answers.received) == {0: b"", 1: b"", 2: b""}
        finally:
            transport.close()
        for index in range(3):  # closing lets the ledgers go: they can be opened and charged again
            again = Ledger(tmp_path / f"party-{index}.sqlite")
            again.open_session(
                opening(dataset="people", exact_metrics=True, plan=plan, run="ab" * 8, session="cd" * 16)
            ).close()

    def test_bytes_that_are_no_message_are_refused_by_every_party(self, plan):
        transport = self.open(setups(plan))
        try:
            answers = transport.exchange(b"\xff" * 100)
            kinds = [Message.from_bytes(answers.received[party]).kind for party in range(3)]
            assert kinds == [MessageKind.REFUSAL] * 3
        finally:
            transport.close()

    def test_a_lost_party_is_named_and_the_others_answers_are_there(self, plan):
        if not self.parties_can_be_lost:
            pytest.skip("parties of this transport have no life of their own")
        server = server_of(plan)
        transport = self.open(setups(plan))
        try:
            message = server.advance()
            assert message is not None
            self.lose(transport, 1)
            answers = transport.exchange(message, timeout=600)
            assert set(answers.received) == {0, 2}
            assert set(answers.lost) == {1}
            with pytest.raises(PartyLost, match="party=1: ") as lost:
                raise PartyLost(answers.lost)
            assert set(lost.value.reasons) == {1}
        finally:
            transport.close()

    def test_a_party_that_is_slow_is_named_when_the_time_is_over(self, plan):
        if not self.can_time_out:
            pytest.skip("a call of this transport ends when it ends")
        server = server_of(plan)
        transport = self.open(setups(plan))
        try:
            message = server.advance()
            assert message is not None
            self.hold(transport, 2)
            answers = transport.exchange(message, timeout=1)
            assert 2 in answers.lost  # on a busy machine others may be too slow as well
            assert set(answers.lost) | set(answers.received) == {0, 1, 2}
            assert "within 1 seconds" in answers.lost[2]
            self.release(transport, 2)
        finally:
            transport.close()

    def test_closing_twice_is_closing_once(self, plan):
        transport = self.open(setups(plan))
        transport.close()
        transport.close()
