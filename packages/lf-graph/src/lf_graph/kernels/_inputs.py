"""Checks and views that operators on rows of floats share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lf_graph.kernels._choice import Implementation, KernelUnavailableError, use_triton

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def runs_on_triton(operator: str, implementation: Implementation, x: Tensor) -> bool:
    """Whether ``operator`` runs as Triton kernels on ``x``; see :func:`triton_computes`."""
    return triton_computes(operator, implementation, x.dtype, x.device)


def triton_computes(
    operator: str, implementation: Implementation, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether ``operator`` runs as Triton kernels; in float64 and on the meta device it always takes the plain twin.

    Raises:
        KernelUnavailableError: ``implementation="triton"`` cannot run on this device, or not in this dtype.
        TypeError: no dtype of floats.
    """
    if not dtype.is_floating_point:
        raise TypeError(f"{operator} takes tensors of floats, not {dtype}")
    if dtype in KERNEL_DTYPES and device.type != "meta":
        return use_triton(operator, implementation, device)
    if implementation == "triton":
        raise KernelUnavailableError(
            f"{operator}: implementation='triton' computes in float32 on a device, not for {dtype} on {device}"
        )
    return use_triton(operator, "plain", device)


def widened(x: Tensor) -> Tensor:
    """x in the dtype that plain twins compute in: float32, or float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_rows(x: Tensor) -> Tensor:
    """x [..., C] as [rows, C] with neighbours in a row side by side; a view where its strides allow one."""
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def no_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Autocast off, where every cast is written out."""
    if device.type == "meta":
        return nullcontext()
    off: AbstractContextManager[None] = torch.autocast(device.type, enabled=False)
    return off
