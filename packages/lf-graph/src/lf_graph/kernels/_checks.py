"""What the public operators ask of their inputs, and the dtype of what they return."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lf_graph._errors import OperandError
from lf_graph.kernels._inputs import KERNEL_DTYPES


def require_tensors(operator: str, **operands: object) -> None:
    """Refuses an operand that is no tensor.

    Raises:
        OperandError: names it.
    """
    for name, operand in operands.items():
        if not isinstance(operand, Tensor):
            raise OperandError(operator, name, operand, "a tensor")


def allow_tensors(operator: str, **operands: object) -> None:
    """Refuses an optional operand that is neither a tensor nor None.

    Raises:
        OperandError: names it.
    """
    for name, operand in operands.items():
        if operand is not None and not isinstance(operand, Tensor):
            raise OperandError(operator, name, operand, "a tensor or None")


def require_module(operator: str, name: str, given: object, kind: type[nn.Module] = nn.Module) -> None:
    """Refuses what is no module of a kind.

    Raises:
        OperandError: names it.
    """
    if not isinstance(given, kind):
        raise OperandError(operator, name, given, f"a torch.nn.{kind.__name__}")


def require_floats(operator: str, **tensors: Tensor | None) -> None:
    """Refuses other dtypes than bf16, fp16, fp32, fp64, and tensors on other devices than the first.

    Raises:
        ValueError: names the tensor.
    """
    first: Tensor | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in (*KERNEL_DTYPES, torch.float64):
            raise ValueError(
                f"{operator}: {name} is {tensor.dtype}: give bfloat16, float16, float32 or float64"
            )
        first = tensor if first is None else first
        if tensor.device != first.device:
            raise ValueError(f"{operator}: {name} is on {tensor.device}, the first tensor on {first.device}")


def require_shape(operator: str, name: str, tensor: Tensor | None, shape: tuple[int, ...], why: str) -> None:
    """Refuses a tensor of another shape.

    Raises:
        ValueError: names the tensor, its shape, the expected one and its reason.
    """
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{operator}: {name} is {list(tensor.shape)}: {list(shape)} is expected, {why}")


def of_sample(operator: str, name: str, rows: Tensor, x: Tensor) -> Tensor:
    """``rows`` [B, 1, D] or [B, D] as [B, D], for x [B, ..., D].

    Raises:
        ValueError: it is neither.
    """
    flat = rows.flatten(0, 1) if rows.dim() == 3 and rows.shape[1] == 1 else rows
    require_shape(operator, name, flat, (x.shape[0], x.shape[-1]), "[batch, width] of x")
    return flat


def output_dtype(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype asked for; else autocast's, if it is on (and x is not float64); else that of x."""
    if dtype is not None:
        return dtype
    kind = x.device.type
    if x.dtype != torch.float64 and kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype a plain twin computes in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
