"""What ranks do in the tests of init_loong_dist: leave the group they were given, and make their own."""

from __future__ import annotations

import contextlib
import datetime
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lf_comm


@contextlib.contextmanager
def no_group() -> Any:
    """Between, this rank is in no group; afterwards in one of its own, which the pool destroys."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # the last may still be connecting
    dist.destroy_process_group()
    try:
        yield rank, world
    finally:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def whole(rank: int, store: str, backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """Start, train a step, and end."""
    with no_group() as (me, world):
        place: dict[str, Any] = {"init_method": f"file://{store}", "rank": me, "world_size": world}
        job = lf_comm.init_loong_dist(backend, timeout=datetime.timedelta(seconds=30), **place, **options)
        ddp = DistributedDataParallel(torch.nn.Linear(512, 600))
        reducer = job.attach(ddp)
        step = job.watch.step(ddp, 0) if job.watch is not None else contextlib.nullcontext()
        with step:
            ddp(torch.ones(2, 512)).sum().backward()
        found = {
            "text": str(job),
            "on": {each.name: each.on for each in job.features},
            "ages": sorted(job.watch.ages()) if job.watch is not None else None,
            "ranks": job.ring.ranks if job.ring is not None else None,
            "rates": job.rates,
            "given": reducer._rows.rates,
            "warnings": job.warnings,
        }
        job.close()
        found["left"] = not dist.is_initialized()
        found["beats"] = any(thread.name == "lf-comm-watch" for thread in threading.enumerate())
        return found


def apart(rank: int, store: str) -> tuple[str, bool]:
    """Ranks ask for different things."""
    with no_group() as (me, world):
        try:
            lf_comm.init_loong_dist(
                "gloo", watch=me == 1, init_method=f"file://{store}", rank=me, world_size=world
            )
        except lf_comm.DisagreementError as error:
            return str(error), dist.is_initialized()
    return "", True


def twice(rank: int) -> str:
    """In a group already."""
    try:
        lf_comm.init_loong_dist("gloo")
    except RuntimeError as error:
        return str(error)
    return ""
