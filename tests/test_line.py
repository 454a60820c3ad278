"""The line does what every transport must do, with a process for each party."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from line_parties import LineProcesses
from pbmvfl.party_setup import PartySetup
from transport_conformance import TransportConformance


@pytest.mark.slow
class TestLine(TransportConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path_factory):
        self.folder = tmp_path_factory

    def open(self, parties: Sequence[PartySetup]) -> LineProcesses:
        return LineProcesses(parties, self.folder.mktemp("line"))

    def lose(self, transport: LineProcesses, party: int) -> None:
        transport.kill(party)

    def hold(self, transport: LineProcesses, party: int) -> None:
        transport.signal(party, signal.SIGSTOP)

    def release(self, transport: LineProcesses, party: int) -> None:
        transport.signal(party, signal.SIGCONT)
