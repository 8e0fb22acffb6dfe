"""linear_cross_entropy: memory and products, second passes, autocast, compilers, graphs, and what is refused."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from head_cases import BOTH, IGNORE, gradients, inputs, reference
from kernel_cases import DEVICE, distance, same_bits
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
