"""A federation makes each party's identity once for a run, and none to look ahead."""

from __future__ import annotations

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.federation.federation import Federation


class CountingFederation(Federation):
    """Notes for which parties it made an identity."""

    def new_identity(self, index: int) -> Identity:
        self.made = [*getattr(self, "made", []), index]
        return super().new_identity(index)


def test_a_forecast_makes_no_identity_and_a_run_one_for_each_party(data, make_plan, tmp_path):
    federation = CountingFederation(make_plan(data))
    federation.made = []
    assert len(federation.forecast(data, tmp_path / "ledgers")) == data.num_parties
    assert federation.made == []
    federation.fit(data, ledger=tmp_path / "ledgers")  # looks ahead itself
    assert federation.made == list(range(data.num_parties))
