#!/usr/bin/env python3
"""HostPool: cost of a lease, and copies into reused slots against fresh buffers.

    bench_memory.py [--json OUT] [--repeat N]

Rows take turns; median and spread over the repeats. torch is a peer where it is installed.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lf_memory import HostPool

SIZES = {"32 KiB": 32 << 10, "4 MiB": 4 << 20, "64 MiB": 64 << 20}


def lease_cases() -> dict[str, Callable[[], None]]:
    pool = HostPool(32 << 10, 8)

    def released() -> None:
        pool.acquire().release()

    def viewed() -> None:
        lease = pool.acquire()
        lease.view((8, 2048), np.uint16)
        lease.release()

    def collected() -> None:
        pool.acquire()

    return {
        "acquire + release": released,
        "acquire + view + release": viewed,
        "acquire, returned by garbage collection": collected,
    }


def copy_cases(size: int) -> dict[str, Callable[[], None]]:
    source = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    pool = HostPool(size, 4)

    def reused() -> None:
        with pool.acquire() as lease:
            np.copyto(lease.array, source)

    def fresh() -> None:
        np.copyto(np.empty(size, np.uint8), source)

    cases = {"into a leased slot": reused, "into a fresh numpy.empty": fresh}
    if importlib.util.find_spec("torch"):
        import torch

        tensor = torch.from_numpy(source)

        def fresh_torch() -> None:
            torch.empty(size, dtype=torch.uint8).copy_(tensor)

        cases["into a fresh torch.empty"] = fresh_torch
    return cases


def seconds(case: Callable[[], None], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        case()
    return (time.perf_counter() - began) / calls


def measure(cases: dict[str, Callable[[], None]], calls: int, repeat: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(repeat + 1):
        for name, case in cases.items():
            took = seconds(case, calls)
            if i:
                times[name].append(took)
    return {n: {"median": statistics.median(t), "min": min(t), "max": max(t)} for n, t in times.items()}


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((x.split(":")[1].strip() for x in lines if "model name" in x), "?")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    leases = measure(lease_cases(), 20_000, args.repeat)
    copies = {
        f"{name} {case}": row | {"bytes": size}
        for name, size in SIZES.items()
        for case, row in measure(copy_cases(size), max(4, (64 << 20) // size), args.repeat).items()
    }
    info = machine()
    print(
        f"{info['cores']} x {info['cpu']}, Linux {info['kernel']}, load {info['load']:.1f}; "
        f"Python {info['python']}, numpy {info['numpy']}; {info['date']}"
    )
    print("| lease | us, median | min - max |\n|---|---|---|")
    for name, row in leases.items():
        print(f"| {name} | {row['median'] * 1e6:.2f} | {row['min'] * 1e6:.2f} - {row['max'] * 1e6:.2f} |")
    print("\n| copy | GB/s, median | min - max |\n|---|---|---|")
    for name, row in copies.items():
        best, worst = (row["bytes"] / row[key] / 1e9 for key in ("min", "max"))
        print(f"| {name} | {row['bytes'] / row['median'] / 1e9:.2f} | {worst:.2f} - {best:.2f} |")
    if args.json:
        args.json.write_text(json.dumps({"machine": info, "leases": leases, "copies": copies}, indent=1))


if __name__ == "__main__":
    main()
