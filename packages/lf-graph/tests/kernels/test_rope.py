"""Rotary positions: numbers, gradients, layouts, packed sequences, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, assert_near, distance, same_bits
from torch import Tensor

import lf_graph
from lf_graph.kernels import packed_positions, rope
from lf_graph.kernels._rope_triton import ROPE, rope_op

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def tables(length: int, half: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin of arXiv 2104.09864 with base 10000."""
    angle = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
    return angle.cos().to(DEVICE, dtype), angle.sin().to(DEVICE, dtype)


def heads(
    shape: tuple[int, ...], kv: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """q [shape] and k with ``kv`` heads."""
    generator = torch.Generator().manual_seed(seed)
    of_k = (*shape[:-2], kv, shape[-1])
    q, k = (torch.randn(s, generator=generator).to(DEVICE, dtype).requires_grad_() for s in (shape, of_k))
    return q, k


def results(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, implementation: str
) -> tuple[Tensor, ...]:
    """Rotated q and k and gradients of both, from the same random ones for every dtype."""
    outputs = rope(q, k, cos, sin, positions, implementation=implementation)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(o.shape, generator=generator).bfloat16().to(o.device, o.dtype) for o in outputs]
    return *outputs, *torch.autograd.grad(outputs, (q, k), upstream)


def exact(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def assert_right(
    shape: tuple[int, ...], kv: int, half: int, dtype: torch.dtype, how: str = "index", seed: int = 0
) -> None:
    q, k = heads(shape, kv, dtype, seed)
    tokens = shape[:-2]
    cos, sin = tables(tokens[-1] + 7, half)
    positions = None
    if how == "positions":
        positions = torch.randint(len(cos), tokens, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    found = results(q, k, cos, sin, positions, "triton")
    assert [f.dtype for f in found] == [dtype] * 4
    assert_near(found, results(*exact(q, k, cos, sin), positions, "plain"), 1, floor=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["index", "positions"])
@pytest.mark.parametrize(
    ("shape", "kv", "half"),
    [
        ((2, 5, 4, 64), 2, 32),
        ((1, 9, 3, 128), 1, 64),
        ((2, 3, 2, 80), 2, 20),
        ((7, 2, 6), 3, 1),
        ((2, 2, 1, 5), 1, 2),
        ((1, 1, 1, 2), 1, 1),
    ],
)
def test_kernels_equal_float64(
    shape: tuple[int, ...], kv: int, half: int, how: str, dtype: torch.dtype
) -> None:
    assert_right(shape, kv, half, dtype, how)


@settings(max_examples=20, deadline=None)
@given(
    data=st.data(),
    tokens=st.one_of(st.tuples(st.integers(1, 3), st.integers(1, 12)), st.tuples(st.integers(1, 20))),
    counts=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    width=st.integers(2, 70),
    dtype=st.sampled_from(DTYPES),
    how=st.sampled_from(["index", "positions"]),
)
def test_kernels_equal_float64_at_any_shape(
    data: st.DataObject,
    tokens: tuple[int, ...],
    counts: tuple[int, int],
    width: int,
    dtype: torch.dtype,
    how: str,
) -> None:
    half = data.draw(st.integers(1, width // 2))
    assert_right((*tokens, counts[0], width), counts[1], half, dtype, how, data.draw(st.integers(0, 99)))


def test_the_twin_is_the_rotation_of_pairs() -> None:
    q, k = heads((2, 5, 3, 8), 1, torch.float64)
    cos, sin = tables(5, 3, torch.float64)
    rotated, _ = rope(q, k, cos, sin, implementation="plain")
    pairs = torch.complex(q[..., :3], q[..., 3:6]) * torch.complex(cos, sin)[:, None]
    torch.testing.assert_close(rotated, torch.cat((pairs.real, pairs.imag, q[..., 6:]), -1))


def test_the_twin_is_that_of_transformers() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    q, k = heads((2, 4, 5, 16), 5)  # here [B, heads, T, D]
    cos, sin = (t.repeat(1, 2)[None] for t in tables(5, 8))
    expected = qwen.apply_rotary_pos_emb(q, k, cos, sin)
    found = rope(q, k, cos[0, :, :8], sin[0, :, :8], heads_dim=-3, implementation="plain")
    torch.testing.assert_close(found, expected)


def test_gradients_of_the_twin_and_second_ones_of_the_operator() -> None:
    q, k = heads((2, 3, 2, 6), 1, torch.float64)
    cos, sin = tables(9, 2, torch.float64)
    positions = torch.tensor([[0, 3, 8], [1, 1, 2]], device=DEVICE)
    assert torch.autograd.gradcheck(
        lambda a, b: rope(a, b, cos, sin, positions, implementation="plain"), (q, k)
    )
    q, k = (t.detach().float().requires_grad_() for t in (q, k))
    rotated, _ = rope(q, k, cos.float(), sin.float(), positions, implementation="triton")
    (first,) = torch.autograd.grad(rotated.pow(3).sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q)
    leaf = q.detach().double().requires_grad_()
    rotated, _ = rope(leaf, k.double(), cos, sin, positions, implementation="plain")
    (first,) = torch.autograd.grad(rotated.pow(3).sum(), leaf, create_graph=True)
    assert distance(second, torch.autograd.grad(first.square().sum(), leaf)[0]) < 1e-5


@pytest.mark.parametrize("implementation", ["triton", "plain"])
def test_heads_before_tokens_are_the_same_heads(implementation: str) -> None:
    q, k = heads((2, 5, 3, 16), 2)
    cos, sin = tables(5, 8)
    expected = rope(q, k, cos, sin, implementation=implementation)
    found = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, heads_dim=-3, implementation=implementation)
    assert same_bits([t.transpose(1, 2) for t in found], expected)
    packed = rope(
        q[0].transpose(0, 1), k[0].transpose(0, 1), cos, sin, heads_dim=-3, implementation=implementation
    )
    assert same_bits([t.transpose(0, 1) for t in packed], [t[0] for t in expected])


@pytest.mark.parametrize("implementation", ["triton", "plain"])
def test_a_table_of_every_token_and_halves_of_repeated_columns(implementation: str) -> None:
    q, k = heads((2, 5, 3, 16), 2)
    cos, sin = tables(20, 8)
    positions = torch.tensor([[4, 3, 2, 9, 19], [0, 0, 7, 1, 5]], device=DEVICE, dtype=torch.int32)
    expected = rope(q, k, cos, sin, positions, implementation=implementation)
    wide = [t[positions].repeat(1, 1, 2)[..., :8] for t in (cos, sin)]
    assert same_bits(rope(q, k, *wide, implementation=implementation), expected)
    columns = [t.T.contiguous().T for t in (cos, sin)]
    assert same_bits(rope(q, k, *columns, positions, implementation=implementation), expected)
    shared = rope(q, k, cos, sin, positions[0], implementation=implementation)
    assert same_bits([s[0] for s in shared], [e[0] for e in expected])


def test_slices_of_a_fused_qkv_are_read_in_place() -> None:
    fused = torch.full((2, 6, 5, 64), float("nan"), device=DEVICE)
    q, k = fused[:, :, :3, :32], fused[:, :, 3:4, :32]
    q.normal_()
    k.normal_()
    cos, sin = tables(6, 16)
    strided = results(*(t.detach().requires_grad_() for t in (q, k)), cos, sin, None, "triton")
    dense = results(
        *(t.detach().clone().contiguous().requires_grad_() for t in (q, k)), cos, sin, None, "triton"
    )
    assert same_bits(strided, dense)
    assert not any(t.isnan().any() for t in strided)
    assert strided[0].is_contiguous()
    odd = fused[:, :, :3, 32:].normal_()[..., ::2]
    found = rope(odd, odd, *tables(6, 8), implementation="triton")
    assert same_bits(found, rope(odd.contiguous(), odd.contiguous(), *tables(6, 8), implementation="triton"))


@pytest.mark.parametrize("implementation", ["triton", "plain"])
def test_packed_sequences_are_rotated_as_each_alone(implementation: str) -> None:
    lengths = (3, 1, 5)
    cu_seqlens = torch.tensor([0, 3, 4, 9], device=DEVICE, dtype=torch.int32)
    q, k = heads((11, 2, 8), 1)
    cos, sin = tables(6, 4)
    positions = packed_positions(cu_seqlens, 11)
    assert positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 0]
    found = rope(q, k, cos, sin, positions, implementation=implementation)
    assert not any(t.isnan().any() for t in found)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = rope(q[part], k[part], cos, sin, implementation=implementation)
        assert same_bits([t[part] for t in found], alone)
        start += length


def test_empty_sequences_take_no_token() -> None:
    cu_seqlens = torch.tensor([0, 0, 2, 2, 3, 3], device=DEVICE)
    assert packed_positions(cu_seqlens, 4).tolist() == [0, 1, 0, 0]
    assert packed_positions(cu_seqlens[:1], 2).tolist() == [0, 0]
    assert packed_positions(cu_seqlens, 0).tolist() == []


@pytest.mark.parametrize("implementation", ["triton", "plain"])
def test_a_position_outside_of_the_table_makes_its_token_nan(implementation: str) -> None:
    q, k = heads((4, 2, 8), 1)
    positions = torch.tensor([0, 5, -1, 4], device=DEVICE)
    for rotated in rope(q, k, *tables(5, 3), positions, implementation=implementation):
        assert rotated[[1, 2], :, :6].isnan().all()
        assert not rotated[[0, 3]].isnan().any()


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (0, 2, 8), (2, 3, 0, 8)])
def test_nothing_gives_nothing(shape: tuple[int, ...]) -> None:
    q, k = heads(shape, 0)
    found = results(q, k, *tables(3, 4), None, "triton")
    assert [f.shape for f in found] == [q.shape, k.shape] * 2


def test_a_missing_gradient_counts_as_zero() -> None:
    q, k = heads((3, 2, 8), 1)
    rotated, _ = rope(q, k, *tables(3, 4), implementation="triton")
    rotated.sum().backward()
    assert torch.equal(k.grad, torch.zeros_like(k))
    assert q.grad.abs().max() > 0


@pytest.mark.parametrize("implementation", ["triton", "plain"])
def test_compiled_whole_it_gives_the_same(implementation: str) -> None:
    q, k = heads((2, 5, 2, 16), 1)
    cos, sin = tables(9, 8)
    cu_seqlens = torch.tensor([0, 2, 5], device=DEVICE)
    torch._dynamo.reset()

    def call(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return rope(a, b, cos, sin, packed_positions(cu_seqlens, 5), implementation=implementation)

    outputs = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k)
    torch.testing.assert_close(outputs, call(q, k))
    upstream = [torch.randn_like(o) for o in outputs]
    torch.testing.assert_close(
        torch.autograd.grad(outputs, (q, k), upstream), torch.autograd.grad(call(q, k), (q, k), upstream)
    )


def test_a_dry_run_and_a_recorded_graph_know_the_operator() -> None:
    cos, sin = tables(9, 8)

    def call(a: Tensor, b: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope(a, b, cos, sin, positions, implementation="triton")

    q, k = heads((2, 5, 2, 16), 1)
    positions = torch.arange(5, device=DEVICE)
    assert lf_graph.check(call, q, k, positions).ok
    with lf_graph.capture(call, q, k, positions) as captured:
        later = positions.flip(0)
        assert same_bits(captured(q, k, later), call(q, k, later))


@pytest.mark.parametrize("positions", [None, torch.tensor([[1, 0, 2], [3, 3, 3]])])
@pytest.mark.parametrize("inverse", [False, True])
def test_the_operator_keeps_the_contract_of_torch(positions: Tensor | None, inverse: bool) -> None:
    q, k = heads((2, 3, 2, 8), 1)
    where = None if positions is None else positions.to(DEVICE)
    torch.library.opcheck(rope_op, (q, k, *tables(4, 3), where, inverse))


@pytest.mark.parametrize("key", [(16, 8, "bfloat16"), (20, 5, "float32"), (2, 1, "float16")])
def test_every_launch_worth_trying_is_right(key: tuple[int | str | bool, ...]) -> None:
    problem, candidates = ROPE.problem(key, DEVICE), ROPE.candidates(key)
    assert ROPE.default(key) in candidates
    for config in candidates[:: max(1, len(candidates) // 4)]:
        for out, expected, tolerance in zip(
            problem.run(config), problem.reference, problem.tolerance, strict=True
        ):
            assert distance(out, expected) <= tolerance, config


Q, (COS, SIN) = torch.zeros(2, 3, 4, 8), (torch.ones(3, 4), torch.zeros(3, 4))
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "integers": (lambda: rope(Q.int(), Q.int(), COS, SIN), "q is torch.int32"),
    "another layout": (lambda: rope(Q, Q, COS, SIN, heads_dim=1), "heads_dim=1: -2"),
    "two dimensions": (lambda: rope(Q[0, 0], Q[0, 0], COS, SIN), r"\[T, heads, D\] of packed rows"),
    "other tokens": (lambda: rope(Q, Q[:1], COS, SIN), "only heads may differ"),
    "other dtypes": (lambda: rope(Q, Q.half(), COS, SIN), "only heads may differ"),
    "unlike tables": (lambda: rope(Q, Q, COS, SIN[:2]), "both must be alike"),
    "trained tables": (lambda: rope(Q, Q, COS.clone().requires_grad_(), SIN), "detach them"),
    "wide tables": (lambda: rope(Q, Q, COS.repeat(1, 2), SIN.repeat(1, 2)), "give the first half"),
    "short tables": (lambda: rope(Q, Q, COS[:2], SIN[:2]), "tables of 2 positions for 3 tokens"),
    "tables of other tokens": (
        lambda: rope(Q, Q, COS[None], SIN[None]),
        r"\[B, T, R/2\] for \[2, 3\] tokens",
    ),
    "floats as positions": (lambda: rope(Q, Q, COS, SIN, Q[..., 0, 0]), "positions is torch.float32"),
    "other positions": (lambda: rope(Q, Q, COS, SIN, torch.arange(2)), r"int32 or int64 \[2, 3\]"),
    "positions elsewhere": (
        lambda: rope(Q, Q, COS, SIN, torch.arange(3, device="meta")),
        "positions is on meta",
    ),
    "tables elsewhere": (lambda: rope(Q, Q, COS.to("meta"), SIN.to("meta")), "cos is on meta"),
    "lengths as floats": (lambda: packed_positions(torch.zeros(3), 4), "cu_seqlens is torch.float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_cause(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()
