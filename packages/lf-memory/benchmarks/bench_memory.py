#!/usr/bin/env python3
"""HostPool: what a batch buffer costs, and copies into it, beside other ways to get one.

    bench_memory.py [--json OUT] [--repeat N]

CPU time, so that a busy machine disturbs little; rows take turns, median and spread over the repeats. Peers: a fresh
array, arrays kept in a queue.Queue, multiprocessing.shared_memory, torch where it is installed; torch's page-locked
memory where there is a CUDA device.
"""

import argparse
import importlib.util
import json
import os
import platform
import queue
import statistics
import time
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np

from lf_memory import HostPool

Case = Callable[[], object]
SHAPE, BATCH_BYTES = (8, 2048), 32 << 10
COPY_BYTES = {"32 KiB": 32 << 10, "4 MiB": 4 << 20, "64 MiB": 64 << 20}


def torch_or_none() -> Any:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    torch.set_num_threads(1)
    return torch


def buffer_cases() -> dict[str, Case | str]:
    """Get a uint16[8, 2048] batch buffer and give it back; a string says why a row is missing."""
    pool, dtype = HostPool(BATCH_BYTES, 8), np.dtype(np.uint16)
    arrays: queue.Queue[Any] = queue.Queue()
    for _ in range(8):
        arrays.put(np.empty(SHAPE, dtype))

    def leased() -> None:
        pool.acquire().release()

    def viewed() -> None:
        lease = pool.acquire()
        lease.view(SHAPE, dtype)
        lease.release()

    def collected() -> None:
        pool.acquire().view(SHAPE, dtype)

    def queued() -> None:
        arrays.put(arrays.get())

    def shared() -> None:
        memory = SharedMemory(create=True, size=BATCH_BYTES)
        np.ndarray(SHAPE, dtype, memory.buf)
        memory.close()
        memory.unlink()

    return {
        "HostPool: acquire, release": leased,
        "HostPool: acquire, view, release": viewed,
        "HostPool: acquire, view, garbage": collected,
        "numpy.empty": lambda: np.empty(SHAPE, dtype),
        "queue.Queue of arrays: get, put": queued,
        "multiprocessing.shared_memory: create, unlink": shared,
    } | torch_buffers()


def torch_buffers() -> dict[str, Case | str]:
    torch = torch_or_none()
    if torch is None:
        return {"torch.empty": "torch is not installed"}
    if torch.cuda.is_available():
        pinned: Case | str = lambda: torch.empty(SHAPE, dtype=torch.int16, pin_memory=True)  # noqa: E731
    else:
        pinned = "no CUDA device"
    return {
        "torch.empty": lambda: torch.empty(SHAPE, dtype=torch.int16),
        "torch.empty(pin_memory=True)": pinned,
    }


def copy_cases(size: int) -> dict[str, Case | str]:
    """Copy `size` bytes into a buffer that is obtained for it."""
    source = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    pool = HostPool(size, 4)

    def leased() -> None:
        with pool.acquire() as lease:
            np.copyto(lease.array, source)

    def shared() -> None:
        memory = SharedMemory(create=True, size=size)
        np.copyto(np.ndarray((size,), np.uint8, memory.buf), source)
        memory.close()
        memory.unlink()

    cases: dict[str, Case | str] = {
        "into a leased slot": leased,
        "into a fresh numpy.empty": lambda: np.copyto(np.empty(size, np.uint8), source),
        "into a fresh shared_memory": shared,
    }
    torch = torch_or_none()
    if torch is not None:
        tensor = torch.from_numpy(source)
        cases["into a fresh torch.empty"] = lambda: torch.empty(size, dtype=torch.uint8).copy_(tensor)
    return cases


def seconds(case: Case, calls: int) -> float:
    began = time.process_time()
    for _ in range(calls):
        case()
    return (time.process_time() - began) / calls


def measure(cases: dict[str, Case | str], calls: int, repeat: int) -> dict[str, dict[str, Any]]:
    """CPU seconds a call; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(repeat + 1):
        for name, case in cases.items():
            if isinstance(case, str):
                continue
            took = seconds(case, calls)
            if i:
                times[name].append(took)
    return {name: row(times[name], cases[name]) for name in cases}


def row(times: list[float], case: Case | str) -> dict[str, Any]:
    if isinstance(case, str):
        return {"missing": case}
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


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


def print_buffers(rows: dict[str, dict[str, Any]]) -> None:
    print("| a 32 KiB batch buffer | ns, median | min - max |\n|---|---|---|")
    for name, found in rows.items():
        if "missing" in found:
            print(f"| {name} | not measured: {found['missing']} | |")
            continue
        low, mid, high = (found[key] * 1e9 for key in ("min", "median", "max"))
        print(f"| {name} | {mid:.0f} | {low:.0f} - {high:.0f} |")


def print_copies(rows: dict[str, dict[str, Any]]) -> None:
    print("\n| copy | GB/s, median | min - max |\n|---|---|---|")
    for name, found in rows.items():
        high, mid, low = (found["bytes"] / found[key] / 1e9 for key in ("min", "median", "max"))
        print(f"| {name} | {mid:.2f} | {low:.2f} - {high:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    info = machine()
    buffers = measure(buffer_cases(), 5000, args.repeat)
    copies = {
        f"{name} {case}": found | {"bytes": size}
        for name, size in COPY_BYTES.items()
        for case, found in measure(copy_cases(size), max(4, (64 << 20) // size), args.repeat).items()
    }
    print(
        f"{info['cores']} x {info['cpu']}, Linux {info['kernel']}, load {info['load']:.1f}; "
        f"Python {info['python']}, numpy {info['numpy']}; {info['date']}\n"
    )
    print_buffers(buffers)
    print_copies(copies)
    if args.json:
        args.json.write_text(
            json.dumps({"machine": info, "buffers": buffers, "copies": copies}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
