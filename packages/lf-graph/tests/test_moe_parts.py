"""The parts of MoE: sorting, moves between tokens and rows, losses, and the choice of the grouped product."""

from __future__ import annotations

import pytest
import torch
from moe_cases import made
from torch import Tensor

from lf_graph import GraphError, _moe_experts
from lf_graph._moe_experts import (
    choose_backend,
    grouped_mm,
    grouped_mm_clearing_idle,
    masked_dense,
    weighted_swiglu,
)
from lf_graph._moe_route import gather_sum, load_balance_loss, route, router_z_loss, sort_by_expert, spread


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


def test_the_mark_of_a_constant_function_is_the_one_torch_sets() -> None:
    @torch.compiler.assume_constant_result
    def constant() -> int:
        return 1

    assert vars(_moe_experts._major) == vars(constant)
    assert vars(constant)
