"""What ranks do in tests of shared tensors."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comm_jobs import bits
from torch import nn

import lf_comm
from lf_comm import _sealed

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.uint8,
    torch.float8_e4m3fn,
)


def some() -> dict[str, torch.Tensor]:
    """Tensors of many kinds."""
    made = torch.Generator().manual_seed(3)
    found = {str(dtype): torch.randint(0, 2, (5, 3), generator=made).to(dtype) for dtype in DTYPES}
    found["scalar"] = torch.tensor(float("nan"))
    found["empty"] = torch.empty(0, 4)
    found["turned"] = torch.randn(6, 5, generator=made).T
    found["grad"] = torch.randn(3, generator=made).requires_grad_()
    return found


def shared(rank: int, owner: int) -> dict[str, Any]:
    """What a rank gets, and where it lies."""
    mine = lf_comm.share_tensors(some() if rank == owner else None, owner=owner)
    wanted = some()
    dist.barrier()
    mine.check()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "names": list(mine) == list(wanted),
        "equal": all(bits(mine[name]) == bits(tensor) for name, tensor in wanted.items()),
        "forms": all(mine[n].dtype == t.dtype and mine[n].shape == t.shape for n, t in wanted.items()),
        "plain": not any(t.requires_grad for t in mine.values()),
        "inode": mine.inode,
        "mapped": any(f" {mine.inode} " in line and "lf-comm-peer" in line for line in maps),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def written(rank: int) -> dict[str, Any]:
    """Rank 1 writes where it must not."""
    mine = lf_comm.share_tensors({"a": torch.zeros(5000), "b": torch.ones(5000)} if rank == 0 else None)
    if rank == 1:
        mine["b"][7] = 5
    dist.barrier()
    said: tuple[str, ...] = ()
    try:
        mine.check()
    except lf_comm.PeerWrittenError as error:
        said = error.names
    refused = []
    for write in (
        lambda: os.pwrite(mine._fd, b"x", 0),
        lambda: os.ftruncate(mine._fd, 1),
        lambda: os.ftruncate(mine._fd, 1 << 20),
    ):
        try:
            write()
        except OSError as error:
            refused.append(type(error).__name__)
    return {"said": said, "seen": float(mine["b"][7]), "refused": refused}


def closed(rank: int) -> dict[str, Any]:
    """The owner closes; others read on."""
    lf_comm.share_tensors(
        {"a": torch.arange(3)} if rank == 0 else None
    ).close()  # opens connections that stay
    before = len(os.listdir("/proc/self/fd"))
    mine = lf_comm.share_tensors({"a": torch.arange(1000)} if rank == 0 else None)
    kept = mine["a"]
    if rank == 0:
        mine.close()
        mine.close()
    dist.barrier()
    said = ""
    if rank == 0:
        try:
            mine.check()
        except ValueError as error:
            said = str(error)
    else:
        mine.check()
        mine.close()
    total = int(kept.sum())
    del kept  # a mapping has a descriptor of its own
    left = len(os.listdir("/proc/self/fd")) - before
    return {"sum": total, "said": said, "left": left, "size": len(mine)}


class Tower(nn.Module):
    """With a tied parameter and a buffer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.first(x)) + self.second(x)
        return out


def towers(rank: int) -> dict[str, Any]:
    """A module of which ranks but the owner have only the shapes."""
    torch.manual_seed(rank)
    with torch.device("cpu" if rank == 1 else "meta"):
        tower = Tower().eval().requires_grad_(False)
    held = lf_comm.share_module(tower, owner=1)
    x = torch.arange(16.0).reshape(2, 8).requires_grad_()
    tower(x).sum().backward()
    return {
        "out": bits(tower(x)),
        "gradient": bits(x.grad),
        "tied": tower.first.weight is tower.second.weight,
        "inode": held.inode,
        "same": tower.first.weight.data_ptr() == held["first.weight"].data_ptr(),
    }


def refusals(rank: int) -> list[str]:
    """What cannot be shared, on every rank."""
    said = []

    def tried(what: object) -> None:
        try:
            what()  # type: ignore[operator]
        except (lf_comm.PeerError, TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")

    own = rank == 0
    tried(lambda: lf_comm.share_tensors({"s": torch.eye(3).to_sparse()} if own else None))
    tried(lambda: lf_comm.share_tensors({"m": torch.empty(3, device="meta")} if own else None))
    tried(lambda: lf_comm.share_tensors(None))
    tried(lambda: lf_comm.share_tensors(None, owner=9))
    tried(lambda: lf_comm.share_module(Tower().requires_grad_(rank == 1)))
    tried(lambda: lf_comm.share_module(Tower(8 if own else 4).requires_grad_(False)))
    stock = _sealed.is_sealed
    if rank == 1:
        _sealed.is_sealed = lambda fd: False
    tried(lambda: lf_comm.share_tensors({"a": torch.ones(3)} if own else None))
    _sealed.is_sealed = stock
    boot = lf_comm.peer._boot
    if rank == 1:
        lf_comm.peer._boot = lambda: "another"
    tried(lambda: lf_comm.share_tensors({"a": torch.ones(3)} if own else None))
    lf_comm.peer._boot = boot
    return said


def leaving(rank: int, world: int, store: str, when: str, out: str) -> None:
    """A process of its own, whose rank 0 leaves before it shares, while it offers, or when all have the tensors."""
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world, timeout=patience)
    dist.barrier()
    if rank == 0:
        if when == "before":
            os._exit(9)
        if when == "offered":
            _sealed.Offer._serve = lambda self: os._exit(9)  # type: ignore[method-assign]
    found: dict[str, object] = {}
    try:
        mine = lf_comm.share_tensors({"a": torch.arange(1000.0)} if rank == 0 else None)
        if rank == 0:
            os._exit(9)
        mine.check()
        found["sum"] = float(mine["a"].sum())
    except lf_comm.PeerError as error:
        found |= {"kind": type(error).__name__, "owner": getattr(error, "owner", None), "text": str(error)}
    Path(out).write_text(json.dumps(found))
    os._exit(3)
