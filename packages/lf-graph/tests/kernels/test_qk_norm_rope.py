"""RMSNorm of heads and their rotation in one pass: numbers, gradients, layouts, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sm90
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, assert_near, distance, same_bits
from test_rope import heads, tables
from torch import Tensor

import lf_graph
from lf_graph.kernels import packed_positions, qk_norm_rope, rms_norm, rope
from lf_graph.kernels._qk_norm_rope_triton import (
    QK_BACKWARD,
    QK_FORWARD,
    qk_norm_rope_backward_op,
    qk_norm_rope_op,
)
from lf_graph.kernels._tunable import Tunable

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def leaves(
    shape: tuple[int, ...], kv: int, dtype: torch.dtype = torch.float32, wide: bool = False, seed: int = 0
) -> list[Tensor]:
    """q, k and their weights."""
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.randn(shape[-1:], generator=generator) for _ in range(2))
    kind = torch.float32 if wide else dtype
    return [*heads(shape, kv, dtype, seed), *(w.to(DEVICE, kind).requires_grad_() for w in weights)]


def in_float64(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def results(tensors: list[Tensor], *rest: Tensor | None, implementation: str) -> tuple[Tensor, ...]:
    """Outputs, and gradients of all leaves from the same random ones for every dtype."""
    outputs = qk_norm_rope(*tensors, *rest, implementation=implementation)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(o.shape, generator=generator).bfloat16().to(o.device, o.dtype) for o in outputs]
    return *outputs, *torch.autograd.grad(outputs, tensors, upstream)


def assert_right(
    shape: tuple[int, ...],
    kv: int,
    half: int,
    dtype: torch.dtype,
    how: str,
    wide: bool = False,
    seed: int = 0,
) -> None:
    tensors = leaves(shape, kv, dtype, wide, seed)
    tokens = shape[:-2]
    angles = tables(tokens[-1] + 7, half)
    positions = None
    if how == "positions":
        positions = torch.randint(len(angles[0]), tokens, generator=torch.Generator().manual_seed(seed)).to(
            DEVICE
        )
    found = results(tensors, *angles, positions, implementation="triton")
    exact = results(in_float64(tensors), *(t.double() for t in angles), positions, implementation="plain")
    assert [f.dtype for f in found[2:]] == [t.dtype for t in tensors]
    assert_near(found[:2], exact[:2], 2)
    assert_near(found[2:], exact[2:], 4, floor=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["index", "positions"])
@pytest.mark.parametrize(
    ("shape", "kv", "half", "wide"),
    [
        ((2, 5, 4, 64), 2, 32, True),
        ((1, 9, 3, 128), 1, 64, False),
        ((2, 3, 2, 80), 2, 20, True),
        ((7, 2, 9), 3, 1, False),
        ((1, 1, 1, 8), 1, 3, False),
    ],
)
def test_kernels_equal_float64(
    shape: tuple[int, ...], kv: int, half: int, wide: bool, how: str, dtype: torch.dtype
) -> None:
    assert_right(shape, kv, half, dtype, how, wide)


@settings(max_examples=20, deadline=None)
@given(
    data=st.data(),
    tokens=st.one_of(st.tuples(st.integers(1, 3), st.integers(1, 12)), st.tuples(st.integers(1, 20))),
    counts=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    width=st.integers(8, 70),
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
    seed = data.draw(st.integers(0, 99))
    assert_right((*tokens, counts[0], width), counts[1], half, dtype, how, data.draw(st.booleans()), seed)


def test_without_an_epsilon_rows_beyond_the_last_do_not_reach_the_gradients_of_weights() -> None:
    tensors, (cos, sin) = leaves((1, 5, 3, 8), 1), tables(5, 4)

    def gradients(given: list[Tensor], *angles: Tensor) -> tuple[Tensor, ...]:
        how = "triton" if angles[0].dtype == torch.float32 else "plain"
        outputs = qk_norm_rope(*given, *angles, eps=0.0, implementation=how)
        return torch.autograd.grad([o.sum() for o in outputs], given)

    assert_near(
        gradients(tensors, cos, sin), gradients(in_float64(tensors), cos.double(), sin.double()), 4, 1.0
    )


def test_the_twin_is_the_norm_and_the_rotation_of_torch() -> None:
    q, k, v, w = leaves((2, 5, 3, 8), 1, torch.float64)
    cos, sin = tables(5, 3, torch.float64)
    expected = rope(
        torch.nn.functional.rms_norm(q, (8,), v, 1e-6),
        torch.nn.functional.rms_norm(k, (8,), w, 1e-6),
        cos,
        sin,
    )
    torch.testing.assert_close(qk_norm_rope(q, k, v, w, cos, sin, implementation="plain"), expected)
    assert torch.autograd.gradcheck(
        lambda *t: qk_norm_rope(*t, cos, sin, implementation="plain"), (q, k, v, w)
    )


def test_it_is_the_two_kernels_with_one_rounding_less() -> None:
    q, k, v, w = leaves((2, 5, 3, 64), 2, torch.bfloat16)
    cos, sin = tables(5, 32)
    ways = {"implementation": "triton"}
    apart = rope(rms_norm(q, v, **ways), rms_norm(k, w, **ways), cos, sin, **ways)
    exact = qk_norm_rope(*in_float64([q, k, v, w]), cos.double(), sin.double())
    for one, two, reference in zip(qk_norm_rope(q, k, v, w, cos, sin, **ways), apart, exact, strict=True):
        assert distance(one, reference) <= distance(two, reference)


def test_slices_of_a_fused_qkv_and_heads_before_tokens_change_no_bit() -> None:
    fused = torch.full((2, 6, 5, 32), float("nan"), device=DEVICE)
    q, k = fused[:, :, :3], fused[:, :, 3:4]
    q.normal_()
    k.normal_()
    weights = leaves((2, 6, 3, 32), 1)[2:]
    angles = tables(6, 16)
    strided, dense = (
        results(
            [*(copy(t.detach()).requires_grad_() for t in (q, k)), *weights], *angles, implementation="triton"
        )
        for copy in (torch.Tensor.detach, torch.Tensor.contiguous)
    )
    assert same_bits(strided, dense)
    assert not any(t.isnan().any() for t in strided)
    turned = qk_norm_rope(
        q.transpose(1, 2), k.transpose(1, 2), *weights, *angles, heads_dim=-3, implementation="triton"
    )
    assert same_bits([t.transpose(1, 2) for t in turned], strided[:2])


@pytest.mark.parametrize("implementation", ["triton", "plain"])
def test_packed_sequences_are_turned_as_each_alone(implementation: str) -> None:
    q, k, v, w = leaves((11, 2, 8), 1)
    angles = tables(6, 4)
    positions = packed_positions(torch.tensor([0, 3, 4, 9], device=DEVICE, dtype=torch.int32), 11)
    found = qk_norm_rope(q, k, v, w, *angles, positions, implementation=implementation)
    for part in (slice(0, 3), slice(3, 4), slice(4, 9)):
        alone = qk_norm_rope(q[part], k[part], v, w, *angles, implementation=implementation)
        assert same_bits([t[part] for t in found], alone)


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (0, 2, 8), (2, 3, 0, 8)])
def test_nothing_gives_nothing_and_gradients_of_zero(shape: tuple[int, ...]) -> None:
    tensors = leaves(shape, 0)
    found = results(tensors, *tables(3, 4), implementation="triton")
    assert same_bits(found[2:], [torch.zeros_like(t) for t in tensors])


def test_a_position_outside_of_the_table_makes_its_token_nan() -> None:
    tensors = leaves((3, 2, 8), 1)
    found = qk_norm_rope(
        *tensors, *tables(3, 4), torch.tensor([0, 3, 2], device=DEVICE), implementation="triton"
    )
    for rotated in found:
        assert rotated[1].isnan().all()
        assert not rotated[[0, 2]].isnan().any()


def test_gradients_repeat_bit_for_bit() -> None:
    def once() -> tuple[Tensor, ...]:
        return results(leaves((2, 40, 3, 16), 2, torch.bfloat16), *tables(40, 8), implementation="triton")

    expected = once()
    assert all(same_bits(once(), expected) for _ in range(3))


@pytest.mark.parametrize("implementation", ["triton", "plain"])
def test_compiled_whole_it_gives_the_same(implementation: str) -> None:
    tensors = leaves((2, 5, 2, 16), 1)
    angles = tables(9, 8)
    torch._dynamo.reset()

    def call(*t: Tensor) -> tuple[Tensor, Tensor]:
        return qk_norm_rope(*t, *angles, implementation=implementation)

    outputs = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
    torch.testing.assert_close(outputs, call(*tensors))
    upstream = [torch.randn_like(o) for o in outputs]
    torch.testing.assert_close(
        torch.autograd.grad(outputs, tensors, upstream),
        torch.autograd.grad(call(*tensors), tensors, upstream),
    )


def test_a_dry_run_and_a_recorded_graph_know_the_operator() -> None:
    tensors = leaves((2, 5, 2, 16), 1)
    angles = tables(9, 8)

    def call(*t: Tensor) -> tuple[Tensor, Tensor]:
        return qk_norm_rope(*t, *angles, implementation="triton")

    assert lf_graph.check(call, *tensors).ok
    with lf_graph.capture(call, *tensors) as captured:
        assert same_bits(captured(*tensors), call(*tensors))


def test_the_operators_keep_the_contract_of_torch() -> None:
    tensors = leaves((2, 3, 2, 8), 1)
    rest = (*tables(4, 3), torch.tensor([[1, 0, 2], [3, 3, 3]], device=DEVICE), 1e-6)
    torch.library.opcheck(qk_norm_rope_op, (*tensors, *rest))
    fixed = [t.detach() for t in tensors]
    upstream = [torch.randn_like(t) for t in fixed[:2]]
    torch.library.opcheck(qk_norm_rope_backward_op, (*upstream, *fixed, *rest))


@pytest.mark.parametrize("tunable", [QK_FORWARD, QK_BACKWARD], ids=lambda t: t.name)
@pytest.mark.parametrize("key", [(16, 8, "bfloat16"), (20, 5, "float32")])
def test_every_launch_worth_trying_is_right(tunable: Tunable, key: tuple[int | str | bool, ...]) -> None:
    problem, candidates = tunable.problem(key, DEVICE), tunable.candidates(key)
    assert tunable.default(key) in candidates
    for config in {tunable.default(key), *candidates[:: max(1, len(candidates) // 3)]}:
        for out, expected, tolerance in zip(
            problem.run(config), problem.reference, problem.tolerance, strict=True
        ):
            assert distance(out, expected) <= tolerance, config


def test_compiled_for_a_gpu_heads_move_16_bytes_at_once() -> None:
    tiles = ("dq", "q", "q_weight", "q_out", "dk", "k", "k_weight", "k_out")
    strides = [
        f"{x}_{level}" for x in ("q", "k", "dq", "dk", "t") for level in ("batch", "token", "head", "row")
    ]
    text = sm90.ptx(
        "lf_graph.kernels._qk_norm_rope_kernels", "norm_and_rotate_backward", default="i32", options={"num_warps": 4},
        types={**dict.fromkeys(tiles, "*bf16"), **dict.fromkeys(("cos", "sin", "partials"), "*fp32"),
               "positions": "*i32", "eps": "fp32"},
        aligned=[s for s in strides if s not in ("q_row", "k_row", "dq_row", "dk_row", "t_token", "t_head")],
        constants={"Q_HEADS": 16, "K_HEADS": 8, "D": 128, "HALF": 64, "BLOCK": 64, "REST": 0, "ROWS": 16,
                   "POSITIONS": True},
    )  # fmt: skip
    found = sm90.accesses(text)
    # 1024 elements over 128 threads: 16 bytes a thread of each half of q and dq, and the same of k and dk; the
    # tables are fp32: twice 16 bytes each
    assert found["ld 16"] >= 2 * (4 + 4)
    assert found["st 16"] >= 2 * 2


Q, W, (COS, SIN) = torch.zeros(2, 3, 4, 8), torch.ones(8), (torch.ones(3, 4), torch.zeros(3, 4))
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a narrow weight": (lambda: qk_norm_rope(Q, Q, W[:7], W, COS, SIN), r"q_weight is \[7\]: \[8\]"),
    "two dtypes": (lambda: qk_norm_rope(Q, Q, W, W.half(), COS, SIN), "give both one dtype"),
    "a weight elsewhere": (lambda: qk_norm_rope(Q, Q, W, W.to("meta"), COS, SIN), "k_weight is on meta"),
    "other tokens": (
        lambda: qk_norm_rope(Q, Q[:1], W, W, COS, SIN),
        "qk_norm_rope: .* only heads may differ",
    ),
    "another layout": (lambda: qk_norm_rope(Q, Q, W, W, COS, SIN, heads_dim=0), "heads_dim=0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_cause(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()
