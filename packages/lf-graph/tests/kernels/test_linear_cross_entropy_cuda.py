"""linear_cross_entropy on a GPU: large shapes, memory, repeatable bits, graphs and compilers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import assert_near, distance, same_bits
from torch import Tensor

import lf_graph
from lf_graph.kernels import linear_cross_entropy
from lf_graph.kernels._choice import choices
from lf_graph.kernels._matmul import add_product, product

pytestmark = pytest.mark.gpu
IGNORE = -100


@pytest.fixture(autouse=True)
def _room() -> Iterator[None]:
    """Float64 references are large: each test starts without those of others."""
    torch.manual_seed(0)
    yield
    gc.collect()
    torch.cuda.empty_cache()


def inputs(
    tokens: int,
    vocab: int,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(tokens, dim, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(vocab, dim, device="cuda") * dim**-0.5).to(weight_dtype or dtype).requires_grad_()
    targets = torch.randint(vocab, (tokens,), device="cuda")
    targets[::9] = IGNORE
    return hidden, weight, targets


def with_gradients(
    fn: Any, hidden: Tensor, weight: Tensor, targets: Tensor, factor: float = 1.0
) -> list[Tensor]:
    """[loss [1], gradient of hidden, gradient of weight]."""
    loss = fn(hidden, weight, targets)
    return [loss.detach()[None], *torch.autograd.grad(loss * factor, (hidden, weight))]


def unfused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")


def fused(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return linear_cross_entropy(hidden, weight, targets, **options)[0]


def exact(hidden: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    return with_gradients(unfused, *(t.detach().double().requires_grad_() for t in (hidden, weight)), targets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [50257, 32000, 77])
@pytest.mark.parametrize("wide", [True, False])
def test_values_and_gradients_equal_float64(dtype: torch.dtype, vocab: int, wide: bool) -> None:
    given = inputs(3001, vocab, 512, dtype)
    found = with_gradients(lambda *a: fused(*a, accumulate_fp32=wide), *given)
    assert_near(found[1:], exact(*given)[1:], slack=3)
    torch.testing.assert_close(found[0].double(), exact(*given)[0], rtol=1e-3, atol=0)


def test_it_is_no_worse_than_unfused_operators() -> None:
    given = inputs(8192, 50257, 512)
    reference = exact(*given)[1:]
    ours = with_gradients(fused, *given)[1:]
    theirs = with_gradients(
        lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t, reduction="sum"), *given
    )[1:]
    for a, b, r in zip(ours, theirs, reference, strict=True):
        assert (a.double() - r).norm() <= 1.05 * (b.double() - r).norm()


def test_the_kernel_is_what_runs() -> None:
    before = choices().get("linear_cross_entropy", {}).get("triton", 0)
    fused(*inputs(10, 77, 16))
    assert choices()["linear_cross_entropy"]["triton"] == before + 1


def test_autocast_sums_the_gradient_of_a_float32_weight_without_rounding() -> None:
    hidden, weight, targets = inputs(4096, 5003, 256, weight_dtype=torch.float32)

    def under_autocast(*given: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return fused(*given)

    found = with_gradients(under_autocast, hidden, weight, targets)
    reference = exact(hidden, weight.detach().bfloat16(), targets)
    assert [g.dtype for g in found] == [torch.float32, torch.bfloat16, torch.float32]
    assert distance(found[2], reference[2]) < 4e-3
    assert not torch.equal(found[2], found[2].bfloat16().float())


def test_bf16_products_are_added_in_float32() -> None:
    a, b = (torch.randn(300, n, device="cuda").bfloat16() for n in (20001, 128))
    out = torch.randn(20001, 128, device="cuda")
    expected = out.double() + a.double().t() @ b.double()
    add_product(a.t(), b, out)
    assert distance(out, expected) < 1e-6
    product(a.t(), b, out)
    assert distance(out, a.double().t() @ b.double()) < 1e-6


def test_thirty_calls_give_the_same_bits() -> None:
    given = inputs(4001, 50257, 256)
    first = with_gradients(fused, *given, factor=0.3)
    assert all(same_bits(with_gradients(fused, *given, factor=0.3), first) for _ in range(30))


def test_the_host_never_waits() -> None:
    given = inputs(300, 5003, 64)
    with_gradients(fused, *given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with_gradients(lambda *a: fused(*a, reduction="mean", z_loss=1e-4), *given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_graph_computes_the_same_and_sees_new_targets(reduction: str) -> None:
    def scaled(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return fused(hidden * 2, weight, targets, reduction=reduction, chunk=128)

    samples = [inputs(300, 5003, 64) for _ in range(3)]
    samples[2][2].fill_(IGNORE)
    captured = lf_graph.capture(scaled, *samples[0])
    for given in [*samples, samples[0]]:
        found, expected = (with_gradients(f, *given, factor=0.7) for f in (captured, scaled))
        assert same_bits(found, expected)


def test_compiled_whole_it_is_the_same() -> None:
    def step(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return fused(hidden.tanh(), weight, targets, chunk=1024) * 2

    compiled = torch.compile(step, fullgraph=True)
    for tokens in (3001, 2000):
        given = inputs(tokens, 5003, 256)
        for a, b in zip(with_gradients(compiled, *given), with_gradients(step, *given), strict=True):
            assert distance(a, b) < 8e-3


@pytest.mark.parametrize("wide", [True, False])
def test_it_takes_a_tenth_of_the_logits(wide: bool) -> None:
    """Beside inputs and gradients; float32 sums of a bf16 weight's gradient come on top, as documented."""
    tokens, vocab, dim = 16376, 50257, 2048
    hidden, weight, targets = inputs(tokens, vocab, dim)
    fused(hidden[:2048].detach(), weight, targets[:2048], accumulate_fp32=wide).backward()  # workspaces, code
    weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fused(hidden, weight, targets, accumulate_fp32=wide).backward()
    extra = torch.cuda.max_memory_allocated() - before - hidden.nbytes - weight.nbytes
    assert extra <= 0.1 * tokens * vocab * 2 + (4 * vocab * dim if wide else 0)


def test_offsets_pass_2_to_the_31() -> None:
    """One chunk of 45,000 rows of 50,304 logits, 4.5 GB."""
    hidden, weight, targets = inputs(45_000, 50257, 64)
    whole = with_gradients(lambda *a: fused(*a, chunk=45_000), hidden, weight, targets)
    parts = with_gradients(lambda *a: fused(*a, chunk=4096), hidden, weight, targets)
    assert distance(whole[0], parts[0]) < 1e-6
    # each is within one rounding of the exact gradients, so they are within two of each other
    assert_near(whole[1:], [p.double() for p in parts[1:]], slack=2)


def test_every_candidate_of_the_tuner_is_right() -> None:
    from lf_graph.kernels._linear_cross_entropy_triton import TUNABLE

    for key in (
        ("bfloat16", 65536, True),
        ("bfloat16", 65536, False),
        ("float32", 1024, True),
        ("float16", 16, True),
    ):
        problem = TUNABLE.problem(key, torch.device("cuda"))
        for config in TUNABLE.candidates(key):
            for actual, reference, tolerance in zip(
                problem.run(config), problem.reference, problem.tolerance, strict=True
            ):
                assert distance(actual, reference) <= tolerance, config
