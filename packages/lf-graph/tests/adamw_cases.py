"""Twins for the AdamW tests: the same parameters twice, one under our flat step, one under plain torch."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lf_graph._adamw import FusedAdamW, Launch
from lf_graph._flat import FlatParameters

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = [
    "torch",
    pytest.param(
        "triton", marks=pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
    ),
]
SMALL = Launch(block=128, chunk=256)  # so that small tensors have full blocks, ends and several chunks
SHAPES: tuple[tuple[int, ...], ...] = ((7, 5), (3,), (640,), (), (2, 255))
SHADOWED = (0, 2, 4)


class Twins:
    """``ours`` (flat, stepped by FusedAdamW) and ``plain`` (stepped by torch) start equal and get equal gradients."""

    def __init__(
        self,
        implementation: str = "torch",
        *,
        kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        shadowed: Sequence[int] = SHADOWED,
        split: int = 2,
        launch: Launch = SMALL,
        half: bool = True,
        step: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.random = torch.Generator().manual_seed(7)
        values = [self.draw(s) for s in shapes]
        self.ours = [torch.nn.Parameter(v.clone()) for v in values]
        self.plain = [torch.nn.Parameter(v.clone()) for v in values]
        self.optimizer = _build(kind, self.ours, split, options)
        self.reference = _build(kind, self.plain, split, options)
        self.shadowed = [self.ours[i] for i in shadowed]
        names = [(f"weight{i}", p) for i, p in enumerate(self.ours)]
        self.flat = FlatParameters(self.optimizer, self.shadowed, names=names)
        self.fused = FusedAdamW(self.flat, implementation=implementation, launch=launch, **(step or {}))
        self.gradients = [
            torch.zeros_like(p, dtype=torch.bfloat16 if half and i in shadowed else torch.float32)
            for i, p in enumerate(self.ours)
        ]
        self.table = self.fused.set_gradients(self.gradients)

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.random).to(DEVICE)

    def new_gradients(self) -> None:
        """Fresh values in place for ours; the same, in fp32, for the reference."""
        for g, p in zip(self.gradients, self.plain, strict=True):
            g.copy_(self.draw(tuple(g.shape)))
            p.grad = g.float().clone()

    def set_lr(self, *lrs: float) -> None:
        for optimizer in (self.optimizer, self.reference):
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr

    def step(self) -> None:
        """One step of both on fresh gradients."""
        self.new_gradients()
        self.reference.step()
        self.fused.refresh_hyper()
        self.fused.step()

    def everything(self) -> list[Tensor]:
        """Copies of all that a step may change."""
        f = self.flat
        return [t.clone() for t in (f.master, f.exp_avg, f.exp_avg_sq, f.shadow, f.steps)]


def _build(
    kind: type[torch.optim.Optimizer], ps: list[torch.nn.Parameter], split: int, options: dict[str, Any]
) -> Any:
    groups = [{"params": ps[:split], "weight_decay": 0.1}, {"params": ps[split:], "weight_decay": 0.0}]
    return kind(groups, **{"lr": 1e-2, **options})  # type: ignore[arg-type]


def cosine(step: int, steps: int = 20) -> float:
    return 5e-3 * (1 + math.cos(math.pi * step / steps))


def error(a: Tensor, b: Tensor) -> float:
    """Largest difference over largest value."""
    if a.numel() == 0:
        return 0.0
    return float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-30))


def assert_twins_equal(twins: Twins, tolerance: float = 1e-6) -> None:
    for i, (p, q) in enumerate(zip(twins.ours, twins.plain, strict=True)):
        a, b = twins.optimizer.state[p], twins.reference.state[q]
        assert error(p, q) <= tolerance, f"parameter {i}"
        for key in ("exp_avg", "exp_avg_sq"):
            assert error(a[key], b[key]) <= tolerance, f"{key} {i}"
        assert float(a["step"]) == float(b["step"])


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Bitwise, so that NaN equals itself and -0 differs from 0."""
    return all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in zip((t.reshape(-1) for t in a), (t.reshape(-1) for t in b), strict=True)
    )
