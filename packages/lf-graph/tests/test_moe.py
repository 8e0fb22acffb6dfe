"""MoE: outputs and every gradient equal the plain loop over experts, whatever the shapes and routes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import assert_equals_the_loop, gradients, made, nan_in_fresh_memory, plain_loop
from torch import nn

from lf_graph import GraphError, MoE
from lf_graph._moe_route import load_balance_loss, router_z_loss


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


@pytest.mark.parametrize(
    "sizes", [(0, 24, 8, 2), (16, 0, 8, 2), (16, 24, 0, 1), (16, 24, 8, 9), (16, 24, 8, 0)]
)
def test_sizes_that_make_no_sense_are_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(GraphError, match="top_k"):
        MoE(*sizes)


@pytest.mark.parametrize("sizes", [(16, 32.0, 4, 2), (16, "32", 4, 2), (0, 32, 4, 2), (16, 32, 4, 5)])
def test_sizes_that_are_no_whole_numbers_above_0_are_refused(sizes: tuple[Any, ...]) -> None:
    with pytest.raises(GraphError, match="must be whole numbers above 0"):
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
