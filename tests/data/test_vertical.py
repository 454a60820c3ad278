"""Aligned rows, split columns: what a data set refuses, and that a split loses and repeats nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pbmvfl.data import VerticalDataset
from pbmvfl.data.vertical import column_blocks, split_whole
from pbmvfl.errors import DataError


def make(**changes: Any) -> VerticalDataset:
    """Two parties with 2 and 3 columns, 4 training rows and 2 test rows, but for the changes."""
    values: dict[str, Any] = {
        "name": "small",
        "party_names": ("bank", "hospital"),
        "train_features": (np.zeros((4, 2), np.float32), np.ones((4, 3), np.float32)),
        "test_features": (np.zeros((2, 2), np.float32), np.ones((2, 3), np.float32)),
        "train_labels": np.array([0, 1, 0, 1]),
        "test_labels": np.array([1, 0]),
        "class_names": ("no", "yes"),
        "default_encoder": "mlp",
    }
    return VerticalDataset(**(values | changes))


def numbered(num_columns: int, *, layout: str = "columns", num_parties: int = 2, rows: int = 3) -> VerticalDataset:
    """A table in which every value says its row and column."""
    whole = np.arange(rows * num_columns, dtype=np.float32).reshape(rows, num_columns)
    parts = split_whole(whole, layout=layout, num_parties=num_parties)  # type: ignore[arg-type]
    return make(
        party_names=tuple(f"party-{m}" for m in range(num_parties)),
        train_features=parts,
        test_features=parts,
        train_labels=np.zeros(rows, np.int64),
        test_labels=np.zeros(rows, np.int64),
        layout=layout,
    )


def test_a_sound_data_set_knows_its_sizes() -> None:
    data = make()
    assert (data.num_parties, data.num_samples, data.num_test_samples, data.num_classes) == (2, 4, 2, 2)
    assert data.notes == ()


def test_a_data_set_shows_its_names_and_shapes_and_none_of_its_values() -> None:
    secret = 7654321.0
    data = make(
        train_features=(np.full((4, 2), secret, np.float32), np.full((4, 3), secret, np.float32)),
        train_ids=("ann", "bob", "cat", "dan"),
        notes=("A long note.",),
    )
    expected = "VerticalDataset(name='small', bank: train (4, 2) test (2, 2), hospital: train (4, 3) test (2, 3))"
    assert repr(data) == str(data) == expected


def test_a_party_with_fewer_rows_is_refused() -> None:
    with pytest.raises(DataError, match=r"party='hospital'.*3 rows.*4 labels"):
        make(train_features=(np.zeros((4, 2), np.float32), np.ones((3, 3), np.float32)))


def test_fewer_labels_than_rows_are_refused() -> None:
    with pytest.raises(DataError, match="party='bank', test features: 2 rows, but there are 1 labels"):
        make(test_labels=np.array([0]))


def test_a_single_party_is_refused() -> None:
    one = (np.zeros((4, 2), np.float32),)
    with pytest.raises(DataError, match="at least 2"):
        make(party_names=("bank",), train_features=one, test_features=(one[0][:2],))


def test_two_parties_of_one_name_are_refused() -> None:
    with pytest.raises(DataError, match="must be different"):
        make(party_names=("bank", "bank"))


def test_a_party_without_columns_is_refused() -> None:
    with pytest.raises(DataError, match=r"party='bank'.*no columns"):
        make(train_features=(np.zeros((4, 0), np.float32), np.ones((4, 3), np.float32)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_with_its_place(value: float) -> None:
    features = np.ones((4, 3), np.float32)
    features[2, 1] = value
    with pytest.raises(DataError, match=r"party='hospital', train features: row=2, column=1 "):
        make(train_features=(np.zeros((4, 2), np.float32), features))


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.bool_])
def test_features_of_another_type_are_refused(dtype: type) -> None:
    with pytest.raises(DataError, match=f"dtype={np.dtype(dtype)}; give a numpy array of float32"):
        make(train_features=(np.zeros((4, 2), dtype), np.ones((4, 3), np.float32)))


@pytest.mark.parametrize(
    "labels", [np.array([0.0, 1.0, np.nan, 1.0]), np.array([0, 1, None, 1], dtype=object)], ids=["nan", "none"]
)
def test_a_missing_label_is_refused_with_its_row(labels: np.ndarray) -> None:
    with pytest.raises(DataError, match=r"train labels: row=2 .* has no label"):
        make(train_labels=labels)


def test_no_labels_at_all_are_refused() -> None:
    with pytest.raises(DataError, match="train labels are missing"):
        make(train_labels=None)


@pytest.mark.parametrize("label", [-1, 2])
def test_a_label_outside_the_classes_is_refused(label: int) -> None:
    with pytest.raises(DataError, match=f"row=1 .* has label={label}; permitted are 0 to 1"):
        make(train_labels=np.array([0, label, 0, 1]))


def test_labels_of_another_type_are_refused() -> None:
    with pytest.raises(DataError, match="dtype=int32; give int64"):
        make(train_labels=np.array([0, 1, 0, 1], np.int32))


def test_splits_with_different_columns_are_refused() -> None:
    with pytest.raises(DataError, match="both splits need the same columns"):
        make(test_features=(np.zeros((2, 1), np.float32), np.ones((2, 3), np.float32)))


def test_training_rows_are_needed_and_test_rows_are_not() -> None:
    empty = (np.zeros((0, 2), np.float32), np.ones((0, 3), np.float32))
    assert make(test_features=empty, test_labels=np.array([], np.int64)).num_test_samples == 0
    with pytest.raises(DataError, match="train labels: there are no rows"):
        make(train_features=empty, train_labels=np.array([], np.int64))


@settings(deadline=None)  # a busy machine is no failure
@given(num_columns=st.integers(2, 80), data=st.data(), layout=st.sampled_from(["columns", "digits"]))
def test_every_column_goes_to_exactly_one_party(num_columns: int, data: st.DataObject, layout: Any) -> None:
    num_parties = data.draw(st.integers(2, num_columns))
    blocks = column_blocks(layout, num_columns, num_parties)
    assert len(blocks) == num_parties
    assert sorted(np.concatenate(blocks).tolist()) == list(range(num_columns))
    sizes = [len(block) for block in blocks]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@settings(deadline=None)  # a busy machine is no failure
@given(first=st.integers(2, 64), second=st.integers(2, 64), layout=st.sampled_from(["columns", "digits"]))
@example(first=4, second=7, layout="digits")  # quadrants are the one split that reorders
def test_splitting_again_equals_splitting_at_once(first: int, second: int, layout: str) -> None:
    again = numbered(64, layout=layout, num_parties=first).split_features(num_parties=second)
    at_once = numbered(64, layout=layout, num_parties=second)
    assert again.party_names == at_once.party_names
    for one, other in zip(again.train_features, at_once.train_features, strict=True):
        np.testing.assert_array_equal(one, other)


def test_thirty_columns_over_five_parties_are_six_in_order_for_each() -> None:
    data = numbered(30).split_features(num_parties=5)
    assert [part[0].tolist() for part in data.train_features] == [list(range(6 * m, 6 * m + 6)) for m in range(5)]


def test_more_parties_than_columns_are_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match="num_parties=31 is more than the 30 columns"):
        numbered(30).split_features(num_parties=31)


@pytest.mark.parametrize("count", [1, 0, -3, True, 2.0])
def test_a_party_count_below_two_or_not_an_integer_is_refused(count: Any) -> None:
    with pytest.raises(DataError, match="at least 2"):
        numbered(30).split_features(num_parties=count)


def test_four_parties_hold_the_quadrants_of_a_digit() -> None:
    data = numbered(64, layout="digits", num_parties=4)
    top_right, bottom_left = data.train_features[1][0].reshape(4, 4), data.train_features[2][0].reshape(4, 4)
    picture = np.arange(64).reshape(8, 8)
    np.testing.assert_array_equal(top_right, picture[:4, 4:])
    np.testing.assert_array_equal(bottom_left, picture[4:, :4])


def test_pictures_have_four_parties_only() -> None:
    pictures = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    parts = split_whole(pictures, layout="quadrants", num_parties=4)
    np.testing.assert_array_equal(parts[3], pictures[:, :, 2:, 2:])
    data = make(
        party_names=("a", "b", "c", "d"),
        train_features=parts,
        test_features=parts,
        train_labels=np.array([0, 1]),
        layout="quadrants",
    )
    assert data.split_features(num_parties=4) is data
    with pytest.raises(DataError, match=r"num_parties=2 .* only num_parties=4"):
        data.split_features(num_parties=2)


def test_views_are_shared_out_by_divisors_of_twelve() -> None:
    whole = np.arange(2 * 12 * 4, dtype=np.uint8).reshape(2, 12, 2, 2)
    for count in (2, 3, 4, 6, 12):
        parts = split_whole(whole, layout="views", num_parties=count)
        assert {part.shape for part in parts} == {(2, 12 // count, 2, 2)}
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    for count in (5, 7, 8, 24):
        with pytest.raises(DataError, match=r"give one of 2, 3, 4, 6, 12"):
            split_whole(whole, layout="views", num_parties=count)


def test_rows_keep_their_ids_when_the_columns_are_cut_again() -> None:
    ids = {"train_ids": ("ann", "bob", "cat"), "test_ids": ("dan", "eve", "fay")}
    data = dataclasses.replace(numbered(64, layout="digits", num_parties=2), **ids)
    for again in (data.split_features(num_parties=4), data.split_features(num_parties=2)):
        assert (again.train_ids, again.test_ids) == (ids["train_ids"], ids["test_ids"])
    assert make().train_ids is make().test_ids is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_ids": ("a", "b", "c")}, "train_ids: 3 ids for 4 rows; give one per row"),
        ({"test_ids": ("a", "b", "c")}, "test_ids: 3 ids for 2 rows"),
        ({"train_ids": ("a", "b", "c", "b")}, "train_ids: 'b' occurs more than once"),
        ({"test_ids": (1, 2)}, r"test_ids must be a tuple of texts; give str\(number\)"),
        ({"test_ids": "ab"}, "test_ids must be a tuple of texts"),
        ({"test_ids": range(2)}, "test_ids must be a tuple of texts"),
    ],
)
def test_ids_that_do_not_name_each_row_once_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(**changes)


def test_the_same_person_may_be_a_training_row_and_a_test_row() -> None:
    assert make(train_ids=("a", "b", "c", "d"), test_ids=("c", "b")).test_ids == ("c", "b")


def test_assigned_columns_are_not_split_again() -> None:
    with pytest.raises(DataError, match="assigned to bank, hospital explicitly"):
        make().split_features(num_parties=2)
