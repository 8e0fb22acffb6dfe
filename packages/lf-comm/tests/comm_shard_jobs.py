"""What ranks do in tests of FSDP2 shards: two replicas of two ranks each."""

from __future__ import annotations

from typing import Any

import torch
from comm_jobs import SLOW_LINK, bits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lf_comm import AccurateReducer, SparseGradientReducer, SparseGradReducer


class Layers(nn.Module):
    """Layers of which one is unused at odd steps; lengths that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(61, 97)
        self.odd = nn.Linear(97, 97)
        self.last = nn.Linear(97, 33)
        self.scale = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(7, 3), requires_grad=False)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.first(x).tanh() * self.scale.sum()
        if step % 2 == 0:
            x = self.odd(x).tanh()
        out: Tensor = self.last(x)
        return out


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 61, generator=torch.Generator().manual_seed(100 * rank + step))


def trained(net: nn.Module, rank: int, steps: int) -> None:
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    for step in range(steps):
        net(batch(rank, step), step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(net: nn.Module) -> dict[str, Tensor]:
    """Full weights by name."""
    return {
        n.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for n, p in net.named_parameters()
    }


def sharded(rank: int, threshold: float, steps: int = 3) -> dict[str, Any]:
    """Steps with shards over ranks {0, 1} and {2, 3}, averaged over {0, 2} and {1, 3}; and those of DDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = Layers()
    fully_shard(net.odd, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    reducer = SparseGradientReducer(net, threshold, group=mesh["replicate"].get_group())
    reducer.apply(net)
    trained(net, rank, steps)
    stock = DistributedDataParallel(Layers(), find_unused_parameters=True)
    trained(stock, rank, steps)
    ours, theirs = whole(net), whole(stock)
    state = reducer.state_dict()
    reducer.load_state_dict(state)
    trained(net, rank, 1)
    return {
        "weights": {n: bits(p) for n, p in ours.items()},
        "apart": max(float((ours[n] - theirs[n]).abs().max()) for n in theirs),
        "paths": {n: d.path for n, d in reducer.report().items()},
        "residuals": {n: (tuple(r.shape), float(r.abs().max())) for n, r in state["residuals"].items()},
        "sent": reducer.bytes_sent,
    }


class Table(nn.Module):
    """A table of which a batch touches few rows, beside a layer that is dense."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(4095, 64)
        self.head = nn.Linear(64, 9)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(ids))
        return out


def by_way(rank: int, way: str) -> dict[str, Any]:
    """Three steps of two replicas of two shards: (weights, paths)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net, group = Table(), mesh["replicate"].get_group()
    fully_shard(net.table, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    rows = SparseGradReducer(net, group, rates=SLOW_LINK, min_bytes=1 << 16)
    {
        "dense": SparseGradientReducer(net, 1.0, group=group).apply,
        "rows": rows.apply,
        "accurate": AccurateReducer(group).apply,
    }[way](net)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for step in range(3):
        ids = torch.randint(0, 4095, (32,), generator=torch.Generator().manual_seed(100 * rank + step))
        net(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "weights": whole(net),
        "paths": {n: d.path for n, d in rows.report().items()},
        "sent": rows.bytes_sent,
    }


def refused(rank: int) -> list[str]:
    """What is said of modules and groups that cannot be meant."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain, partly, hybrid, right = Layers(), Layers(), Layers(), Layers()
    fully_shard(hybrid, mesh=mesh)
    fully_shard(partly.odd, mesh=mesh["shard"])
    fully_shard(right, mesh=mesh["shard"])
    replicas, said = mesh["replicate"].get_group(), []
    for net, part, group in (
        (plain, plain, replicas),
        (hybrid, hybrid, replicas),
        (right, right, None),
        (right, right, mesh["shard"].get_group()),
        (partly, partly.odd, replicas),
    ):
        try:
            SparseGradientReducer(net, group=group).apply(part)
        except ValueError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
