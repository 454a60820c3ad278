"""The typical lead of scores: bins against a loop, the estimate against the medians, whatever the scores hold."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pbmvfl.randomness.secret import SystemEntropy
from pbmvfl.score_scale import NUM_BINS, lead_bins, noisy_leads, typical_lead
from pbmvfl.symbol_tables import steps_per_row
from pbmvfl.votes import score_leads


@settings(max_examples=60, deadline=None)
@given(
    scores=arrays.arrays(
        np.float32, st.tuples(st.integers(1, 6), st.integers(2, 5)), elements=st.floats(width=32, allow_nan=True)
    )
)
def test_every_row_has_a_lead_and_a_bin_whatever_its_scores_are(scores: Any) -> None:
    for row, lead, place in zip(scores.tolist(), score_leads(scores), lead_bins(scores), strict=True):
        known = sorted(0.0 if math.isnan(each) else min(max(each, -1e30), 1e30) for each in row)
        assert lead == known[-1] - known[-2]
        assert 0 <= place < NUM_BINS
        if 2**-7.9 < lead < 2**7.9:
            assert 2 ** (-8 + place / 2) * (1 - 1e-9) <= lead <= 2 ** (-8 + (place + 1) / 2) * (1 + 1e-9)


@pytest.mark.parametrize("sizes", [(1.0, 1.0), (0.1, 4.0, 25.0)])
def test_the_typical_lead_is_near_the_mean_of_the_medians(sizes: tuple[float, ...]) -> None:
    rng = np.random.default_rng(4)
    scores = [size * rng.normal(size=(6000, 3)) for size in sizes]
    medians = [statistics.median((lambda a: a[-1] - a[-2])(sorted(row)) for row in part.tolist()) for part in scores]
    exact = math.exp(statistics.fmean(math.log(each) for each in medians))
    found = typical_lead([noisy_leads(part, 30.0, SystemEntropy()) for part in scores], 6000, 30.0)
    assert exact / 1.2 < found < exact * 1.2


def test_a_table_of_nothing_but_noise_still_gives_a_number() -> None:
    empty = np.full((1, NUM_BINS), -(2**35), dtype=np.int64)
    assert 2.0**-8 <= typical_lead([empty], 5, 30.0) <= 2.0**8


def test_replacing_one_row_moves_two_counts_by_one() -> None:
    class SameNoise:
        seeded = True

        def fill(self, buffer: Any) -> None:
            buffer.view(np.uint8)[...] = 0x35

    scores = np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 3.0]])
    other = np.array([[0.0, 1.0], [0.0, 9.0], [0.0, 3.0]])
    moved = noisy_leads(scores, 7.0, SameNoise()) - noisy_leads(other, 7.0, SameNoise())
    assert sorted(moved[moved != 0].tolist()) == [-steps_per_row(7.0), steps_per_row(7.0)]
