"""MoE: equal to the plain loop over experts, deterministic, and without a read-back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lf_graph import GraphError, MoE, _moe_experts, capture
from lf_graph._check import check
from lf_graph._moe_experts import (
    choose_backend,
    grouped_mm,
    grouped_mm_clearing_idle,
    masked_dense,
    weighted_swiglu,
)
from lf_graph._moe_route import gather_sum, load_balance_loss, route, router_z_loss, sort_by_expert, spread
from lf_graph._uses import parameter_uses

# what reads device memory back, or makes a shape from it
READ_BACKS = {
    *("_local_scalar_dense", "item", "nonzero", "masked_select", "bincount", "unique_consecutive"),
    *("_unique2", "unique_dim", "repeat_interleave", "equal", "is_nonzero"),
}


def plain_loop(moe: MoE, x: Tensor, keep: Tensor | None = None) -> Tensor:
    """The loop of Mixtral-style reference code, [N, hidden] to [N, hidden]."""
    gate, up = moe.experts.gate_up.chunk(2, dim=-1)
    weights, chosen = F.softmax(moe.router(x), dim=-1).topk(moe.top_k, dim=-1)
    if moe.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(x)
    for e in range(gate.shape[0]):
        token, choice = torch.where(chosen == e)
        y = (F.silu(x[token] @ gate[e]) * (x[token] @ up[e])) @ moe.experts.down[e]
        out = out.index_add(0, token, y * weights[token, choice, None])
    return out if keep is None else out * keep[:, None]


def gradients(moe: MoE, x: Tensor, y: Tensor, seed: int = 1) -> list[Tensor]:
    """Gradients of x and of every parameter for one fixed gradient of y."""
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return list(torch.autograd.grad(y, [x, *moe.parameters()], grad.to(y.dtype)))


def assert_equals_the_loop(moe: MoE, x: Tensor, keep: Tensor | None = None, tolerance: float = 1e-11) -> None:
    x = x.detach().requires_grad_()
    ours, loop = moe(x, keep).y, plain_loop(moe, x, keep)
    torch.testing.assert_close(ours, loop, rtol=tolerance, atol=tolerance)
    for a, b in zip(gradients(moe, x, ours), gradients(moe, x, loop), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def made(hidden: int = 16, ffn: int = 24, experts: int = 8, top_k: int = 2, **options: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(hidden, ffn, experts, top_k, **options)


class NoReadBack(TorchDispatchMode):
    """Refuses what would make the host wait for a device, and records every shape that comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        assert name not in READ_BACKS, f"{func} reads back"
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{func} with a mask"
        out = func(*args, **(kwargs or {}))
        self.shapes += [
            (str(func), tuple(t.shape))
            for t in (out if isinstance(out, tuple) else (out,))
            if isinstance(t, Tensor)
        ]
        return out


@contextmanager
def nan_in_fresh_memory() -> Iterator[None]:
    """torch.empty holds NaN, so that what is used before it is written is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("backend", ["auto", "masked_dense"])
def test_output_and_every_gradient_equal_the_plain_loop(backend: str, normalize: bool) -> None:
    moe = made(backend=backend, normalize=normalize).double()
    assert_equals_the_loop(moe, torch.randn(50, 16, dtype=torch.float64))


def test_it_takes_over_the_weights_of_one_linear_layer_for_each_expert_and_part() -> None:
    gate, up = ([nn.Linear(16, 24, bias=False) for _ in range(5)] for _ in range(2))
    down, router = [nn.Linear(24, 16, bias=False) for _ in range(5)], nn.Linear(16, 5, bias=False)
    parts = [[m.weight for m in part] for part in (gate, up, down)]
    moe = MoE.from_linears(router.weight, *parts, top_k=2, z_weight=0.1)
    x = torch.randn(1, 16)
    weights, chosen = router(x).softmax(-1).topk(2, -1)
    each = [down[e](F.silu(gate[e](x)) * up[e](x)) for e in chosen[0].tolist()]
    expected = sum(w * y for w, y in zip((weights / weights.sum())[0], each, strict=True))
    torch.testing.assert_close(moe(x).y, expected)
    assert moe.z_weight == 0.1
    assert all(p.is_contiguous() and p.requires_grad for p in moe.parameters())


def test_float32_runs_on_the_grouped_product_and_equals_the_loop() -> None:
    moe = made()
    assert moe.expert_backend(torch.device("cpu"), torch.float32).name == "grouped_mm"
    assert_equals_the_loop(moe, torch.randn(50, 16), tolerance=2e-5)


@given(
    tokens=st.integers(1, 24),
    hidden=st.integers(1, 20),
    ffn=st.integers(1, 20),
    experts=st.integers(1, 9),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_any_shape_equals_the_loop(tokens: int, hidden: int, ffn: int, experts: int, data: Any) -> None:
    top_k = data.draw(st.integers(1, experts))
    moe = made(hidden, ffn, experts, top_k).double()
    x = torch.randn(tokens, hidden, dtype=torch.float64)
    keep = torch.rand(tokens) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    assert_equals_the_loop(moe, x, keep)


def test_all_tokens_to_one_expert_leaves_the_others_without_gradient() -> None:
    moe = made(top_k=1, normalize=False)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[3] = 1.0
    x = torch.rand(20, 16) + 0.1
    out = moe(x)
    assert out.counts.tolist() == [0, 0, 0, 20, 0, 0, 0, 0]
    out.y.sum().backward()
    used = moe.experts.gate_up.grad.abs().amax(dim=(1, 2)) > 0  # type: ignore[union-attr]
    assert used.tolist() == [False, False, False, True, False, False, False, False]
    assert_equals_the_loop(moe.double(), x.double())


def test_one_token_and_all_experts_at_once() -> None:
    assert_equals_the_loop(made().double(), torch.randn(1, 16, dtype=torch.float64))
    assert_equals_the_loop(made(experts=5, top_k=5).double(), torch.randn(9, 16, dtype=torch.float64))
    assert_equals_the_loop(made(experts=1, top_k=1).double(), torch.randn(9, 16, dtype=torch.float64))


def test_no_tokens_give_an_empty_output_and_zero_gradients() -> None:
    moe = made(balance_weight=0.01, z_weight=0.001)
    out = moe(torch.empty(0, 16))
    assert out.y.shape == (0, 16)
    assert out.aux == 0
    (out.y.sum() + out.aux).backward()
    assert all(p.grad is not None and not p.grad.any() for p in moe.parameters())


def test_more_experts_than_a_byte_can_name() -> None:
    moe = made(8, 4, experts=300, top_k=3).double()
    assert_equals_the_loop(moe, torch.randn(40, 8, dtype=torch.float64), torch.rand(40) < 0.7)


def test_bfloat16_autocast_stays_within_the_rounding_of_its_inputs() -> None:
    moe, x = made(), torch.randn(64, 16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = moe(x)
    assert out.y.dtype == torch.bfloat16
    exact = plain_loop(moe, x)
    # 2^-8 is bfloat16's rounding; three products and two sums deep
    assert (out.y - exact).norm() < 5 * 2**-8 * exact.norm()
    for a, b in zip(gradients(moe, x, out.y), gradients(moe, x, exact), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 6 * 2**-8 * b.norm()


def test_the_router_is_not_rounded_under_autocast() -> None:
    moe, x = made(experts=64, top_k=4), torch.randn(512, 16)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = moe(x).counts
    assert torch.equal(rounded, moe(x).counts)


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


def test_a_permutation_of_the_tokens_permutes_the_output() -> None:
    moe, x = made().double(), torch.randn(60, 16, dtype=torch.float64)
    shuffle = torch.randperm(60)
    torch.testing.assert_close(moe(x[shuffle]).y, moe(x).y[shuffle], rtol=1e-12, atol=1e-12)
    assert torch.equal(moe(x[shuffle]).counts, moe(x).counts)


def test_tokens_that_are_not_kept_go_nowhere_and_touch_nothing() -> None:
    moe = made(balance_weight=0.01, z_weight=0.001)
    x = torch.randn(4, 10, 16)
    keep = torch.arange(10) < torch.tensor([10, 3, 0, 7])[:, None]
    with nan_in_fresh_memory():  # rows of dropped tokens are never written by the grouped product
        padded_x = x.clone().requires_grad_()
        padded = moe(padded_x, keep)
        (padded.y.square().sum() + padded.aux).backward()
        grads = [p.grad.clone() for p in moe.parameters()]  # type: ignore[union-attr]
        moe.zero_grad()
        alone = moe(x[keep])
        (alone.y.square().sum() + alone.aux).backward()
    assert not padded.y[~keep].any()
    assert not padded_x.grad[~keep].any()  # type: ignore[index]
    torch.testing.assert_close(padded.y[keep], alone.y)
    torch.testing.assert_close(padded.aux, alone.aux)
    assert torch.equal(padded.counts, alone.counts)
    assert padded.counts.sum() == 2 * keep.sum()
    for a, p in zip(grads, moe.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-6)


def test_counts_are_int32_and_add_up_to_every_assignment() -> None:
    out = made()(torch.randn(3, 11, 16))
    assert out.counts.dtype == torch.int32
    assert out.counts.sum() == 3 * 11 * 2


def test_aux_is_the_weighted_sum_of_both_losses_and_trains_the_router_alone() -> None:
    x = torch.randn(100, 16)
    moe = made(balance_weight=0.5, z_weight=0.25)
    out = moe(x)
    logits = moe.router(x)
    expected = 0.5 * load_balance_loss(logits.softmax(-1), out.counts) + 0.25 * router_z_loss(logits)
    torch.testing.assert_close(out.aux, expected)
    out.aux.backward()
    assert moe.router.weight.grad is not None
    assert moe.experts.down.grad is None
    assert made()(x).aux == 0


def test_balance_loss_is_one_when_even_and_the_number_of_experts_when_all_go_to_one() -> None:
    even = torch.full((6, 4), 0.25)
    assert load_balance_loss(even, torch.tensor([3, 3, 3, 3])) == pytest.approx(1.0)
    one = torch.tensor([[0.0, 1.0, 0.0, 0.0]]).expand(6, 4)
    assert load_balance_loss(one, torch.tensor([0, 6, 0, 0])) == pytest.approx(4.0)


def test_z_loss_is_the_mean_squared_logsumexp_of_kept_tokens() -> None:
    logits = torch.randn(5, 4)
    expected = torch.stack([row.exp().sum().log() ** 2 for row in logits[:3]]).mean()
    keep = torch.tensor([True, True, True, False, False])
    torch.testing.assert_close(router_z_loss(logits, keep), expected)


def test_training_on_the_balance_loss_evens_the_load() -> None:
    moe = made(experts=4, top_k=1, balance_weight=1.0)
    x = torch.randn(256, 16) + 0.5
    before = moe(x).counts.float().std()
    optimizer = torch.optim.Adam(moe.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        moe(x).aux.backward()
        optimizer.step()
    assert moe(x).counts.float().std() < 0.5 * before


def test_rows_are_sorted_by_expert_then_by_token() -> None:
    expert = torch.tensor([[2, 0], [1, 2], [0, 2]])
    order, inverse, offsets = sort_by_expert(expert, 4, None)
    assert order.tolist() == [1, 4, 2, 0, 3, 5]
    assert inverse.tolist() == [[3, 0], [2, 4], [1, 5]]
    assert offsets.tolist() == [2, 3, 6, 6]


def test_a_routing_has_weights_that_sum_to_one() -> None:
    r = route(torch.randn(9, 6), 3, True, None)
    torch.testing.assert_close(r.weights.sum(1), torch.ones(9))
    assert torch.equal(r.counts().cumsum(0), r.offsets)
    assert torch.equal(r.tokens[r.inverse], torch.arange(9)[:, None].expand(9, 3))


def test_moves_and_swiglu_have_exact_gradients() -> None:
    order, rows, _ = sort_by_expert(torch.randint(0, 3, (4, 2)), 3, None)
    keep = torch.tensor([True, False, True, True])
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    for k in (None, keep):
        assert torch.autograd.gradcheck(lambda x, k=k: spread(x, order // 2, rows, k), (x,))
        assert torch.autograd.gradcheck(lambda y, k=k: gather_sum(y, order // 2, rows, k), (y,))
    gate_up = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(weighted_swiglu, (gate_up, weight))


def test_gather_sum_adds_in_float32() -> None:
    y = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 256 + 1 rounds to 256 in bfloat16
    out = gather_sum(y, torch.zeros(3, dtype=torch.int64), torch.tensor([[0, 1, 2]]))
    assert out.item() == 258


def test_masked_dense_is_zero_where_no_expert_has_a_row() -> None:
    x, w = torch.randn(6, 3), torch.randn(2, 3, 5)
    out = masked_dense(x, w, torch.tensor([2, 4], dtype=torch.int32))
    torch.testing.assert_close(out, torch.cat([x[:2] @ w[0], x[2:4] @ w[1], torch.zeros(2, 5)]))


@pytest.mark.parametrize(
    ("device", "dtype", "dims", "name", "reason"),
    [
        ("cpu", torch.float32, (16, 24), "grouped_mm", "supported"),
        ("cpu", torch.bfloat16, (16, 24), "grouped_mm", "supported"),
        ("cpu", torch.float64, (16, 24), "masked_dense", "no grouped_mm for torch.float64"),
        ("cpu", torch.float32, (16, 25), "masked_dense", "multiples of 16 bytes"),
        ("mps", torch.float32, (16, 24), "masked_dense", "mps"),
    ],
)
def test_the_backend_that_runs_and_its_reason_are_told(
    device: str, dtype: torch.dtype, dims: tuple[int, int], name: str, reason: str
) -> None:
    choice = choose_backend(torch.device(device), dtype, dims)
    assert choice.name == name
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("major", "dtype", "name"),
    [
        (9, torch.bfloat16, "grouped_mm"),
        (10, torch.bfloat16, "grouped_mm"),
        (8, torch.bfloat16, "masked_dense"),
        (12, torch.bfloat16, "masked_dense"),
        (9, torch.float32, "masked_dense"),
    ],
)
def test_cuda_takes_only_the_grouped_product_that_stays_on_the_device(
    monkeypatch: pytest.MonkeyPatch, major: int, dtype: torch.dtype, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    choice = choose_backend(torch.device("cuda", 0), dtype, (16, 24))
    assert choice.name == name
    assert choice.clear_idle == (major == 10)


def test_a_gradient_that_the_kernel_leaves_undefined_for_idle_experts_is_cleared() -> None:
    x, w = torch.randn(6, 16), torch.randn(4, 16, 8, requires_grad=True)
    offsets = torch.tensor([2, 2, 6, 6], dtype=torch.int32)

    def poisoned(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        """Adds NaN to the gradients of experts 1 and 3, as sm_100 may (pytorch#172439)."""
        poison = torch.tensor([0.0, torch.nan, 0.0, torch.nan])[:, None, None]
        w.register_hook(lambda grad: grad + poison)
        return grouped_mm(x, w, offsets)

    (expected,) = torch.autograd.grad(grouped_mm(x, w, offsets).square().sum(), w)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_moe_experts, "grouped_mm", poisoned)
        (grad,) = torch.autograd.grad(grouped_mm_clearing_idle(x, w, offsets).square().sum(), w)
    assert torch.equal(grad, expected)
    assert not grad[[1, 3]].any()


def test_a_backend_that_cannot_run_is_refused_with_the_reason() -> None:
    with pytest.raises(GraphError, match="float64"):
        made(backend="grouped_mm").double()(torch.randn(4, 16, dtype=torch.float64))
    with pytest.raises(GraphError, match="no MoE backend 'cutlass'"):
        made(backend="cutlass")


@pytest.mark.parametrize(
    "sizes", [(0, 24, 8, 2), (16, 0, 8, 2), (16, 24, 0, 1), (16, 24, 8, 9), (16, 24, 8, 0)]
)
def test_sizes_that_make_no_sense_are_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(GraphError, match="top_k"):
        MoE(*sizes)


def test_inputs_that_do_not_fit_are_refused() -> None:
    moe = made()
    with pytest.raises(GraphError, match="width 8"):
        moe(torch.randn(3, 8))
    with pytest.raises(GraphError, match="keep is"):
        moe(torch.randn(3, 16), torch.ones(4, dtype=torch.bool))
    with pytest.raises(GraphError, match="keep is"):
        moe(torch.randn(3, 16), torch.ones(3))
    with pytest.raises(GraphError, match="differ"):
        moe(torch.randn(3, 16, dtype=torch.float64))


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
