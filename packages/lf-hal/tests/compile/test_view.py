"""Views against numpy: every view names the elements that numpy's own operation gives."""

from math import prod

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from lf_hal.codegen.view import NHWC, View, dense, memory_order

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def elements(view: View, buffer: np.ndarray) -> np.ndarray:
    strides = [s * buffer.itemsize for s in view.strides]
    return np.lib.stride_tricks.as_strided(buffer[view.offset :], view.shape, strides)


@st.composite
def views(draw: st.DrawFn) -> tuple[View, np.ndarray]:
    """A dense array in some order, then some slices and a broadcast."""
    shape = draw(shapes)
    order = draw(st.permutations(range(len(shape))))
    view = dense("b", "f32", shape, order)
    buffer = np.arange(prod(shape), dtype=np.float32)
    for axis in range(len(shape)):
        if draw(st.booleans()):
            start = draw(st.integers(0, view.shape[axis] - 1))
            step = draw(st.integers(1, 3))
            view = view.slice(axis, start, -(-(view.shape[axis] - start) // step), step)
    if draw(st.booleans()):
        view = view.broadcast([draw(st.integers(1, 3)), *view.shape])
    return view, buffer


@given(shapes, st.data())
def test_a_dense_view_in_an_order_is_a_transposed_array(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    view = dense("b", "f32", shape, order)
    assert view.is_dense(order)
    buffer = np.arange(prod(shape), dtype=np.float32)
    expected = buffer.reshape([shape[a] for a in order]).transpose(np.argsort(order))
    assert np.array_equal(elements(view, buffer), expected)
    assert view.is_dense(memory_order(view))


@given(views(), st.data())
def test_permuting_is_numpys_transpose(given_: tuple[View, np.ndarray], data: st.DataObject) -> None:
    view, buffer = given_
    perm = data.draw(st.permutations(range(len(view.shape))))
    assert np.array_equal(elements(view.permute(perm), buffer), elements(view, buffer).transpose(perm))


@given(views(), st.data())
def test_a_reshape_is_numpys_or_none(given_: tuple[View, np.ndarray], data: st.DataObject) -> None:
    view, buffer = given_
    rest, wanted = prod(view.shape), []
    while rest > 1 and data.draw(st.booleans()):
        divisor = data.draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
        wanted.append(divisor)
        rest //= divisor
    wanted.append(rest)
    found = view.reshape(wanted)
    assume(found is not None)
    assert np.array_equal(elements(found, buffer), elements(view, buffer).reshape(wanted))


@given(shapes, st.data())
def test_a_dense_array_takes_every_shape(shape: list[int], data: st.DataObject) -> None:
    view = dense("b", "f32", shape)
    split = data.draw(st.integers(0, len(shape)))
    wanted = [prod(shape[:split]), 1, prod(shape[split:])]
    found = view.reshape(wanted)
    assert found is not None
    assert found.is_dense(range(3))


def test_an_image_of_one_pixel_is_flat_in_both_layouts() -> None:
    view = dense("b", "f32", (2, 512, 1, 1), NHWC)
    assert view.is_dense(range(4))
    assert view.reshape((2, 512)) == dense("b", "f32", (2, 512))


def test_heads_cannot_be_joined_before_they_stand_side_by_side() -> None:
    heads = dense("b", "f32", (1, 4, 7, 8))  # batch, heads, time, width
    assert heads.permute((0, 2, 1, 3)).reshape((1, 7, 32)) is None
    side_by_side = dense("b", "f32", (1, 4, 7, 8), (0, 2, 1, 3))
    joined = side_by_side.permute((0, 2, 1, 3)).reshape((1, 7, 32))
    assert joined is not None
    assert joined.is_dense(range(3))


@given(views(), st.data())
def test_broadcasting_is_numpys(given_: tuple[View, np.ndarray], data: st.DataObject) -> None:
    view, buffer = given_
    shape = tuple(data.draw(st.integers(1, 3)) if n == 1 else n for n in view.shape)
    assert np.array_equal(
        elements(view.broadcast(shape), buffer), np.broadcast_to(elements(view, buffer), shape)
    )
