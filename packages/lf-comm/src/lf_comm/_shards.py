"""What an FSDP2 module hands to an all-reduce hook: one flat tensor of the shards of its parameters, in their order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from lf_comm._errors import CommError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class ShardError(CommError, ValueError):
    """A module that is not sharded by FSDP2 as it must be, or a group that is not that of its replicas."""


class ShardView(NamedTuple):
    """A parameter in the flat tensor. shape: of one rank's shard, rounded up to that of the largest."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def shards_of(module: nn.Module, group: dist.ProcessGroup | None) -> list[tuple[FSDPModule, list[ShardView]]]:
    """Each FSDP2 module in `module` that has parameters of its own, with those in the order of its flat tensor.

    FSDP2 is told to hand over parameters without a gradient as zeros, so that the tensor is the same on every rank.
    Raises ShardError unless each is sharded over one dimension of a mesh, and `group` meets that in this rank alone.
    """
    from torch.distributed.fsdp import (
        FSDPModule,
    )  # half of the time of importing torch, for those who need it

    found = []
    for prefix, part in module.named_modules():
        if not isinstance(part, FSDPModule):
            continue
        owned = [(name, p) for name, p in _owned(module.get_submodule(prefix), prefix) if p.requires_grad]
        if not owned:
            continue
        for name, parameter in owned:
            _check(name, parameter, group)
        if hasattr(part, "set_reduce_scatter_unused_params"):  # torch 2.13; before, such a step is refused
            part.set_reduce_scatter_unused_params(True)
        found.append((part, [ShardView(name, _padded(parameter)) for name, parameter in owned]))
    if not found:
        raise ShardError("no part of the module was given to torch.distributed.fsdp.fully_shard")
    return found


def cut_shards(views: Sequence[ShardView], flat: Tensor) -> list[Tensor]:
    """Views of the flat tensor in the shapes of its shards. ShardError when it has other elements than they."""
    if sum(view.elements for view in views) != flat.numel():
        raise ShardError(
            f"{views[0].name}: {flat.numel()} elements for shards of {sum(view.elements for view in views)}; every "
            "parameter must have a gradient (torch 2.13 fills in those without)"
        )
    spans = flat.split([view.elements for view in views])
    return [span.view(view.shape) for view, span in zip(views, spans, strict=True)]


def _owned(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters that no FSDP2 module further down has, in FSDP2's order."""
    from torch.distributed.fsdp import FSDPModule

    dot = f"{prefix}." if prefix else ""
    for name, parameter in module.named_parameters(recurse=False):
        yield dot + name, parameter
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _owned(child, dot + name)


def _check(name: str, parameter: Tensor, group: dist.ProcessGroup | None) -> None:
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(parameter, DTensor):
        raise ShardError(f"{name}: no shard of FSDP2; give every module with parameters to fully_shard")
    mesh: Any = parameter.device_mesh
    if mesh.ndim != 1 or not isinstance(parameter.placements[0], Shard):
        raise ShardError(
            f"{name}: {parameter.placements} over a mesh of {mesh.ndim} dimensions; call fully_shard over the mesh of "
            "one replica alone (mesh['shard']), and let this reduce over the replicas: FSDP2 runs its own all-reduce "
            "of HSDP whatever hook there is"
        )
    mine = set(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    shared = mine & set(mesh.mesh.flatten().tolist())
    if shared != {dist.get_rank()}:
        raise ShardError(
            f"{name}: ranks {sorted(shared)} are in the reducer's group and shard the parameter as well; group= is to "
            "be that of the replicas (mesh['replicate'].get_group())"
        )


def _padded(parameter: Tensor) -> tuple[int, ...]:
    """Shape of a shard as FSDP2 sends it: the sharded dimension rounded up to a multiple of the ranks."""
    tensor: Any = parameter
    shape, dim = list(tensor.shape), tensor.placements[0].dim
    shape[dim] = -(-shape[dim] // tensor.device_mesh.size())
    return tuple(shape)
