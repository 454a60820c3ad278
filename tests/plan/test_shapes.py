"""Shapes as text, and their knots from public ranges alone."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbmvfl.data.column_rules import PartyColumns
from pbmvfl.data.schema import ColumnRule
from pbmvfl.errors import PlanError
from pbmvfl.plan.groups import FeatureMap
from pbmvfl.plan.plan import Plan
from pbmvfl.plan.shapes import PartyShapes, join_shapes, kind_of_range, knots_of, parse_shapes

COLUMN = st.one_of(
    st.just(("c", 0)),
    st.tuples(st.sampled_from("uvg"), st.integers(2, 64)),
    st.tuples(st.just("w"), st.integers(1, 4096)),
)
SHAPES = st.builds(
    PartyShapes, st.lists(COLUMN, min_size=1, max_size=12).map(tuple), st.one_of(st.just(0), st.integers(2, 64))
)


@given(shapes=st.lists(SHAPES, min_size=1, max_size=4))
def test_text_says_all_of_it(shapes: list[PartyShapes]) -> None:
    assert parse_shapes(join_shapes(shapes)) == tuple(shapes)


def test_text_is_short() -> None:
    shapes = PartyShapes((("u", 16), ("u", 16), ("c", 0), ("c", 0), ("g", 8)), 4)
    assert str(shapes) == "2u16+2c+1g8+p4"
    assert parse_shapes("") == ()
    # 16 + 16 + 1 + 1 + 8, and three pairs of 4 by 4.
    assert (shapes.width, shapes.num_pairs) == (42 + 3 * 16, 3)
    assert shapes.norm == math.sqrt(5 + 3)
    # Two words of 3 and 2 slots and a column: 3 * 2 + 3 * 4 + 2 * 4 products. A word is one column of its norm.
    worded = PartyShapes((("w", 3), ("c", 0), ("w", 2), ("u", 16)), 4)
    assert str(worded) == "1w3+1c+1w2+1u16+p4"
    assert (worded.num_columns, worded.width, worded.num_pairs) == (7, 22 + 26, 3)
    assert worded.norm == math.sqrt(4 + 3)


@pytest.mark.parametrize(
    "text",
    [
        "u16",
        "0c",
        "1w0",
        "1w4097",
        "2w",
        "2u1",
        "2u65",
        "3c+p1",
        "3c+p65",
        "2x4",
        "+",
        "p4",
        "2u16+",
        " 2c",
        "2u16;",
        "2c\n",
        "p4+2u16",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="shapes="):
        parse_shapes(text)


@pytest.mark.parametrize("kind", ["u", "v", "g"])
@pytest.mark.parametrize("count", [2, 3, 16, 64])
def test_knots_ascend_over_the_whole_range(kind: str, count: int) -> None:
    knots = knots_of(kind, count)
    assert len(knots) == count
    assert all(low < high for low, high in pairwise(knots))
    assert (knots[0], knots[-1]) == (0.0 if kind == "v" else -1.0, 1.0)


def test_geometric_knots_have_one_ratio_and_reach_two_decades_down() -> None:
    above_the_lower_end = [knot + 1 for knot in knots_of("g", 16)[1:]]
    ratios = [high / low for low, high in pairwise(above_the_lower_end)]
    assert ratios == pytest.approx([100 ** (1 / 14)] * 14)
    assert above_the_lower_end[0] == pytest.approx(2 / 100)


def test_ranges_alone_decide_the_kind() -> None:
    assert [kind_of_range(*each) for each in ((0, 40000), (0, 999), (-125, -113), (1, 5000))] == list("guuu")
    rules = (
        ColumnRule(name="rooms", range=(0.0, 40000.0), missing=True),
        ColumnRule(name="near", vocabulary=("bay", "sea"), other=True),
        ColumnRule(name="age", range=(0.0, 60.0)),
        ColumnRule(name="as it is"),
    )
    assert PartyColumns(party="a", rules=rules).kinds == "gc" + "bww" + "u" + "c"
    shapes = PartyShapes.of_kinds("gcbwwuc", 16, 4)
    assert str(shapes) == "1g16+1c+1w3+1u16+1c+p4"
    assert str(PartyShapes.of_kinds("gcu", 1, 4)) == "3c"
    assert str(PartyShapes.of_kinds("bwbwwc", 16, 4)) == "1w2+1w3+1c+p4"
    assert str(PartyShapes.of_kinds("cbw", 16, 4)) == "1c+1w2", "one word has no products"
    assert str(PartyShapes.of_kinds("wwu", 16)) == "2w1+1u16", "slots without a first one are words of their own"


def test_a_plan_has_shapes_for_every_party_or_none() -> None:
    sizes = {"num_parties": 2, "num_samples": 10, "num_classes": 2}
    plan = Plan.of(**sizes, features="shapes", shapes="2u4;3c")
    assert [str(each) for each in plan.party_shapes] == ["2u4", "3c"]
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.hash != Plan.of(**sizes, features="shapes", shapes="2u5;3c").hash
    with pytest.raises(PlanError, match="of 1 of num_parties=2"):
        Plan.of(**sizes, features="shapes", shapes="2u4")
    for wrong in ({"features": "shapes"}, {"shapes": "2u4;3c"}):
        with pytest.raises(PlanError, match="features=shapes"):
            Plan.of(**sizes, **wrong)
    assert Plan.of(**sizes).party_shapes == ()
    assert Plan.of(**sizes).features is FeatureMap.COLUMNS


def test_a_narrow_party_clips_to_the_root_of_its_width_and_no_party_beyond_the_plan() -> None:
    sizes = {"num_parties": 2, "num_samples": 10, "num_classes": 3, "embedding_dim": 3, "encoder": "linear"}
    plan = Plan.of(**sizes, features="shapes", shapes="2u4;9u16", clip_norm=5.0, noise_multiplier=1.0)
    assert plan.clip_norm_of(9 * 3) == 3.0  # eight numbers and a constant, three scores
    assert plan.clip_norm_of(145 * 3) == 5.0
    assert Plan.of(**sizes, clip_norm=5.0, noise_multiplier=1.0).clip_norm_of(9 * 3) == 5.0
