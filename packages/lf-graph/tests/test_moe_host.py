"""HostRoutedMoE: the same results as MoE in the smallest capacity that fits, never a dropped token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lf_graph import GraphCaptureError, GraphError, HostRoutedMoE, HostRouting, MoE, StaleReplayError, capture
from lf_graph._check import check


def pair(
    capacities: tuple[int, ...] = (4, 8, 16), experts: int = 6, top_k: int = 2, **options: Any
) -> tuple[HostRoutedMoE, MoE]:
    """A host-routed layer and a device-routed one with the same weights, in float64."""
    torch.manual_seed(0)
    host = HostRoutedMoE(16, 24, experts, top_k, capacities=capacities, **options).double()
    device = MoE(16, 24, experts, top_k, **options).double()
    device.load_state_dict(host.state_dict())
    return host, device


def all_to(moe: MoE, expert: int) -> None:
    """Send every token with a positive sum to one expert."""
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[expert] = 1.0


def run(moe: MoE, x: Tensor, keep: Tensor | None = None) -> list[Tensor]:
    """Output, auxiliary loss, counts and every gradient."""
    x = x.detach().requires_grad_()
    moe.zero_grad()
    out = moe(x, keep)
    (out.y * torch.linspace(-1, 1, out.y.numel()).view(out.y.shape)).sum().add(out.aux).backward()
    return [*out, x.grad, *(p.grad.clone() for p in moe.parameters())]  # type: ignore[list-item, union-attr]


def assert_same(a: list[Tensor], b: list[Tensor], tolerance: float = 1e-11) -> None:
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def rows(n: int) -> Tensor:
    return torch.randn(n, 16, dtype=torch.float64)


@given(
    tokens=st.integers(1, 30),
    experts=st.integers(1, 6),
    capacities=st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True).map(sorted),
    kept=st.sampled_from([None, 0.0, 0.5]),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_any_capacities_give_what_the_device_router_gives(
    tokens: int, experts: int, capacities: list[int], kept: float | None, data: Any
) -> None:
    top_k = data.draw(st.integers(1, experts))
    host, device = pair(tuple(capacities), experts, top_k, balance_weight=0.01, z_weight=0.001)
    x, keep = rows(tokens), None if kept is None else torch.rand(tokens) < kept
    assert_same(run(host, x, keep), run(device, x, keep))
    fullest = int(device(x, keep).counts.max())
    expected = next((c for c in capacities if c >= fullest), None)
    assert host.stats() == HostRouting(1, {expected: 1} if expected else {}, int(expected is None))


def test_the_smallest_capacity_that_holds_the_fullest_expert_runs() -> None:
    host, _ = pair((4, 8, 16), top_k=1)
    all_to(host, 2)
    for tokens in (1, 4, 5, 8, 9, 16):
        host(rows(tokens).abs())
    assert host.stats() == HostRouting(read_backs=6, buckets={4: 2, 8: 2, 16: 2}, overflow=0)


def test_beyond_the_largest_capacity_it_is_still_exact() -> None:
    host, device = pair((4, 8), top_k=1)
    all_to(host, 2)
    all_to(device, 2)
    x = rows(9).abs()
    assert_same(run(host, x), run(device, x))
    assert host.stats() == HostRouting(read_backs=1, buckets={}, overflow=1)


def test_no_tokens_and_no_kept_tokens_run() -> None:
    host, device = pair()
    assert host(rows(0)).y.shape == (0, 16)
    assert_same(
        run(host, rows(5), torch.zeros(5, dtype=torch.bool)),
        run(device, rows(5), torch.zeros(5, dtype=torch.bool)),
    )
    assert host.stats().overflow == 0


def test_bfloat16_autocast_is_as_close_as_the_device_router() -> None:
    host, _ = pair((64,))
    host.float()
    x = torch.randn(40, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = host(x).y
    assert y.dtype == torch.bfloat16
    exact = host(x).y
    assert (y - exact).norm() < 5 * 2**-8 * exact.norm()


def test_results_repeat_bit_for_bit() -> None:
    host, _ = pair((64,))
    x = rows(50)
    assert all(torch.equal(a, b) for a, b in zip(run(host, x), run(host, x), strict=True))


class Shapes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen.append(
            (func, [tuple(t.shape) for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)])
        )
        return out


def routing(moe: MoE, x: Tensor) -> tuple[Tensor, ...]:
    r = moe._route(moe.router(x), None)
    return r.weights.detach().requires_grad_(), r.order, r.inverse, r.offsets


def test_the_experts_at_a_capacity_are_a_function_of_static_shapes() -> None:
    host, _ = pair((32,))
    traces = []
    for seed in range(3):
        torch.manual_seed(seed)
        x = rows(20).requires_grad_()
        given_ = routing(host, x)
        host.zero_grad()
        with Shapes() as shapes:
            host.experts_at(32)(x, *given_).sum().backward()
        traces.append(shapes.seen)
    assert traces[0] == traces[1] == traces[2]


def test_the_experts_at_a_capacity_can_be_captured_and_follow_other_routes() -> None:
    host, _ = pair((32,))
    x = rows(20).requires_grad_()
    experts = host.experts_at(32)
    with capture(experts, x, *routing(host, x)) as captured:
        for seed in range(3):
            torch.manual_seed(seed)
            x = (rows(20) * seed).requires_grad_()
            given_ = routing(host, x)
            assert torch.equal(captured(x, *given_), experts(x, *given_))


@pytest.mark.parametrize("with_keep", [False, True])
def test_captured_buckets_give_the_same_outputs_and_gradients(with_keep: bool) -> None:
    host, device = pair((4, 8, 16), balance_weight=0.01)
    sample = rows(20).requires_grad_()
    keep = torch.rand(20) < 0.5 if with_keep else None
    host.capture_buckets(sample, keep)
    for scale in (1.0, -3.0, 0.1):
        x = rows(20) * scale
        keep = torch.rand(20) < 0.6 if with_keep else None
        assert_same(run(host, x, keep), run(device, x, keep))
    used = host.stats()
    assert used.read_backs == 3
    assert sum(used.buckets.values()) == 3
    host.close()


def test_captured_buckets_run_in_the_callers_autocast_dtype() -> None:
    host, _ = pair((64,))
    host.float()
    x = torch.randn(30, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        eager = host(x).y
        host.capture_buckets(x)
        assert torch.equal(host(x).y, eager)


def test_buckets_share_a_pool_so_that_a_backward_after_the_next_call_is_refused() -> None:
    host, _ = pair((8, 16), top_k=1)
    all_to(host, 1)
    host.capture_buckets(rows(12).requires_grad_())
    first = host(rows(12).abs().requires_grad_())
    host(rows(12).abs().requires_grad_())
    with pytest.raises(StaleReplayError):
        first.y.sum().backward()


def test_after_close_calls_run_eagerly_at_any_size() -> None:
    host, device = pair()
    host.capture_buckets(rows(20).requires_grad_())
    host.close()
    x = rows(7)
    assert_same(run(host, x), run(device, x))


def test_the_dry_run_finds_its_read_back_and_nothing_in_its_experts() -> None:
    host, _ = pair()
    x = rows(20).requires_grad_()
    assert "Tensor.tolist" in {f.op for f in check(host, x).errors}
    assert check(host.experts_at(16), x, *routing(host, x)).ok


def test_it_refuses_to_be_captured_as_a_whole_and_says_what_to_capture() -> None:
    host, _ = pair()
    with pytest.raises(GraphCaptureError, match="capture_buckets"):
        capture(host, rows(4).requires_grad_())


@pytest.mark.parametrize("capacities", [(), (0, 4), (8, 4), (4, 4)])
def test_capacities_that_make_no_sense_are_refused(capacities: tuple[int, ...]) -> None:
    with pytest.raises(GraphError, match="positive and ascending"):
        HostRoutedMoE(16, 24, 6, 2, capacities=capacities)


def test_other_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(GraphError, match="takes no backend"):
        HostRoutedMoE(16, 24, 6, 2, backend="auto")
    with pytest.raises(GraphError, match="5 is not one of the capacities"):
        pair()[0].run_with(5, lambda x: x)


def test_parameters_are_those_of_the_device_router() -> None:
    host, device = pair()
    host(rows(3))
    assert [n for n, _ in host.named_parameters()] == [n for n, _ in device.named_parameters()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_captured_buckets_equal_eager_ones() -> None:
    torch.manual_seed(0)
    host = HostRoutedMoE(64, 96, 8, 2, capacities=(64, 128, 256)).cuda()
    x = torch.randn(300, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        eager = host(x).y
        eager_grad = torch.autograd.grad(eager.sum(), x)[0]
        host.capture_buckets(x)
        y = host(x).y
        grad = torch.autograd.grad(y.sum(), x)[0]
    # bfloat16's rounding: a captured product may run with another cuBLAS workspace
    assert (y - eager).norm() < 2**-8 * eager.norm()
    assert (grad - eager_grad).norm() < 2**-8 * eager_grad.norm()
    assert host.stats().read_backs == 2
    assert host.stats().overflow == 0
    host.close()
