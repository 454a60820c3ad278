"""The line does what every transport must do; and what a link does besides."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from line_parties import LineThreads
from pbmvfl.party_setup import PartySetup
from transport_conformance import TransportConformance


class TestLine(TransportConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path_factory):
        self.folder = tmp_path_factory

    def open(self, parties: Sequence[PartySetup]) -> LineThreads:
        return LineThreads(parties, self.folder.mktemp("line"))

    def lose(self, transport: LineThreads, party: int) -> None:
        transport.ends[party].close()

    def hold(self, transport: LineThreads, party: int) -> None:
        transport.held[party].clear()

    def release(self, transport: LineThreads, party: int) -> None:
        transport.held[party].set()
