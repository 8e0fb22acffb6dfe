"""Attention on a GPU: sizes of the models, repeated bits, other lengths in one graph, compiler, 64-bit addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import Case, Results, assert_close, cumulative, gradients, inputs, reference
from kernel_cases import same_bits
from torch import Tensor

import lf_graph
from lf_graph.kernels import _attention_choice as choice
from lf_graph.kernels import attention, attention_lengths, varlen_attention

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def ours(case: Case, *tensors: Tensor) -> Results:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, case.cu_q, case.cu_k, **case.options(), implementation="triton")

    return gradients(call, *tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [48, 64, 72, 128])
def test_values_and_gradients_equal_float64(head_dim: int, causal: bool, dtype: torch.dtype) -> None:
    lengths = (1, 0, 63, 64, 65, 127, 128, 129, 500, 1024, 777)
    case = Case(lengths, heads=4, kv_heads=2, head_dim=head_dim, causal=causal, dtype=dtype, unused=300)
    tensors = inputs(case)
    assert_close(ours(case, *tensors), reference(case, *tensors), 3.0)


@pytest.mark.parametrize("causal", [False, True])
def test_keys_of_other_lengths(causal: bool) -> None:
    case = Case((200, 0, 51, 300), (77, 40, 513, 0), 8, 2, 64, causal, torch.bfloat16, unused=0)
    tensors = inputs(case)
    assert_close(ours(case, *tensors), reference(case, *tensors), 3.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 8, 16, 33, 96, 160, 192, 256])
def test_every_head_size_fits_the_card(head_dim: int, dtype: torch.dtype) -> None:
    case = Case((150, 33), heads=2, kv_heads=1, head_dim=head_dim, causal=True, dtype=dtype)
    tensors = inputs(case)
    assert_close(ours(case, *tensors), reference(case, *tensors), 3.0)


def test_many_short_sequences() -> None:
    case = Case(tuple(i % 5 for i in range(3000)), heads=1, head_dim=64, dtype=torch.bfloat16)
    tensors = inputs(case)
    assert_close(ours(case, *tensors), reference(case, *tensors), 3.0)


def test_padded_sequences_equal_packed_ones() -> None:
    lengths = (300, 0, 1, 257)
    packed = Case(lengths, heads=4, kv_heads=2, head_dim=64, causal=True, dtype=torch.bfloat16, unused=0)
    q, k, v, _ = inputs(packed)
    used = torch.arange(300, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]

    def pad(x: Tensor) -> Tensor:
        out = x.new_full((4, 300, *x.shape[1:]), float("nan"))
        out[used] = x
        return out

    device_lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    found = attention_lengths(pad(q), pad(k), pad(v), device_lengths, causal=True)
    assert same_bits([found[used]], [varlen_attention(q, k, v, packed.cu_q, causal=True)])
    assert (found[~used] == 0).all()


def test_thirty_calls_give_the_same_bits() -> None:
    case = Case((1000, 17, 2048, 900), heads=16, kv_heads=8, head_dim=128, causal=True, dtype=torch.bfloat16)
    tensors = inputs(case)
    first = ours(case, *tensors)
    assert all(same_bits(ours(case, *tensors), first) for _ in range(30))


def test_a_graph_replays_other_lengths() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return varlen_attention(q, k, v, cu, causal=True, implementation="triton")

    def call(fn: Any, q: Tensor, cu: Tensor) -> tuple[Tensor, ...]:
        leaves = [(q + i).requires_grad_() for i in range(3)]
        out = fn(*leaves, cu)
        return out.detach().clone(), *torch.autograd.grad(out, leaves, q)

    q = torch.randn(1600, 4, 64, device="cuda").bfloat16()
    captured = lf_graph.capture(
        attention, *(q.clone().requires_grad_() for _ in range(3)), cumulative((500, 300))
    )
    for lengths in ((100, 700), (1600, 0), (800, 800), (0, 0), (1, 1599), (500, 300)):
        cu = cumulative(lengths)
        assert same_bits(call(captured, q, cu), call(attention, q, cu))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole_it_computes_the_same(dynamic: bool) -> None:
    case = Case((900, 20, 300), heads=4, kv_heads=2, head_dim=64, causal=True, dtype=torch.bfloat16)
    tensors = inputs(case)

    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return varlen_attention(q, k, v, cu, causal=True, implementation="triton")

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic)
    found = gradients(lambda q, k, v: compiled(q, k, v, case.cu_q), *tensors)
    assert_close(found, reference(case, *tensors), 3.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", ["triton", "varlen_attn", "flex"])
def test_other_ways_over_packed_rows_keep_the_contract(way: Any, causal: bool) -> None:
    case = Case((300, 0, 51, 513), (77, 40, 513, 513), 8, 2, 64, causal, torch.bfloat16, unused=100)
    tensors = inputs(case)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, case.cu_q, case.cu_k, causal=causal, implementation=way)

    assert_close(gradients(call, *tensors), reference(case, *tensors), 3.0)


@pytest.mark.parametrize("lengths", [None, [300, 1]])
@pytest.mark.parametrize("way", ["triton", "flash", "cudnn", "flex"])
def test_other_ways_over_padded_rows_keep_the_contract(way: Any, lengths: list[int] | None) -> None:
    q, k, v, gradient = (torch.randn(2, 300, h, 64, device="cuda").bfloat16() for h in (8, 2, 2, 8))
    given = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device="cuda")
    for x in (q, k, v, gradient) if lengths else ():
        x[1, 1:] = float("nan")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, lengths_q=given, causal=True, implementation=way)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_lengths(q, k, v, given, causal=True)

    expected = gradients(plain, *(x.double() for x in (q, k, v, gradient)))
    assert_close(gradients(call, q, k, v, gradient), expected, 3.0)


@pytest.mark.parametrize("kind", ["packed", "padded", "whole"])
def test_the_problem_of_the_choice_is_solved_by_every_way(kind: str) -> None:
    calls, expected, _ = choice._problem(
        (kind, True, "bfloat16", 64, 8, 4, True, 256, 256, 2048), torch.device("cuda")
    )
    assert len(calls) > 2
    for call in calls.values():
        assert_close(call(), expected, 3.0)


def test_more_than_2_to_the_31_elements_are_addressed() -> None:
    count, length, heads, dim = 4100, 128, 32, 128
    q = torch.zeros(count * length, heads, dim, dtype=torch.bfloat16, device="cuda")
    assert q.numel() > 2**31
    q[-length:] = torch.randn(length, heads, dim, device="cuda").bfloat16()
    last = q[-length:].clone()
    cu = torch.arange(count + 1, dtype=torch.int32, device="cuda") * length

    def call(cu: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        out = varlen_attention(leaf, leaf, leaf, cu, implementation="triton")
        (dx,) = torch.autograd.grad(out, leaf, x)
        return out[-length:].detach(), dx[-length:]

    assert same_bits(call(cu, q), call(cumulative([length]), last))
