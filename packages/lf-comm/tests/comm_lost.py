"""Ranks of which one goes away in the middle of a step; run as ``comm_lost.py RANK WORLD STORE HOW HOOK OUT``."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lf_comm

TIMEOUT = 5.0
FREE = lf_comm.Rates(1e-5, 1e-9, 1e-9, 1e-9, 1e-10, 1e-10, 1e-10)


class Leaves(torch.autograd.Function):
    """Gone when the backward pass comes by, between two buckets."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, how: str) -> torch.Tensor:
        ctx.how = how  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        how = ctx.how  # type: ignore[attr-defined]
        time.sleep(0.3)  # the bucket behind is summed by all
        if how == "exit":
            os._exit(9)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return grad, None


def main() -> None:
    rank, world, store, how, hook, out = sys.argv[1:]
    me, leaver = int(rank), 1
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store, rank=me, world_size=int(world), timeout=timeout)
    watch = lf_comm.PeerWatch(interval_s=0.4)
    torch.manual_seed(0)
    first, last = nn.Linear(64, 400), nn.Linear(400, 400)
    model = nn.ModuleList([first, last])
    ddp = DistributedDataParallel(_Two(model, how if me == leaver else ""), bucket_cap_mb=0.1)
    attach = {"sparse": lf_comm.SparseGradReducer.attach, "accurate": lf_comm.AccurateReducer.attach}
    reducer = attach[hook](ddp) if hook in attach else None
    found: dict[str, object] = {"steps": 0}
    for step in range(5):
        began = time.monotonic()
        ddp.module.leaving = step == 2
        try:
            with watch.step(ddp, step, hook=reducer):
                ddp(torch.randn(8, 64)).square().mean().backward()
        except lf_comm.PeerLost as error:
            found |= {
                "rank": error.rank, "step": error.step, "op": error.op, "bucket": error.bucket,
                "seconds": time.monotonic() - began, "text": str(error), "cause": type(error.__cause__).__name__,
                "gradients": sum(p.grad is not None for p in ddp.parameters()),
            }  # fmt: skip
            break
        found["steps"] = step + 1
        for parameter in ddp.parameters():
            parameter.grad = None
    Path(out).write_text(json.dumps(found))
    os._exit(3)


class _Two(nn.Module):
    def __init__(self, layers: nn.ModuleList, how: str) -> None:
        super().__init__()
        self.layers, self.how, self.leaving = layers, how, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if self.how and self.leaving:
            x = Leaves.apply(x, self.how)  # type: ignore[no-untyped-call]
        out: torch.Tensor = self.layers[1](x)
        return out


if __name__ == "__main__":
    main()
