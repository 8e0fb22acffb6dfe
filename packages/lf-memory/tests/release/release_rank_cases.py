"""What the ranks run: released training of wrapped models, and the ordinary loop beside it."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from release_cases import batches, groups, net, train, train_released
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from lf_memory.gradients import release


def adamw(params):
    return AdamW(params, lr=1e-2)


def momentum(params):
    return SGD(params, lr=0.1, momentum=0.9)


def difference(ours, theirs):
    """Largest difference of parameters, over all ranks."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    largest = max((whole(a) - whole(b)).abs().max() for a, b in pairs)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def whole(p):
    p = p.detach()
    return p.full_tensor() if isinstance(p, DTensor) else p


def ddp_exact(rank, options, accumulation=1, clip=None, unused=False, view=False):
    """DistributedDataParallel, released beside ordinary."""
    model = net()
    if not unused:
        model.unused.requires_grad_(False)
    models = [model, copy.deepcopy(model)]
    wrapped = [
        DistributedDataParallel(m, find_unused_parameters=unused, gradient_as_bucket_view=view)
        for m in models
    ]
    data = batches(8, seed=10 + rank)
    train(wrapped[0], adamw(groups(models[0])), data, accumulation, clip)
    _, handle = train_released(
        wrapped[1], adamw(groups(models[1])), data, "exact", accumulation=accumulation, clip=clip, **options
    )
    return difference(models[1], models[0]), handle.stats().steps, handle.norm is not None


def ddp_refused(rank, mode, options):
    wrapped = DistributedDataParallel(net(), find_unused_parameters=True)
    try:
        release(wrapped, adamw(wrapped.parameters()), mode, **options)
    except ValueError as error:
        return str(error)
    return ""


def ddp_inside_refused(rank):
    """`release` of the module that DistributedDataParallel wraps, which no argument shows."""
    inner = net()
    wrapped = DistributedDataParallel(inner, find_unused_parameters=True)
    with release(inner, adamw(inner.parameters()), "fused"):
        try:
            wrapped(batches(1)[0])
        except ValueError as error:
            return str(error)
    return ""


def sharded(model, mesh=None, **options):
    for part in (model.first, model.second):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp(rank, mode, options, clip=None, make=adamw, device="cpu", mesh_shape=None, dtype=None):
    """fully_shard, released beside ordinary; (difference, peak over plan, live bytes, early updates)."""
    mesh = mesh_of(device, mesh_shape)
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)} if dtype else {}
    models = [sharded(net(width=33).to(device), mesh, **policy) for _ in range(2)]
    for model in models:
        model.unused.requires_grad_(False)
    data = [ids.to(device) for ids in batches(6, seed=20 + rank)]
    train(models[0], make(models[0].parameters()), data, 1, clip)
    optimizer = make(models[1].parameters())
    _, handle = train_released(models[1], optimizer, data, mode, **{"chunk_bytes": 1, **options})
    stats = handle.stats()
    return (
        difference(models[1], models[0]),
        stats.peak_bytes - stats.planned_bytes,
        stats.live_bytes,
        stats.in_backward,
    )


def mesh_of(device, shape):
    if shape is None:
        return None
    names = ("replicate", "shard")[-len(shape) :]
    return torch.distributed.device_mesh.init_device_mesh(device, shape, mesh_dim_names=names)


def fsdp_local_clip(rank, device="cpu"):
    """Each parameter is clipped by its whole norm, not by that of this rank's shard."""
    theirs, ours = (sharded(net(width=33).to(device)) for _ in range(2))
    plain, data = momentum(theirs.parameters()), [ids.to(device) for ids in batches(4, seed=20 + rank)]
    for model in (theirs, ours):
        model.unused.requires_grad_(False)
    for ids in data:
        plain.zero_grad()
        theirs(ids).backward()
        for p in theirs.parameters():
            if p.grad is not None:
                torch.nn.utils.clip_grad_norm_([p], 0.05)
        plain.step()
    train_released(ours, momentum(ours.parameters()), data, "local_clip", clip=0.05)
    return difference(ours, theirs)


def compiled(rank):
    """A released model whose whole forward is one graph, on a rank."""
    theirs, ours = net(), net()
    train(theirs, adamw(theirs.parameters()), batches(3))
    with release(ours, adamw(ours.parameters()), "fused") as handle:
        forward = torch.compile(ours, backend="aot_eager", fullgraph=True)
        for ids in batches(3):
            forward(ids).backward()
            handle.step()
    return difference(ours, theirs)
