"""Rows that stay in a mapped file: the same messages to the byte as rows in memory, and never all of them at once."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import DataError, EncoderError
from pbmvfl.federation.federation import Federation
from pbmvfl.ledger.row_identity import keyed_digests, row_digests
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.round_kinds import FUSION, LOCAL, Split
from pbmvfl.protocol import party_rows
from pbmvfl.protocol.party_rows import PartyRows, check_rows
from pbmvfl.training import features as lazy_rows
from pbmvfl.training.features import LazyRows, feature_shape, following, is_mapped, mapped
from support.cohorts import Cohort, small_data, small_plan
from support.local_plans import WHITENED, local_plan, voting_plan

DATA = small_data(num_parties=3, num_samples=37, num_test_samples=13)
PLAIN = {"mean_noise": 0.0, "gram_noise": 0.0}
#: Of three parties that have four columns each.
SHAPES = "2u4+2c+p2;1c+3g5+p3;4u3"


def in_a_file(folder: Path, rows: np.ndarray, name: str = "rows") -> np.memmap:
    np.save(folder / f"{name}.npy", rows)
    found = np.load(folder / f"{name}.npy", mmap_mode="r")
    assert isinstance(found, np.memmap)
    return found


def in_files(folder: Path, data: VerticalDataset) -> VerticalDataset:
    parts = {
        split: tuple(in_a_file(folder, part, f"{split}-{index}") for index, part in enumerate(getattr(data, split)))
        for split in ("train_features", "test_features")
    }
    return dataclasses.replace(data, **parts)


@pytest.fixture
def few_at_a_time(monkeypatch):
    """Pieces of two rows of four columns."""
    monkeypatch.setattr(lazy_rows, "_PIECE_BYTES", 40)


PLANS: dict[str, Any] = {
    "joint": lambda: small_plan(DATA),
    "joint, noisy": lambda: small_plan(DATA, noise_multiplier=2.0, clip_norm=0.5),
    "joint, whole epoch as a batch": lambda: small_plan(DATA, batch_size=37),
    "mlp": lambda: small_plan(DATA, encoder="mlp", momentum=0.9),
    "local": lambda: local_plan(DATA, batch_size=37),
    "local, noisy": lambda: local_plan(DATA, batch_size=37, noise_multiplier=3.0, clip_norm=0.7),
    "local, whitened": lambda: local_plan(DATA, noise_multiplier=3.0, **WHITENED),
    "local, pairs": lambda: local_plan(DATA, noise_multiplier=3.0, features="pairs"),
    "local, values": lambda: local_plan(DATA, noise_multiplier=3.0, features="values", column_values=3),
    "local, shapes": lambda: local_plan(DATA, noise_multiplier=3.0, features="shapes", shapes=SHAPES, **WHITENED),
    "votes": lambda: voting_plan(DATA),
    "votes, whole": lambda: voting_plan(DATA, batch_size=37),
}


@pytest.mark.parametrize("kept", [False, True], ids=["made again", "kept"])
@pytest.mark.parametrize("name", PLANS)
def test_every_message_is_the_same_to_the_byte(tmp_path, name, kept, request, monkeypatch):
    plan = PLANS[name]()
    in_memory = Cohort(plan, DATA)
    if not kept:
        monkeypatch.setattr(party_rows, "_MOST_KEPT", 0)
        request.getfixturevalue("few_at_a_time")
    mapped_rows = Cohort(plan, in_files(tmp_path, DATA))
    in_memory.run()
    mapped_rows.run()
    assert len(in_memory.transcript) > 10
    assert mapped_rows.transcript == in_memory.transcript
    for party in mapped_rows.parties:
        few = party.rows.batch(Split.TRAIN, np.arange(3))
        assert kept or few.untyped_storage().nbytes() == few.nbytes  # a part of nothing that is kept
    for one, other in zip(in_memory.parties, mapped_rows.parties, strict=True):
        assert one.fault is None
        assert other.fault is None
        for key, value in one.part_state().items():
            assert value.numpy().tobytes() == other.part_state()[key].numpy().tobytes(), key


def test_a_changed_row_changes_the_messages(tmp_path):
    """The control: the comparison above sees one row."""
    plan = small_plan(DATA, mechanism="none")
    changed = in_files(tmp_path, DATA)
    first = np.array(DATA.train_features[0])
    first[5] += 1
    changed = dataclasses.replace(changed, train_features=(in_a_file(tmp_path, first), *changed.train_features[1:]))
    in_memory, mapped_rows = Cohort(plan, DATA), Cohort(plan, changed)
    in_memory.run()
    mapped_rows.run()
    assert mapped_rows.transcript != in_memory.transcript


@pytest.mark.parametrize("features", ["columns", "pairs", "values", "shapes"])
def test_lazy_rows_are_the_mapped_ones(tmp_path, features, monkeypatch):
    monkeypatch.setattr(lazy_rows, "_PIECE_BYTES", 200)
    more = {"values": {"column_values": 3}, "shapes": {"shapes": SHAPES}}
    plan = local_plan(DATA, features=features, **more.get(features, {}))
    rows = in_a_file(tmp_path, DATA.train_features[1])
    lazy, expected = LazyRows(plan, rows, index=1), mapped(plan, DATA.train_features[1], index=1)
    assert (lazy.shape, lazy.dtype, len(lazy)) == (expected.shape, expected.dtype, len(expected))
    np.testing.assert_array_equal(lazy.take(np.arange(37)), expected)
    order = np.random.default_rng(3).permutation(37)[:20]
    np.testing.assert_array_equal(lazy.take(order), expected[order])


# --- shapes ---


def hats(values: Any, knots: Sequence[float]) -> npt.NDArray[np.float64]:
    """Hat functions by numpy's interpolation of one peak each."""
    peaks = np.eye(len(knots))
    return np.stack([np.interp(values, knots, peak) for peak in peaks], axis=1)


@settings(max_examples=30, deadline=None)
@given(
    rows=arrays(np.float32, (5, 3), elements=st.floats(-1.25, 1.25, width=32)),
    kinds=st.lists(st.sampled_from(["u5", "g6", "v3", "c"]), min_size=3, max_size=3),
    products=st.sampled_from([0, 2, 3]),
)
def test_shapes_are_interpolated_peaks_and_their_products(rows, kinds, products):
    text = "+".join([f"1{kind}" for kind in kinds] + ([f"p{products}"] if products else []))
    plan = Plan.of(num_parties=2, num_samples=5, num_classes=2, features="shapes", shapes=f"7c;{text}")
    found = mapped(plan, rows, index=1)
    ends = {"u": (-1, 1), "v": (0, 1)}
    parts, coarse = [], []
    for column, kind in enumerate(kinds):
        values = rows[:, column].astype(np.float64)
        if kind == "c":
            parts.append(values[:, None])
            continue
        for into, count in ((parts, int(kind[1:])), (coarse, products)):
            if kind[0] == "g":
                span = 100.0 ** (np.arange(count - 1) / max(1, count - 2)) / 100 if count > 2 else np.ones(1)
                knots = np.concatenate([[-1], 2 * span - 1])
            else:
                knots = np.linspace(*ends[kind[0]], count)
            if count:
                into.append(hats(values, knots))
    pairs = [(a[:, :, None] * b[:, None, :]).reshape(5, -1) for a, b in itertools.combinations(coarse, 2)]
    np.testing.assert_allclose(found, np.concatenate([*parts, *pairs], axis=1), atol=2e-6)
    assert found.dtype == np.float32
    assert found.shape == (5, *feature_shape(plan, (3,), index=1))
    if "c" not in kinds:
        assert (np.linalg.norm(found, axis=1) <= plan.party_shapes[1].norm * (1 + 1e-6)).all()


def test_slots_of_words_are_multiplied_by_those_of_other_words_and_by_hats():
    """Each row's two words and a number, against products written out one by one."""
    plan = Plan.of(num_parties=2, num_samples=5, num_classes=2, features="shapes", shapes="1w2+1c+1u5+1w3+p3;1c")
    random = np.random.default_rng(4)
    first, second, number = random.integers(0, 2, 50), random.integers(0, 3, 50), random.uniform(-1, 1, 50)
    other = random.normal(size=50)
    columns = [np.eye(2)[first], other[:, None], number[:, None], np.eye(3)[second]]
    found = mapped(plan, np.concatenate(columns, axis=1).astype(np.float32), index=0)
    coarse = hats(number, np.linspace(-1, 1, 3))
    for row in range(50):
        expected = [float(first[row] == word) for word in range(2)] + [other[row]]
        expected += [*hats(number[row : row + 1], np.linspace(-1, 1, 5))[0]]
        expected += [float(second[row] == word) for word in range(3)]
        expected += [float(first[row] == word) * coarse[row, at] for word in range(2) for at in range(3)]
        expected += [float(first[row] == a and second[row] == b) for a in range(2) for b in range(3)]
        expected += [coarse[row, at] * float(second[row] == word) for at in range(3) for word in range(3)]
        np.testing.assert_allclose(found[row], expected, atol=1e-6)
    assert (np.linalg.norm(np.delete(found, 2, axis=1), axis=1) <= plan.party_shapes[0].norm).all()


def test_shapes_are_defined_for_whatever_a_column_holds():
    plan = Plan.of(num_parties=2, num_samples=5, num_classes=2, features="shapes", shapes="1u3+1g3;1c")
    rows = np.array([[np.nan, np.nan], [np.inf, -np.inf], [1e9, -1e9]], dtype=np.float32)
    expected = [[1, 0, 0, 1, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0]]
    np.testing.assert_array_equal(mapped(plan, rows, index=0), expected)


def test_shapes_of_other_columns_or_of_no_party_are_refused():
    plan = Plan.of(num_parties=2, num_samples=5, num_classes=2, features="shapes", shapes="2u3;1c")
    with pytest.raises(EncoderError, match="party=0: shapes=2u3 are of 2 columns, but its rows have 3"):
        mapped(plan, np.zeros((4, 3), np.float32), index=0)
    with pytest.raises(EncoderError, match="index"):
        mapped(plan, np.zeros((4, 2), np.float32))
    wide = Plan.of(num_parties=2, num_samples=5, num_classes=2, features="shapes", shapes="9u3+p20;1c")
    with pytest.raises(EncoderError, match="numbers a row"):
        mapped(wide, np.zeros((4, 9), np.float32), index=0)


def test_a_column_of_two_humps_is_learned_by_its_shape_and_not_by_a_line():
    """The class is whether a column is far from 0, which no straight line tells."""
    random = np.random.default_rng(2)
    columns = [random.uniform(-1, 1, (3000, 1)).astype(np.float32) for _ in range(2)]
    labels = (np.abs(columns[0][:, 0]) > 0.5).astype(np.int64)
    data = VerticalDataset(
        name="humps",
        party_names=("a", "b"),
        train_features=tuple(part[:2000] for part in columns),
        test_features=tuple(part[2000:] for part in columns),
        train_labels=labels[:2000],
        test_labels=labels[2000:],
        class_names=("near", "far"),
        default_encoder="linear",
    )
    common = {"epsilon": 8, "data": data, "label_epsilon": None, "clip_norm": 3.0, "learning_rate": 0.5}
    shapes = Plan.for_budget(**common, features="shapes", shapes="1u8;1u8", gram_clip=1.0)
    lines = Plan.for_budget(**common, features="columns")
    assert Federation(shapes).fit(data).metrics["test_accuracy"] > 0.95
    assert Federation(lines).fit(data).metrics["test_accuracy"] < 0.7


@given(st.lists(st.integers(0, 9), max_size=6) | st.builds(lambda a, n: [*range(a, a + n)], *[st.integers(0, 9)] * 2))
def test_rows_are_a_slice_only_if_each_is_the_one_after_the_last(rows):
    table = np.arange(30)
    at = following(np.array(rows, dtype=np.int64))
    assert (at is not None) == (bool(rows) and rows == list(range(rows[0], rows[0] + len(rows))))
    if at is not None:
        assert table[at].tolist() == rows


@pytest.mark.parametrize("more", [{}, {"features": "pairs"}, WHITENED], ids=["as they are", "pairs", "whitened"])
def test_rows_in_memory_are_prepared_once_and_anew_after_each_statistic(more, monkeypatch):
    plan = local_plan(DATA, noise_multiplier=3.0, num_epochs=4, batch_size=10, **more)
    prepared = []
    original = PartyRows._all_kept
    monkeypatch.setattr(PartyRows, "_all_kept", lambda rows: prepared.append(rows) or original(rows))
    cohort = Cohort(plan, DATA)
    cohort.run()
    assert len(prepared) == plan.num_parties  # after both statistics, if there are any
    for party in cohort.parties:
        one, other = (party.rows.batch(Split.TRAIN, np.arange(37)) for _ in range(2))
        assert one.data_ptr() == other.data_ptr()  # of one memory: no batch is a copy


@pytest.mark.parametrize(
    "more", [{"preparation": "none"}, {"features": "pairs"}, {}], ids=["plain", "pairs", "whitened"]
)
def test_rows_that_train_are_kept_and_all_others_are_made(more):
    """Whatever is asked for, in whatever order, and after the last step too: the same rows as one by one."""
    plan = voting_plan(DATA, num_fusion_samples=11, **more)
    rows_of, other_rows = (Cohort(plan, DATA).parties[0].rows for _ in range(2))
    learned = {name: torch.randn_like(value) for name, value in rows_of.state().items()}
    for each in (rows_of, other_rows):
        each.load_state(dict(learned))
    other_rows.train_no_more()
    alone = torch.cat([other_rows.batch(Split.TRAIN, np.array([row])) for row in range(37)])
    network, fusion = plan.schedule.part_of(LOCAL), plan.schedule.part_of(FUSION)
    draw = np.random.default_rng(1)
    asked = [network, fusion, network[3:9], network[::-1].copy(), np.arange(37), draw.permutation(37), fusion[:0]]
    one, other = (rows_of.batch(Split.TRAIN, network[5:]) for _ in range(2))
    if "preparation" not in more:
        assert one.data_ptr() == other.data_ptr()  # no copy, although fusion rows lie between them
        assert one.untyped_storage().nbytes() == plan.num_network_samples * one[0].nbytes  # no memory for the others
    for _ in range(2):
        for rows in asked:
            torch.testing.assert_close(rows_of.batch(Split.TRAIN, rows), alone[torch.tensor(rows)])
        rows_of.train_no_more()


def test_only_read_only_maps_stay_in_their_file(tmp_path):
    np.save(tmp_path / "rows.npy", DATA.train_features[0])
    assert is_mapped(np.load(tmp_path / "rows.npy", mmap_mode="r"))
    assert not is_mapped(np.load(tmp_path / "rows.npy", mmap_mode="c"))
    assert not is_mapped(DATA.train_features[0])
    frozen = DATA.train_features[0].copy()
    frozen.setflags(write=False)
    assert not is_mapped(frozen)


@pytest.mark.usefixtures("few_at_a_time")
@pytest.mark.parametrize("value", [np.nan, np.inf, -2e9])
def test_a_row_that_is_no_number_is_named_wherever_it_stands(tmp_path, value):
    rows = np.array(DATA.train_features[0])
    rows[[31, 35], [2, 0]] = value
    lazy = LazyRows(small_plan(DATA), in_a_file(tmp_path, rows))
    errors = []
    for either in (rows, lazy):
        with pytest.raises(DataError, match=r"row 31 of its train rows, column \[2\]") as caught:
            check_rows(either, index=0, split=Split.TRAIN)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_a_party_with_many_mapped_rows_takes_little_memory(tmp_path):
    """100,000 rows of 40 columns are 16 MB; a party and 20 batches of them take a part of that."""
    rows, columns = 100_000, 40
    data = small_data(num_parties=2, num_samples=20, num_test_samples=0, columns=columns)
    wide = np.lib.format.open_memmap(tmp_path / "wide.npy", mode="w+", dtype=np.float32, shape=(rows, columns))
    wide[:] = np.random.default_rng(0).random(columns, dtype=np.float32)
    wide.flush()
    del wide
    part = np.load(tmp_path / "wide.npy", mmap_mode="r")
    data = dataclasses.replace(
        data,
        train_features=(part, part),
        train_labels=np.resize(data.train_labels, rows),
        test_features=(np.empty((0, columns), np.float32),) * 2,
    )
    plan = local_plan(data, noise_multiplier=3.0, batch_size=100, num_epochs=1, **WHITENED)
    Cohort(local_plan(DATA, noise_multiplier=3.0, **WHITENED), DATA).run()  # loads compiled loops, which take memory
    tracemalloc.start()
    try:
        cohort = Cohort(plan, data)
        party = cohort.parties[0]
        party.rows.learn(plan.schedule[0], party.noise)
        for number in range(20):
            assert party.rows.batch(Split.TRAIN, np.arange(number, number + 100)).shape == (100, columns)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20


# --- batches larger than memory ---


MANY = small_data(num_parties=2, num_samples=700, num_test_samples=10)


@pytest.mark.parametrize("choices", [{}, {"noise_band": 2, "batch_size": 300}, {"encoder": "mlp"}], ids=str)
def test_a_step_over_pieces_is_the_step_over_the_batch_to_the_bit(choices):
    """Chunks of 128 rows are added up exactly, so that it does not matter how many of them come at a time."""
    plan = local_plan(MANY, **{"noise_multiplier": 3.0, "clip_norm": 0.7, "batch_size": 700, **choices})
    at_once, in_pieces = (Cohort(plan, MANY).parties[0] for _ in range(2))
    count = plan.batch_size
    rows = torch.from_numpy(MANY.train_features[0][:count])
    gradient = np.random.default_rng(4).normal(size=(count, plan.embedding_dim)).astype(np.float32) / count
    for _ in range(3):
        at_once.network.update.embed(rows, for_training=True)
        at_once.network.update.apply(gradient, at_once.noise)
        pieces = (
            (rows[start : start + 256], lambda _, part=gradient[start : start + 256]: part)
            for start in range(0, count, 256)
        )
        in_pieces.network.update.step_over(pieces, rows=count, entropy=in_pieces.noise)
    for key, value in at_once.part_state().items():
        assert value.numpy().tobytes() == in_pieces.part_state()[key].numpy().tobytes(), key
    assert in_pieces.network.update.waiting_rows == 0


@pytest.mark.parametrize("held", ["memory", "file"])
def test_all_rows_as_one_batch_are_learned_from_piece_by_piece(tmp_path, monkeypatch, held):
    """Rows are taken in the table's order, so sums of chunks in float32 are of other rows: equal to its rounding."""
    plan = local_plan(MANY, noise_multiplier=3.0, batch_size=700, num_epochs=5, **WHITENED)
    at_once = Cohort(plan, MANY)
    monkeypatch.setattr(lazy_rows, "_PIECE_BYTES", 4 * 4 * 200)
    in_pieces = Cohort(plan, MANY if held == "memory" else in_files(tmp_path, MANY))
    largest: list[int] = []
    original = PartyRows.batch

    def note(self, split, rows):
        largest.append(len(rows))
        return original(self, split, rows)

    at_once.run()
    monkeypatch.setattr(PartyRows, "batch", note)
    in_pieces.run()
    assert max(largest) == 128
    for one, other in zip(at_once.parties, in_pieces.parties, strict=True):
        assert one.fault is None
        assert other.fault is None
        state = other.part_state()
        for key, value in one.part_state().items():
            np.testing.assert_allclose(state[key].numpy(), value.numpy(), rtol=1e-5, atol=1e-6)
        assert max(float(value.abs().max()) for key, value in state.items() if key.startswith("model.")) > 0.01


# --- the ledger's digests of values ---


@pytest.mark.parametrize("with_test", [True, False])
@pytest.mark.parametrize("names", [True, False])
def test_digests_of_values_do_not_depend_on_pieces(monkeypatch, with_test, names):
    train, test = DATA.train_features[0], DATA.test_features[0] if with_test else None
    ids = [f"n{number * 7 % 37}" for number in range(37)] if names else range(37)
    test_ids = [f"t{number}" for number in range(13)] if names else range(37, 50)
    whole = keyed_digests(b"k" * 32, train, test, ids, test_ids), row_digests(b"k" * 32, train, test)
    monkeypatch.setattr("pbmvfl.ledger.row_identity._ROWS_AT_A_TIME", 5)
    pieces = keyed_digests(b"k" * 32, train, test, ids, test_ids), row_digests(b"k" * 32, train, test)
    assert whole[0] == pieces[0]
    np.testing.assert_array_equal(whole[1], pieces[1])
