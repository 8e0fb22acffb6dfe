"""Chains of small layers beside the same in eager code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lf_graph import (
    Chain,
)
from lf_graph._elements import Element

WIDTH = 4


def linears(count: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def data() -> Tensor:
    return torch.randn(3, WIDTH)


def run_eagerly(
    elements: Sequence[Element], inputs: Sequence[str], outputs: Sequence[str], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """What a chain means: the functions, one after the other."""
    values = dict(zip(inputs, tensors, strict=True))
    for e in elements:
        result = e.fn(*[values[n] for n in e.inputs])
        values |= dict(zip(e.outputs, result if isinstance(result, tuple) else (result,), strict=True))
    return tuple(values[n] for n in outputs)


class Pair:
    """A chain and the same elements with copies of their modules, to run eagerly."""

    def __init__(self, build: Callable[[list[nn.Linear]], list[Element]], count: int, **options: Any) -> None:
        self.ours = linears(count)
        self.theirs = copy.deepcopy(self.ours)
        self.chain = Chain(build(self.ours), ("x",), ("y",), **options)
        self._eager = build(self.theirs)

    def eager(self, x: Tensor) -> Tensor:
        (y,) = run_eagerly(self._eager, ("x",), ("y",), x)
        return y

    def capture(self) -> Pair:
        self.chain.capture(data())
        return self

    def micro_batches(self, count: int = 3) -> None:
        """Outputs and gradients are equal to the bit after each of several micro-batches without zero_grad."""
        for i in range(count):
            x = data()
            found, expected = [], []
            for run, into in ((self.chain, found), (self.eager, expected)):
                torch.manual_seed(i)
                y = run(x)
                y.square().sum().backward()
                into.append(y.detach())
            assert torch.equal(found[0], expected[0])
            self.same_gradients()

    def same_gradients(self) -> None:
        for a, b in zip(self.ours, self.theirs, strict=True):
            for p, q in zip(a.parameters(), b.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                if p.grad is not None and q.grad is not None:
                    assert torch.equal(p.grad, q.grad)
