"""A server that deviates, against a party with a ledger: no sequence of messages draws a round a second time.

The attack that these tests are about: ROUND t, STOP, ROUND t again. STOP replaced the one message that a party
remembered, a request whose gradient was used skipped the check of its number, and the ledger let a round pass for
nothing that it had charged before. Each repetition was a fresh draw, and their mean is the exact table.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pbmvfl.errors import LedgerError
from pbmvfl.ledger.charging import Charging
from pbmvfl.ledger.ledger import Ledger
from pbmvfl.ledger.limits import Limit
from pbmvfl.plan.plan import Plan
from pbmvfl.protocol.party import Party
from pbmvfl.protocol.stored_answers import StoredAnswers
from pbmvfl.wire.messages import Message, MessageKind
from support import release_monitor
from support.cohorts import Cohort, small_data, small_plan
from support.known_randomness import TwinSetup
from support.ledger_books import opening
from support.local_plans import voting_plan

DATA = small_data()
REFUSAL, EMBEDDING, ROUND = MessageKind.REFUSAL, MessageKind.EMBEDDING, MessageKind.ROUND
REPEATS = 20


def staged() -> Plan:
    return voting_plan(DATA)


def in_clear() -> Plan:
    return small_plan(DATA, secure_aggregation=False, evaluation="released")


def masked() -> Plan:
    return small_plan(DATA, evaluation="released")


def first_of(plan: Plan, name: str) -> int:
    return next(current.number for current in plan.schedule if current.kind.name == name)


CASES = [(staged, name) for name in ("mean", "gram", "local", "fusion", "prediction")]
CASES += [(make, name) for make in (in_clear, masked) for name in ("joint", "prediction")]


class Attacked(Cohort):
    """A cohort whose first party has a ledger with a limit."""

    def __init__(
        self, plan: Plan, folder: Path, *, kind: type[Party] | None = None, answers: Path | None = None
    ) -> None:
        super().__init__(plan, DATA)
        self.path = folder / "party-0.sqlite"
        ledger = Ledger(self.path, owner="party-0")
        limit = Limit.choose(unit="cell", accounting="strict", epsilon=1e6, delta=1e-5, counting="renyi")
        ledger.set_limit(DATA.name, limit)
        ledger.close()
        honest = self.parties[0]
        setup = TwinSetup(
            plan=plan,
            index=0,
            identity=bytes([100]) * 32,
            identities=self.pinned,
            train_features=DATA.train_features[0],
            test_features=DATA.test_features[0],
            ledger=self.path,
            answers=answers,
            owner="party-0",
            dataset=DATA.name,
        )
        self.parties[0] = setup.build()
        if kind is not None:
            self.parties[0].__class__ = kind
        honest.close()

    @property
    def party(self) -> Party:
        return self.parties[0]

    def drive_to(self, number: int) -> bytes:
        """Run honestly until every party has answered round `number`; return its request."""
        while True:
            message = self.server.advance()
            assert message is not None
            for index, party in enumerate(self.parties):
                if answer := party.receive(message):
                    assert answer[5] != REFUSAL, answer
                    self.server.receive(answer, sender=index)
            if message[5] == ROUND and Message.from_bytes(message).round_number == number:
                return message

    def stop(self, number: int) -> bytes:
        session = self.server.session
        assert session is not None
        return Message(
            MessageKind.STOP, 0xFFFF, run_id=session.run_id, session_id=session.id, round_number=number
        ).to_bytes()

    def charged(self) -> list[tuple[int, int]]:
        ledger = Ledger(self.path, read_only=True)
        try:
            return [(entry.first_round, entry.charged_until) for entry in ledger.sessions(DATA.name)]
        finally:
            ledger.close()


def weights(party: Party) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in party.part_state().items()}


def assert_same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(("make", "name"), CASES, ids=[f"{make.__name__}-{name}" for make, name in CASES])
def test_stop_and_the_same_round_again_draws_nothing(make: Callable[[], Plan], name: str, tmp_path: Path) -> None:
    plan = make()
    cohort = Attacked(plan, tmp_path)
    number = first_of(plan, name)
    request = cohort.drive_to(number)
    answers = {cohort.party.receive(request)}
    before, charged = weights(cohort.party), cohort.charged()
    for _ in range(REPEATS):
        for completed in (number, number + 1):
            cohort.party.receive(cohort.stop(completed))
            answers.add(cohort.party.receive(request))
    assert {answer[5] for answer in answers} <= {EMBEDDING, REFUSAL}
    assert len({answer for answer in answers if answer[5] == EMBEDDING}) == 1
    assert_same(before, weights(cohort.party))
    assert cohort.charged() == charged
    cohort.party.close()


@pytest.mark.parametrize(("make", "name"), CASES, ids=[f"{make.__name__}-{name}" for make, name in CASES])
def test_after_a_stop_no_further_round_of_the_session_is_answered(
    make: Callable[[], Plan], name: str, tmp_path: Path
) -> None:
    """A resume is another session: with other keys, other noise and other charges."""
    plan = make()
    cohort = Attacked(plan, tmp_path)
    number = first_of(plan, name)
    cohort.drive_to(number)
    stopped = [cohort.party.receive(cohort.stop(completed)) for completed in (number, number + 1)]
    assert b"" in stopped
    before, charged = weights(cohort.party), cohort.charged()
    following = cohort.server.advance()
    assert following is not None
    answer = cohort.party.receive(following)
    assert answer[5] == REFUSAL
    assert_same(before, weights(cohort.party))
    assert cohort.charged() == charged
    cohort.party.close()


@pytest.mark.parametrize("failures", [1, 3])
def test_a_round_that_fails_after_its_charge_is_sent_as_it_was_drawn(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of the stored answers is full for a while: one charge, one draw, and the same bytes in the end."""
    plan = staged()
    number = first_of(plan, "prediction")
    cohort = Attacked(plan, tmp_path, answers=tmp_path / "answers")
    twin = Attacked(plan, tmp_path / "twin", answers=tmp_path / "twin" / "answers")
    cohort.drive_to(number - 1)
    ended, request = cohort.server.advance(), cohort.server.advance()  # the end of the fusion round, and the request
    assert ended is not None
    assert request is not None
    assert [party.receive(ended) for party in cohort.parties] == [b""] * len(cohort.parties)
    left = [failures]

    put = StoredAnswers.put

    def put_later(self: StoredAnswers, *arguments: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        put(self, *arguments)

    monkeypatch.setattr(StoredAnswers, "put", put_later)
    for _ in range(failures):
        assert cohort.party.receive(request)[5] == REFUSAL
    answer = cohort.party.receive(request)
    assert answer[5] == EMBEDDING
    # Both have the same seed, so that another draw in between would show.
    assert answer == twin.party.receive(twin.drive_to(number))
    assert cohort.charged() == twin.charged()
    for each in (cohort, twin):
        each.party.close()


def test_the_ledger_refuses_a_round_below_what_was_charged(tmp_path: Path) -> None:
    plan = masked()
    ledger = Ledger(tmp_path / "party-0.sqlite", owner="party-0")
    session = ledger.open_session(
        opening(
            dataset=DATA.name, plan=plan, run="run", session="s", public_start=True, exact_metrics=True, rounds_ahead=8
        )
    )
    for number in (0, 1, 5):
        session.charge(plan.schedule[number], plan.events(plan.schedule[number].kind))
    before = [(entry.first_round, entry.charged_until) for entry in ledger.sessions(DATA.name)]
    for number in (0, 1, 2, 4, 5):
        with pytest.raises(LedgerError, match=f"round={number} was charged.*permitted: 6 to"):
            session.charge(plan.schedule[number], plan.events(plan.schedule[number].kind))
    assert [(entry.first_round, entry.charged_until) for entry in ledger.sessions(DATA.name)] == before
    session.charge(plan.schedule[6], plan.events(plan.schedule[6].kind))
    session.close()


# --- the release monitor ---


class Forgetful(Party):
    """A party as it was: one remembered message, and no check of a request whose gradient was used."""

    def _answer(self, data: bytes) -> bytes:
        self._last_round, self._stopped = None, False
        if data == self._stepped_for and data[5] == ROUND and (self._last is None or data != self._last[0]):
            self._next_round = Message.from_bytes(data).round_number
            self._answered = None
        return super()._answer(data)


@pytest.mark.releases_uncharged
@pytest.mark.parametrize("name", ["mean", "gram", "local", "fusion", "prediction"])
def test_the_monitor_sees_the_attack_on_a_party_as_it_was(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the monitor: with the faults put back, the attack succeeds and is reported."""
    charge = Charging.charge

    def charge_once(self: Charging, current: Any, events: Any) -> None:
        if current.number >= self._sent_until:
            charge(self, current, events)

    plan = staged()
    cohort = Attacked(plan, tmp_path, kind=Forgetful)
    request = cohort.drive_to(first_of(plan, name))
    monkeypatch.setattr(Charging, "charge", charge_once)
    assert release_monitor.violations() == []
    for _ in range(3):
        cohort.party.receive(cohort.stop(first_of(plan, name) + 1))
        assert cohort.party.receive(request)[5] == EMBEDDING
    found = release_monitor.violations()
    if name in ("fusion", "prediction"):
        assert any("two different payloads" in each for each in found)
    else:
        assert any("took its own step twice" in each for each in found)
    cohort.party.close()


@pytest.mark.releases_uncharged
def test_the_monitor_sees_a_payload_without_a_charge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = masked()
    cohort = Attacked(plan, tmp_path)
    cohort.drive_to(0)
    monkeypatch.setattr(cohort.party, "_guard", None)
    assert release_monitor.violations() == []
    cohort.drive_to(1)
    assert any("its ledger has no charge" in each for each in release_monitor.violations())
    cohort.party.close()


@pytest.mark.releases_uncharged
def test_the_monitor_sees_processes_that_a_test_starts(run_process: Callable[..., Any], tmp_path: Path) -> None:
    program = (
        "import pbmvfl.protocol.party, sys; from support import release_monitor; "
        "assert hasattr(pbmvfl.protocol.party.Party.receive, '__wrapped__'); release_monitor.report('in a child')"
    )
    assert run_process(cwd=tmp_path, program=program).returncode == 0
    assert release_monitor.violations() == ["in a child"]
