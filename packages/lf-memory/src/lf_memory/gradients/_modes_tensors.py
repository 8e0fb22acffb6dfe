"""What gradients need that are plain tensors on one rank and DTensors on the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_, which the results are to equal


def is_sharded(t: Tensor) -> bool:
    """Whether `t` is a DTensor; False where torch was built without distributed."""
    return hasattr(t, "to_local") and hasattr(t, "device_mesh")


def local(t: Tensor) -> Tensor:
    """The part of `t` on this rank, without a copy; `t` itself if it is no DTensor."""
    if not is_sharded(t):
        return t
    part: Tensor = cast("Any", t).to_local()
    return part


def norm_of(grad: Tensor) -> Tensor:
    """2-norm of this rank's part, a scalar on its device; float32, or float64 for float64 gradients."""
    part = local(grad.detach())
    if part.is_complex():
        part = torch.view_as_real(part)
    norm: Tensor = torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32))
    return norm


def norms_of(grads: Sequence[Tensor]) -> list[Tensor]:
    """`norm_of` each, those of one device and type in one launch."""
    norms: dict[int, Tensor] = {}
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, grad in enumerate(grads):
        kinds.setdefault((grad.device, grad.dtype), []).append(i)
    for (_, dtype), indices in kinds.items():
        if dtype.is_complex:
            found = [norm_of(grads[i]) for i in indices]
        else:
            wide = torch.promote_types(dtype, torch.float32)
            found = list(torch._foreach_norm([local(grads[i]) for i in indices], 2, dtype=wide))
        norms.update(zip(indices, found, strict=True))
    return [norms[i] for i in range(len(grads))]


def total_norm(norms: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """2-norm over all gradients and, where they are sharded, over all ranks.

    Args:
        norms: (gradient or parameter, `norm_of` it) in the same order on all ranks; at least one.

    Returns:
        A scalar on the device of the first; for plain tensors with the bits of `torch.nn.utils.get_total_norm`.
    """
    device = norms[0][1].device
    groups: dict[Any, list[Tensor]] = {}
    for tensor, norm in norms:
        groups.setdefault(_sharding(tensor), []).append(norm.to(device))
    parts = [_reduced(torch.linalg.vector_norm(torch.stack(found)), key) for key, found in groups.items()]
    return parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts))


def coefficient(clip: float, norm: Tensor) -> Tensor:
    """What gradients of norm `norm` are multiplied with: clip / (norm + 1e-6), at most 1."""
    return torch.clamp(clip / (norm + _EPSILON), max=1.0)


def scale(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a scalar tensor, those of one device in one launch."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for part in map(local, grads):
        by_device.setdefault(part.device, []).append(part)
    for device, parts in by_device.items():
        torch._foreach_mul_(parts, factor.to(device))


def _sharding(tensor: Tensor) -> Any:
    if not is_sharded(tensor):
        return None
    sharded = cast("Any", tensor)
    dims = tuple(i for i, placement in enumerate(sharded.placements) if not placement.is_replicate())
    return sharded.device_mesh, dims


def _reduced(norm: Tensor, sharding: Any) -> Tensor:
    if sharding is None:
        return norm
    mesh, dims = sharding
    square = norm.square()
    for dim in dims:
        dist.all_reduce(square, group=mesh.get_group(dim))
    return square.sqrt()
