"""Which elements a shard covers: pure geometry, checked against marking every element of a small array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lf_ckpt.boxes import Box, boxes_of_range, cover_problem, intersect, relative, whole

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(*box, strict=True))


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape of one element or more and boxes from cutting it again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(boxes) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        offsets, size = boxes[at]
        if size[dim] < 2:
            continue
        cut = draw(st.integers(1, size[dim] - 1))
        low = Box(offsets, (*size[:dim], cut, *size[dim + 1 :]))
        high = Box(
            (*offsets[:dim], offsets[dim] + cut, *offsets[dim + 1 :]),
            (*size[:dim], size[dim] - cut, *size[dim + 1 :]),
        )
        boxes[at : at + 1] = [low, high]
    return shape, draw(st.permutations(boxes))


@given(tilings())
def test_boxes_that_tile_a_tensor_cover_it(tiling: tuple[tuple[int, ...], list[Box]]) -> None:
    assert cover_problem(*tiling) is None


@settings(max_examples=200)
@given(tilings(), st.data())
def test_a_moved_box_is_found_exactly_when_an_element_is_missed_or_hit_twice(
    tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = tiling
    at = data.draw(st.integers(0, len(boxes) - 1))
    offsets = tuple(data.draw(st.integers(0, 7)) for _ in shape)
    size = tuple(data.draw(st.integers(1, 7)) for _ in shape)
    boxes[at] = Box(offsets, size)

    marks = np.zeros([16] * len(shape), int)
    for box in boxes:
        marks[slices(box)] += 1
    wanted = np.zeros_like(marks)
    wanted[slices(whole(shape))] = 1
    assert (cover_problem(shape, boxes) is None) == bool((marks == wanted).all())


def test_a_pinwheel_that_no_straight_cut_divides_is_a_cover() -> None:
    parts = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    pinwheel = [Box(*part) for part in parts]
    assert cover_problem((3, 3), pinwheel) is None
    assert cover_problem((3, 3), pinwheel[:-1]) is not None


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_empty_and_0_dim_tensors_are_one_shard(shape: tuple[int, ...]) -> None:
    assert cover_problem(shape, [whole(shape)]) is None
    assert cover_problem(shape, []) is not None
    assert cover_problem(shape, [whole(shape)] * 2) is not None


def test_thousands_of_shards_cost_no_pairs() -> None:
    grid = [Box((i, j), (1, 1)) for i in range(100) for j in range(100)]
    assert cover_problem((100, 100), grid) is None
    assert cover_problem((100, 100), grid[:-1]) is not None


def test_too_many_split_dimensions_are_refused_before_they_cost() -> None:
    shape = (2,) * 40
    halves = [Box((0,) * 40, (1,) * 40)]
    assert "dimensions" in (cover_problem(shape, halves) or "")


@given(shapes, st.data())
def test_ranges_of_elements_are_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = int(np.prod(shape, dtype=int))
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    array = np.arange(count).reshape(shape)

    found = [(at, box, array[slices(box)].reshape(-1)) for at, box in boxes_of_range(shape, begin, end)]

    assert [x for _, _, part in found for x in part] == list(range(begin, end))
    assert all(part[0] == at and part.size == box.volume for at, box, part in found)
    assert len(found) <= max(2 * len(shape) - 1, 1)


boxes_2d = st.builds(
    Box, st.tuples(st.integers(0, 6), st.integers(0, 6)), st.tuples(st.integers(0, 6), st.integers(0, 6))
)


@given(boxes_2d, boxes_2d)
def test_what_two_boxes_share_is_what_both_mark(a: Box, b: Box) -> None:
    marks = np.zeros((12, 12), int)
    marks[slices(a)] += 1
    marks[slices(b)] += 1
    shared = intersect(a, b)

    assert (0 if shared is None else shared.volume) == int((marks == 2).sum())
    if shared is not None:
        assert (marks[slices(shared)] == 2).all()
        inside = marks[slices(a)][slices(relative(shared, a.offsets))]
        assert (inside == 2).all()
