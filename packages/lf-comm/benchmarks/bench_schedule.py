#!/usr/bin/env python3
"""Planned buckets beside DDP's defaults and a sweep of bucket_cap_mb, on Gloo ranks whose link is shaped to a rate.

    bench_schedule.py --json OUT.json [--ranks 2] [--link-mbit 1000] [--models device10,blocks]

The ranks run in a network namespace of their own, as in bench_rows.py (root, iproute2). A step is forward and backward
of one batch, from a barrier to the slowest rank's end; "no sums" is the same step without DDP, and exposed is what a
row's median step takes longer. Each row gets --steps steps in each of --rounds rounds, behind two steps of a new DDP
that are not counted; every second round runs the rows backwards. Planning, its trial included, is timed apart.
"device10" is a model whose layers take 10 ms forward and 20 backward without a core, whatever neighbours do; "blocks"
and "lm" compute on the processor, which sums and neighbours need as well.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_rows import INSIDE, shape
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lf_comm

WARM = 2
NEVER_SLOWER = 1.02  # of DDP's defaults; what medians of the same rows differed by


class Waits(torch.autograd.Function):
    """Takes a fixed time forward, and twice that backward, without a core."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Device(nn.Module):
    """16 layers of 4 MiB that take fixed milliseconds forward and twice that backward, as on a device."""

    vocabulary, width = 0, 1024

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.seconds = milliseconds / 1e3
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = Waits.apply(layer(x[:1, :1]), self.seconds)  # type: ignore[no-untyped-call]
        return x.square().mean()


class Blocks(nn.Module):
    """Transformer blocks [batch, 128, width], with an embedding tied to the head if vocabulary is set."""

    def __init__(self, width: int, depth: int, vocabulary: int = 0) -> None:
        super().__init__()
        self.width, self.vocabulary = width, vocabulary
        self.table = nn.Embedding(vocabulary, width) if vocabulary else nn.Identity()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        ids = x
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        if not self.vocabulary:
            return x.square().mean()
        logits = x @ self.table.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def batch(model: Blocks | Device, rank: int, size: int) -> Tensor:
    """Of one rank; the same in every step."""
    made = torch.Generator().manual_seed(rank)
    if model.vocabulary:
        return torch.randint(0, model.vocabulary, (size, 128), generator=made)
    return torch.randn(size, 128, model.width, generator=made)


def step(model: nn.Module, x: Tensor) -> float:
    """Seconds of forward and backward on the slowest rank."""
    model.zero_grad()
    dist.barrier()
    began = time.perf_counter()
    model(x).backward()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def cell(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """All rows of one model."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: Blocks | Device
    if kind.startswith("device"):
        model = Device(float(kind.removeprefix("device")))
    else:
        model = Blocks(384, options.depth, 8192 if kind == "lm" else 0)
    x = batch(model, rank, options.batch)
    began = time.perf_counter()
    plan = lf_comm.plan_buckets(model, lambda m: m(x).backward(), trial_steps=options.trial_steps)
    planning = time.perf_counter() - began
    rows: dict[str, dict[str, Any] | None] = {"no sums": None, "DDP defaults": {}}
    rows |= {f"bucket_cap_mb={mib}": {"bucket_cap_mb": mib} for mib in map(float, options.sweep.split(","))}
    rows["lf-comm plan"] = plan.ddp_options()
    found: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(options.rounds):
        for name in list(rows) if number % 2 == 0 else list(rows)[::-1]:
            caps = rows[name]
            used = model if caps is None else DistributedDataParallel(model, **caps)
            for at in range(WARM + options.steps):
                seconds = step(used, x)
                if at >= WARM:
                    found[name].append(seconds)
            del used
            gc.collect()
    return {
        "model": kind,
        "gradient_bytes": sum(p.nbytes for p in model.parameters()),
        "planning_s": planning,
        "plan": json.loads(plan.to_json()),
        "text": str(plan),
        "seconds": found,
    }


def table(one: dict[str, Any]) -> str:
    """Rows of one model."""
    median = {name: statistics.median(seconds) for name, seconds in one["seconds"].items()}
    compute, default = median["no sums"], median["DDP defaults"]
    lines = [
        f"\n{one['model']}: {one['gradient_bytes'] / 1e6:.0f} MB of gradients; planned in {one['planning_s']:.1f} s",
        "",
        "| row | step ms (quartiles) | exposed ms | of DDP's defaults |",
        "|---|---|---|---|",
    ]
    for name, seconds in one["seconds"].items():
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        lines.append(
            f"| {name} | {1e3 * median[name]:.0f} ({1e3 * low:.0f} - {1e3 * high:.0f}) | "
            f"{1e3 * max(0.0, median[name] - compute):.0f} | {median[name] / default:.3f} |"
        )
    return "\n".join(lines)


def bars(one: dict[str, Any]) -> list[dict[str, Any]]:
    """Never slower than DDP's defaults; beside the best of the sweep for information."""
    median = {name: statistics.median(seconds) for name, seconds in one["seconds"].items()}
    ours = median["lf-comm plan"]
    best = min((name for name in median if name.startswith("bucket_cap")), key=median.__getitem__)
    ratio = ours / median["DDP defaults"]
    beside = {"bar": f"{one['model']}: plan / best of sweep ({best})", "value": ours / median[best]}
    never = {"bar": f"{one['model']}: plan / defaults", "value": ratio, "limit": NEVER_SLOWER}
    return [{**never, "holds": ratio <= NEVER_SLOWER}, {**beside, "limit": None, "holds": None}]


def one_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    """What each process does; rank 0 prints and writes."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=options.ranks)
    cells = []
    for kind in options.models.split(","):
        cells.append(cell(kind, options))
        if rank == 0:
            print(table(cells[-1]), "\n", cells[-1]["text"], sep="\n", flush=True)
    if rank == 0:
        found = [bar for one in cells for bar in bars(one)]
        for bar in found:
            verdict = "" if bar["holds"] is None else ", holds" if bar["holds"] else ", MISSED"
            print(f"bar {bar['bar']}: {bar['value']:.3f}{verdict}")
        machine = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "torch": str(torch.__version__),
            "load": " ".join(f"{x:.1f}" for x in os.getloadavg()),
        }
        settings = {k: v for k, v in vars(options).items() if k != "json"}
        document = {"version": 1, "machine": machine, "settings": settings, "cells": cells, "bars": found}
        options.json.write_text(json.dumps(document, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Enter a namespace, shape it, run the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link-mbit", type=int, default=1000, help="of each rank; 0 leaves it free")
    parser.add_argument("--models", default="device10,device20,blocks,lm")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch", type=int, default=1, help="sequences of 128 on each rank")
    parser.add_argument("--sweep", default="1,5,10,50", help="MiB of bucket_cap_mb")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of each row in each round")
    parser.add_argument("--trial-steps", type=int, default=3)
    options = parser.parse_args()
    if INSIDE not in os.environ:
        options.json.resolve().parent.mkdir(parents=True, exist_ok=True)
        command = ["unshare", "-n", sys.executable, *sys.argv]
        raise SystemExit(subprocess.run(command, env={**os.environ, INSIDE: "1"}).returncode)
    shape(options)
    store = f"{options.json.resolve()}.store"
    Path(store).unlink(missing_ok=True)
    mp.spawn(one_rank, (options, store), nprocs=options.ranks)
    Path(store).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
