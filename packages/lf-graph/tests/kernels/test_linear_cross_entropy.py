"""linear_cross_entropy: both implementations against float64, over shapes, options, dtypes and what may go wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, assert_near, distance, same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lf_graph
from lf_graph import GraphError
from lf_graph.kernels import KernelUnavailableError, linear_cross_entropy
from lf_graph.kernels._choice import Implementation
from lf_graph.kernels._linear_cross_entropy_plain import Terms, plain_rows
from lf_graph.kernels.linear_cross_entropy import chunk_rows, losses_and_gradients

BOTH: tuple[Implementation, ...] = ("plain", "triton")
IGNORE = -100


def inputs(
    tokens: int,
    vocab: int,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    ignored: float = 0.2,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight (leaves of one dtype) and targets, some of them ignored; logits have a deviation of about 2."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, dim, generator=generator)
    weight = torch.randn(vocab, dim, generator=generator) * 2 / math.sqrt(dim)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < ignored] = IGNORE
    leaves = [t.to(DEVICE, dtype).requires_grad_() for t in (hidden, weight)]
    return leaves[0], leaves[1], targets.to(DEVICE)


def reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    z_loss: float = 0.0,
    **options: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Summed loss in float64 and the gradients of its inputs, of unfused operators."""
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    logits = F.linear(*leaves)
    loss = F.cross_entropy(logits, targets, reduction="sum", **options)
    used = (targets != options.get("ignore_index", IGNORE)).double()
    loss = loss + z_loss * (logits.logsumexp(1).square() * used).sum()
    return loss.detach(), list(torch.autograd.grad(loss, leaves))


def gradients(*leaves: Tensor | None, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [t for t in leaves if t is not None]))


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


class Operators(TorchDispatchMode):
    """Counts operators, and the elements of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        tensors = [
            t for t in (result if isinstance(result, tuple | list) else [result]) if isinstance(t, Tensor)
        ]
        self.largest = max([self.largest, *(t.untyped_storage().nbytes() // t.itemsize for t in tensors)])
        return result


def run_below(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, wanted: bool) -> Operators:
    """The operator's own operators, which a mode around it does not see."""
    with torch.no_grad(), Operators() as seen:
        losses_and_gradients(
            hidden,
            weight,
            None,
            targets,
            IGNORE,
            0.0,
            0.0,
            hidden.dtype,
            chunk,
            True,
            "plain",
            [wanted, wanted, False],
        )
    return seen


def test_without_gradients_there_is_one_product_a_chunk() -> None:
    arguments = inputs(40, 30)
    forward, both = (run_below(*arguments, chunk=10, wanted=wanted).calls for wanted in (False, True))
    assert (forward["mm"], forward["addmm_"]) == (4, 0)
    assert (both["mm"], both["addmm_"]) == (4 + 4 + 1, 3)
    assert forward["exp_"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_the_logits_of_a_chunk(dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(400, 1000, dim=8, dtype=dtype)
    seen = run_below(hidden, weight, targets, chunk=20, wanted=True)
    assert seen.largest == 20 * 1024  # the weight has 8,000 elements, the logits of all tokens 400,000


def test_backward_scales_in_place_and_hands_over_the_memory() -> None:
    hidden, weight, targets = inputs(40, 30, dtype=torch.bfloat16)
    loss, _ = linear_cross_entropy(hidden, weight, targets)
    with Operators() as seen:
        loss.backward()
    assert seen.calls["mul"] == 2
    assert not {"clone", "copy_", "_to_copy", "zeros_like", "zeros"} & set(seen.calls)


def test_a_factor_is_not_rounded_to_the_gradients_dtype() -> None:
    hidden, weight, targets = inputs(40, 30, dtype=torch.bfloat16)

    def gradient(factor: float) -> Tensor:
        loss, _ = linear_cross_entropy(hidden, weight, targets)
        return gradients(weight, loss=loss * factor)[0]

    assert same_bits([gradient(1 + 2**-9)], [(gradient(1).double() * (1 + 2**-9)).bfloat16()])


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    hidden, weight, targets = inputs(40, 30)
    loss, _ = linear_cross_entropy(hidden, weight, targets)
    loss = loss * 0.3
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    last = torch.autograd.grad(loss, (hidden, weight))
    assert same_bits(first, again)
    assert same_bits(first, last)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_a_checkpoint_gradients_are_the_same(reentrant: bool) -> None:
    hidden, weight, targets = inputs(40, 30)

    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden.tanh(), weight, targets, chunk=16)[0]

    expected = gradients(hidden, weight, loss=loss_of(hidden, weight))
    checkpoint(loss_of, hidden, weight, use_reentrant=reentrant).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert same_bits([hidden.grad, weight.grad], expected)


def test_second_derivatives_are_refused() -> None:
    hidden, weight, targets = inputs(4, 30)
    loss, _ = linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(GraphError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("implementation", BOTH)
def test_autocast_multiplies_in_bf16_and_sums_the_weights_gradient_in_float32(
    implementation: Implementation,
) -> None:
    hidden, weight, targets = inputs(96, 65)
    expected, (exact_hidden, exact_weight) = reference(hidden.bfloat16(), weight.bfloat16(), targets)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss, _ = linear_cross_entropy(hidden, weight, targets, chunk=32, implementation=implementation)
    assert loss.dtype == torch.float32
    found = gradients(hidden, weight, loss=loss)
    assert [g.dtype for g in found] == [torch.float32] * 2
    assert loss.item() == pytest.approx(float(expected), rel=2e-3)
    for actual, exact in zip(found, (exact_hidden, exact_weight), strict=True):
        assert distance(actual, exact) < 8e-3
    assert not torch.equal(found[1], found[1].bfloat16().float()), "rounded to bf16 on the way"


def test_autocast_leaves_float64_alone() -> None:
    hidden, weight, targets = inputs(20, 30, dtype=torch.float64)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss, _ = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(loss, reference(hidden, weight, targets)[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("mixed", [torch.bfloat16, torch.float16])
def test_autocast_takes_inputs_of_different_dtypes(mixed: torch.dtype) -> None:
    hidden, weight, targets = inputs(20, 30)
    narrow = hidden.detach().to(mixed).requires_grad_()
    expected = reference(narrow, weight, targets)[1]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss, _ = linear_cross_entropy(narrow, weight, targets, accumulate_fp32=False)
    found = gradients(narrow, weight, loss=loss)
    assert [g.dtype for g in found] == [mixed, torch.float32]
    for actual, exact in zip(found, expected, strict=True):
        assert distance(actual, exact) < 2e-2


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_it_compiles_whole(implementation: Implementation, reduction: Any) -> None:
    hidden, weight, targets = inputs(40, 30)

    def step(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        loss, count = linear_cross_entropy(
            hidden.tanh(), weight, targets, reduction=reduction, chunk=16, implementation=implementation
        )
        return loss * 2 + count

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (40, 24):
        arguments = hidden[:rows].detach().requires_grad_(), weight, targets[:rows]
        expected, actual = step(*arguments), compiled(*arguments)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(
            gradients(*arguments[:2], loss=actual), gradients(*arguments[:2], loss=expected)
        )


def test_compiled_under_autocast_it_is_the_same() -> None:
    hidden, weight, targets = inputs(40, 30)

    def step(hidden: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return linear_cross_entropy(hidden, weight, targets)[0]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(hidden), step(hidden))


@pytest.mark.parametrize("gradients_of", [(), ("hidden",), ("hidden", "weight", "bias")])
def test_the_operator_keeps_its_contract(gradients_of: tuple[str, ...]) -> None:
    hidden, weight, targets = inputs(12, 30)
    bias = torch.randn(30, device=DEVICE)
    wanted = [name in gradients_of for name in ("hidden", "weight", "bias")]
    for leaf, needed in zip((hidden, weight, bias), wanted, strict=True):
        leaf.requires_grad_(needed)
    arguments = (hidden, weight, bias, targets, IGNORE, 0.0, 0.0, torch.float32, 5, True, "plain", wanted)
    torch.library.opcheck(torch.ops.lf_graph.linear_cross_entropy.default, arguments)


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_tensors_without_data_have_the_shapes_and_dtypes_of_real_ones(kind: str) -> None:
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        hidden = torch.empty(2, 6, 16, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(50, 16, dtype=torch.bfloat16, requires_grad=True)
        loss, count = linear_cross_entropy(hidden, weight, torch.empty(2, 6, dtype=torch.int64))
        loss.backward()
    assert (loss.shape, loss.dtype, count.dtype) == ((), torch.float32, torch.int64)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert (hidden.grad.shape, weight.grad.dtype) == (hidden.shape, torch.bfloat16)


def test_a_graph_can_hold_it() -> None:
    hidden, weight, targets = inputs(12, 30)
    report = lf_graph.check(lambda h: linear_cross_entropy(h, weight, targets, reduction="mean")[0], hidden)
    assert report.ok, str(report)


def test_a_captured_call_sees_new_values() -> None:
    def scaled(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden * 2, weight, targets, reduction="mean", chunk=5)[0]

    captured = lf_graph.capture(scaled, *inputs(12, 30))
    for seed, ignored in ((1, 0.2), (2, 2.0), (1, 0.2)):
        given_ = inputs(12, 30, seed=seed, ignored=ignored)
        found, expected = captured(*given_), scaled(*given_)
        assert torch.equal(found, expected)
        assert same_bits(
            gradients(*given_[:2], loss=found * 0.7), gradients(*given_[:2], loss=expected * 0.7)
        )


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [(1, 1024), (1024, 1024), (11519, 1024), (11520, 1152), (16376, 1536), (131072, 13056)],
)
def test_a_chunk_is_a_tenth_in_whole_tiles(tokens: int, rows: int) -> None:
    assert chunk_rows(tokens) == rows


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("block", [16, 64, 1024])
def test_every_block_size_computes_the_rows_of_the_twin(block: int, gradient: bool) -> None:
    from lf_graph.kernels._linear_cross_entropy_triton import _config, _launch

    generator = torch.Generator().manual_seed(block)
    memory = torch.randn(20, 256, generator=generator).to(DEVICE) * 3
    memory[:, 200:] = math.nan  # beyond the vocabulary
    targets = torch.randint(200, (20,), generator=generator).to(DEVICE)
    targets[::5], targets[3] = IGNORE, 200
    terms = Terms(IGNORE, 0.01, 0.1)
    exact, expected = memory[:, :200].double(), torch.empty(20, device=DEVICE, dtype=torch.float64)
    plain_rows(exact, targets, expected, terms, gradient)
    losses = torch.empty(20, device=DEVICE)
    _launch(_config(block, 1), memory[:, :200], targets, losses, terms, gradient)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(memory[:, :200].double(), exact, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_every_candidate_of_the_tuner_is_right() -> None:
    from lf_graph.kernels._linear_cross_entropy_triton import TUNABLE

    for key in (("bfloat16", 2048, True), ("float32", 1024, False)):
        problem = TUNABLE.problem(key, DEVICE)
        candidates = TUNABLE.candidates(key)
        assert candidates
        for config in (TUNABLE.default(key), *candidates[:1]):
            for actual, exact, tolerance in zip(
                problem.run(config), problem.reference, problem.tolerance, strict=True
            ):
                assert distance(actual, exact) <= tolerance


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4)}, "hidden is"),
        ({"hidden": torch.zeros(4, 5)}, "dim 3"),
        ({"weight": torch.zeros(3)}, "weight is"),
        ({"weight": torch.zeros(0, 3)}, "not empty"),
        ({"weight": torch.zeros(6, 3).bfloat16()}, "cast them to one"),
        ({"weight": torch.zeros(6, 3, dtype=torch.int64)}, "floating point"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, "one for each row"),
        ({"targets": torch.zeros(4, dtype=torch.int32)}, r"targets\.long\(\)"),
        ({"bias": torch.zeros(3)}, "bias is"),
        ({"weight": torch.zeros(6, 3, device="meta")}, "move weight"),
        ({"reduction": "none"}, "sum or mean"),
        ({"z_loss": -1.0}, "negative"),
        ({"z_loss": math.nan}, "negative"),
        ({"label_smoothing": 1.5}, "within"),
        ({"chunk": 0}, "at least one"),
        ({"implementation": "fast"}, "one of"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_reason(change: dict[str, Any], message: str) -> None:
    given_ = {
        "hidden": torch.zeros(4, 3),
        "weight": torch.zeros(6, 3),
        "targets": torch.zeros(4, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**given_, **change})


def test_the_kernel_does_not_pretend_to_float64() -> None:
    hidden, weight, targets = inputs(4, 30, dtype=torch.float64)
    with pytest.raises(KernelUnavailableError, match="float32"):
        linear_cross_entropy(hidden, weight, targets, implementation="triton")
