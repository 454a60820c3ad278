"""A process that was killed is told from a cable that was cut; and after a cut rounds go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from pbmvfl.deploy.link.interface import Channel
from support.line_parties import EchoProcess, Federation
from support.networks import Networks, why_not

_WHY_NOT = why_not()
needs_networks = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)


@pytest.fixture
def networks() -> Iterator[Networks]:
    made = Networks()
    yield made
    made.close()


class Rounds:
    """Asks one question after the other in a thread, until it is stopped or a party is lost."""

    def __init__(self, federation: Federation) -> None:
        self._line = federation.line
        self.count = 0
        self.lost: dict[int, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        everybody = range(len(self._line.parties))
        while not self._over.is_set():
            body = b"%d" % self.count
            answers = self._line.ask(dict.fromkeys(everybody, body), channel=Channel.PROTOCOL)
            if answers.lost:
                self.lost = dict(answers.lost)
                return
            assert all(answer == b"\2" + body for answer in answers.received.values())
            self.count += 1
            self._over.wait(0.005)

    def wait_for(self, more: int, *, seconds: float = 120) -> bool:
        """Whether so many more rounds come; the seconds end a test that hangs."""
        wanted, last = self.count + more, time.monotonic() + seconds
        while self.count < wanted and self._thread.is_alive() and time.monotonic() < last:
            time.sleep(0.01)
        return self.count >= wanted

    def stop(self) -> None:
        self._over.set()
        self._thread.join(timeout=120)


def test_a_killed_process_is_named_as_such_and_others_are_not(tmp_path):
    with Federation(tmp_path, ["bank", "hospital"], choices={"ended_after": 1.0}) as federation:
        processes = [EchoProcess(federation.site(name), tmp_path) for name in federation.names]
        try:
            rounds = Rounds(federation)
            assert rounds.wait_for(5)
            processes[1].kill()
            assert not rounds.wait_for(10_000_000)
            assert rounds.lost == {1: "its process ended"}
        finally:
            for process in processes:
                process.kill()


@needs_networks
@pytest.mark.slow
def test_a_cut_of_three_seconds_is_not_seen_and_a_kill_behind_it_is(networks, tmp_path):
    with networks.at_the_server():
        federation = Federation(tmp_path, ["bank"], host=networks.host, choices={"ended_after": 3.0})
    with federation:
        process = EchoProcess(federation.site("bank"), tmp_path, network=networks.party)
        try:
            rounds = Rounds(federation)
            assert rounds.wait_for(5)
            networks.cut()
            time.sleep(3)  # the cut itself
            networks.mend()
            assert rounds.wait_for(20)
            process.kill()
            assert not rounds.wait_for(10_000_000)
            assert rounds.lost == {0: "its process ended"}
        finally:
            process.kill()


@needs_networks
@pytest.mark.slow
def test_a_stopped_process_and_a_cut_are_no_ended_process(networks, tmp_path):
    with networks.at_the_server():
        federation = Federation(tmp_path, ["bank"], patience=4.0, host=networks.host)
    with federation:
        process = EchoProcess(federation.site("bank"), tmp_path, network=networks.party)
        try:
            federation.line.join(timeout=120)
            os.kill(process.process.pid, signal.SIGSTOP)
            stopped = federation.line.ask({0: b"x"}, channel=Channel.SETUP, timeout=1)
            assert stopped.lost == {0: "no answer within 1 seconds"}
            os.kill(process.process.pid, signal.SIGCONT)
            networks.cut()
            cut = federation.line.ask({0: b"y"}, channel=Channel.SETUP, timeout=100)
            assert cut.lost == {0: "no connection within 4 seconds"}
        finally:
            process.kill()
