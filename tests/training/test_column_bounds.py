"""Which cells are permitted: one public bound of raw columns, the same for every plan, and nothing after it refuses.

A plan that multiplies columns makes numbers far beyond the bound from cells within it. Whether a party takes part must
not tell how large those are.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbmvfl.crypto.key_exchange import Identity
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import DataError
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import Split
from pbmvfl.training.features import LazyRows, mapped
from support.cohorts import Cohort, small_data
from support.local_plans import WHITENED, local_plan, voting_plan

#: The public bound, written out: the tests share no number with the code.
BOUND = 1_000_000_000.0
BEYOND = float(np.nextafter(np.float32(BOUND), np.float32(np.inf)))
PARTY = 0
MAPS: dict[str, dict[str, Any]] = {
    "columns": {"features": "columns"},
    "pairs": {"features": "pairs"},
    "values": {"features": "values", "column_values": 3},
}
ROWS, TESTED = 24, 6


def table(cells: dict[tuple[str, int, int], float]) -> VerticalDataset:
    """Two parties with three small columns; the first has these cells, by (split, row, column)."""
    data = small_data(num_parties=2, num_samples=ROWS, num_test_samples=TESTED, columns=3)
    parts = {split: np.array(getattr(data, f"{split}_features")[PARTY]) for split in ("train", "test")}
    for (split, row, column), value in cells.items():
        parts[split][row, column] = value
    return dataclasses.replace(
        data,
        train_features=(parts["train"], *data.train_features[1:]),
        test_features=(parts["test"], *data.test_features[1:]),
    )


def in_files(folder: Path, data: VerticalDataset) -> VerticalDataset:
    """The same columns as read-only maps of files."""
    folder.mkdir()
    found: dict[str, Any] = {}
    for split in ("train_features", "test_features"):
        parts = []
        for index, part in enumerate(getattr(data, split)):
            np.save(folder / f"{split}-{index}.npy", part)
            parts.append(np.load(folder / f"{split}-{index}.npy", mmap_mode="r"))
        found[split] = tuple(parts)
    return dataclasses.replace(data, **found)


def as_held(kept: str, folder: Path, data: VerticalDataset) -> VerticalDataset:
    return in_files(folder, data) if kept == "file" else data


HELD = pytest.mark.parametrize("kept", ["memory", "file"])


# --- the attack: is a cell above 31,623? ---


@HELD
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_whether_there_is_a_party_does_not_depend_on_products_of_cells(name, kept, split, tmp_path):
    """Two worlds that differ in one cell: 30,000 or 32,000 beside a 32,000, products of 0.96e9 and 1.02e9."""
    plan = voting_plan(table({}), num_epochs=1, **MAPS[name])
    made = []
    for cell in (30_000.0, 32_000.0):
        data = table({(split, 0, 0): cell, (split, 0, 1): 32_000.0})
        made.append(Cohort(plan, as_held(kept, tmp_path / f"{cell:g}", data)))
    assert len(made) == 2


@HELD
def test_what_leaves_has_one_form_however_large_products_are(kept, tmp_path):
    """All of a run, to its predictions: the same messages are answered, with the same headers and lengths."""
    plan = voting_plan(table({}), num_epochs=2, features="pairs")
    forms = []
    for cell in (0.25, 30_000.0, 32_000.0, BOUND, -BOUND):
        cells = {(split, row, column): cell for split in ("train", "test") for row in (0, 3) for column in (0, 1)}
        cohort = Cohort(plan, as_held(kept, tmp_path / f"{cell:g}", table(cells)))
        cohort.run()
        assert [party.fault for party in cohort.parties] == [None, None]
        forms.append([(way, who, sent[5], sent[40], len(sent)) for way, who, sent in cohort.transcript])
    assert len(forms[0]) > 10
    assert all(form == forms[0] for form in forms)


# --- what is permitted ---


@HELD
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("value", [np.nan, -np.inf, BEYOND, -2e9])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_cell_that_is_no_number_or_beyond_the_bound_is_refused_by_every_plan(name, kept, value, split, tmp_path):
    data = table({})
    plan = voting_plan(data, num_epochs=1, **MAPS[name])
    rows = {"train": data.train_features[PARTY].copy(), "test": data.test_features[PARTY].copy()}
    rows[split][4, 2] = value
    if kept == "file":
        for each, columns in rows.items():
            np.save(tmp_path / f"{each}.npy", columns)
            rows[each] = np.load(tmp_path / f"{each}.npy", mmap_mode="r")
    identities = [Identity.generate() for _ in range(2)]
    setup = PartySetup(
        plan=plan,
        index=PARTY,
        identity=identities[PARTY].private_bytes(),
        identities=tuple(identity.public for identity in identities),
        train_features=rows["train"],
        test_features=rows["test"],
    )
    words = rf"party=0: row 4 of its {split} rows, column \[2\] is NaN or beyond 1e\+09; give finite numbers"
    with pytest.raises(DataError, match=words):
        setup.build()


@HELD
@pytest.mark.parametrize("name", MAPS)
def test_cells_at_the_bound_are_permitted_by_every_plan(name, kept, tmp_path):
    plan = voting_plan(table({}), num_epochs=1, **MAPS[name])
    cells = {(split, row, column): sign * BOUND for split in ("train", "test") for row, column, sign in CORNERS}
    assert len(Cohort(plan, as_held(kept, tmp_path / "rows", table(cells))).parties) == 2


CORNERS = [(0, 0, 1), (0, 1, 1), (0, 2, -1), (1, 0, -1), (1, 1, -1), (2, 2, 1)]


# --- what the map makes of them ---


def products(rows: np.ndarray) -> np.ndarray:
    """Columns and the product of every two, in exact arithmetic, clipped and then rounded."""
    found = []
    for row in rows.tolist():
        line = list(row)
        for left in range(len(row)):
            line += [max(-BOUND, min(BOUND, row[left] * row[right])) for right in range(left + 1, len(row))]
        found.append(line)
    return np.array(found, dtype=np.float32)


def pair_plan() -> Plan:
    return local_plan(small_data(num_parties=2, num_samples=ROWS, columns=3), features="pairs", noise_multiplier=3.0)


def test_products_beyond_the_bound_are_the_bound_and_others_are_as_before(tmp_path):
    rows = np.random.default_rng(8).normal(size=(200, 3)).astype(np.float32)
    rows[100:] *= np.float32(1e5)
    rows[0], rows[1], rows[2] = (30_000, 32_000, -0.0), (32_000, 32_000, -32_000), (BOUND, -BOUND, 0.5)
    found = mapped(pair_plan(), rows)
    np.testing.assert_array_equal(found, products(rows))
    assert found.dtype == np.float32
    assert (found[1, 3:] == [BOUND, -BOUND, -BOUND]).all()
    inside = np.abs(rows[:100, 0].astype(np.float64) * rows[:100, 1]) < BOUND
    assert (found[:100, 3][inside].view(np.uint32) == (rows[:100, 0] * rows[:100, 1])[inside].view(np.uint32)).all()
    np.save(tmp_path / "rows.npy", rows)
    lazy = LazyRows(pair_plan(), np.load(tmp_path / "rows.npy", mmap_mode="r"))
    assert lazy.take(np.arange(200)).tobytes() == found.tobytes()
    assert lazy.take(np.arange(len(lazy))).tobytes() == found.tobytes()


def test_columns_are_not_changed_by_being_mapped():
    """A map clips what it computes, never the owner's own rows."""
    rows = np.array([[30_000.0, 32_000.0, BOUND]], dtype=np.float32)
    kept = rows.copy()
    mapped(pair_plan(), rows)
    assert rows.tobytes() == kept.tobytes()


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 28, 28)])
def test_points_of_pictures_at_the_bound_are_within_it(shape):
    pictures = np.full((3, *shape), BOUND, dtype=np.float32)
    pictures[1] *= -1
    plan = local_plan(small_data(num_parties=2, num_samples=ROWS), encoder="linear", noise_multiplier=3.0)
    assert np.abs(mapped(plan, pictures)).max() <= BOUND


@pytest.mark.parametrize("more", [{}, WHITENED], ids=["as they are", "whitened"])
def test_the_party_s_rows_are_the_mapped_columns(more, tmp_path):
    """The map is applied once, wherever the columns are held."""
    data = table({("train", 0, 0): 32_000.0, ("train", 0, 1): 32_000.0})
    plan = local_plan(data, features="pairs", noise_multiplier=3.0, **more)
    expected = products(data.train_features[PARTY])
    for kept in ("memory", "file"):
        cohort = Cohort(plan, as_held(kept, tmp_path / kept, data))
        source = cohort.parties[PARTY].rows._sources[Split.TRAIN]
        np.testing.assert_array_equal(source.take(np.arange(ROWS)), expected)
