"""What tests of kernels check alike: values with gradients, beside float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_gradients(fn: Callable[..., Tensor], *inputs: Any) -> tuple[Tensor, ...]:
    """Output of ``fn`` and the gradients of all inputs that want one, for one fixed gradient of the output."""
    out = fn(*inputs)
    generator = torch.Generator().manual_seed(7)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).bfloat16()
    wanted = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    return out.detach(), *torch.autograd.grad(out, wanted, grad.to(out.device, out.dtype))


def exact(*inputs: Any) -> list[Any]:
    """Float tensors in float64, as leaves that want a gradient where the given ones do."""
    return [
        t.detach().double().requires_grad_(t.requires_grad)
        if isinstance(t, Tensor) and t.is_floating_point()
        else t
        for t in inputs
    ]
