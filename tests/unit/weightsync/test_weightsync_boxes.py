"""Boxes are sets of coordinates: every operation is checked against those sets."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_weightsync import Box, LayoutError
from cosmos_weightsync.boxes import subtract_all


def points(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    ndim = draw(st.integers(0, 3))

    def one() -> Box:
        corners = [sorted((draw(st.integers(0, 5)), draw(st.integers(0, 5)))) for _ in range(ndim)]
        return Box(tuple(c[0] for c in corners), tuple(c[1] for c in corners))

    return one(), one()


@given(box_pairs())
def test_intersection_holds_the_common_points(pair):
    a, b = pair
    shared = a.intersect(b)
    assert (points(shared) if shared else set()) == points(a) & points(b)


@given(box_pairs())
def test_subtraction_leaves_disjoint_boxes_with_the_other_points(pair):
    a, b = pair
    parts = a.subtract(b)
    assert sum(part.numel for part in parts) == len(points(a) - points(b))
    assert set().union(*map(points, parts)) == points(a) - points(b)


@given(box_pairs())
def test_containment_is_the_subset_relation(pair):
    a, b = pair
    assert a.contains(b) == (points(b) <= points(a))


@given(box_pairs(), st.integers(1, 9))
def test_split_parts_follow_one_another_in_row_major_order(pair, size):
    box, _ = pair
    parts = list(box.split(size))
    assert all(part.numel <= size for part in parts)
    rows = [list(product(*map(range, part.start, part.stop))) for part in parts]
    assert [point for row in rows for point in row] == sorted(points(box))


def test_scalar_box_holds_one_element():
    assert Box.full(()).numel == 1
    assert Box.full(()).intersect(Box.full(())) == Box.full(())


def test_a_box_minus_its_halves_is_nothing():
    whole = Box.full((4, 4))
    assert subtract_all(whole, [Box((0, 0), (2, 4)), Box((2, 0), (4, 4))]) == ()


def test_relative_slices_select_the_part():
    assert Box((5, 2), (7, 4)).relative_to(Box((4, 2), (8, 6))) == (slice(1, 3), slice(0, 2))


@pytest.mark.parametrize(
    ("start", "stop"),
    [((0,), (1, 2)), ((2,), (1,)), ((-1,), (1,))],  # lengths differ; negative side; below zero
)
def test_impossible_boxes_are_refused(start, stop):
    with pytest.raises(LayoutError):
        Box(start, stop)


def test_a_box_outside_the_origin_is_refused():
    with pytest.raises(LayoutError, match="does not lie inside"):
        Box((0,), (3,)).relative_to(Box((0,), (2,)))
