#!/usr/bin/env python3
"""Seconds to make a large pool: getting its pages, and page-locking them where there is a CUDA device.

    bench_making.py [--json OUT] [--gib N] [--threads 1,2,4] [--repeat N]

Each row makes and drops a pool of one slot, right after doing the same untimed: a virtual machine gets memory it has
not used before from its host, which takes far longer and would fall on whoever comes first. Peer:
torch.empty(pin_memory=True) with a CUDA device; otherwise a numpy array written once.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lf_memory import CudaRegistrar, HostPool, PoolError, Registrar, _populate

Times = dict[str, float]
KINDS = {
    "memfd, normal pages": {"hugepages": "off"},
    "memfd, auto": {"hugepages": "auto"},
    "private, normal pages": {"hugepages": "off", "shared": False},
    "private, auto": {"hugepages": "auto", "shared": False},
}


def registrar() -> Registrar | None:
    try:
        return CudaRegistrar()
    except PoolError as error:
        print(f"locking is not measured: {error}\n")
        return None


def make_pool(size: int, threads: int, pin: Registrar | None, options: dict[str, Any]) -> dict[str, Any]:
    """Pages, lock and total seconds, and which pages came."""
    _populate.threads_for = lambda nbytes: threads
    began = time.perf_counter()
    pool = HostPool(size, 1, pin=pin, **options)
    total, stats = time.perf_counter() - began, pool.stats()
    pool.close()
    return {"pages_s": stats.populate_s, "lock_s": stats.lock_s, "total_s": total, "pages": stats.pages}


def make_peer(size: int) -> tuple[str, Callable[[], object]]:
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None and torch.cuda.is_available():

        def pinned() -> None:
            torch.empty(size, dtype=torch.uint8, pin_memory=True)
            torch._C._host_emptyCache()

        torch.cuda.init()
        return "torch.empty(pin_memory=True)", pinned
    return "numpy.empty, written once", lambda: np.empty(size, np.uint8).fill(1)


def peer_times(make: Callable[[], object]) -> dict[str, Any]:
    began = time.perf_counter()
    make()
    return {"total_s": time.perf_counter() - began, "pages": ""}


def measure(cases: dict[str, Callable[[], dict[str, Any]]], repeat: int) -> dict[str, dict[str, Any]]:
    """Median of each time; rows take turns."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for _ in range(repeat):
        for name, case in cases.items():
            for timed in (False, True):
                times = case()
                gc.collect()
                if timed:
                    found[name].append(times)
    return {name: summary(runs) for name, runs in found.items()}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    times = [key for key in runs[0] if key.endswith("_s")]
    middle = {key: statistics.median(run[key] for run in runs) for key in times}
    totals = [run["total_s"] for run in runs]
    return middle | {"min_s": min(totals), "max_s": max(totals), "pages": runs[-1]["pages"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--threads", default="")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    size, pin = int(args.gib * (1 << 30)), registrar()
    most = _populate.threads_for(size)
    threads = [int(n) for n in args.threads.split(",")] if args.threads else sorted({1, most})
    name, make = make_peer(size)
    cases: dict[str, Callable[[], dict[str, Any]]] = {name: lambda: peer_times(make)}
    for kind, options in KINDS.items():
        for count in threads:
            plural = "s" if count > 1 else ""
            cases[f"{kind}, {count} thread{plural}"] = lambda c=count, o=options: make_pool(size, c, pin, o)  # type: ignore[misc]
    rows = measure(cases, args.repeat)
    info = {"cores": len(os.sched_getaffinity(0)), "kernel": platform.release(), "gib": args.gib}
    info |= {"load": os.getloadavg()[0], "locked": pin is not None, "date": time.strftime("%Y-%m-%d")}
    print(
        f"{args.gib:g} GiB; {info['cores']} cores, Linux {info['kernel']}, load {info['load']:.1f}; {info['date']}\n"
    )
    print("| made by | pages | s, median | min - max | getting pages | locking |\n|---|---|---|---|---|---|")
    for case, row in rows.items():
        parts = " | ".join(f"{row[key]:.2f}" if row.get(key) else "-" for key in ("pages_s", "lock_s"))
        print(
            f"| {case} | {row['pages']} | {row['total_s']:.2f} | {row['min_s']:.2f} - {row['max_s']:.2f} | {parts} |"
        )
    if args.json:
        args.json.write_text(json.dumps({"machine": info, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
