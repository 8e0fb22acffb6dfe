"""What ranks do in tests of hooks that route buckets by size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from comm_jobs import Net, batch, bits, made
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lf_comm
from lf_comm._oneshot import OneShotReducer
from lf_comm.hybrid import DenseReducer


class Recording(DenseReducer):
    """Averages as DDP, `times` times over, and notes the bytes of its buckets."""

    def __init__(self, group: dist.ProcessGroup, times: int = 1) -> None:
        super().__init__(group)
        self.times, self.seen = times, []  # type: ignore[var-annotated]

    def work(self, bucket: Any) -> Callable[[], Tensor]:
        def average() -> Tensor:
            self.seen.append(bucket.buffer().nbytes)
            for _ in range(self.times - 1):
                self._average(bucket.buffer().clone())
            return self._average(bucket.buffer())

        return average


def once(module: nn.Module, group: dist.ProcessGroup) -> Recording:
    return Recording(group)


def many_times(module: nn.Module, group: dist.ProcessGroup) -> Recording:
    return Recording(group, 100)


def trained(
    rank: int, steps: int, ways: tuple[Any, Any, Any] | None, sparse: bool = False, accumulate: int = 1
) -> dict[str, Any]:
    """Steps with a hook, or DDP's own averaging when ways is None."""
    net: Net = made(sparse=sparse)
    ddp = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0.02)
    hybrid = None if ways is None else lf_comm.hybrid_comm(*ways).attach(ddp)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    early = []
    for step in range(steps):
        for micro in range(accumulate):
            with torch.enable_grad() if micro == accumulate - 1 else ddp.no_sync():
                ddp(batch(rank, 10 * step + micro), rank % 2).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if hybrid is not None:
            early.append(hybrid.decision is None)
    found: dict[str, Any] = {"weights": {n: bits(p) for n, p in net.named_parameters()}, "early": early}
    if hybrid is not None:
        found["decision"] = hybrid.decision
        found["seen"] = [getattr(one, "seen", None) for one in (hybrid.small, hybrid.large)]
    return found


class Emulated:
    """Symmetric memory by Gloo: the contract of `TorchSymmetric` where there are no GPUs."""

    def __init__(self) -> None:
        self.shown: list[int] = []

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full((count,), float("nan"), dtype=dtype, device=device)

    def rendezvous(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        self.shown.append(tensor.nbytes)

    def reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        assert tensor.nbytes % 16 == 0
        assert bool(torch.isfinite(tensor).all())
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts).sum(0)


class Bucket:
    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def buffer(self) -> Tensor:
        return self._buffer


def one_shot(rank: int) -> tuple[list[bool], list[int]]:
    """(right, bytes shown to others) of buckets of different lengths and dtypes."""
    memory = Emulated()
    reducer = OneShotReducer(nn.Linear(1, 1), dist.group.WORLD, symmetric=memory)  # type: ignore[arg-type]
    right = []
    kinds = [torch.float32] * 4 + [torch.bfloat16, torch.float64]
    for count, dtype in zip((5, 3, 0, 9, 7, 6), kinds, strict=True):
        mine = (torch.arange(count) * 4.0 + rank).to(dtype)
        wanted = mine / dist.get_world_size()
        dist.all_reduce(wanted)
        right.append(torch.equal(reducer.work(Bucket(mine))(), wanted) and torch.equal(mine, wanted))
    return right, memory.shown


def refused(rank: int) -> list[str]:
    """What cannot be meant."""
    said = []
    for ways in (("ring", "dense"), ("dense", "top-k"), ("dense", "rows", -1), ("dense", "rows", "guessed")):
        try:
            lf_comm.hybrid_comm(*ways)  # type: ignore[arg-type]
        except ValueError as error:
            said.append(str(error))
    ddp = DistributedDataParallel(nn.Embedding(2000, 8, sparse=True))
    lf_comm.hybrid_comm("dense", "dense", 0).attach(ddp)
    for call in (lambda: lf_comm.hybrid_comm().attach(ddp), lambda: ddp(torch.arange(5)).sum().backward()):
        try:
            call()
        except Exception as error:
            said.append(str(error))
    return said
