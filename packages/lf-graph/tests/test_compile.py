"""Blocks that run compiled: what they are given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch._inductor import compile_fx

from lf_graph._compile import (
    InductorWith,
    Recompute,
    blocks_of,
    compile_function,
    compiled,
    with_standard_strides,
)


class Seen:
    """Doubles its argument and notes its strides."""

    def __init__(self) -> None:
        self.strides: list[tuple[int, ...]] = []

    def __call__(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        self.strides += [t.stride() for t in (x, mask) if t is not None]
        return x * 2


def base(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


TRANSPOSED: list[Callable[[], Tensor]] = [
    lambda: base(2, 3, 5).transpose(1, 2),
    lambda: base(4, 3).T,
    lambda: base(2, 3, 4, 5).permute(3, 1, 0, 2),
    lambda: base(2, 1, 5).permute(2, 1, 0),
]
LEFT_ALONE: list[Callable[[], Tensor]] = [
    lambda: base(2, 3),
    lambda: base(6)[::2],
    lambda: base(4, 6)[:, :3],
    lambda: base(1, 3).expand(4, 3),
    lambda: base(3, 1).expand(3, 4).T,
    lambda: base(2, 3, 4, 5).to(memory_format=torch.channels_last),
    lambda: base(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    lambda: base(0, 3).T,
    lambda: torch.tensor(1.0),
]


@pytest.mark.parametrize("make", TRANSPOSED)
def test_a_block_is_given_transposed_tensors_in_standard_strides(make: Callable[[], Tensor]) -> None:
    x, seen = make(), Seen()
    result = with_standard_strides(seen)(x, mask=make())
    assert seen.strides == [torch.empty(x.shape).stride()] * 2
    assert torch.equal(result, x * 2)


@pytest.mark.parametrize("make", LEFT_ALONE)
def test_everything_else_is_passed_on_as_it_is(make: Callable[[], Tensor]) -> None:
    x, seen = make(), Seen()
    with_standard_strides(seen)(x)
    assert seen.strides == [x.stride()]


def test_gradients_reach_the_transposed_tensor() -> None:
    leaf = base(3, 4).requires_grad_()
    with_standard_strides(Seen())(leaf.T).backward(torch.ones(4, 3))
    assert torch.equal(leaf.grad, torch.full((3, 4), 2.0))  # type: ignore[arg-type]


def test_what_a_block_writes_to_its_argument_is_kept() -> None:
    x = base(3, 4).T

    def fill(target: Tensor) -> Tensor:
        target[0] = -1.0
        return target

    with_standard_strides(fill)(x)
    assert torch.equal(x[0], torch.full((3,), -1.0))
    assert torch.equal(x[1], torch.tensor([1.0, 5.0, 9.0]))


def test_inference_mode_passes_everything_on() -> None:
    x, seen = base(4, 3).T, Seen()
    with torch.inference_mode():
        with_standard_strides(seen)(x)
    assert seen.strides == [x.stride()]


def test_arguments_that_are_no_tensors_pass() -> None:
    assert with_standard_strides(lambda a, b=None, *, c: (a, b, c))(1, "x", c=[2]) == (1, "x", [2])


def test_a_stack_behind_a_convolution_runs_in_standard_strides_after_its_first_block() -> None:
    strides = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.f(x)

    stack = nn.ModuleList(Block() for _ in range(3))
    for block in stack:
        block.register_forward_pre_hook(lambda _, args: strides.append(args[0].stride()))
    x = nn.Conv2d(3, 8, 2, 2)(torch.ones(1, 3, 8, 8)).flatten(2).transpose(1, 2)
    expected = x
    for block in stack:
        expected = block(expected)
    strides.clear()
    with compiled(blocks_of([stack]), {"fx_graph_cache": False}):
        for block in stack:
            x = block(x)
    assert strides[1:] == [(128, 8, 1)] * 2
    torch.testing.assert_close(x, expected)


# -- what the backward computes again -------------------------------------------------------------------------------


NO_PATTERNS = {"pattern_matcher": False}  # they take seconds to be made


class Gated(nn.Module):
    """A normed SwiGLU layer behind a residual sum, in the shapes of a language model's."""

    def __init__(self, width: int = 16, ffn: int = 48) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.gate, self.up = nn.Linear(width, ffn, bias=False), nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


def as_it_is(graph: torch.fx.GraphModule, inputs: Any, **_: Any) -> Callable[[list[Any]], Any]:
    """In the place of writing and compiling code, which takes seconds: the graph, run by PyTorch."""

    def call(values: list[Any]) -> Any:
        given = list(values)
        values.clear()  # as compiled code does, so that what was kept is freed
        return graph(*given)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


@pytest.fixture
def cut_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor up to and with the cut into forward and backward."""
    monkeypatch.setattr(compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=as_it_is))


def kept_and_gradients(recompute: Recompute, layers: int = 2) -> tuple[int, list[Tensor]]:
    """Bytes that the compiled forward of a stack keeps, parameters left out, and all gradients."""
    torch.manual_seed(0)
    stack = nn.Sequential(*[Gated() for _ in range(layers)])
    own = {p.untyped_storage().data_ptr() for p in stack.parameters()}
    sizes: dict[int, int] = {}

    def note(kept: Tensor) -> Tensor:
        memory = kept.untyped_storage()
        if memory.data_ptr() not in own:
            sizes[memory.data_ptr()] = memory.nbytes()
        return kept

    x = torch.randn(32, 16)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
        loss = compile_function(stack, NO_PATTERNS, recompute)(x).square().sum()
    return sum(sizes.values()), list(torch.autograd.grad(loss, list(stack.parameters())))


@pytest.mark.usefixtures("cut_only")
def test_recomputation_keeps_less_and_gives_the_same_gradients() -> None:
    rows, width, ffn, layers = 32, 16, 48, 2
    default, expected = kept_and_gradients("default", layers)
    cheap, gradients = kept_and_gradients("cheap", layers)
    least, those_of_least = kept_and_gradients(0.3, layers)
    assert all(map(torch.equal, gradients, expected))
    assert all(map(torch.equal, those_of_least, expected))
    products = rows * (2 * ffn + width) * 4  # gate, up, and the sum or what it is made of
    assert layers * products <= cheap <= layers * (products + 8 * rows) + rows * width * 4
    assert default - cheap >= layers * rows * (ffn + width) * 4 * 0.9  # gate times up, and the normed input
    assert least < cheap * 0.6  # not without a product


def cuts_of(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each cut: whether torch's own rules were in force."""
    seen: list[bool] = []

    def note(graph: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        seen.append(functorch_config.ban_recompute_materialized_backward)
        return graph

    monkeypatch.setattr(compile_fx, "compile_fx", note)
    return seen


def test_code_is_shared_by_equal_settings_only_and_torchs_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, x = cuts_of(monkeypatch), torch.ones(2)

    def double(x: Tensor) -> Tensor:
        return x * 2

    for recompute in ("cheap", "cheap", "default", "cheap"):
        compile_function(double, None, recompute)(x)
    assert seen == [False, True]
    assert len({InductorWith({"a": [1]}, {"b": 1}), InductorWith({"a": [1]}, {"b": 1})}) == 1
    assert functorch_config.ban_recompute_materialized_backward is True
