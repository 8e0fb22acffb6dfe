"""GELU by its tanh approximation (arXiv 1606.08415), the bias before it and the dropout behind it in one kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lf_graph.kernels._checks import allow_tensors, require_tensors
from lf_graph.kernels._choice import Implementation
from lf_graph.kernels._inputs import runs_on_triton, widened
from lf_graph.kernels._philox import draw_seed, keep_mask, scale_of

SLOPE = 2 * math.sqrt(2 / math.pi)  # of gelu(x) = x * sigmoid(SLOPE * (x + CUBIC * x^3)), the same as by tanh
CUBIC = 0.044715


def gelu_tanh(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """``dropout(gelu(x + bias, approximate="tanh"))``, computed in float32 and rounded once.

    The mask of the dropout is computed again in the backward: only x, the bias and 16 bytes are kept for it. Both
    implementations drop the same elements. Autocast changes nothing: the result has the dtype of ``x``.

    Args:
        x: float [..., C].
        bias: float [C] of any float dtype; its gradient is summed over rows in fixed order.
        dropout_p: probability to drop, from 0 to 1, rounded to 1 / 65536; kept elements are scaled up. 0 while
            evaluating.
        seed: int64 [2] on the device, seed and offset: the same pair drops the same elements. None draws a seed from
            torch's generator of the device, so ``torch.manual_seed`` and activation checkpointing work as for torch's
            dropout, and every replay of a CUDA graph drops others.
        implementation: Triton, the plain twin, or Triton where it runs.

    Returns:
        Like ``x``. Repeats bit for bit for a seed, as do the gradients.

    Raises:
        ValueError: a bias or seed that does not fit, or a probability outside of 0 to 1.
        TypeError: x or bias is not float, or the seed not int64.
        KernelUnavailableError: ``implementation="triton"`` cannot run here.
    """
    _check(x, bias, dropout_p, seed)
    triton = runs_on_triton("gelu_tanh", implementation, x)
    if dropout_p and seed is None:
        seed = draw_seed(x.device)
    if not triton:
        return gelu_tanh_plain(x, bias, dropout_p, seed)
    from lf_graph.kernels import _gelu_triton as kernels

    seed = seed.contiguous() if dropout_p and seed is not None else None
    out: Tensor = kernels.forward(x, bias, seed, dropout_p)
    return out


def _check(x: Tensor, bias: Tensor | None, p: float, seed: Tensor | None) -> None:
    require_tensors("gelu_tanh", x=x)
    allow_tensors("gelu_tanh", bias=bias, seed=seed)
    if not x.ndim:
        raise ValueError("gelu_tanh: x has no dimension; give [..., C]")
    if bias is not None:
        if bias.shape != x.shape[-1:] or bias.device != x.device:
            raise ValueError(
                f"gelu_tanh: bias {tuple(bias.shape)} on {bias.device} for x {tuple(x.shape)} on {x.device}; "
                f"it must be [{x.shape[-1]}]"
            )
        if not bias.dtype.is_floating_point:
            raise TypeError(f"gelu_tanh: bias is {bias.dtype}; it must be float")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"gelu_tanh: dropout_p={p}: a probability is from 0 to 1")
    if seed is None:
        return
    if seed.dtype != torch.int64:
        raise TypeError(f"gelu_tanh: seed is {seed.dtype}; it must be int64 [2], seed and offset")
    if seed.shape != (2,) or seed.device != x.device:
        raise ValueError(
            f"gelu_tanh: seed {tuple(seed.shape)} on {seed.device}; it must be int64 [2] on {x.device}, "
            "seed and offset"
        )


def gelu_tanh_plain(x: Tensor, bias: Tensor | None, dropout_p: float, seed: Tensor | None) -> Tensor:
    """The plain twin, on any device and in float64 too; saves what the kernels save."""
    out: Tensor = _Plain.apply(x, bias, seed if dropout_p else None, dropout_p)  # type: ignore[no-untyped-call]
    return out


def _shifted(x: Tensor, bias: Tensor | None) -> Tensor:
    wide = widened(x)
    return wide if bias is None else wide + bias.to(wide.dtype)


def _kept(x: Tensor, seed: Tensor | None, p: float) -> Tensor:
    if seed is None:
        return x
    mask = keep_mask(x.shape[:-1].numel(), x.shape[-1], seed, p).view(x.shape)
    return torch.where(mask, x * scale_of(p), torch.zeros((), dtype=x.dtype, device=x.device))


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, seed: Tensor | None, p: float) -> Tensor:
        ctx.save_for_backward(x, bias, seed)
        ctx.p = p
        wide = _shifted(x, bias)
        out = _kept(wide * torch.sigmoid(SLOPE * wide * (1 + CUBIC * wide * wide)), seed, p)
        # torch 2.11 compiles a forward that ends in a cast to its own dtype to one without gradients
        return out if out.dtype == x.dtype else out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, bias, seed = ctx.saved_tensors
        wide = _shifted(x, bias)
        square = wide * wide
        sigmoid = torch.sigmoid(SLOPE * wide * (1 + CUBIC * square))
        slope = sigmoid + wide * sigmoid * (1 - sigmoid) * SLOPE * (1 + 3 * CUBIC * square)
        grad = _kept(widened(grads[0]), seed, ctx.p) * slope
        rows = x.shape[:-1].numel()  # -1 would be any number where there are no columns
        to_bias = None if bias is None else grad.reshape(rows, bias.shape[0]).sum(0).to(bias.dtype)
        return grad.to(x.dtype), to_bias, None, None
