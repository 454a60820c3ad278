"""NVFlare's cell carries what the line carries, and what others put into it has no effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

pytest.importorskip("nvflare")

from cell_parties import Backbone, CellThreads
from pbmvfl.party_setup import PartySetup
from transport_conformance import TransportConformance


@pytest.fixture(scope="module")
def backbone() -> Iterator[Backbone]:
    opened = Backbone()
    yield opened
    opened.close()


class TestCell(TransportConformance):
    @pytest.fixture(autouse=True)
    def _cells(self, backbone):
        self.backbone = backbone
        self.patience = 60.0

    def open(self, parties: Sequence[PartySetup]) -> CellThreads:
        return CellThreads(self.backbone, parties, patience=self.patience)

    def lose(self, transport: CellThreads, party: int) -> None:
        transport.lose(party)

    def hold(self, transport: CellThreads, party: int) -> None:
        transport.hold(party, still=True)

    def release(self, transport: CellThreads, party: int) -> None:
        transport.hold(party, still=False)
