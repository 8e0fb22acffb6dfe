"""A rank that stops beating while another one waits in a collective of a group that can only be aborted, as NCCL's."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lf_comm


class Waiting:
    """Stands for a group of NCCL: what it has begun ends by an abort alone, and says nothing of it."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1
        self._over.set()

    def wait(self) -> None:
        assert self._over.wait(30), "nobody aborted it"


def aborted(rank: int, raises: bool) -> dict[str, Any]:
    """Rank 0: what the step whose peer is silent ends with. raises: whether the aborted collective tells."""
    group: Any = Waiting()
    watch = lf_comm.PeerWatch(interval_s=0.1, patience_s=0.4, abort=[group])
    layer = nn.Linear(3, 3)
    layer(torch.ones(1, 3)).sum().backward()
    dist.barrier()
    found: dict[str, Any] = {}
    if rank == 1:
        watch.close()
    else:
        try:
            with watch.step(layer, 4):
                group.wait()
                if raises:
                    raise RuntimeError("NCCL communicator was aborted")
        except lf_comm.PeerLost as error:
            found = {"rank": error.rank, "step": error.step, "cause": str(error.__cause__)}
        found |= {"aborts": group.aborts, "gradients": sum(p.grad is not None for p in layer.parameters())}
    dist.barrier()
    watch.close()
    return found


def outside(rank: int) -> int:
    """Aborts of a watch whose peer is silent while no step runs."""
    group: Any = Waiting()
    watch = lf_comm.PeerWatch(interval_s=0.05, patience_s=0.1, abort=[group])
    dist.barrier()
    if rank == 1:
        watch.close()
    else:
        while watch.ages()[1] < 0.5:
            time.sleep(0.05)
    dist.barrier()
    watch.close()
    return group.aborts
