"""linear_cross_entropy: losses and gradients of the twin and, interpreted, of the kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from head_cases import BOTH, IGNORE, gradients, inputs, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, assert_near, same_bits
from torch import Tensor

from lf_graph.kernels import linear_cross_entropy
from lf_graph.kernels._choice import Implementation


@pytest.mark.parametrize("implementation", BOTH)
@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(1, 40),
    vocab=st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 127, 1000]),
    chunk=st.sampled_from([1, 7, 16, 100, None]),
    z_loss=st.sampled_from([0.0, 0.01]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_loss_and_gradients_are_those_of_unfused_operators(
    implementation: Implementation, tokens: int, vocab: int, chunk: int | None, z_loss: float, smoothing: float,
    biased: bool, seed: int,
) -> None:  # fmt: skip
    hidden, weight, targets = inputs(tokens, vocab, seed=seed)
    bias = torch.randn(vocab, device=DEVICE, requires_grad=True) if biased else None
    loss, count = linear_cross_entropy(
        hidden, weight, targets, bias=bias, z_loss=z_loss, label_smoothing=smoothing, chunk=chunk,
        implementation=implementation,
    )  # fmt: skip
    expected, expected_gradients = reference(hidden, weight, targets, bias, z_loss, label_smoothing=smoothing)
    assert int(count) == int((targets != IGNORE).sum())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-4)
    for actual, exact in zip(gradients(hidden, weight, bias, loss=loss), expected_gradients, strict=True):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("vocab", [8191, 8192, 8193, 20011])
def test_rows_longer_than_a_block_are_summed_whole(implementation: Implementation, vocab: int) -> None:
    hidden, weight, targets = inputs(5, vocab, ignored=0)
    targets[:2] = torch.tensor([0, vocab - 1], device=DEVICE)
    loss, _ = linear_cross_entropy(hidden, weight, targets, implementation=implementation)
    expected, expected_gradients = reference(hidden, weight, targets)
    assert_near([loss.detach(), *gradients(hidden, weight, loss=loss)], [expected, *expected_gradients])


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [True, False])
def test_half_precision_is_within_its_roundings(
    implementation: Implementation, dtype: torch.dtype, wide: bool
) -> None:
    hidden, weight, targets = inputs(96, 333, dtype=dtype)
    loss, _ = linear_cross_entropy(
        hidden, weight, targets, chunk=32, accumulate_fp32=wide, implementation=implementation
    )
    expected, expected_gradients = reference(hidden, weight, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(float(expected), rel=2e-3)
    actual = gradients(hidden, weight, loss=loss)
    assert [g.dtype for g in actual] == [dtype] * 2
    assert_near(actual, expected_gradients, slack=2)


def test_sums_in_float32_are_nearer_than_those_in_bf16() -> None:
    hidden, weight, targets = inputs(256, 65, dtype=torch.bfloat16)
    exact = reference(hidden, weight, targets)[1][1]

    def error(wide: bool) -> float:
        loss, _ = linear_cross_entropy(
            hidden, weight, targets, chunk=8, accumulate_fp32=wide, implementation="plain"
        )
        return float((gradients(weight, loss=loss)[0].double() - exact).norm() / exact.norm())

    assert error(True) < 0.6 * error(False)


def test_the_twin_passes_a_check_by_finite_differences() -> None:
    hidden, weight, targets = inputs(5, 7, dim=3, dtype=torch.float64)
    bias = torch.randn(7, device=DEVICE, dtype=torch.float64, requires_grad=True)

    def mean(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, targets, bias=bias, reduction="mean", z_loss=0.1, label_smoothing=0.2, chunk=2
        )[0]

    assert torch.autograd.gradcheck(mean, (hidden, weight, bias))


@pytest.mark.parametrize("implementation", BOTH)
def test_mean_is_sum_over_count(implementation: Implementation) -> None:
    hidden, weight, targets = inputs(20, 33)
    total, count = linear_cross_entropy(hidden, weight, targets, implementation=implementation)
    mean, same = linear_cross_entropy(
        hidden, weight, targets, reduction="mean", implementation=implementation
    )
    assert int(same) == int(count)
    torch.testing.assert_close(mean, total / count)
    torch.testing.assert_close(
        gradients(hidden, weight, loss=mean), gradients(hidden, weight, loss=total / count)
    )


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("tokens", [0, 6])
def test_nothing_to_predict_costs_nothing(
    implementation: Implementation, reduction: Any, tokens: int
) -> None:
    hidden, weight, targets = inputs(tokens, 33, ignored=2)
    loss, count = linear_cross_entropy(
        hidden, weight, targets, reduction=reduction, implementation=implementation
    )
    found = gradients(hidden, weight, loss=loss)
    assert (loss.item(), int(count)) == (0.0, 0)
    assert [g.shape for g in found] == [hidden.shape, weight.shape]
    assert not any(g.any() for g in found)


@pytest.mark.parametrize("implementation", BOTH)
def test_a_row_that_is_ignored_gets_a_gradient_of_exactly_zero(implementation: Implementation) -> None:
    hidden, weight, targets = inputs(9, 40, ignored=0)
    targets[4] = 7
    loss, count = linear_cross_entropy(hidden, weight, targets, ignore_index=7, implementation=implementation)
    used = targets != 7
    expected, expected_gradients = reference(hidden[used], weight, targets[used])
    actual = gradients(hidden, weight, loss=loss)
    assert int(count) == int(used.sum()) < 9
    assert not actual[0][~used].any()
    assert_near([loss.detach(), actual[0][used], actual[1]], [expected, *expected_gradients])


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("target", [-1, 40, 2**40])
def test_a_target_outside_of_the_vocabulary_is_seen_in_loss_and_gradients(
    implementation: Implementation, target: int
) -> None:
    hidden, weight, targets = inputs(9, 40, ignored=0)
    targets[4] = target
    loss, count = linear_cross_entropy(hidden, weight, targets, implementation=implementation)
    actual = gradients(hidden, weight, loss=loss)
    assert int(count) == 9
    assert loss.isnan()
    assert actual[0].isnan().all(1).tolist() == [i == 4 for i in range(9)]
    assert actual[1].isnan().all()


@pytest.mark.parametrize("implementation", BOTH)
def test_a_class_that_a_bias_rules_out_gets_no_probability(implementation: Implementation) -> None:
    hidden, weight, targets = inputs(9, 9000)
    bias = torch.zeros(9000, device=DEVICE)
    bias[: 8192 + 5] = -math.inf  # a whole block of the kernel
    targets[targets >= 0] = 8999
    loss, _ = linear_cross_entropy(hidden, weight, targets, bias=bias, implementation=implementation)
    expected, (exact, _, _) = reference(hidden, weight, targets, bias)
    actual = gradients(hidden, weight, loss=loss)
    assert_near([loss.detach(), actual[0]], [expected, exact])
    assert not actual[1][: 8192 + 5].any()


@pytest.mark.parametrize("implementation", BOTH)
def test_large_logits_do_not_overflow(implementation: Implementation) -> None:
    hidden, weight, targets = inputs(9, 40)
    hidden = (hidden.detach() * 1e4).requires_grad_()
    loss, _ = linear_cross_entropy(hidden, weight, targets, implementation=implementation)
    expected, expected_gradients = reference(hidden, weight, targets)
    assert_near([loss.detach(), *gradients(hidden, weight, loss=loss)], [expected, *expected_gradients])


@pytest.fixture
def _new_memory_is_nan() -> Iterator[None]:
    """Memory that nothing was written to holds NaN."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.usefixtures("_new_memory_is_nan")
@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [333, 64])
def test_what_new_memory_held_does_not_matter(
    implementation: Implementation, dtype: torch.dtype, vocab: int
) -> None:
    hidden, weight, targets = inputs(80, vocab, dtype=dtype)
    assert torch.empty(3, device=DEVICE).isnan().all()
    loss, _ = linear_cross_entropy(hidden, weight, targets, chunk=32, implementation=implementation)
    assert_near(gradients(hidden, weight, loss=loss), reference(hidden, weight, targets)[1], slack=2)


@pytest.mark.parametrize("implementation", BOTH)
def test_bits_repeat(implementation: Implementation) -> None:
    def run() -> list[Tensor]:
        hidden, weight, targets = inputs(50, 130, dtype=torch.bfloat16)
        loss, count = linear_cross_entropy(hidden, weight, targets, chunk=16, implementation=implementation)
        return [loss.detach()[None], count[None], *gradients(hidden, weight, loss=loss * 0.3)]

    first = run()
    assert all(same_bits(run(), first) for _ in range(5))


@pytest.mark.parametrize("implementation", BOTH)
def test_memory_that_is_not_in_order_is_read_as_such(implementation: Implementation) -> None:
    hidden, weight, targets = inputs(24, 30, dim=8)
    loss, _ = linear_cross_entropy(hidden, weight, targets, implementation=implementation)
    expected = [loss.detach(), *gradients(hidden, weight, loss=loss)]
    strided = hidden.detach().t().contiguous().t().requires_grad_()
    transposed = weight.detach().t().contiguous().t().requires_grad_()
    apart = torch.stack((targets, targets), 1)[:, 0]
    loss, _ = linear_cross_entropy(strided, transposed, apart, implementation=implementation)
    torch.testing.assert_close([loss.detach(), *gradients(strided, transposed, loss=loss)], expected)


def test_leading_dimensions_are_kept() -> None:
    hidden, weight, targets = inputs(24, 30)
    batch = hidden.detach().view(2, 12, -1)[:, 1:].requires_grad_()
    labels = targets.view(2, 12)[:, 1:]
    loss, _ = linear_cross_entropy(batch, weight, labels)
    expected, expected_gradients = reference(batch.flatten(0, 1), weight, labels.flatten())
    found = gradients(batch, weight, loss=loss)
    assert found[0].shape == batch.shape
    assert_near([loss.detach(), found[0].flatten(0, 1), found[1]], [expected, *expected_gradients])


def test_a_weight_that_is_also_the_embedding_gets_both_gradients() -> None:
    _, table, targets = inputs(24, 30)

    def loss_of(fused: bool) -> Tensor:
        x = F.embedding(targets.clamp(min=0), table).tanh()
        if fused:
            return linear_cross_entropy(x, table, targets)[0]
        return F.cross_entropy(F.linear(x, table), targets, reduction="sum")

    torch.testing.assert_close(gradients(table, loss=loss_of(True)), gradients(table, loss=loss_of(False)))


def test_micro_batches_add_up_to_the_whole() -> None:
    hidden, weight, targets = inputs(24, 30)
    _, expected = reference(hidden, weight, targets)
    for part in range(0, 24, 8):
        loss, _ = linear_cross_entropy(hidden[part : part + 8], weight, targets[part : part + 8])
        loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert_near([hidden.grad, weight.grad], expected)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias"])
def test_only_the_gradients_that_are_needed_are_made(implementation: Implementation, wanted: str) -> None:
    hidden, weight, targets = inputs(24, 30)
    leaves = {"hidden": hidden, "weight": weight, "bias": torch.randn(30, device=DEVICE)}
    _, expected = reference(hidden, weight, targets, leaves["bias"])
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == wanted)
    loss, _ = linear_cross_entropy(
        hidden, weight, targets, bias=leaves["bias"], chunk=10, implementation=implementation
    )
    loss.backward()
    made = [name for name, leaf in leaves.items() if leaf.grad is not None]
    assert made == [wanted]
    assert_near([leaves[wanted].grad], [expected[list(leaves).index(wanted)]])  # type: ignore[list-item]
