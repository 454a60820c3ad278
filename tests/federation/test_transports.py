"""The transports that are there, held to what every transport must do; and a toy that one file adds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
import pytest

from pbmvfl.crypto.entropy import SystemEntropy
from pbmvfl.errors import PolicyError
from pbmvfl.federation import in_process
from pbmvfl.federation.federation import Federation
from pbmvfl.federation.in_process import InProcess
from pbmvfl.federation.party_processes import Processes
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.plan.policy import Policy
from pbmvfl.protocol.party import Party
from pbmvfl.protocol.transport import Answers
from support.federation_runs import process_of
from support.transport_conformance import TransportConformance


class TestInProcess(TransportConformance):
    parties_can_be_lost = False
    can_time_out = False

    def open(self, parties: Sequence[PartySetup]) -> InProcess:
        transport = InProcess(parties)
        assert not transport.at_the_same_time
        return transport


class TestInProcessAtTheSameTime(TestInProcess):
    """As with large batches: every answer is what it is one after the other."""

    def open(self, parties: Sequence[PartySetup]) -> InProcess:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(in_process, "_LARGE_BATCH", 1)
            transport = InProcess(parties)
        assert transport.at_the_same_time
        return transport


@pytest.mark.slow
class TestProcesses(TransportConformance):
    def open(self, parties: Sequence[PartySetup]) -> Processes:
        return Processes(parties)

    def lose(self, transport: Processes, party: int) -> None:
        process_of(transport, party).kill()
        process_of(transport, party).join()

    def hold(self, transport: Processes, party: int) -> None:
        os.kill(process_of(transport, party).pid, signal.SIGSTOP)

    def release(self, transport: Processes, party: int) -> None:
        os.kill(process_of(transport, party).pid, signal.SIGCONT)


class Threads:
    """A toy transport: a thread for each party. Nothing else in the project knows of it."""

    def __init__(self, parties: Sequence[PartySetup]) -> None:
        self._requests: list[SimpleQueue] = [SimpleQueue() for _ in parties]
        self._answers: list[SimpleQueue] = [SimpleQueue() for _ in parties]
        self.held = [threading.Event() for _ in parties]
        self.lost: set[int] = set()
        for event in self.held:
            event.set()
        self._parties = [setup.build() for setup in parties]
        self._threads = [
            threading.Thread(target=self._serve, args=(index, party), daemon=True)
            for index, party in enumerate(self._parties)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, index: int, party: Party) -> None:
        while (message := self._requests[index].get()) is not None:
            self.held[index].wait()
            self._answers[index].put(party.receive(message))

    def exchange(self, message: bytes, *, timeout: float | None = None) -> Answers:
        for index, queue in enumerate(self._requests):
            if index not in self.lost:
                queue.put(message)
        received, lost = {}, dict.fromkeys(self.lost, "its thread is gone")
        for index, queue in enumerate(self._answers):
            if index in self.lost:
                continue
            try:
                received[index] = queue.get(timeout=timeout)
            except Empty:
                lost[index] = f"no answer within {timeout:g} seconds"
        return Answers(received, lost)

    def close(self) -> None:
        for index, thread in enumerate(self._threads):
            self._requests[index].put(None)
            thread.join()
            self._parties[index].close()
        self._threads = []


class TestAToyTransportInOneFile(TransportConformance):
    def open(self, parties: Sequence[PartySetup]) -> Threads:
        return Threads(parties)

    def lose(self, transport: Threads, party: int) -> None:
        transport.lost.add(party)

    def hold(self, transport: Threads, party: int) -> None:
        transport.held[party].clear()

    def release(self, transport: Threads, party: int) -> None:
        transport.held[party].set()


# --- what a party accepts is asked before there is one ---


@pytest.mark.parametrize(
    ("policy", "choices", "words"),
    [
        (Policy(smallest_num_parties=4), {}, "num_parties=3: the policy permits 4 or more"),
        (Policy(mechanisms=frozenset({"pbm"})), {"mechanism": "ldp"}, "mechanism=ldp: the policy permits pbm"),
        (Policy(needs_secure_aggregation=True), {"secure_aggregation": False}, "secure_aggregation=False"),
        (Policy(allows_exact_metrics=False), {}, "evaluation=simulator"),
    ],
    ids=str,
)
def test_a_plan_that_the_owner_does_not_accept_makes_no_party(policy, choices, words, data, make_plan, monkeypatch):
    monkeypatch.setattr(Party, "__init__", lambda *_, **__: pytest.fail("a party was made"))
    plan = make_plan(data, **choices)
    setup = Federation(plan).party_setups(data, None, None, 1)[0]
    guarded = PartySetup(**{**vars(setup), "policy": policy})
    with pytest.raises(PolicyError, match=words):
        guarded.build()
    with pytest.raises(PolicyError, match=words):
        policy.check(plan)


def test_the_default_policy_accepts_what_a_simulation_runs(data, make_plan):
    for choices in ({}, {"mechanism": "none"}, {"mechanism": "ldp"}, {"evaluation": "released"}):
        Policy().check(make_plan(data, **choices))


@pytest.mark.slow
def test_what_is_wrong_with_a_party_in_a_process_is_said_when_it_starts(data, make_plan):
    setups = Federation(make_plan(data)).party_setups(data, None, None, 1)
    refusing = [PartySetup(**{**vars(each), "policy": Policy(smallest_num_parties=9)}) for each in setups]
    with pytest.raises(PolicyError, match="the policy permits 9 or more"):
        Processes(refusing)


class NamesItsSurroundings(Policy):
    """What a process of a party has around it, as the words of its refusal."""

    def check(self, plan, *, public_start=None):
        del plan, public_start
        drawn = SystemEntropy()
        drawn.fill(noise := np.zeros(16, dtype=np.uint8))
        raise PolicyError(f"{os.environ.get('PBMVFL_TEST_WORD')} {os.getpid()} {noise.tobytes().hex()}")


def test_parties_come_from_one_template_with_the_environment_of_now_and_noise_of_their_own(
    data, make_plan, monkeypatch
):
    """Copies of one process: whatever is random in one must not be so in the other."""
    setups = Federation(make_plan(data)).party_setups(data, None, None, 1)
    naming = [PartySetup(**{**vars(each), "policy": NamesItsSurroundings()}) for each in setups]
    found = []
    for word in ("first", "second"):
        monkeypatch.setenv("PBMVFL_TEST_WORD", word)
        for each in naming:
            with pytest.raises(PolicyError) as refused:
                Processes([each])
            found.append(str(refused.value).split())
    assert [words for words, _, _ in found] == ["first"] * len(naming) + ["second"] * len(naming)
    for column in (1, 2):  # neither a process nor its noise twice
        assert len({each[column] for each in found}) == len(found)
    assert str(os.getpid()) not in {process for _, process, _ in found}


@pytest.mark.slow
def test_a_program_that_no_process_can_be_started_from_is_told_so(data, make_plan, tmp_path):
    """One that is typed in, so that there is no file of it: the way of Python's own processes ends there."""
    (tmp_path / "plan.json").write_text(make_plan(data).to_json())
    program = """
from support.cohorts import small_data
from pbmvfl.federation.federation import Federation
from pbmvfl.plan.plan import Plan
from pbmvfl.federation.party_processes import Processes
plan = Plan.from_json(open("plan.json").read())
Processes(Federation(plan).party_setups(small_data(), None, None, 1))
"""
    path = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-"],
        input=program,
        text=True,
        capture_output=True,
        cwd=tmp_path,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("pbmvfl.errors.PartyLost"), done.stderr
