#!/usr/bin/env python3
"""Row-sparse all-reduce beside torch's dense and COO ones, on Gloo ranks whose link is shaped to a rate.

    bench_rows.py --json OUT.json [--ranks 4] [--mb 64] [--columns 1024] [--steps 20] [--link-mbit 1000]

The ranks run in a network namespace of their own, whose loopback carries all of them and is held to ranks x rate
(needs root, iproute2); --link-mbit 0 leaves it free. Gradients are float32 whole numbers, so that every sum must be
that of torch.distributed.all_reduce to the bit; finding the rows and writing back is part of every time. Each step
is timed for dense and for lf-comm in turns, from a barrier to the slowest rank's end. "steady" is the mean of
--steps steps behind 16 that are not counted; bytes are what the loopback counted, headers included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
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
from lf_comm._scan import live_rows

LEARNING = 16
INSIDE = "LF_COMM_BENCH_SHAPED"
# of the issue: least gain over dense at 64 MB, 4 ranks, 1 Gb/s
BARS = {
    ("random", 0.01): 10.0,
    ("random", 0.05): 5.5,
    ("random", 0.1): 3.0,
    ("same", 0.1): 5.5,
    ("same", 0.5): 1.5,
}
NEVER_SLOWER, OVER_COO, BYTES_OFF = 1.05, 3.0, 0.03


def sent_by_loopback() -> int:
    """Bytes that the loopback device has carried."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[0])
    raise SystemExit("no loopback device")


def gradient(pattern: str, density: float, rank: int, rows: int, columns: int) -> Tensor:
    """[rows, columns] float32, some rows of small whole numbers."""
    seed = 7 if pattern == "same" else 7 + rank
    ids = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: max(1, int(rows * density))]
    out = torch.zeros(rows, columns)
    values = torch.randint(-64, 65, (len(ids), columns), generator=torch.Generator().manual_seed(100 + rank))
    out[ids] = values.float()
    return out


def coo(tensor: Tensor) -> None:
    """torch's own sparse all-reduce, and back into the dense gradient."""
    ids = live_rows(tensor).nonzero().flatten()
    sparse = torch.sparse_coo_tensor(
        ids[None], tensor.index_select(0, ids), tensor.shape, check_invariants=False
    )
    dist.all_reduce(sparse)
    sparse = sparse.coalesce()
    tensor.zero_()
    tensor.index_copy_(0, sparse.indices()[0], sparse.values())


class Timer:
    """Seconds from a barrier to the end of the slowest rank, and bytes on the wire by rank."""

    def __init__(self, base: Tensor, wanted: Tensor) -> None:
        self.base, self.wanted, self.work = base, wanted, base.clone()
        self.seconds: list[float] = []
        self.sent: list[float] = []

    def step(self, job: Callable[[Tensor], object], *, keep: bool = True) -> None:
        """One sum from the gradient as it was."""
        self.work.copy_(self.base)
        dist.barrier()
        before = sent_by_loopback()
        dist.barrier()
        began = time.perf_counter()
        job(self.work)
        seconds = torch.tensor([time.perf_counter() - began])
        dist.barrier()
        sent = (sent_by_loopback() - before) / dist.get_world_size()
        dist.barrier()
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        if not torch.equal(self.work, self.wanted):
            raise SystemExit("a sum differs from torch.distributed.all_reduce")
        if keep:
            self.seconds.append(float(seconds))
            self.sent.append(sent)


def cell(pattern: str, density: float, options: argparse.Namespace, rates: lf_comm.Rates) -> dict[str, Any]:
    """All rows of one pattern and density."""
    rank = dist.get_rank()
    rows = (options.mb << 20) // (4 * options.columns)
    base = gradient(pattern, density, rank, rows, options.columns)
    wanted = base.clone()
    dist.all_reduce(wanted)
    dense, ours, stock = (Timer(base, wanted) for _ in range(3))
    reducer = lf_comm.RowReducer(rates=rates)
    decisions = []
    for number in range(LEARNING + options.steps):
        counted = number >= LEARNING
        if counted:
            dense.step(dist.all_reduce)
        ours.step(lambda t: decisions.append(reducer.all_reduce(t, "w").decision), keep=counted)
    for number in range(options.coo_steps + 1):
        stock.step(coo, keep=number > 0)
    last = decisions[-1]
    return {
        "pattern": pattern,
        "density": density,
        "union": float(live_rows(wanted).float().mean()),
        "path": last.path,
        "asked": sum(d.predicted_seconds > 0 for d in decisions[LEARNING:]),
        "dense_s": dense.seconds,
        "ours_s": ours.seconds,
        "coo_s": stock.seconds,
        "dense_bytes": statistics.median(dense.sent),
        "ours_bytes": statistics.median(ours.sent),
        "formula_bytes": last.predicted_bytes
        + (dist.get_world_size() - 1) * (-(-rows // 8) + 8) * (last.path != "dense"),
        "predicted_s": last.predicted_seconds,
    }


def one_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    """What each process does; rank 0 prints and writes."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=options.ranks)
    began = time.perf_counter()
    rates = lf_comm.measure_rates()
    measuring = time.perf_counter() - began
    cells = []
    for pattern in options.patterns.split(","):
        for density in map(float, options.densities.split(",")):
            cells.append(cell(pattern, density, options, rates))
            if rank == 0:
                print(line(cells[-1]), flush=True)
    if rank == 0:
        found = bars(cells, options)
        for bar in found:
            verdict = "holds" if bar["holds"] else "MISSED"
            print(f"bar {bar['bar']}: {bar['value']:.3g}, limit {bar['limit']:.3g}, {verdict}")
        document = {
            "version": 1,
            "machine": {
                "date": datetime.now(UTC).strftime("%Y-%m-%d"),
                "cpus": os.cpu_count(),
                "kernel": platform.release(),
                "torch": str(torch.__version__),
                "load": " ".join(f"{x:.1f}" for x in os.getloadavg()),
            },
            "settings": {k: v for k, v in vars(options).items() if k != "json"},
            "measuring_rates_s": measuring,
            "rates": rates.__dict__,
            "cells": cells,
            "bars": found,
        }
        options.json.write_text(json.dumps(document, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def line(found: dict[str, Any]) -> str:
    """One row of the table."""
    dense, ours = statistics.mean(found["dense_s"]), statistics.mean(found["ours_s"])
    stock = f"{1e3 * statistics.mean(found['coo_s']):.0f}" if found["coo_s"] else "-"
    return (
        f"| {found['density']:.0%} {found['pattern']} ({found['union']:.0%}) | {1e3 * dense:.0f} | {stock} | "
        f"{1e3 * ours:.0f} | {dense / ours:.2f}x | {found['path']} | {found['ours_bytes'] / 1e6:.1f} |"
    )


def bars(cells: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The bars of the issue that these cells can show."""
    found = []

    def bar(name: str, value: float, limit: float, holds: bool) -> None:
        found.append({"bar": name, "value": value, "limit": limit, "holds": holds})

    for one in cells:
        what = f"{one['density']:.0%} {one['pattern']}"
        dense, ours = statistics.mean(one["dense_s"]), statistics.mean(one["ours_s"])
        bar(f"{what}: lf-comm / dense", ours / dense, NEVER_SLOWER, ours <= NEVER_SLOWER * dense)
        if (least := BARS.get((one["pattern"], one["density"]))) and options.link_mbit == 1000:
            bar(f"{what}: gain over dense", dense / ours, least, dense / ours >= least)
        off = abs(one["ours_bytes"] / one["formula_bytes"] - 1)
        bar(f"{what}: bytes off the formula", off, BYTES_OFF, off <= BYTES_OFF)
        if (one["pattern"], one["density"]) == ("same", 0.25) and one["coo_s"]:
            gain = statistics.mean(one["coo_s"]) / ours
            bar(f"{what}: gain over torch COO", gain, OVER_COO, gain >= OVER_COO)
    return found


def shape(options: argparse.Namespace) -> None:
    """Give the loopback of this namespace the rate of all ranks."""
    rate = f"{options.link_mbit * options.ranks}mbit"
    for command in (
        "ip link set lo up mtu 9000",
        f"tc qdisc add dev lo root tbf rate {rate} burst 1mb latency 200ms" if options.link_mbit else "true",
    ):
        subprocess.run(command.split(), check=True)


def main() -> None:
    """Enter a namespace, shape it, run the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--columns", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20, help="steps of each cell that count")
    parser.add_argument("--coo-steps", type=int, default=2)
    parser.add_argument(
        "--link-mbit", type=int, default=1000, help="of each rank; 0 leaves the loopback free"
    )
    parser.add_argument("--densities", default="0.01,0.05,0.1,0.25,0.5,1")
    parser.add_argument("--patterns", default="same,random")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        options.json.resolve().parent.mkdir(parents=True, exist_ok=True)
        command = ["unshare", "-n", sys.executable, *sys.argv]
        raise SystemExit(subprocess.run(command, env={**os.environ, INSIDE: "1"}).returncode)
    shape(options)
    print(
        f"{options.ranks} ranks, {options.mb} MiB in rows of {options.columns} float32, {options.link_mbit} Mb/s\n"
    )
    print("| rows set (union) | dense ms | torch COO ms | lf-comm ms | gain | path | MB sent |")
    print("|---|---|---|---|---|---|---|", flush=True)
    store = f"{options.json.resolve()}.store"
    Path(store).unlink(missing_ok=True)
    mp.spawn(one_rank, (options, store), nprocs=options.ranks)
    Path(store).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
