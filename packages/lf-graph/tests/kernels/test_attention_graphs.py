"""Attention in captured graphs, compilers and autocast; its operators' contracts, tuning and code for an H200."""

from __future__ import annotations

import re
from typing import Any

import pytest
import sm90
import torch
import traced
from attention_cases import Case, assert_close, cumulative, gradients, inputs, reference
from kernel_cases import DEVICE, same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import lf_graph
from lf_graph.kernels import _attention_triton as triton_attention
from lf_graph.kernels import _attention_tuning as tuning
from lf_graph.kernels import attention_lengths, varlen_attention
from lf_graph.kernels._attention_layout import Layout
from lf_graph.kernels._tunable import Config, Tunable

BOTH = pytest.mark.parametrize("implementation", ["triton", "plain"])
TUNABLES = [tuning.FORWARD, tuning.DQ, tuning.DKV]


@BOTH
def test_a_graph_replays_other_lengths(implementation: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return varlen_attention(q, k, v, cu, causal=True, implementation=implementation)  # type: ignore[arg-type]

    def call(fn: Any, q: Tensor, cu: Tensor) -> tuple[Tensor, ...]:
        leaves = [(q + i).requires_grad_() for i in range(3)]
        out = fn(*leaves, cu)
        return out.detach().clone(), *torch.autograd.grad(out, leaves, q)

    q = torch.randn(16, 1, 16, device=DEVICE)
    captured = lf_graph.capture(
        attention, *(q.clone().requires_grad_() for _ in range(3)), cumulative((5, 3))
    )
    for lengths in ((1, 7), (16, 0), (8, 8), (0, 0)):
        cu = cumulative(lengths)
        assert same_bits(call(captured, q, cu), call(attention, q, cu))


@BOTH
def test_a_graph_replays_other_padding(implementation: str) -> None:
    def attention(q: Tensor, lengths: Tensor) -> Tensor:
        return attention_lengths(q, q, q, lengths, implementation=implementation)  # type: ignore[arg-type]

    q = torch.randn(2, 8, 2, 16, device=DEVICE)
    sample = torch.tensor([5, 3], dtype=torch.int32, device=DEVICE)
    captured = lf_graph.capture(attention, q, sample)
    for lengths in ([1, 7], [8, 8], [0, 2]):
        given = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        assert same_bits([captured(q, given)], [attention(q, given)])


@BOTH
def test_compiled_whole_it_computes_the_same(implementation: str) -> None:
    case = Case((9, 20), causal=True)
    tensors = inputs(case)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, case.cu_q, causal=True, implementation=implementation)  # type: ignore[arg-type]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_close(gradients(compiled, *tensors), [x.double() for x in gradients(call, *tensors)])


def test_a_compiler_sees_three_operators_and_copies_nothing() -> None:
    graphs = [
        traced.calls_of(["packed", "chosen", "fused"], dynamic, "traced_attention")
        for dynamic in (False, True)
    ]
    for forward, backward in (of for table in graphs for of in table.values()):
        assert forward.count("attention_forward.default") == 1
        assert [c for c in backward if "attention" in c] == ["attention_dq.default", "attention_dkv.default"]
        assert not [c for c in forward + backward if "clone" in c or "copy" in c or "select" in c]


def test_the_operators_keep_their_contract() -> None:
    q, k, v, gradient = (torch.nan_to_num(x)[None] for x in inputs(Case((3, 5), heads=2, kv_heads=1)))
    cu = cumulative((3, 5))
    rest = (cu, cu, 2, True, True, 0.25)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(triton_attention.forward, (*leaves, *rest))
    given = [x.detach() for x in (gradient, q, k, v)]
    out, lse = triton_attention.forward(*given[1:], *rest)
    torch.library.opcheck(triton_attention.backward_queries, (*given, out, lse, *rest))
    _, terms = triton_attention.backward_queries(*given, out, lse, *rest)
    torch.library.opcheck(triton_attention.backward_keys, (*given, terms, *rest))


@BOTH
def test_fake_tensors_know_shapes_and_types(implementation: str) -> None:
    with FakeTensorMode():
        leaves = [torch.empty(30, h, 64, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2)]
        cu = torch.empty(4, dtype=torch.int32)
        out = varlen_attention(*leaves, cu, implementation=implementation)  # type: ignore[arg-type]
        found = torch.autograd.grad(out.sum(), leaves)
    assert [(x.shape, x.dtype) for x in (out, *found)] == [(x.shape, x.dtype) for x in (leaves[0], *leaves)]


@BOTH
def test_autocast_computes_in_its_dtype(implementation: str) -> None:
    case = Case((9, 20))
    q, k, v, _ = inputs(case)
    options: dict[str, Any] = {"implementation": implementation}
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        found = varlen_attention(q, k.half(), v, case.cu_q, **options)
    expected = varlen_attention(q.bfloat16(), k.half().bfloat16(), v.bfloat16(), case.cu_q, **options)
    assert found.dtype == torch.bfloat16
    assert same_bits([found], [expected])


@pytest.mark.parametrize("causal", [False, True])
def test_the_plain_twin_has_the_gradient_of_what_it_computes(causal: bool) -> None:
    q, k, v, _ = (torch.nan_to_num(x).double().requires_grad_() for x in inputs(Case((3, 0, 2), (2, 1, 3))))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, cumulative((3, 0, 2)), cumulative((2, 1, 3)), causal=causal)

    assert torch.autograd.gradcheck(call, (q, k, v))


# launches


@pytest.mark.parametrize(("m", "n"), [(16, 16), (16, 64), (64, 16), (128, 32)])
@pytest.mark.parametrize(("head_dim", "split"), [(24, False), (40, True)])
def test_every_block_size_computes_the_same(m: int, n: int, head_dim: int, split: bool) -> None:
    case = Case((37, 0, 18), (50, 3, 20), heads=2, kv_heads=1, head_dim=head_dim, causal=True, unused=1)
    tensors = inputs(case)
    q, k, v, gradient = (x[None] for x in tensors)
    layout = Layout(case.cu_q, case.cu_k, 3, True, True, 0.2)
    config = Config((("BLOCK_M", m), ("BLOCK_N", n), ("SPLIT", int(split))), num_warps=4)
    out, lse = triton_attention.launch_forward(q, k, v, layout, config)
    dq, terms = triton_attention.launch_dq(gradient, q, k, v, out, lse, layout, config)
    dk, dv = triton_attention.launch_dkv(gradient, q, k, v, terms, layout, config)
    scaled = Case(case.lengths, case.lengths_k, 2, 1, head_dim, True, scale=0.2)
    assert_close([x[0] for x in (out, dq, dk, dv)], reference(scaled, *tensors))


def test_heads_that_are_no_power_of_two_are_split_where_that_saves_columns() -> None:
    assert [tuning.head_parts(d, True) for d in (8, 16, 40, 48, 64, 72, 80, 96, 120, 256)] == [
        (16, 0), (16, 0), (32, 16), (32, 16), (64, 0), (64, 16), (64, 16), (64, 32), (128, 0), (256, 0),
    ]  # fmt: skip
    assert [tuning.head_parts(d, False) for d in (8, 48, 72)] == [(16, 0), (64, 0), (128, 0)]


KEYS = [
    (dtype, d, True, rows)
    for dtype in ("bfloat16", "float32")
    for d in (64, 72, 128, 256)
    for rows in (64, 8192)
]


@pytest.mark.parametrize("tunable", TUNABLES, ids=lambda t: t.name)
def test_every_key_has_candidates_and_a_default_among_what_fits(tunable: Tunable) -> None:
    for key in KEYS:
        candidates = tunable.candidates(key)
        assert len(candidates) == len(set(candidates)) > 0
        assert tunable.default(key)["BLOCK_M"] >= 16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tunable", TUNABLES, ids=lambda t: t.name)
def test_a_problem_accepts_the_default_and_notices_a_wrong_result(tunable: Tunable, dtype: str) -> None:
    key = (dtype, 72, True, 64)
    problem = tunable.problem(key, DEVICE)
    for found, expected, allowed in zip(
        problem.run(tunable.default(key)), problem.reference, problem.tolerance, strict=True
    ):
        largest = expected.abs().max()
        assert float((found.double() - expected).abs().max() / largest) < allowed
        assert float(found.double().roll(1, 1).sub(expected).abs().max() / largest) > allowed


def h200(
    kernel: str, tunable: Tunable, head_dim: int
) -> tuple[str, str, dict[str, str], dict[str, Any], dict[str, int]]:
    config = tunable.default(("bfloat16", head_dim, True, 2048))
    low, high = tuning.head_parts(head_dim, bool(config["SPLIT"]))
    constants = {
        "LAYOUT_Q": 0, "LAYOUT_K": 0, "CAUSAL": True, "GROUP": 2, "HEAD_DIM": head_dim, "LOW": low, "HIGH": high,
        "ALIGN": 8, "LANES": 16, "BLOCK_M": config["BLOCK_M"], "BLOCK_N": config["BLOCK_N"],
    }  # fmt: skip
    if kernel == "backward_keys":
        constants["TERMS"] = triton_attention.terms_width(config)
    integers = ("sequences", "pitch_q", "pitch_k", "capacity_q", "capacity_k", "heads", "kv_heads")
    strides = tuple(f"{part}_{x}" for part in ("batch", "row", "head") for x in "qkvg")
    types = dict.fromkeys(integers + strides, "i32") | dict.fromkeys(("scale", "scale2"), "fp32")
    types |= dict.fromkeys(("lse", "terms"), "*fp32") | dict.fromkeys(("offsets_q", "offsets_k"), "*i32")
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return "lf_graph.kernels._attention_kernels", kernel, types, constants, options


def test_on_an_h200_tensor_cores_are_fed_16_bytes_at_a_time() -> None:
    kernels = (("forward", tuning.FORWARD), ("backward_queries", tuning.DQ), ("backward_keys", tuning.DKV))
    cases = [
        (name, tunable, d)
        for name, tunable in kernels
        for d in ((64, 72) if name == "backward_keys" else (64,))
    ]
    for case in cases:
        ptx, head_dim = sm90.ptx(*h200(*case)), case[2]
        assert "wgmma.mma_async" in ptx
        assert "mma.sync" not in ptx
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x([0-9a-f]+)", ptx)
        wide = copies.count("10")
        assert wide >= 8
        if head_dim == 64:  # of 72, a block is 16 columns wide: fewer bytes than threads times 16
            assert len(copies) - wide <= 8  # the two numbers of each query
