"""DynamicMaskBuffer: what may be seen, at an address that never changes, also in a replayed graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lf_graph import BlockSparse, Causal, DynamicMaskBuffer, Full, GraphError, capture


def tokens(*values: int) -> Tensor:
    return torch.tensor(values)


def by_hand(pattern: Any, lengths: list[int], capacity: int, prefix: list[int] | None = None) -> Tensor:
    """The definition, one pair at a time."""
    out = torch.zeros(len(lengths), 1, capacity, capacity, dtype=torch.bool)
    for b, length in enumerate(lengths):
        for q in range(capacity):
            for k in range(capacity):
                in_prefix = prefix is not None and k < prefix[b]
                out[b, 0, q, k] = q == k or (k < length and (in_prefix or pattern(q, k)))
    return out


def causal(q: int, k: int) -> bool:
    return k <= q


def full(q: int, k: int) -> bool:
    return True


def sparse(c: BlockSparse) -> Any:
    def allowed(q: int, k: int) -> bool:
        qb, kb = q // c.block, k // c.block
        near, everyone = abs(qb - kb) < c.window, kb < c.global_blocks
        if c.causal:
            return k <= q and (near or everyone)
        return near or everyone or qb < c.global_blocks

    return allowed


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    prefix=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    capacity=st.integers(1, 8),
    kind=st.sampled_from(["causal", "full", "sparse"]),
    block=st.integers(1, 3),
    window=st.integers(1, 3),
    global_blocks=st.integers(0, 2),
    with_prefix=st.booleans(),
    sparse_causal=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_mask_equals_its_definition(
    lengths: list[int],
    prefix: list[int],
    capacity: int,
    kind: str,
    block: int,
    window: int,
    global_blocks: int,
    with_prefix: bool,
    sparse_causal: bool,
) -> None:
    blocks = BlockSparse(block, window, global_blocks, sparse_causal)
    pattern, rule = {
        "causal": (Causal(), causal),
        "full": (Full(), full),
        "sparse": (blocks, sparse(blocks)),
    }[kind]
    buffer = DynamicMaskBuffer(8, batch=3, pattern=pattern)  # type: ignore[arg-type]
    limits = prefix[: len(lengths)] if with_prefix else None
    mask = buffer.write(tokens(*lengths), capacity, None if limits is None else tokens(*limits))
    assert torch.equal(mask, by_hand(rule, lengths, capacity, limits))


def test_a_float_mask_is_zero_where_seen_and_minus_infinity_elsewhere() -> None:
    seen = DynamicMaskBuffer(6, batch=2).write(tokens(4, 2))
    for dtype in (torch.float32, torch.bfloat16):
        mask = DynamicMaskBuffer(6, dtype, batch=2).write(tokens(4, 2))
        assert mask.dtype == dtype
        assert torch.equal(mask == 0, seen)
        assert torch.equal(mask == -torch.inf, ~seen)


def test_both_dtypes_give_the_same_attention() -> None:
    q, k, v = torch.randn(3, 2, 4, 8, 16).unbind(0)
    lengths = tokens(8, 3)
    outputs = [
        F.scaled_dot_product_attention(q, k, v, attn_mask=DynamicMaskBuffer(8, dtype, batch=2).write(lengths))
        for dtype in (torch.bool, torch.float32)
    ]
    torch.testing.assert_close(*outputs)


def test_real_positions_attend_as_if_each_sequence_were_alone_even_empty_ones_stay_finite() -> None:
    q, k, v = torch.randn(3, 3, 2, 8, 4).unbind(0)
    lengths = [5, 0, 8]
    for causal_ in (True, False):
        mask = DynamicMaskBuffer(8, batch=3, causal=causal_).write(tokens(*lengths))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert torch.isfinite(y).all()
        for b, n in enumerate(lengths):
            alone = F.scaled_dot_product_attention(q[b, :, :n], k[b, :, :n], v[b, :, :n], is_causal=causal_)
            torch.testing.assert_close(y[b, :, :n], alone)


def test_the_address_is_the_same_for_every_length() -> None:
    buffer = DynamicMaskBuffer(16, batch=4)
    first = buffer.write(tokens(5, 3), 8)
    second = buffer.write(tokens(1, 8), 8)
    assert first.data_ptr() == second.data_ptr() == buffer.view(2, 8).data_ptr()
    assert first.is_contiguous()
    assert buffer.write(tokens(16, 1, 2, 3)).shape == (4, 1, 16, 16)


class Allocations(TorchDispatchMode):
    """Counts results that live in new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        taken = {
            t.untyped_storage().data_ptr() for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)
        }
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in taken:
            self.new.append(str(func))
        return out


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
def test_writing_allocates_nothing_and_reads_nothing_back(dtype: torch.dtype) -> None:
    buffer = DynamicMaskBuffer(16, dtype, batch=2)
    lengths, prefix = tokens(5, 3), torch.tensor([1, 2], dtype=torch.int32)
    with Allocations() as seen:
        buffer.write(lengths, 12, prefix)
    assert seen.new == []


def attention_through(buffer: DynamicMaskBuffer, capacity: int) -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=buffer.write(lengths, capacity))

    return attend


A2 = [[5, 3], [1, 7], [16, 0], [8, 8]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_graph_captured_with_some_lengths_follows_others(dtype: torch.dtype) -> None:
    buffer = DynamicMaskBuffer(32, dtype, batch=2)
    q, k, v = (torch.randn(2, 2, 16, 4, requires_grad=True) for _ in range(3))
    with capture(attention_through(buffer, 16), q, k, v, tokens(*A2[0])) as captured:
        for lengths in A2:
            fresh = DynamicMaskBuffer(16, dtype, batch=2)
            expected = attention_through(fresh, 16)(q, k, v, tokens(*lengths))
            replayed = captured(q, k, v, tokens(*lengths))
            assert torch.equal(replayed, expected), lengths
            expected_grads = torch.autograd.grad(expected.sum(), [q, k, v])
            grads = torch.autograd.grad(replayed.sum(), [q, k, v])
            assert all(torch.equal(a, b) for a, b in zip(grads, expected_grads, strict=True)), lengths


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_graph_captured_with_some_lengths_follows_others_without_a_sync() -> None:
    buffer = DynamicMaskBuffer(32, batch=2, device="cuda")
    q, k, v = torch.randn(3, 2, 2, 16, 8, device="cuda").unbind(0)
    lengths = tokens(*A2[0]).cuda()
    attend = attention_through(buffer, 16)
    attend(q, k, v, lengths)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        buffer.write(lengths, 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, k, v, lengths)
    for values in A2:
        lengths.copy_(tokens(*values))
        graph.replay()
        fresh = DynamicMaskBuffer(16, batch=2, device="cuda")
        assert torch.equal(out, attention_through(fresh, 16)(q, k, v, lengths)), values


def test_a_rewrite_between_forward_and_backward_is_an_error_and_not_a_wrong_gradient() -> None:
    buffer = DynamicMaskBuffer(8, torch.float32)
    q = torch.randn(1, 1, 8, 4, requires_grad=True)
    y = F.scaled_dot_product_attention(q, q, q, attn_mask=buffer.write(tokens(8)))
    buffer.write(tokens(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_it_never_grows() -> None:
    buffer = DynamicMaskBuffer(16, batch=2)
    size = buffer.nbytes
    with pytest.raises(GraphError, match=r"capacity 17 does not fit .* max_len 16"):
        buffer.write(tokens(3, 4), 17)
    with pytest.raises(GraphError, match="batch 3"):
        buffer.write(tokens(3, 4, 5))
    with pytest.raises(GraphError, match="capacity 0"):
        buffer.view(1, 0)
    assert buffer.nbytes == size


@pytest.mark.parametrize(
    "lengths",
    [
        torch.tensor([1.0, 2.0]),
        torch.tensor([[1, 2]]),
        torch.tensor([1, 2], dtype=torch.int16),
        torch.tensor(3),
        [1, 2],
    ],
)
def test_lengths_of_another_kind_are_refused(lengths: Any) -> None:
    with pytest.raises(GraphError, match="lengths"):
        DynamicMaskBuffer(4, batch=2).write(lengths)


def test_lengths_elsewhere_and_a_prefix_of_another_batch_are_refused() -> None:
    buffer = DynamicMaskBuffer(4, batch=2)
    with pytest.raises(GraphError, match="meta"):
        buffer.write(torch.empty(2, dtype=torch.int64, device="meta"))
    with pytest.raises(GraphError, match=r"prefix have shape \(1,\), expected \(2,\)"):
        buffer.write(tokens(1, 2), prefix=tokens(1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_len": 0}, "at least 1"),
        ({"max_len": 4, "batch": 0}, "at least 1"),
        ({"max_len": 4, "dtype": torch.int32}, "float type"),
        ({"max_len": 4, "causal": True, "pattern": Full()}, "not both"),
    ],
)
def test_a_buffer_that_makes_no_sense_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(GraphError, match=words):
        DynamicMaskBuffer(**options)


def test_a_sparse_pattern_without_blocks_is_refused() -> None:
    for wrong in ({"block": 0}, {"window": 0}, {"global_blocks": -1}):
        with pytest.raises(GraphError, match="at least"):
            BlockSparse(**wrong)
