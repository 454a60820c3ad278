"""Ledgers of earlier versions have rounds of counts: they stay readable, and keep every charge."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from pbmvfl.ledger.limits import Limit, Rates
from pbmvfl.ledger.session_terms import SessionTerms
from pbmvfl.plan.round_kinds import COUNTS, LOCAL

#: As version 0.1 wrote it: three local epochs, then noisy counts of votes over all 23 rows, deviation 5 rows.
TERMS: dict[str, Any] = {
    "schedule": {
        "num_samples": 23,
        "num_test_samples": 0,
        "batch_size": 23,
        "seed": 7,
        "phases": [
            {"kind": "local", "passes": 3, "order": "shuffled"},
            {"kind": "counts", "passes": 1, "order": "as-given"},
        ],
    },
    "events": {
        "local": [{"event": "rounded-gaussian-sum", "clip_norm": 1.0, "noise_multiplier": 6.0, "diameter": 2.0}],
        "counts": [
            {"event": "rounded-gaussian-sum", "clip_norm": 1.0, "noise_multiplier": 5.0, "diameter": math.sqrt(2)}
        ],
    },
    "num_parties": 3,
    "couples_rows": False,
    "words": "nothing leaves a party, M=3",
    "public_start": True,
}


def limit(unit: str) -> Limit:
    return Limit.choose(unit=unit, accounting="strict", epsilon=1e6, delta=1e-5, order=4.0)


def test_terms_with_counts_are_read_and_written_as_they_were() -> None:
    terms = SessionTerms.from_json(json.dumps(TERMS))
    assert json.loads(terms.to_json()) == TERMS
    assert [current.kind for current in terms.schedule] == [LOCAL] * 3 + [COUNTS]
    assert np.array_equal(terms.schedule[3].rows, np.arange(23))


@pytest.mark.parametrize(("unit", "parties"), [("cell", 1), ("record", 3)])
def test_counts_cost_a_row_what_they_did(unit: str, parties: int) -> None:
    """Order times half the squared shift of Gaussian noise, sqrt 2 over 5, at each honest party."""
    rates = Rates.of(SessionTerms.from_json(json.dumps(TERMS)), limit(unit))
    assert rates.for_row(COUNTS, 23).amount == pytest.approx(parties * 4.0 * (2 / 25) / 2, rel=1e-8)
    assert rates.for_all(COUNTS, 23, first_of_run=False).amount == 0


def test_counts_cost_a_party_as_if_all_its_rows_were_others() -> None:
    rates = Rates.of(SessionTerms.from_json(json.dumps(TERMS)), limit("party"))
    moved = 23 * math.sqrt(2) / 5
    assert rates.for_all(COUNTS, 23, first_of_run=False).amount == pytest.approx(4.0 * moved**2 / 2, rel=1e-8)
