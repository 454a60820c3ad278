"""Rules of local training: what they do to noise, and what they are for, on tables that would fail without them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import PlanError
from pbmvfl.federation.federation import Federation
from pbmvfl.plan.local_search import LocalRules, block_sides, dense_columns
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.search import plan_for_budget
from pbmvfl.plan.shapes import PartyShapes

SHIFT = 1.6


def rules(rows: int, columns: int | None, classes: int = 2, **more: Any) -> LocalRules:
    return LocalRules(num_samples=rows, num_classes=classes, columns=columns, **more)


def strength(rows: int, columns: int | None, classes: int = 2, shift: float = SHIFT, **how: Any) -> dict[str, float]:
    return rules(rows, columns, classes).strength(shift, **{"num_epochs": 40, "prepared": True, **how})


def features(rows: int, columns: int, classes: int = 2, shift: float = SHIFT, **more: Any) -> str:
    return str(rules(rows, columns, classes, **more).settings(shift).get("features", "columns"))


# --- noise ---


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("epochs", [1, 7, 40])
def test_squares_of_all_shifts_add_up_to_that_of_the_whole(prepared, epochs):
    """Two rows are at most 2 clip norms apart in a step and in a mean, sqrt(2) in a Gram matrix."""
    found = rules(5000, 9).strength(SHIFT, num_epochs=epochs, prepared=prepared)
    squares = epochs * (2 / found["noise_multiplier"]) ** 2
    if prepared:
        squares += (2 / found["mean_noise"]) ** 2 + 2 / found["gram_noise"] ** 2
    assert ("mean_noise" in found) == prepared
    assert squares == pytest.approx(SHIFT**2, rel=1e-4)


# --- clip norms and steps ---


def test_rows_keep_their_usual_norm_where_there_are_many_of_them():
    """Whitened rows of D numbers and a constant have a norm of about sqrt(D + 1): 2.65 to three digits for 6."""
    assert strength(20_000, 6)["clip_norm"] == 2.65
    assert strength(20_000, 20)["clip_norm"] == 4.58


def test_the_fewer_rows_and_the_more_columns_and_classes_the_harder_rows_are_clipped():
    """0.1 sqrt(shift N / K) where that is below the usual norm."""
    assert strength(2000, 100)["clip_norm"] == pytest.approx(0.1 * math.sqrt(1.6 * 2000 / 2), rel=0.01)
    assert strength(500, 100)["clip_norm"] == pytest.approx(0.05 * math.sqrt(1.6 * 2000 / 2), rel=0.01)
    assert strength(2000, 100, 8)["clip_norm"] == pytest.approx(0.05 * math.sqrt(1.6 * 2000 / 2), rel=0.01)
    # Parties with shapes clip to the usual norm of their own widths: the plan has what none of them exceeds.
    assert strength(20_000, 6, features="shapes")["clip_norm"] == pytest.approx(0.1 * math.sqrt(16_000), rel=0.01)


def test_steps_grow_with_the_classes():
    assert [strength(5000, 9, classes)["learning_rate"] for classes in (2, 4, 8)] == [0.25, 0.5, 1.0]


def test_half_the_steps_go_twice_as_far_and_no_step_is_absurd():
    assert strength(5000, 9, num_epochs=20)["learning_rate"] == pytest.approx(
        2 * strength(5000, 9)["learning_rate"], rel=0.01
    )
    for rows, columns, classes in ((1, 1, 2), (10**9, 1, 1000), (10, 10_000, 50)):
        for prepared in (True, False):
            found = strength(rows, columns, classes, num_epochs=1, prepared=prepared)
            assert 0 < found["learning_rate"] < 1000
            assert 0 < found["clip_norm"] <= math.sqrt(columns + 1) * 1.01


def test_columns_that_nobody_counted_are_planned_for_too():
    assert strength(5000, None) == strength(5000, 16)
    assert rules(10**6, None).settings(SHIFT).get("features", "columns") == "columns"


# --- what a network sees ---


def test_products_of_columns_are_looked_at_where_rows_pay_for_them():
    assert features(5000, 5) == "pairs"
    assert features(40_000, 10) == "pairs"
    assert features(100, 5) == "columns"  # too few rows for 15 numbers
    assert features(10_000, 30, 6) == "columns"  # too much noise for 465 numbers and 6 classes
    assert features(10**7, 100) == features(10**7, 10) == "columns"  # too many numbers
    assert features(5000, 5, shift=0.01) == "columns"
    assert features(10**6, 1) == "columns"  # there are no two


def shapes(rows: int, *kinds: str, classes: int = 2, shift: float = SHIFT, **more: Any) -> str:
    return str(rules(rows, max(map(len, kinds)), classes, kinds=kinds, **more).settings(shift).get("shapes", ""))


def test_columns_with_ranges_have_as_many_knots_as_their_noise_permits():
    assert shapes(5000, "uuc", "gg") == "2u20+1c+p4;2g20+p4"
    # 2 * 81 * 7 / (1.6 * 1000) is above 0.5 for 5 columns of 16 knots, and 2 * 61 * 7 / 1600 is not far above it.
    assert shapes(1000, "uuuuu", classes=7) == "5u8+p3"
    assert shapes(400, "uuuuu", classes=7) == "5u4"
    assert shapes(100, "uuuuu", classes=7) == "", "straight lines"
    assert shapes(20_000, "ccc", "cc") == ""
    # 2 * (40 + 64 + 1) * 2 / (1.6 * rows) is at most 0.05 from 5,250 rows on: fine products.
    assert [shapes(rows, "uu") for rows in (5249, 5250)] == ["2u20+p4", "2u20+p8"]
    assert shapes(10**5, "uuu") == "3u20+p8", "252 numbers"
    assert shapes(10**5, "uuuu", "uu") == "4u20+p4;2u20+p8", "464 numbers would be too many"
    found = rules(20_000, 2, kinds=("uu", "uc")).settings(SHIFT)
    assert (found["features"], found["gram_clip"]) == ("shapes", 1.0)
    assert rules(20_000, 2, kinds=("uu", "uc")).settings().get("features") is None, "before the shift is known"


def test_every_party_has_shapes_by_its_own_width():
    wide = "u" * 60
    found = shapes(20_000, wide, "uu").split(";")
    assert found[1] == "2u20+p8"
    assert found[0] == "60u3", "200 hats at the most, whatever their noise"
    assert shapes(10**6, "u" * 67, "uu").split(";")[0] == "67c"
    assert shapes(20_000, "uu", wide).split(";") == found[::-1]


def test_a_column_alone_at_its_party_has_few_knots():
    assert shapes(200_000, "u", "cuc") == "1u8;1c+1u8+1c"


def test_mapped_rows_of_many_stay_small():
    """2^25 numbers a party: 64 of each of 521,000 rows."""
    found = PartyShapes.parse(shapes(521_000, "uuuuu"))
    assert found.width <= 64
    assert str(found) == "5u12"


def test_columns_of_few_values_have_a_knot_at_each_and_a_product_for_every_two():
    assert shapes(8844, "v" * 6, column_values=3) == "6v3+p3"
    sizes = {"num_parties": 5, "num_samples": 8844, "num_classes": 2, "columns": 6}
    plan = plan_for_budget(Plan, epsilon=8, delta=None, unit="cell", accounting="strict", column_values=3, **sizes).plan
    assert plan.shapes == ";".join(["6v3+p3"] * 5)


def test_what_the_caller_fixes_stays_fixed():
    sizes = {"num_parties": 3, "num_samples": 5000, "num_classes": 2, "columns": 5}
    assert Plan.for_budget(epsilon=8, **sizes).features == "pairs"
    plan = Plan.for_budget(epsilon=8, features="columns", clip_norm=0.7, learning_rate=0.3, num_epochs=9, **sizes)
    assert (plan.features, plan.clip_norm, plan.learning_rate, plan.num_epochs) == ("columns", 0.7, 0.3, 9)
    with pytest.raises(PlanError, match="num_epochs=0"):
        Plan.for_budget(epsilon=8, num_epochs=0, **sizes)


def test_another_map_than_shapes_may_be_chosen_for_columns_with_ranges():
    sizes = {"num_parties": 2, "num_samples": 5000, "num_classes": 2, "columns": 3, "kinds": ("uuu", "uuu")}
    assert Plan.for_budget(epsilon=8, **sizes).features == "shapes"
    plan = Plan.for_budget(epsilon=8, **sizes, features="columns")
    assert (plan.features, plan.shapes) == ("columns", "")


def test_pictures_are_counted_as_the_smaller_ones_that_they_become():
    assert dense_columns((7,)) == 7
    assert dense_columns((3, 16, 16)) == 768
    assert (block_sides((2, 32, 48)), dense_columns((2, 32, 48))) == ((2, 3), 2 * 16 * 16)
    assert (block_sides((3, 112, 112)), dense_columns((3, 112, 112))) == ((7, 7), 768)
    assert block_sides((1, 17, 34)) == (17, 17)  # a side of 17 points has no smaller blocks


# --- what the rules are for ---


def made(
    labels_of: Callable[[np.ndarray, np.random.Generator], np.ndarray], rows: int, columns: int
) -> VerticalDataset:
    """Two parties with normal columns in a public range of -4 to 4; labels of all columns together."""
    random = np.random.default_rng(11)
    x = random.normal(size=(rows + 1000, 2 * columns))
    labels = labels_of(x, random).astype(np.int64)
    parts = [np.clip(x[:, part * columns : (part + 1) * columns] / 4, -1, 1).astype(np.float32) for part in (0, 1)]
    return VerticalDataset(
        name="made",
        party_names=("one", "two"),
        train_features=tuple(part[:rows] for part in parts),
        test_features=tuple(part[rows:] for part in parts),
        train_labels=labels[:rows],
        test_labels=labels[rows:],
        class_names=("no", "yes"),
        default_encoder="linear",
    )


def test_a_rare_class_is_found_at_epsilon_8():
    """With every row clipped to a norm of 1 the same training ends at the rate of the frequent class. The accuracy
    planned for is .95 with a deviation of .005 over draws of noise: the bound is more than ten of them away."""

    def rare(x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return 2 * x.sum(axis=1) / math.sqrt(x.shape[1]) + 0.3 * random.normal(size=len(x)) > 2.1

    data = made(rare, 4000, 8)
    majority = float((data.test_labels == 0).mean())
    assert 0.82 < majority < 0.88
    result = Federation(Plan.for_budget(epsilon=8, data=data)).fit(data)
    assert result.metrics["test_accuracy"] > majority + 0.04


def test_columns_of_one_party_that_act_together_are_learned_at_epsilon_8():
    """Without products both classes look alike: .5. With them it is .85 and more."""

    def together(x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return x[:, 0] * x[:, 1] + x[:, 4] * x[:, 5] + 0.2 * random.normal(size=len(x)) > 0

    data = made(together, 3000, 4)
    assert Federation(Plan.for_budget(epsilon=8, data=data)).fit(data).metrics["test_accuracy"] > 0.75
    alone = Plan.for_budget(epsilon=8, data=data, features="columns")
    assert Federation(alone).fit(data).metrics["test_accuracy"] < 0.6


def test_words_of_one_party_that_act_together_are_learned_at_epsilon_8():
    """Each word by itself says nothing: without products of their slots both classes look alike."""
    random = np.random.default_rng(3)
    words = random.integers(0, 3, size=(2, 5000, 2))
    labels = ((words[0, :, 0] == words[0, :, 1]) ^ (random.random(5000) < 0.1)).astype(np.int64)
    parts = tuple(np.eye(3, dtype=np.float32)[each].reshape(5000, 6) for each in words)
    data = VerticalDataset(
        name="words",
        party_names=("a", "b"),
        train_features=tuple(part[:4000] for part in parts),
        test_features=tuple(part[4000:] for part in parts),
        train_labels=labels[:4000],
        test_labels=labels[4000:],
        class_names=("no", "yes"),
        default_encoder="linear",
    )
    sizes = {"epsilon": 8, "num_parties": 2, "num_samples": 4000, "num_classes": 2, "num_test_samples": 1000}
    joined = Plan.for_budget(**sizes, columns=6, kinds=("bwwbww",) * 2)
    assert joined.shapes == "2w3+p8;2w3+p8"
    assert Federation(joined).fit(data).metrics["test_accuracy"] > 0.85
    alone = Plan.for_budget(**sizes, columns=6, features="columns")
    assert Federation(alone).fit(data).metrics["test_accuracy"] < 0.75
