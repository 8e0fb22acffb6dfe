#!/usr/bin/env python3
"""A frozen table on all ranks of a host: held once by lf-comm, or received by each rank with broadcast.

    bench_peer.py --json OUT.json [--ranks 4] [--mb 256]

Seconds are from a barrier until the slowest rank has the table and has read all of it; memory is what all ranks hold
beyond what they held before (Pss of /proc/PID/smaps_rollup: a page that n processes map counts 1/n in each). The
owner's own table, which both rows begin with, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import lf_comm


def pss() -> int:
    """Bytes of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no Pss in smaps_rollup")


def received(table: Tensor) -> tuple[Tensor, object]:
    """By broadcast, into memory of each rank's own; the owner keeps its table."""
    mine = table if dist.get_rank() == 0 else torch.empty_like(table)
    dist.broadcast(mine, 0)
    return mine, None


def shared(table: Tensor) -> tuple[Tensor, object]:
    """Held once."""
    found = lf_comm.share_tensors({"table": table} if dist.get_rank() == 0 else None)
    return found["table"], found


def one_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    """What each process does; rank 0 prints and writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=options.ranks)
    table = torch.ones((options.mb << 20) // 4) if rank == 0 else torch.empty((options.mb << 20) // 4)
    ways: dict[str, Callable[[Tensor], tuple[Tensor, object]]] = {"broadcast": received, "lf-comm": shared}
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "bytes": []} for name in ways}
    for number in range(options.repeat):
        for name in list(ways) if number % 2 == 0 else list(ways)[::-1]:
            before = pss()
            dist.barrier()
            began = time.perf_counter()
            got, held = ways[name](table)
            if float(got.sum()) != table.numel():
                raise SystemExit(f"{name}: other numbers than the owner's")
            seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            extra = torch.tensor([pss() - before], dtype=torch.float64)
            dist.all_reduce(extra)
            found[name]["seconds"].append(float(seconds))
            found[name]["bytes"].append(float(extra))
            del got, held
            dist.barrier()
    if rank == 0:
        report(found, options)
    dist.barrier()
    dist.destroy_process_group()


def report(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Table and JSON."""
    print(
        f"{options.ranks} ranks, a table of {options.mb} MiB\n\n| way | seconds | MB held more by all |\n|---|---|---|"
    )
    for name, one in found.items():
        print(
            f"| {name} | {statistics.median(one['seconds']):.2f} | {statistics.median(one['bytes']) / 1e6:.0f} |"
        )
    machine = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "torch": str(torch.__version__),
        "load": " ".join(f"{x:.1f}" for x in os.getloadavg()),
    }
    settings = {k: v for k, v in vars(options).items() if k != "json"}
    document = {"version": 1, "machine": machine, "settings": settings, "rows": found}
    options.json.write_text(json.dumps(document, indent=1))


def main() -> None:
    """Run the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    store = f"{options.json.resolve()}.store"
    Path(store).unlink(missing_ok=True)
    mp.spawn(one_rank, (options, store), nprocs=options.ranks)
    Path(store).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
