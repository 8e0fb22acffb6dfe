"""RMSNorm, LayerNorm, their residual sums and AdaLN: numbers, gradients, strides, dtypes, refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, assert_near, distance, same_bits
from norm_cases import CASES, gradients, in_float64, inputs, run
from torch import Tensor

import lf_graph
from lf_graph.kernels import (
    KernelUnavailableError,
    add_rms_norm,
    layer_norm,
    layer_norm_modulate,
    rms_norm,
)
from lf_graph.kernels._norm_triton import NORM_BACKWARD, NORM_FORWARD, norm_backward_op, norm_op
from lf_graph.kernels._tunable import Tunable

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


SHAPES = (
    (1, 1, 1),
    (2, 3, 64),
    (3, 19, 128),
    (1, 70, 65),
    (2, 2, 3, 63),
    (2, 5, 1152),
    (50, 1, 5),
    (2, 2050),
)


@pytest.mark.parametrize("case", CASES)
def test_the_twin_is_torch(case: str) -> None:
    leaves = inputs(case, (2, 3, 40), torch.float64)
    x, width = leaves["x"], (40,)
    h = x + leaves["r"] if "r" in leaves else x
    affine = leaves.get("w"), leaves.get("b")
    if "rms" in case:
        expected = F.rms_norm(h, width, affine[0], 1e-6)
    elif "modulate" in case:
        expected = F.layer_norm(h, width, eps=1e-5) * (1 + leaves["c"][:, None]) + leaves["s"][:, None]
    else:
        expected = F.layer_norm(h, width, *affine)
    y, *summed = run(case, leaves, "plain")
    torch.testing.assert_close(y, expected)
    assert all(torch.equal(s, h) for s in summed)


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_the_twin(case: str) -> None:
    leaves = inputs(case, (2, 3, 5), torch.float64)
    names = list(leaves)
    assert torch.autograd.gradcheck(
        lambda *t: run(case, dict(zip(names, t, strict=True)), "plain"), tuple(leaves.values())
    )


def assert_right(case: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> None:
    """Kernels within roundings of the float64 twin: outputs and all gradients."""
    leaves = inputs(case, shape, dtype, seed)
    exact = in_float64(leaves)
    outputs, expected = run(case, leaves, "triton"), run(case, exact, "plain")
    assert_near(outputs, expected, 2)
    grads = gradients(outputs, leaves)
    assert [g.dtype for g in grads] == [dtype] * len(grads)
    assert_near(grads, gradients(expected, exact), 4, floor=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_float64(case: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_right(case, shape, dtype)


@settings(max_examples=30, deadline=None)
@given(
    case=st.sampled_from(sorted(CASES)),
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(8, 200)),
    seed=st.integers(0, 1000),
)
def test_kernels_equal_float64_at_any_shape(
    case: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int
) -> None:
    assert_right(case, shape, dtype, seed)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (0, 8)])
def test_nothing_gives_nothing_and_gradients_of_zero(case: str, shape: tuple[int, ...]) -> None:
    leaves = inputs(case, shape)
    outputs = run(case, leaves, "triton")
    assert all(o.shape == shape for o in outputs)
    for leaf, grad in zip(leaves.values(), gradients(outputs, leaves), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


def test_rows_without_width_stay_empty() -> None:
    assert rms_norm(torch.zeros(3, 0, device=DEVICE), implementation="triton").shape == (3, 0)


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "a third of qkv": lambda t: t.view(2, 6, 3, 2, 32)[:, :, 1],
    "the first half of every row": lambda t: t.view(12, 2, 96)[:, 0],
    "every other row": lambda t: t.view(12, 192)[::2],
    "heads before tokens": lambda t: t.view(2, 6, 6, 32).transpose(1, 2),
    "a repeated row": lambda t: t.view(12, 192)[0].expand(5, 192),
    "columns": lambda t: t.view(12, 192).T,
    "every other element": lambda t: t.view(12, 192)[:, ::2],
}


@pytest.mark.parametrize("name", STRIDED)
def test_strides_change_no_bit_and_what_lies_between_is_not_read(name: str) -> None:
    base = torch.full((2 * 6 * 192,), float("nan"), device=DEVICE)
    view = STRIDED[name](base)
    (view[:1] if name == "a repeated row" else view).normal_()
    weight = torch.randn(view.shape[-1], device=DEVICE, requires_grad=True)

    def outputs_of(x: Tensor) -> tuple[Tensor, ...]:
        leaf = x.requires_grad_()
        y = rms_norm(leaf, weight, implementation="triton")
        return y, *torch.autograd.grad(y, (leaf, weight), STRIDED[name](grads_base))

    grads_base = torch.randn(base.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    strided, dense = outputs_of(view.detach()), outputs_of(view.detach().clone().contiguous())
    assert same_bits(strided, dense)
    assert not any(t.isnan().any() for t in strided)
    assert strided[0].is_contiguous()


def test_a_gradient_of_one_number_arrives_everywhere() -> None:
    leaves = inputs("add_rms_norm", (2, 3, 16))
    y, summed = run("add_rms_norm", leaves, "triton")
    (y.sum() + summed.sum()).backward()  # expanded gradients, of stride 0
    exact = in_float64(leaves)
    y, summed = run("add_rms_norm", exact, "plain")
    (y.sum() + summed.sum()).backward()
    assert_near([t.grad for t in leaves.values()], [t.grad for t in exact.values()], 4)


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_without_a_gradient_counts_as_zero(used: int) -> None:
    leaves = inputs("add_layer_norm", (2, 3, 16))
    exact = in_float64(leaves)
    for tensors, name in ((leaves, "triton"), (exact, "plain")):
        run("add_layer_norm", tensors, name)[used].square().sum().backward()
    for mine, theirs in zip(leaves.values(), exact.values(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert theirs.grad is None or distance(mine.grad, theirs.grad) < 1e-5


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)])
def test_branch_and_stream_of_two_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    leaves = inputs("add_rms_norm", (2, 9, 48))
    for name, dtype in zip("xr", dtypes, strict=True):
        leaves[name] = leaves[name].detach().to(dtype).requires_grad_()
    exact = in_float64(leaves)
    y, summed = run("add_rms_norm", leaves, "triton")
    assert (y.dtype, summed.dtype) == (dtypes[0], torch.float32)
    grads = gradients((y, summed), leaves)
    assert [g.dtype for g in grads] == [*dtypes, torch.float32]
    expected = run("add_rms_norm", exact, "plain")
    assert_near((y, summed), expected, 2)
    assert_near(grads, gradients(expected, exact), 4)


@pytest.mark.parametrize("frozen", ["x", "r", "w", "b"])
def test_frozen_inputs_get_no_gradient(frozen: str) -> None:
    leaves, exact = (f(inputs("add_layer_norm", (2, 3, 16))) for f in (dict, in_float64))
    for tensors, name in ((leaves, "triton"), (exact, "plain")):
        tensors[frozen].requires_grad_(False)
        sum(o.square().sum() for o in run("add_layer_norm", tensors, name)).backward()
    for mine, theirs in zip(leaves.values(), exact.values(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert theirs.grad is None or distance(mine.grad, theirs.grad) < 1e-5


def test_without_grad_nothing_is_recorded() -> None:
    leaves = inputs("rms_norm", (2, 3, 16))
    with torch.no_grad():
        assert not run("rms_norm", leaves, "triton")[0].requires_grad


@pytest.mark.parametrize("case", CASES)
def test_gradients_repeat_bit_for_bit(case: str) -> None:
    def once() -> tuple[Tensor, ...]:
        leaves = inputs(case, (2, 37, 72), torch.bfloat16)
        outputs = run(case, leaves, "triton")
        return *outputs, *gradients(outputs, leaves)

    expected = once()
    assert all(same_bits(once(), expected) for _ in range(3))


@pytest.mark.parametrize("case", ["rms_norm", "layer_norm", "modulate"])
@pytest.mark.parametrize("implementation", ["triton", "plain"])
def test_rows_far_from_zero_and_rows_without_variance_stay_exact(case: str, implementation: str) -> None:
    leaves = inputs(case, (2, 4, 96))
    with torch.no_grad():
        leaves["x"][0] += 1000
        leaves["x"][1, :2] = 3.0
        leaves["x"][1, 2:] = 0.0
    exact = in_float64(leaves)
    (y,), (expected,) = run(case, leaves, implementation), run(case, exact, "plain")
    assert distance(y, expected) < 2e-4  # fp32 holds 1000 + noise to 6e-5
    assert distance(y[1], expected[1]) < 1e-5


def test_half_does_not_overflow() -> None:
    x = torch.full((2, 64), 60000.0, dtype=torch.float16, device=DEVICE)
    torch.testing.assert_close(rms_norm(x, implementation="triton"), torch.ones_like(x))


def test_nan_stays_in_its_row() -> None:
    x = torch.randn(4, 33, device=DEVICE)
    x[2, 5] = float("nan")
    y = layer_norm(x, implementation="triton")
    assert y[2].isnan().all()
    assert not y[[0, 1, 3]].isnan().any()


@pytest.mark.parametrize("implementation", ["triton", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_autocast_and_dtype_choose_the_output(case: str, implementation: str) -> None:
    leaves = inputs(case, (2, 3, 16))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y, *summed = run(case, leaves, implementation)
        wide = run(case, leaves, implementation, dtype=torch.float32)[0]
    assert (y.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(y, wide.bfloat16())
    assert all(s.dtype == torch.float32 for s in summed)
    grads = gradients((y, *summed), leaves)
    assert all(g.dtype == torch.float32 for g in grads)


@pytest.mark.parametrize("implementation", ["triton", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_compiled_whole_it_gives_the_same(case: str, implementation: str) -> None:
    leaves = inputs(case, (2, 3, 16))

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(2 * o for o in run(case, dict(zip(leaves, tensors, strict=True)), implementation))

    torch._dynamo.reset()
    outputs = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves.values())
    expected = step(*leaves.values())
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(gradients(outputs, leaves), gradients(expected, leaves))


def test_one_compilation_serves_every_batch() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w: add_rms_norm(x, x, w, implementation="triton")[0],
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    weight = torch.randn(16, device=DEVICE, requires_grad=True)
    for batch, tokens in ((2, 3), (5, 7), (6, 4)):
        x = torch.randn(batch, tokens, 16, device=DEVICE)
        torch.testing.assert_close(compiled(x, weight), add_rms_norm(x, x, weight, implementation="plain")[0])


@pytest.mark.parametrize("modulated", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_the_operators_keep_the_contract_of_torch(modulated: bool, residual: bool) -> None:
    x, r = (torch.randn(2, 3, 16, device=DEVICE, requires_grad=True) for _ in range(2))
    weight, bias = (
        torch.randn(*((2, 16) if modulated else (16,)), device=DEVICE, requires_grad=True) for _ in range(2)
    )
    arguments = (x, r if residual else None, weight, bias, 1e-5, True, torch.bfloat16)
    torch.library.opcheck(
        norm_op, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )
    y, _, statistics = (t.detach() for t in norm_op(*arguments))
    dsummed = torch.randn_like(x) if residual else None
    arguments = (y, dsummed, x.detach(), weight.detach(), bias.detach(), statistics)
    for wanted in ((True, True, None), (False, True, torch.bfloat16), (False, False, None)):
        torch.library.opcheck(norm_backward_op, (*arguments, *wanted[:2], torch.float32, wanted[2]))


@pytest.mark.parametrize("tunable", [NORM_FORWARD, NORM_BACKWARD], ids=lambda t: t.name)
@pytest.mark.parametrize(
    "key",
    [
        (48, "bfloat16", False, True, True, False),
        (130, "float32", True, False, True, True),
        (33, "float16", True, True, False, False),
    ],
)
def test_every_launch_worth_trying_is_right(tunable: Tunable, key: tuple[int | str | bool, ...]) -> None:
    problem = tunable.problem(key, DEVICE)
    candidates = tunable.candidates(key)
    assert len(set(candidates)) == len(candidates)
    for config in {tunable.default(key), *candidates[:: max(1, len(candidates) // 4)]}:
        for out, expected, tolerance in zip(
            problem.run(config), problem.reference, problem.tolerance, strict=True
        ):
            assert distance(out, expected) <= tolerance, config


@pytest.mark.parametrize("width", [64, 128, 1152, 1536, 2048, 4608, 8192, 32768])
def test_the_default_launch_is_a_candidate(width: int) -> None:
    key = (width, "bfloat16", False, True, True, False)
    for tunable in (NORM_FORWARD, NORM_BACKWARD):
        assert tunable.default(key) in tunable.candidates(key)


X = torch.zeros(2, 3, 8)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "integers": (lambda: rms_norm(X.int()), "x is torch.int32"),
    "a number": (lambda: rms_norm(torch.tensor(1.0)), "no dimension"),
    "a narrow weight": (lambda: rms_norm(X, torch.ones(7)), r"weight is \[7\]: \[8\] is expected"),
    "a weight of two rows": (lambda: rms_norm(X, torch.ones(2, 8)), r"weight is \[2, 8\]"),
    "two dtypes": (lambda: layer_norm(X, torch.ones(8), torch.ones(8).half()), "give both one dtype"),
    "another residual": (lambda: add_rms_norm(X, X[:1]), r"residual is \[1, 3, 8\]: \[2, 3, 8\]"),
    "another device": (lambda: rms_norm(X, torch.ones(8, device="meta")), "weight is on meta"),
    "other samples": (lambda: layer_norm_modulate(X, X[:1, 0], X[:, 0]), r"shift is \[1, 8\]"),
    "rows per token": (lambda: layer_norm_modulate(X, X[:, 0], X), r"scale is \[2, 3, 8\]"),
    "no samples": (lambda: layer_norm_modulate(X[0, 0], X[:, 0], X[:, 0]), r"\[batch, ..., width\]"),
    "an unknown way": (lambda: rms_norm(X, implementation="fast"), "one of auto, triton, plain"),
    "wide rows": (lambda: rms_norm(torch.zeros(1, 32769, device=DEVICE), implementation="triton"), "'plain'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_cause(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_float64_is_left_to_the_twin() -> None:
    x = torch.randn(2, 8, dtype=torch.float64, device=DEVICE)
    assert rms_norm(x).dtype == torch.float64
    with pytest.raises(KernelUnavailableError, match="computes in float32"):
        rms_norm(x, implementation="triton")


def test_a_float64_stream_keeps_its_digits() -> None:
    x, stream = torch.randn(2, 8, device=DEVICE), torch.randn(2, 8, dtype=torch.float64, device=DEVICE)
    assert torch.equal(add_rms_norm(x, stream)[1], x + stream)
    with pytest.raises(KernelUnavailableError, match="float64"):
        add_rms_norm(x, stream, implementation="triton")


def test_the_twin_needs_no_triton() -> None:
    script = (
        "import sys; sys.modules['triton'] = None; import torch; from lf_graph.kernels import layer_norm;"
        "print(layer_norm(torch.ones(2, 4), implementation='plain').sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "0.0"), done.stderr


def test_a_dry_run_and_a_recorded_graph_know_the_operators() -> None:
    leaves = inputs("add_rms_norm", (2, 5, 16))

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        return run("add_rms_norm", dict(zip(leaves, tensors, strict=True)), "triton")

    assert lf_graph.check(call, *leaves.values()).ok
    with lf_graph.capture(call, *leaves.values()) as captured:
        replayed, eager = captured(*leaves.values()), call(*leaves.values())
        assert same_bits(replayed, eager)
        assert same_bits(gradients(replayed, leaves), gradients(eager, leaves))


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_a_meta_tensor_gives_a_shape(norm: Any) -> None:
    found = norm(torch.empty(3, 8, device="meta"), torch.ones(8, device="meta"))
    assert (found.shape, found.dtype, found.device.type) == ((3, 8), torch.float32, "meta")
