"""SwiGLU: ``silu(gate) * up`` (arXiv 2002.05202), optionally times a weight for each row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lf_graph.kernels._checks import allow_tensors, require_tensors
from lf_graph.kernels._choice import Implementation
from lf_graph.kernels._inputs import runs_on_triton, widened


def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    overwrite: bool = False,
    implementation: Implementation = "auto",
) -> Tensor:
    """``silu(gate) * up * weight``, computed in float32 and rounded once; one kernel forward, one backward.

    Backward bytes of bf16: 10 an element, against 24 for the kernels eager PyTorch runs.
    Autocast changes nothing: it computes in float32 and returns the dtype of its inputs.

    Args:
        gate: float [..., F]; or, without ``up``, both halves packed, [..., 2 F], gate first.
        up: [..., F] like ``gate``. Halves of one packed tensor are read where they are.
        weight: float32 (float64 beside float64) [...], one for each row, such as a router's; its gradient is a sum
            over the row in fixed order.
        overwrite: the backward writes the gradients into ``gate`` and ``up``, which saves their size in memory.
            Nothing else may use their values after the forward; a second backward then fails with autograd's error of
            a changed saved tensor. Ignored by the plain twin and under torch.compile, which places buffers itself.
        implementation: Triton, the plain twin, or Triton where it runs.

    Returns:
        [..., F] of the dtype of ``gate``. Repeats bit for bit, as do the gradients.

    Raises:
        ValueError: shapes that do not fit, or an odd packed width.
        TypeError: dtypes that differ.
        KernelUnavailableError: ``implementation="triton"`` cannot run here.
    """
    _check(gate, up, weight)
    if not runs_on_triton("swiglu", implementation, gate):
        first, second = (gate, up) if up is not None else gate.chunk(2, dim=-1)
        return swiglu_plain(first, second, weight)
    from lf_graph.kernels import _swiglu_triton as kernels

    in_place = overwrite and not torch.compiler.is_compiling()
    out: Tensor = (kernels.overwriting if in_place else kernels.forward)(gate, up, weight)
    return out


def _check(gate: Tensor, up: Tensor | None, weight: Tensor | None) -> None:
    require_tensors("swiglu", gate=gate)
    allow_tensors("swiglu", up=up, weight=weight)
    if up is None and (not gate.ndim or gate.shape[-1] % 2):
        raise ValueError(f"swiglu: {tuple(gate.shape)} does not hold gate and up; give [..., 2 F], or both")
    if up is not None and (up.shape != gate.shape or not gate.ndim):
        raise ValueError(
            f"swiglu: gate {tuple(gate.shape)} and up {tuple(up.shape)} must be one shape [..., F]"
        )
    if up is not None and (up.dtype != gate.dtype or up.device != gate.device):
        raise TypeError(f"swiglu: gate is {gate.dtype} on {gate.device}, up {up.dtype} on {up.device}")
    if weight is None:
        return
    if weight.shape != gate.shape[:-1] or weight.device != gate.device:
        raise ValueError(
            f"swiglu: weight {tuple(weight.shape)} on {weight.device} for rows {tuple(gate.shape[:-1])} "
            f"on {gate.device}"
        )
    if weight.dtype != torch.promote_types(gate.dtype, torch.float32):
        raise TypeError(
            f"swiglu: weight must be {torch.promote_types(gate.dtype, torch.float32)}, not {weight.dtype}"
        )


def swiglu_plain(gate: Tensor, up: Tensor, weight: Tensor | None = None) -> Tensor:
    """The plain twin, on any device and in float64 too; saves what the kernels save."""
    out: Tensor = _Plain.apply(gate, up, weight)  # type: ignore[no-untyped-call]
    return out


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return swiglu_value(gate, up, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return swiglu_gradients(grads[0], *ctx.saved_tensors)


def swiglu_value(gate: Tensor, up: Tensor, weight: Tensor | None) -> Tensor:
    """The plain forward, without autograd."""
    out = F.silu(widened(gate)) * widened(up)
    out = out if weight is None else out * weight[..., None]
    # torch 2.11 compiles a forward that ends in a cast to its own dtype to one without gradients
    return out if out.dtype == gate.dtype else out.to(gate.dtype)


def swiglu_gradients(
    grad: Tensor, gate: Tensor, up: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The plain backward: gradients of gate, up and weight."""
    wide_gate, wide_up, wide = widened(gate), widened(up), widened(grad)
    sigmoid = torch.sigmoid(wide_gate)
    silu, to_weight = wide_gate * sigmoid, None
    if weight is not None:
        to_weight = (wide * silu * wide_up).sum(dim=-1)
        wide = wide * weight[..., None]
    to_gate = wide * wide_up * (sigmoid + silu * (1 - sigmoid))
    return to_gate.to(gate.dtype), (wide * silu).to(gate.dtype), to_weight
