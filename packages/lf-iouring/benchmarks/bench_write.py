#!/usr/bin/env python3
"""One large file to the device, durable at the end: WriteEngine beside plain pwrite, dd and fio, passes in turns.

    bench_write.py [--json OUT] [--repeat N] [--bytes N] [--root DIR]

Every pass writes the same number of bytes to a new file and ends with fdatasync; the time includes open, close
and that. Of fio it is what fio reports for its job, which leaves out half a second of its start. Chunks are
1 MiB, 8 in flight where a case keeps several (`dd` and `pwrite` keep one). The source is one slab of random
bytes; dd and fio make their own. Median, spread and CPU seconds over the passes. fio is left out where it is
not installed.
"""

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lf_iouring import WriteEngine

CHUNK = 1 << 20
DEPTH = 8

Case = Callable[[Path], float]  # seconds


def plain(slab: Any) -> Case:
    """Through the page cache, as a program without a plan does it."""

    def run(path: Path) -> float:
        began = time.perf_counter()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for at in range(0, slab.size, CHUNK):
            os.pwrite(fd, slab[at : at + CHUNK], at)
        os.fdatasync(fd)
        os.close(fd)
        return time.perf_counter() - began

    return run


def dd(total: int) -> Case:
    command = ["dd", "if=/dev/zero", f"bs={CHUNK}", f"count={total // CHUNK}", "oflag=direct"]
    command += ["conv=fdatasync", "status=none"]

    def run(path: Path) -> float:
        began = time.perf_counter()
        subprocess.run([*command, f"of={path}"], check=True)
        return time.perf_counter() - began

    return run


def fio(total: int) -> Case:
    command = ["fio", "--name=write", "--rw=write", f"--bs={CHUNK}", f"--size={total}", "--direct=1"]
    command += ["--ioengine=io_uring", f"--iodepth={DEPTH}", "--fixedbufs=1", "--end_fsync=1"]
    command += ["--fallocate=none", "--output-format=json"]

    def run(path: Path) -> float:
        done = subprocess.run([*command, f"--filename={path}"], check=True, capture_output=True)
        return float(json.loads(done.stdout)["jobs"][0]["job_runtime"]) / 1000

    return run


def ours(engine: WriteEngine, data: Any, *, reserve: bool, xxh3: bool) -> Case:
    def run(path: Path) -> float:
        began = time.perf_counter()
        with engine.create(path, reserve=data.size if reserve else 0, io="direct") as file:
            file.write(data, xxh3=xxh3)
        return time.perf_counter() - began

    return run


def cases(slab: Any) -> dict[str, Case]:
    """Name -> a pass; ours from registered memory unless the row says otherwise."""
    total = slab.size - 64
    total -= total % CHUNK
    data, shifted = slab[:total], slab[64 : 64 + total]
    ring = WriteEngine([slab], engine="io_uring", depth=DEPTH, chunk=CHUNK)
    blocking = WriteEngine(engine="pwrite", chunk=CHUNK)
    rows = {
        "pwrite + fdatasync": plain(data),
        "dd oflag=direct conv=fdatasync": dd(total),
        "lf-iouring io_uring": ours(ring, data, reserve=False, xxh3=False),
        "lf-iouring io_uring, reserved": ours(ring, data, reserve=True, xxh3=False),
        "lf-iouring io_uring, with XXH3": ours(ring, data, reserve=False, xxh3=True),
        "lf-iouring io_uring, with XXH3, memory not aligned": ours(ring, shifted, reserve=False, xxh3=True),
        "lf-iouring pwrite, direct": ours(blocking, data, reserve=False, xxh3=False),
    }
    return {"fio io_uring": fio(total)} | rows if shutil.which("fio") else rows


def measure(cases: dict[str, Case], folder: Path, total: int, repeat: int) -> dict[str, dict[str, float]]:
    """GB/s of each case, and CPU seconds of this process and its children."""
    rates: dict[str, list[float]] = {name: [] for name in cases}
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeat):
        for name, case in cases.items():
            path = folder / "file"
            os.sync()
            before = sum(os.times()[:4])
            rates[name].append(total / case(path) / 1e9)
            cpu[name].append(sum(os.times()[:4]) - before)
            path.unlink()
    return {
        name: {
            "median": statistics.median(rates[name]),
            "min": min(rates[name]),
            "max": max(rates[name]),
            "cpu": statistics.median(cpu[name]),
        }
        for name in cases
    }


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((x.split(":")[1].strip() for x in lines if "model name" in x), "?"),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--root", type=Path, help="where the file goes; default a temporary directory")
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    slab = np.frombuffer(mmap.mmap(-1, args.bytes + 4096), np.uint8)
    slab[:] = np.random.default_rng(0).integers(0, 256, slab.size, dtype=np.uint8)
    info = machine()
    with tempfile.TemporaryDirectory(dir=args.root) as folder:
        results = measure(cases(slab), Path(folder), args.bytes, args.repeat)
    print(
        f"{info['cores']} x {info['cpu']}, Linux {info['kernel']}, load {info['load']:.1f}; "
        f"Python {info['python']}; {info['date']}; {args.bytes / 2**30:.0f} GiB, {args.repeat} passes"
    )
    peer = "fio io_uring" if "fio io_uring" in results else "dd oflag=direct conv=fdatasync"
    print(f"| case | GB/s, median | min - max | CPU s | of {peer} |\n|---|---|---|---|---|")
    for name, row in results.items():
        spread = f"{row['min']:.2f} - {row['max']:.2f}"
        ratio = f"{row['median'] / results[peer]['median']:.2f}x"
        print(f"| {name} | {row['median']:.2f} | {spread} | {row['cpu']:.2f} | {ratio} |")
    if args.json:
        job = {"bytes": args.bytes, "repeat": args.repeat, "chunk": CHUNK, "depth": DEPTH}
        args.json.write_text(json.dumps({"machine": info, "job": job, "results": results}, indent=1))


if __name__ == "__main__":
    main()
