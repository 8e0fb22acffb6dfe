"""MoE as part of a graph: no read-back, fixed shapes, one cast for each weight, replays, compilers, CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_cases import NoReadBack, gradients, made, nan_in_fresh_memory, plain_loop
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lf_graph import capture
from lf_graph._check import check
from lf_graph._moe_experts import (
    grouped_mm_clearing_idle,
    masked_dense,
    weighted_swiglu,
)
from lf_graph._moe_route import gather_sum, sort_by_expert, spread
from lf_graph._uses import parameter_uses


def test_autocast_casts_each_expert_weight_once() -> None:
    moe, casts = made(), []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0].dim() == 3:
                casts.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    with Count(), torch.autocast("cpu", torch.bfloat16):
        moe(torch.randn(10, 16))
    assert casts == [(8, 16, 48), (8, 24, 16)]


def test_expert_weights_are_read_through_their_cast_only_so_that_a_bfloat16_copy_can_stand_in() -> None:
    moe = made()
    with torch.autocast("cpu", torch.bfloat16):
        uses = parameter_uses(moe, torch.randn(10, 16))
    assert {name: use.only_cast_to for name, use in uses.items()} == {
        "router.weight": None,
        "experts.gate_up": torch.bfloat16,
        "experts.down": torch.bfloat16,
    }


def test_weights_already_in_bfloat16_give_the_same_bits_as_casting_them() -> None:
    moe, x = made(), torch.randn(30, 16)
    with torch.autocast("cpu", torch.bfloat16):
        cast = moe(x).y
        moe.experts.bfloat16()
        assert torch.equal(moe(x).y, cast)


def test_forward_and_backward_read_nothing_back() -> None:
    for dtype in (torch.float32, torch.float64):
        moe = made(balance_weight=0.01, z_weight=0.001).to(dtype)
        x = torch.randn(3, 7, 16, dtype=dtype, requires_grad=True)
        with NoReadBack():
            out = moe(x, torch.rand(3, 7) < 0.8)
            (out.y.sum() + out.aux).backward()


def test_shapes_do_not_depend_on_where_the_tokens_go() -> None:
    moe, traces = made(), []
    for router in (torch.zeros(8, 16), torch.eye(8, 16), torch.randn(8, 16)):
        with torch.no_grad():
            moe.router.weight.copy_(router)
        moe.zero_grad()
        with NoReadBack() as trace:
            moe(torch.randn(40, 16, requires_grad=True)).y.sum().backward()
        traces.append(trace.shapes)
    assert traces[0] == traces[1] == traces[2]


def test_results_repeat_bit_for_bit() -> None:
    moe, x = made(), torch.randn(200, 16, requires_grad=True)

    def bits() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            out = moe(x)
        return [out.y, *gradients(moe, x, out.y)]

    first = bits()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, bits(), strict=True))


def test_the_dry_run_finds_nothing_that_a_graph_cannot_hold() -> None:
    moe = made(balance_weight=0.01, z_weight=0.001)
    report = check(moe, torch.randn(3, 7, 16, requires_grad=True), torch.rand(3, 7) < 0.7)
    assert report.findings == ()
    assert not report.random


def test_a_captured_layer_follows_tokens_that_go_elsewhere() -> None:
    moe = made(balance_weight=0.01, z_weight=0.001)
    keep = torch.rand(3, 7) < 0.7
    with capture(moe, torch.randn(3, 7, 16, requires_grad=True), keep) as captured:
        for scale in (1.0, -2.0, 5.0):
            x, keep = (torch.randn(3, 7, 16) * scale).requires_grad_(), torch.rand(3, 7) < 0.5
            moe.zero_grad()
            out = captured(x, keep)
            (out.y.square().sum() + out.aux).backward()
            grads = [p.grad.clone() for p in moe.parameters()]  # type: ignore[union-attr]
            moe.zero_grad()
            expected = moe(x, keep)
            assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
            (expected.y.square().sum() + expected.aux).backward()
            assert all(torch.equal(a, p.grad) for a, p in zip(grads, moe.parameters(), strict=True))


@pytest.mark.parametrize("autocast", [True, False])
def test_it_compiles_as_one_graph_forward_and_backward(autocast: bool) -> None:
    moe, x = made(balance_weight=0.01), torch.randn(3, 7, 16, requires_grad=True)
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    # a compiled backward runs under the forward's autocast, so the router's products round to bfloat16 there
    tolerance = 2**-6 if autocast else 1e-5
    for keep in (None, torch.rand(3, 7) < 0.7):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            a, b = moe(x, keep), compiled(x, keep)
        assert torch.equal(a.counts, b.counts)
        for left, right in zip(gradients(moe, x, a.y), gradients(moe, x, b.y), strict=True):
            assert (left - right).norm() <= tolerance * left.norm()


def test_every_move_and_product_compiles_with_its_gradients() -> None:
    order, rows, offsets = sort_by_expert(torch.randint(0, 4, (5, 2)), 4, None)
    w = torch.randn(4, 16, 8, requires_grad=True)

    def check(fn: Callable[..., Tensor], *inputs: Tensor) -> None:
        torch.compiler.reset()
        grad = torch.randn_like(fn(*inputs))
        compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
        expected, found = (torch.autograd.grad(f(*inputs), inputs, grad) for f in (fn, compiled))
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b)

    for dtype in (torch.float32, torch.bfloat16):
        y = torch.randn(10, 16, dtype=dtype, requires_grad=True)
        check(lambda x: spread(x, order // 2, rows), torch.randn(5, 16, dtype=dtype, requires_grad=True))
        check(lambda y: gather_sum(y, order // 2, rows), y)
        check(weighted_swiglu, y, torch.rand(10, requires_grad=True))
    wide = w.detach().bfloat16().requires_grad_()
    check(lambda x, w: grouped_mm_clearing_idle(x, w, offsets), y, wide)
    check(lambda x, w: masked_dense(x, w, offsets), y.detach().float().requires_grad_(), w)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_bfloat16_equals_float64_without_a_sync_and_repeats_bit_for_bit() -> None:
    moe = made(64, 96, experts=16, balance_weight=0.01, z_weight=0.001).cuda()
    x = torch.randn(500, 64, device="cuda").requires_grad_()
    keep = torch.rand(500, device="cuda") < 0.8
    grad = torch.randn(500, 64, device="cuda", dtype=torch.bfloat16)

    def bits() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            out = moe(x, keep)
        return [
            out.y,
            *torch.autograd.grad([out.y, out.aux], [x, *moe.parameters()], [grad, torch.ones_like(out.aux)]),
        ]

    bits()
    torch.cuda.set_sync_debug_mode("error")
    try:
        first, second = bits(), bits()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    exact = plain_loop(moe.double(), x.double(), keep)
    assert (first[0] - exact).norm() < 5 * 2**-8 * exact.norm()
    assert all(torch.isfinite(t).all() for t in first)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_idle_experts_and_dropped_tokens_leave_no_garbage() -> None:
    moe = made(64, 96, experts=16, top_k=1, normalize=False).cuda()
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[3] = 0.1
    x = torch.rand(500, 64, device="cuda").requires_grad_()
    keep = torch.arange(500, device="cuda") % 5 > 0
    with nan_in_fresh_memory(), torch.autocast("cuda", torch.bfloat16):
        out = moe(x, keep)
        grads = torch.autograd.grad(out.y.float().square().sum(), [x, *moe.parameters()])
    assert out.counts.tolist() == [0, 0, 0, 400, *[0] * 12]
    assert not out.y[~keep].any()
    assert all(torch.isfinite(g).all() for g in grads)
    used = torch.arange(16, device="cuda") == 3
    for grad in grads[2:]:
        assert torch.equal(grad.abs().amax(dim=(1, 2)) > 0, used)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_follows_new_tokens() -> None:
    moe = made(64, 96, experts=16).cuda()
    x = torch.randn(300, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False), torch.no_grad():
        moe(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = moe(x)
        for seed in range(3):
            torch.manual_seed(seed)
            x.copy_(torch.randn(300, 64) * (seed + 1) + seed)
            graph.replay()
            assert torch.equal(out.y, moe(x).y)
            assert torch.equal(out.counts, moe(x).counts)
