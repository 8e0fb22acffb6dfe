"""Blocks that run compiled: what they are given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lf_graph._compile import blocks_of, compiled, with_standard_strides


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
