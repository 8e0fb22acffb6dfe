"""What ranks do in tests of planned buckets."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
import torch.distributed as dist
from comm_jobs import bits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import lf_comm

SLOW = lf_comm.Rates(1e-4, 1e-7, 1e-7, 1e-7, 0, 0, 0)  # a wire on which every model here leaves sums exposed


class Slow(torch.autograd.Function):
    """A layer whose backward takes 3 ms, to stand for a device; else times would follow what the machine does."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(0.003)
        return grad


class Net(nn.Module):
    """Layers, of which kinds of users' models are made by `what`."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.what, self.calls = what, 0
        count = 1 if what == "one layer" else 4
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(count))
        if what == "tied":
            self.layers[3].weight = self.layers[0].weight
        if what == "frozen":
            self.layers[1].requires_grad_(False)
        if what == "empty":
            self.nothing = nn.Parameter(torch.empty(0, 96))
        if what == "norm":
            self.norm = nn.BatchNorm1d(96)
        if what == "two dtypes":
            self.layers[2].double()
        if what == "sparse":
            self.table = nn.Embedding(100, 96, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        order = list(self.layers)
        if self.what == "order by step" and self.calls % 2 == 0:
            order.reverse()
        if self.what == "order by rank" and dist.get_rank() == 1:
            order[0], order[1] = order[1], order[0]
        if self.what == "experts":
            order = [order[0], order[1 + dist.get_rank() % 2]]
        if self.what == "empty":
            x = x + self.nothing.sum()
        if self.what == "norm":
            x = self.norm(x)
        if self.what == "sparse":
            x = x + self.table(torch.arange(len(x)))
        for layer in order:
            x = Slow.apply(layer(x.to(layer.weight.dtype)).relu())  # type: ignore[no-untyped-call]
        return x


def run(model: nn.Module) -> None:
    """Forward and backward of one batch."""
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x).square().mean().backward()


def dense(net: nn.Module) -> dict[str, bytes]:
    """Bits of strided gradients, by name."""
    return {n: bits(p.grad) for n, p in net.named_parameters() if p.grad is not None and not p.grad.is_sparse}


def quiet() -> None:
    """DDP warns that all parameters were used, which is what these tests want."""
    logging.getLogger("torch.nn.parallel.distributed").setLevel(logging.ERROR)


def planned(rank: int, what: str, options: dict[str, Any], trial_steps: int = 0) -> dict[str, Any]:
    """A plan for one kind of model, and DDP's buckets when it is applied."""
    quiet()
    net = Net(what)
    plan = lf_comm.plan_buckets(net, run, ddp_options=options, rates=SLOW, steps=2, trial_steps=trial_steps)
    ddp = DistributedDataParallel(net, **options, **plan.ddp_options())
    for _ in range(3):
        net.zero_grad()
        run(ddp)
    names = [n for n, p in net.named_parameters() if p.requires_grad]
    log = ddp._get_ddp_logging_data()
    made = log.get("rebuilt_per_bucket_param_indices", "")
    return {
        "json": plan.to_json(),
        "lever": plan.lever,
        "planned": [list(b.names) for b in plan.buckets],
        "bytes": [b.nbytes for b in plan.buckets],
        "made": [[names[int(i)] for i in bucket.split()] for bucket in made.split(",")] if made else [],
        "sizes": [int(size) for size in log["bucket_sizes"].split(",")],
        "exposed": (plan.exposed_s, plan.default_exposed_s),
        "gradients": {
            n: bits(p.grad) for n, p in net.named_parameters() if p.grad is not None and not p.grad.is_sparse
        },
        "text": str(plan),
    }


def with_defaults(rank: int, what: str, options: dict[str, Any]) -> dict[str, bytes]:
    """Gradients of stock DDP."""
    quiet()
    net = Net(what)
    ddp = DistributedDataParallel(net, **options)
    for _ in range(3):
        net.zero_grad()
        run(ddp)
    return dense(net)


def refused(rank: int, what: str, options: dict[str, Any]) -> tuple[str, str, str]:
    """(kind, parameter, text) of what planning raised."""
    quiet()
    try:
        lf_comm.plan_buckets(Net(what), run, ddp_options=options, rates=SLOW, steps=2)
    except lf_comm.ScheduleError as error:
        return type(error).__name__, getattr(error, "parameter", ""), str(error)
    return "", "", ""


def failing(rank: int) -> str:
    """One rank's run fails; no other may wait for it."""

    def broken(model: nn.Module) -> None:
        if rank == 1:
            raise KeyError("no batch")
        run(model)

    try:
        lf_comm.plan_buckets(Net(""), broken, rates=SLOW)
    except (KeyError, lf_comm.ScheduleError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def leaves_no_trace(rank: int) -> dict[str, bool]:
    """What a plan with a trial leaves as it was."""
    net = Net("norm")
    net.layers[0].weight.grad = held = torch.ones(96, 96)
    buffers = {n: b.clone() for n, b in net.named_buffers()}
    parameters = {n: bits(p) for n, p in net.named_parameters()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    plan = lf_comm.plan_buckets(net, run, rates=SLOW, steps=1, trial_steps=1)
    same = {
        "tried": plan.measured is not None,
        "gradient": net.layers[0].weight.grad is held and bool((held == 1).all()),
        "none": net.layers[1].weight.grad is None,
        "buffers": all(torch.equal(b, buffers[n]) for n, b in net.named_buffers()),
        "parameters": all(bits(p) == parameters[n] for n, p in net.named_parameters()),
        "random": torch.equal(torch.get_rng_state(), state),
    }
    net.zero_grad()
    run(net)  # without DDP: with its hooks still there, ranks would get the mean
    alone = Net("norm")
    run(alone)
    pairs = zip(net.parameters(), alone.parameters(), strict=True)
    same["no hooks"] = all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None)  # type: ignore[arg-type]
    return same


def exposed(rank: int) -> dict[str, Any]:
    """Of a DDP module."""
    net = Net("")
    ddp = DistributedDataParallel(net)
    net.layers[0].weight.grad = held = torch.ones(96, 96)
    found = lf_comm.measure_exposed(ddp, run, 3)
    said = ""
    try:
        lf_comm.measure_exposed(DistributedDataParallel(Net(""), static_graph=True), run, 1)
    except lf_comm.ScheduleError as error:
        said = str(error)
    return {
        "times": (found.step_s, found.compute_s),
        "exposed": found.exposed_s,
        "gradient": net.layers[0].weight.grad is held,
        "said": said,
    }


def accumulated(rank: int) -> dict[str, Any]:
    """A step in micro-batches beside the same in one; how often DDP summed."""
    torch.manual_seed(0)
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(rank))
    whole, parts = nn.Linear(16, 8), nn.Linear(16, 8)
    parts.load_state_dict(whole.state_dict())
    at_once = DistributedDataParallel(whole)
    at_once(x).square().mean().backward()
    ddp, sums = DistributedDataParallel(parts), []

    def counted(state: None, bucket):  # type: ignore[no-untyped-def]
        sums.append(bucket.index())
        return default_hooks.allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, counted)
    for part in lf_comm.accumulate(ddp, 7, 3):
        (ddp(x[part.begin : part.end]).square().mean() * part.share).backward()
    said = ""
    try:
        next(lf_comm.accumulate(DistributedDataParallel(nn.Linear(16, 8), static_graph=True), 7, 3))
    except lf_comm.ScheduleError as error:
        said = str(error)
    pairs = zip(whole.parameters(), parts.parameters(), strict=True)
    apart = max(float((a.grad - b.grad).abs().max()) for a, b in pairs)  # type: ignore[operator]
    return {"apart": apart, "sums": len(sums), "said": said}
