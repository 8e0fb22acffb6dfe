#!/usr/bin/env python3
"""Cold direct reads against fio: same file, same record size, same queue depth, passes in turns.

    bench_direct.py [--json OUT] [--repeat N] [--seconds S] [--bytes N] [--depth N] [--root DIR]

Each file holds uint16 records of one size. fio reads blocks of that size at random (O_DIRECT, io_uring,
registered buffers and file); ours delivers random records in batches of 32 MiB, every hash checked unless the
row says otherwise. Ours reads up to one page more a record, because records do not begin at pages; only record
bytes count. `seconds` a pass; median and spread over the passes. Needs fio (apt install fio).
"""

import argparse
import json
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

import lf_format
from lf_iouring import LoongDataLoader

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20}
BATCH = 32 << 20


def prepare(path: Path, record: int, total: int) -> Any:
    """A data set of random records, none of it in the page cache."""
    rng = np.random.default_rng(0)
    info = lf_format.TokenizerInfo("random", "00")
    edge = record // 2
    with lf_format.Writer(path, vocab_size=65_536, tokenizer=info, buckets=(edge,)) as writer:
        for _ in range(total // record):
            writer.append(rng.integers(0, 65_536, edge, dtype=np.uint16))
    dataset = lf_format.open_dataset(path)
    for reader in dataset.readers:
        os.fsync(reader.fileno())
        os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return dataset


def fio(path: Path, record: int, depth: int, seconds: float, jobs: int) -> float:
    """Bytes a second of fio's random direct reads."""
    command = ["fio", "--name=read", f"--filename={path}", "--rw=randread", f"--bs={record}", "--direct=1"]
    command += ["--ioengine=io_uring", f"--iodepth={depth}", "--fixedbufs=1", "--registerfiles=1"]
    command += [f"--numjobs={jobs}", "--group_reporting", "--readonly", "--time_based"]
    command += [f"--runtime={int(seconds * 1000)}ms", "--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def ours(loader: LoongDataLoader, seconds: float) -> float:
    """Record bytes a second after the first batch."""
    next(loader).release()
    began, total = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds:
        batch = next(loader)
        total += batch.tokens.nbytes
        batch.release()
    return total / took


Case = Callable[[], float]


def cases(path: Path, dataset: Any, record: int, depth: int, seconds: float) -> dict[str, Case]:
    def loading(threads: int, verify: bool) -> Case:
        loader = LoongDataLoader(
            dataset, global_batch=BATCH // record, engine="io_uring", io="direct", queue_depth=depth,
            num_workers=threads, return_type="numpy", verify=verify,
        )  # fmt: skip
        return lambda: ours(loader, seconds)

    return {
        "fio, 1 job": lambda: fio(path, record, depth, seconds, 1),
        "lf-iouring, 1 thread, hashes checked": loading(1, True),
        "lf-iouring, 1 thread, unchecked": loading(1, False),
        "fio, 2 jobs": lambda: fio(path, record, depth, seconds, 2),
        "lf-iouring, 2 threads, hashes checked": loading(2, True),
    }


def measure(cases: dict[str, Case], repeat: int) -> dict[str, dict[str, float]]:
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(repeat + 1):  # the first pass faults buffers in
        for name, case in cases.items():
            rate = case()
            if i:
                rates[name].append(rate)
    return {n: {"median": statistics.median(r), "min": min(r), "max": max(r)} for n, r in rates.items()}


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((x.split(":")[1].strip() for x in lines if "model name" in x), "?")
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "fio": version,
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--root", type=Path, help="where the data go; default a temporary directory")
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("bench_direct.py compares with fio, which is not installed: apt install fio")
    results = {}
    with tempfile.TemporaryDirectory(dir=args.root) as folder:
        for size, record in SIZES.items():
            path = Path(folder) / f"{record}.loongbin"
            dataset = prepare(path, record, args.bytes)
            results[size] = measure(cases(path, dataset, record, args.depth, args.seconds), args.repeat)
    info = machine()
    print(
        f"{info['cores']} x {info['cpu']}, Linux {info['kernel']}, load {info['load']:.1f}; Python {info['python']}, "
        f"{info['fio']}; {info['date']}; depth {args.depth} a job or thread, {args.bytes / 2**30:.0f} GiB"
    )
    print(
        "| records, case | GB/s, median | min - max | of fio, median | of fio, best |\n|---|---|---|---|---|"
    )
    for size, rows in results.items():
        peer = ""
        for name, row in rows.items():
            peer = name if name.startswith("fio") else peer
            ratios = [f"{row[key] / rows[peer][key]:.2f}x" for key in ("median", "max")]
            spread = f"{row['min'] / 1e9:.2f} - {row['max'] / 1e9:.2f}"
            print(f"| {size}, {name} | {row['median'] / 1e9:.2f} | {spread} | {ratios[0]} | {ratios[1]} |")
    if args.json:
        job = {"depth": args.depth, "bytes": args.bytes, "repeat": args.repeat, "seconds": args.seconds}
        args.json.write_text(json.dumps({"machine": info, "job": job, "results": results}, indent=1))


if __name__ == "__main__":
    main()
