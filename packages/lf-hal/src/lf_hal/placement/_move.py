"""A copy to another device whose gradient is copied back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["move"]


def move(
    x: torch.Tensor, device: torch.device, count: Callable[[str, torch.Tensor, torch.device], None]
) -> torch.Tensor:
    """``x`` on ``device``; ``count`` is told of the copy, and of the one of its gradient."""
    out: torch.Tensor = _function().apply(x, device, count)
    return out


@cache
def _function() -> Any:
    import torch

    class Move(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, device: torch.device, count: Any) -> torch.Tensor:
            ctx.source, ctx.count = x.device, count
            count("forward", x, device)
            return x.to(device)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            (grad,) = grads
            ctx.count("backward", grad, ctx.source)
            return grad.to(ctx.source), None, None

    return Move
