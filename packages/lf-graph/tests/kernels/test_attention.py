"""varlen_attention and attention_lengths: kernels and plain twin equal the formula, and nothing leaks between rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import (
    Case,
    Results,
    assert_close,
    cumulative,
    gradients,
    inputs,
    one_sequence,
    reference,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, same_bits
from torch import Tensor

from lf_graph.kernels import KernelUnavailableError, attention_lengths, varlen_attention
from lf_graph.kernels import _attention_triton as triton_attention

BOTH = pytest.mark.parametrize("implementation", ["triton", "plain"])


def ours(case: Case, implementation: str, *tensors: Tensor) -> Results:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cu_k = None if case.lengths_k is None else case.cu_k
        return varlen_attention(q, k, v, case.cu_q, cu_k, **case.options(), implementation=implementation)  # type: ignore[arg-type]

    return gradients(call, *tensors)


def check(case: Case, implementation: str, slack: float = 2.0) -> None:
    tensors = inputs(case)
    assert_close(ours(case, implementation, *tensors), reference(case, *tensors), slack)


LENGTHS = st.lists(st.one_of(st.sampled_from([0, 1, 15, 16, 17]), st.integers(0, 40)), min_size=1, max_size=3)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(LENGTHS)
    keys = draw(st.none() | st.lists(st.integers(0, 40), min_size=len(lengths), max_size=len(lengths)))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))
    return Case(
        tuple(lengths),
        None if keys is None else tuple(keys),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 24, 40])),
        causal=draw(st.booleans()),
        unused=draw(st.sampled_from([0, 1, 70])),
        scale=draw(st.sampled_from([None, 0.0, 1.3])),
    )


@settings(max_examples=10, deadline=None, derandomize=True)
@given(case=cases())
def test_kernels_equal_float64(case: Case) -> None:
    check(case, "triton")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=cases())
def test_the_plain_twin_equals_float64(case: Case) -> None:
    check(case, "plain")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [48, 64, 72, 128])
def test_head_sizes_of_the_models(head_dim: int, dtype: torch.dtype) -> None:
    case = Case((33, 0, 20), heads=2, head_dim=head_dim, causal=True, dtype=dtype)
    check(case, "triton")
    check(case, "plain")


@BOTH
@pytest.mark.parametrize("lengths", [(0,), (1,), (64,), (63, 65), (0, 0, 3, 0), (129,), (1,) * 9])
@pytest.mark.parametrize("unused", [0, 64])
def test_lengths_at_the_edges_of_blocks(lengths: tuple[int, ...], unused: int, implementation: str) -> None:
    check(Case(lengths, heads=1, causal=True, unused=unused), implementation)


@BOTH
def test_no_sequence_at_all_gives_zeros(implementation: str) -> None:
    check(Case((), unused=3), implementation)
    check(Case((), unused=0), implementation)


@BOTH
def test_a_causal_query_sees_keys_up_to_the_last_one(implementation: str) -> None:
    q, k = torch.zeros(2, 1, 16, device=DEVICE), torch.zeros(3, 1, 16, device=DEVICE)
    v = torch.tensor([1.0, 2.0, 6.0], device=DEVICE)[:, None, None].expand(3, 1, 16)

    def out(n: int, m: int) -> list[float]:
        cu_q, cu_k = cumulative([n]), cumulative([m])
        found = varlen_attention(q, k, v, cu_q, cu_k, causal=True, implementation=implementation)  # type: ignore[arg-type]
        return found[:, 0, 0].tolist()

    assert out(2, 3) == [1.5, 3.0]  # means of two keys and of all three
    assert out(2, 2) == [1.0, 1.5]
    assert out(2, 1) == [0.0, 1.0]  # the first of two queries sees none of one key
    assert out(2, 0) == [0.0, 0.0]


@BOTH
def test_rows_of_no_sequence_give_zero_whatever_they_hold(implementation: str) -> None:
    case = Case((20, 3), (5, 30), causal=True, unused=37)
    out, dq, dk, dv = ours(case, implementation, *inputs(case))
    for found, used in ((out, 23), (dq, 23), (dk, 35), (dv, 35)):
        assert (found[used:] == 0).all()
        assert found[:used].isfinite().all()


def test_the_bits_of_a_sequence_do_not_depend_on_its_neighbours() -> None:
    case = Case((21, 40, 9), (30, 17, 9), causal=True)
    q, k, v, gradient = inputs(case)
    alone = replace(case, lengths=(40,), lengths_k=(17,), unused=0)
    expected = ours(alone, "triton", q[21:61], k[30:47], v[30:47], gradient[21:61])
    found = ours(case, "triton", q, k, v, gradient)
    cut = [x[a:b] for x, (a, b) in zip(found, [(21, 61), (21, 61), (30, 47), (30, 47)], strict=True)]
    assert same_bits(cut, expected)


def test_a_repeated_call_gives_the_same_bits() -> None:
    case = Case((21, 40), heads=2, kv_heads=1, dtype=torch.bfloat16)
    tensors = inputs(case)
    assert same_bits(ours(case, "triton", *tensors), ours(case, "triton", *tensors))


def test_parts_of_one_projection_are_read_where_they_are() -> None:
    case = Case((20, 13), heads=2, kv_heads=2, head_dim=24, unused=0)
    q, k, v, gradient = inputs(case)
    fused = torch.stack([q, k, v], 1)
    parts = fused.unbind(1)
    assert all(triton_attention.dense_heads(x) is x for x in (x[None] for x in parts))
    assert same_bits(ours(case, "triton", *parts, gradient), ours(case, "triton", q, k, v, gradient))


@pytest.mark.parametrize("lengths", [None, [13, 20]])
def test_heads_may_come_before_rows(lengths: list[int] | None) -> None:
    """As scaled_dot_product_attention has them: [batch, heads, rows, head_dim]; nothing is copied."""
    given = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    q, k, v, gradient = (torch.randn(2, h, 20, 16, device=DEVICE).transpose(1, 2) for h in (4, 2, 2, 4))
    assert all(triton_attention.dense_heads(x) is x for x in (q, k, v, gradient))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_lengths(q, k, v, given, causal=True, implementation="triton")

    neat = [x.contiguous() for x in (q, k, v, gradient)]
    assert same_bits(gradients(call, q, k, v, gradient), gradients(call, *neat))


def test_any_strides_will_do() -> None:
    case = Case((20, 13), heads=2, kv_heads=2, head_dim=16)
    q, k, v, gradient = inputs(case)
    strange = [x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in (q, k, v)]
    ones = torch.ones(1, 1, 1, device=DEVICE).expand_as(gradient)
    assert same_bits(ours(case, "triton", *strange, ones), ours(case, "triton", q, k, v, ones.contiguous()))


def test_more_sequences_than_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "_LANES", 16)
    check(Case(tuple(i % 3 for i in range(20)), heads=1), "triton")


def test_offsets_beyond_the_capacity_are_cut_off() -> None:
    case = Case((8, 8), unused=0, heads=1)
    q, k, v, gradient = inputs(case)

    def call(cu: Tensor) -> Results:
        return gradients(
            lambda q, k, v: varlen_attention(q, k, v, cu, implementation="triton"), q, k, v, gradient
        )

    assert same_bits(call(cumulative((8, 500))), call(cumulative((8, 8))))


@pytest.mark.parametrize("offsets", [(-9, 20, 33), (-50, -40, 33), (20, 33), (40, 50, 60)])
def test_a_sequence_behind_hostile_offsets_is_itself(offsets: tuple[int, ...]) -> None:
    q, k, v = (x.requires_grad_() for x in torch.randn((3, 33, 2, 16), device=DEVICE))
    cu = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    out = varlen_attention(q, k, v, cu, causal=True, implementation="triton")
    out.sum().backward()
    last = slice(max(0, min(33, offsets[-2])), min(33, offsets[-1]))
    plain = [x[last].detach() for x in (q, k, v)]
    rows = torch.tensor([0, len(plain[0])], dtype=torch.int32, device=DEVICE)
    expected = varlen_attention(*plain, rows, causal=True, implementation="plain")
    torch.testing.assert_close(out[last], expected, rtol=1e-4, atol=1e-5)


def test_only_queries_may_want_a_gradient() -> None:
    case = Case((20,), unused=0)
    q, k, v, gradient = inputs(case)
    leaf = q.clone().requires_grad_()
    out = varlen_attention(leaf, k, v, case.cu_q, implementation="triton")
    (dq,) = torch.autograd.grad(out, leaf, gradient)
    assert same_bits([dq], [ours(case, "triton", q, k, v, gradient)[1]])


# padded sequences


def padded(
    rows_q: int,
    rows_k: int,
    lengths_q: list[int] | None,
    lengths_k: list[int] | None,
    causal: bool,
    implementation: str,
) -> None:
    batch, heads, kv_heads, dim = 3, 2, 1, 16
    generator = torch.Generator().manual_seed(0)
    q, k, v, gradient = (
        torch.randn(batch, n, h, dim, generator=generator).to(DEVICE)
        for n, h in ((rows_q, heads), (rows_k, kv_heads), (rows_k, kv_heads), (rows_q, heads))
    )
    used_q, used_k = lengths_q or [rows_q] * batch, lengths_k or [rows_k] * batch
    for b in range(batch):
        for x, n in ((q, used_q), (k, used_k), (v, used_k), (gradient, used_q)):
            x[b, n[b] :] = float("nan")
    device_lengths: list[Any] = [
        None if n is None else torch.tensor(n, dtype=torch.int32, device=DEVICE)
        for n in (lengths_q, lengths_k)
    ]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_lengths(q, k, v, *device_lengths, causal=causal, implementation=implementation)  # type: ignore[arg-type]

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        for b in range(batch):
            n, m = used_q[b], used_k[b]
            out[b, :n] = one_sequence(q[b, :n], k[b, :m], v[b, :m], causal, None)
        return out

    exact = [torch.nan_to_num(x.double()) for x in (q, k, v, gradient)]
    assert_close(gradients(call, q, k, v, gradient), gradients(formula, *exact), 2.0)


@BOTH
@pytest.mark.parametrize("causal", [False, True])
def test_padded_sequences_equal_float64(causal: bool, implementation: str) -> None:
    padded(33, 33, None, None, causal, implementation)
    padded(40, 23, [40, 0, 17], [1, 23, 16], causal, implementation)
    padded(19, 23, None, [1, 0, 16], causal, implementation)


@BOTH
def test_keys_have_the_lengths_of_queries_unless_told(implementation: str) -> None:
    q = torch.randn(2, 9, 1, 16, device=DEVICE)
    lengths = torch.tensor([4, 9], dtype=torch.int32, device=DEVICE)
    options: dict[str, Any] = {"implementation": implementation}
    expected = attention_lengths(q, q, q, lengths, lengths, **options)
    assert same_bits([attention_lengths(q, q, q, lengths, **options)], [expected])


@BOTH
def test_lengths_are_cut_to_the_rows_there_are(implementation: str) -> None:
    q = torch.randn(2, 9, 1, 16, device=DEVICE)
    wild, tame = (torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in ([-3, 500], [0, 9]))
    options: dict[str, Any] = {"implementation": implementation}
    assert same_bits(
        [attention_lengths(q, q, q, wild, **options)], [attention_lengths(q, q, q, tame, **options)]
    )


# refused


def arguments(**changed: Any) -> dict[str, Any]:
    x = torch.randn(8, 2, 16, device=DEVICE)
    return {"q": x, "k": x, "v": x, "cu_seqlens_q": cumulative((3, 5)), **changed}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": torch.zeros(8, 2, 16, dtype=torch.int32)}, TypeError, "one floating dtype"),
        ({"k": torch.zeros(8, 2, 16, dtype=torch.float16)}, TypeError, "one floating dtype"),
        ({"q": torch.zeros(8, 32)}, ValueError, "3 dimensions"),
        ({"k": torch.zeros(7, 2, 16)}, ValueError, "one shape"),
        ({"q": torch.zeros(8, 2, 24)}, ValueError, "head"),
        ({"q": torch.zeros(8, 3, 16)}, ValueError, "multiple"),
        ({n: torch.zeros(8, 2, 257) for n in "qkv"}, ValueError, "1 to 256"),
        ({"cu_seqlens_q": torch.tensor([0, 8])}, TypeError, "int32"),
        ({"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)}, ValueError, "empty"),
        ({"cu_seqlens_q": torch.zeros(4, dtype=torch.int32)[::2]}, ValueError, "contiguous"),
        ({"cu_seqlens_k": torch.zeros(2, dtype=torch.int32)}, ValueError, "entries"),
        ({"scale": -1.0}, ValueError, "negate q"),
        ({"scale": float("nan")}, ValueError, "finite"),
        ({"implementation": "flash"}, ValueError, "one of"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    on_device = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in changed.items()}
    strided = changed.get("cu_seqlens_q")
    if isinstance(strided, Tensor) and not strided.is_contiguous():
        on_device["cu_seqlens_q"] = torch.zeros(4, dtype=torch.int32, device=DEVICE)[::2]
    with pytest.raises(error, match=message):
        varlen_attention(**arguments(**on_device))


def test_a_batch_needs_as_many_lengths() -> None:
    q = torch.zeros(2, 4, 1, 16, device=DEVICE)
    with pytest.raises(ValueError, match="batch of 2"):
        attention_lengths(q, q, q, torch.zeros(3, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="batch"):
        attention_lengths(q, q[:1], q[:1])


def test_float64_runs_plain_and_refuses_triton() -> None:
    given = arguments(**{n: torch.randn(8, 2, 16, dtype=torch.float64, device=DEVICE) for n in "qkv"})
    assert varlen_attention(**given).dtype == torch.float64
    with pytest.raises(KernelUnavailableError, match="float64"):
        varlen_attention(**given, implementation="triton")
