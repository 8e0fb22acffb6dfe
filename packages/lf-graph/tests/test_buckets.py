"""Buckets: every length gives what the unpadded model gives, and what padding holds; on the recorder."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bucket_cases import VOCABULARY, Attention, Pooled, full, gradients, square
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lf_graph import (
    Buckets,
    SignatureError,
)

# -- the numbers -------------------------------------------------------------------------------------------


def test_500_lengths_make_5_captures_and_equal_the_unpadded_model() -> None:
    """A4: pytorch#119640, one graph per length without bound."""
    model, draw = Pooled(), random.Random(1)
    buckets = Buckets(model, (256, 512, 1024, 2048, 4096), dims={"x": 1}, lengths="lengths")
    lengths = [draw.randint(1, 4096) for _ in range(500)]
    last_new = max(
        lengths.index(next(n for n in lengths if lo < n <= hi)) for lo, hi in _ranges(buckets.edges)
    )
    for i, length in enumerate(lengths):
        x = torch.randn(2, length)
        found = buckets(x)
        assert buckets.stats().captures == 5 or i < last_new
        expected = model(x, full(x))
        torch.testing.assert_close(found, expected)
        if i % 5 == 0:
            found.sum().backward()
            ours = gradients(model)
            expected.sum().backward()
            for a, b in zip(ours, gradients(model), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    stats = buckets.stats()
    assert (stats.captures, stats.hits, stats.evictions, stats.eager) == (5, 495, 0, 0)


def _ranges(edges: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip((0, *edges), edges, strict=False))


@pytest.mark.parametrize("unpad", [None, 1])
def test_attention_equals_eager_forward_and_backward(unpad: int | None) -> None:
    model, draw = Attention(16), random.Random(0)
    buckets = Buckets(model, (4, 8, 16), dims={"ids": 1}, lengths="lengths", unpad=unpad)
    for length in [draw.randint(1, 16) for _ in range(12)]:
        ids = torch.randint(0, VOCABULARY, (2, length))
        weights = torch.randn(2, length, VOCABULARY)
        out = buckets(ids)
        assert out.shape[1] == (length if unpad else min(e for e in buckets.edges if e >= length))
        (out[:, :length] * weights).sum().backward()
        ours = gradients(model)
        expected = model(ids, full(ids))
        (expected * weights).sum().backward()
        torch.testing.assert_close(out[:, :length], expected)
        torch.testing.assert_close(ours, gradients(model))


def test_lengths_of_a_batch_are_read_by_the_replay() -> None:
    """A2: flash-attention#1164, lengths frozen in the graph. Captured with [5, 3] in a capacity of 16."""
    model = Attention(16)
    buckets = Buckets(model, (16,), dims={"ids": 1}, lengths="lengths")
    for lengths in ([5, 3], [1, 7], [16, 2], [8, 8]):
        ids = torch.randint(0, VOCABULARY, (2, max(lengths)))
        found = buckets(ids, torch.tensor(lengths))
        for row, n in enumerate(lengths):
            alone = model(ids[row : row + 1, :n], torch.tensor([n]))
            torch.testing.assert_close(found[row : row + 1, :n], alone)
    assert buckets.stats().captures == 1


def packed(x: Tensor, lengths: Tensor) -> Tensor:
    """Attention inside segments of a packed sequence [T, D]; lengths int64 [S] add up to what is real."""
    ends = lengths.cumsum(0)
    segment = torch.searchsorted(ends, torch.arange(x.shape[0]), right=True)
    seen = segment[:, None] == segment[None, :]
    return F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=seen[None])[0]


def test_packed_segments_are_read_by_the_replay() -> None:
    buckets = Buckets(packed, (16,), dims={"x": 0}, lengths="lengths", unpad=0)
    for lengths in ([5, 3], [1, 7], [16, 0], [8, 8]):
        x = torch.randn(sum(lengths), 4)
        alone = [packed(part, torch.tensor([len(part)])) for part in x.split(lengths) if len(part)]
        torch.testing.assert_close(buckets(x, torch.tensor(lengths)), torch.cat(alone))
    assert buckets.stats().captures == 1


@given(
    edges=st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True).map(sorted),
    data=st.data(),
    rows=st.integers(1, 3),
    most=st.integers(1, 4),
)
@settings(max_examples=15, deadline=None)
def test_any_sequence_of_lengths_equals_eager(edges: list[int], data: Any, rows: int, most: int) -> None:
    model = Pooled()
    lengths = data.draw(st.lists(st.integers(1, edges[-1]), min_size=1, max_size=8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Buckets(model, edges, dims={"x": 1}, lengths="lengths", max_graphs=most) as buckets:
            for length in lengths:
                x = torch.randn(rows, length)
                torch.testing.assert_close(buckets(x), model(x, full(x)))
            stats = buckets.stats()
    assert stats.hits + stats.captures == len(lengths)
    assert stats.captures - stats.evictions == sum(b.open for b in stats.buckets) <= most


def test_gradients_add_up_over_buckets() -> None:
    model = Pooled()
    buckets = Buckets(model, (4, 8), dims={"x": 1}, lengths="lengths")
    batches = [torch.randn(2, n) for n in (3, 7, 2, 8)]
    for x in batches:
        buckets(x).sum().backward()
    ours = gradients(model)
    for x in batches:
        model(x, full(x)).sum().backward()
    torch.testing.assert_close(ours, gradients(model))


def test_an_input_gets_its_own_gradient_without_the_padding() -> None:
    buckets = Buckets(square, (8,), unpad=1)
    for length in (3, 5):
        x = torch.randn(2, length, requires_grad=True)
        y = x * 2
        buckets(y).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, 8 * x.detach())


def test_a_leaf_input_keeps_its_gradient_over_the_next_call() -> None:
    buckets = Buckets(square, (8,))
    first, second = torch.ones(1, 8, requires_grad=True), torch.full((1, 8), 3.0, requires_grad=True)
    buckets(first).sum().backward()
    buckets(second).sum().backward()
    assert first.grad is not None
    assert second.grad is not None
    assert (first.grad.unique().tolist(), second.grad.unique().tolist()) == ([2.0], [6.0])


def test_without_grad_mode_a_call_only_replays_forward() -> None:
    buckets = Buckets(square, (8,), unpad=1)
    x = torch.randn(1, 5, requires_grad=True)
    buckets(x)
    with torch.no_grad():
        found = buckets(x)
    assert not found.requires_grad
    assert torch.equal(found, x * x)


# -- padding -----------------------------------------------------------------------------------------------


def test_positions_beyond_the_length_hold_the_pad_value() -> None:
    def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a + 0, b + 0

    buckets = Buckets(both, (6,), pad={"b": -100})
    for length in (5, 2):
        a, b = buckets(torch.ones(1, length), torch.ones(1, length, dtype=torch.int64))
        assert a.tolist() == [[1.0] * length + [0.0] * (6 - length)]
        assert b.tolist() == [[1] * length + [-100] * (6 - length)]


def test_nested_arguments_and_keywords_are_named_by_their_path() -> None:
    def fn(batch: dict[str, Tensor], *, scale: float, weights: Tensor) -> Tensor:
        return batch["ids"] * scale + batch["rows"][:, None] + weights

    buckets = Buckets(fn, (4,), dims={"batch.ids": 1, "weights": 1}, pad={"weights": 7}, unpad=1)
    batch = {"ids": torch.ones(2, 3), "rows": torch.tensor([1.0, 2.0])}
    found = buckets(batch, scale=2.0, weights=torch.zeros(2, 3))
    assert found.tolist() == [[3.0] * 3, [4.0] * 3]


def test_lengths_are_filled_where_the_caller_leaves_them_out() -> None:
    def fn(x: Tensor, lengths: Tensor | None = None) -> Tensor:
        assert lengths is not None
        return lengths + 0 * x.sum().long()

    buckets = Buckets(fn, (4, 8), dims={"x": 1}, lengths="lengths")
    x = torch.ones(2, 3)
    assert buckets(x).tolist() == [3, 3]
    assert buckets(x[:, :2]).tolist() == [2, 2]
    assert buckets(torch.ones(2, 5), lengths=None).tolist() == [5, 5]
    assert Buckets(fn, (4,), dims={"x": 1}, lengths="lengths")(x, None).tolist() == [3, 3]
    given = Buckets(fn, (4,), dims={"x": 1}, lengths="lengths")
    assert given(x, torch.tensor([3, 1])).tolist() == [3, 1]
    assert given(x, torch.tensor([2, 3])).tolist() == [2, 3]


def test_inputs_need_not_be_contiguous() -> None:
    buckets = Buckets(square, (8,), unpad=1)
    for view in (torch.randn(5, 2).t(), torch.randn(2, 10)[:, ::2], torch.randn(1, 5).expand(2, 5)):
        assert torch.equal(buckets(view), view * view)


def test_a_host_number_that_follows_the_length_is_refused_not_frozen() -> None:
    """A2: ``max_seqlen`` as it was at the capture gave wrong attention silently."""

    def fn(x: Tensor, max_seqlen: int) -> Tensor:
        return x * max_seqlen

    buckets = Buckets(fn, (8,), dims={"x": 1})
    buckets(torch.ones(1, 5), 5)
    with pytest.raises(SignatureError, match=r"args\[1\]: 5 -> 6"):
        buckets(torch.ones(1, 6), 6)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_known_length_writes_in_place_and_reads_nothing_back() -> None:
    buckets = Buckets(Pooled(), (8,), dims={"x": 1}, lengths="lengths")
    x = torch.randn(2, 5)
    call = buckets._read((x,), {})
    buckets(x)
    bucket = buckets._buckets[8]
    addresses = [p.data_ptr() for p in bucket.places]
    with Operators() as seen:
        call.write(bucket.places)
    assert set(seen.names) <= {"aten::detach", "aten::slice", "aten::fill_", "aten::_foreach_copy_"}
    buckets(x[:, :2])
    assert [p.data_ptr() for p in bucket.places] == addresses
