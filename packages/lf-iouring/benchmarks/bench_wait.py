#!/usr/bin/env python3
"""How long a consumer waits for data while fio reads from the same disk.

    bench_wait.py [--json OUT] [--repeat N] [--batches N] [--root DIR]

Job: a consumer that takes 20 ms a batch (it sleeps, as a host does while a device works) of 16 random records of
64 KiB, 1 MiB a batch, from a file that is dropped from the page cache before each pass. Meanwhile fio reads
another file of the same disk at random: 64 KiB, O_DIRECT, 16 in flight. Wait = time in next(); the first five
batches of a pass do not count. Percentiles over all passes, which take turns. The bar is a p99 of 1 ms. The peers
are torch's DataLoader over a memmap of the same ids, unchecked. Needs fio (apt install fio).
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from random_ids import Rows, heading, keep, prepare
from torch.utils.data import DataLoader

import lf_format
from lf_iouring import LoongDataLoader
from peers.report import machine

RECORDS, LENGTH, ROWS = 8192, 32 << 10, 16
STEP_S, BAR_S, UNCOUNTED = 0.020, 0.001, 5

Case = Callable[[], Iterator[Any]]


@contextlib.contextmanager
def rival(path: Path) -> Iterator[None]:
    """fio at work on its own file."""
    command = ["fio", "--name=rival", f"--filename={path}", "--rw=randread", "--bs=64k", "--direct=1"]
    command += ["--ioengine=libaio", "--iodepth=16", "--size=512m", "--time_based", "--runtime=3600"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not path.exists() or path.stat().st_blocks * 512 < 512 << 20:
            if process.poll() is not None:
                raise SystemExit(f"fio ended with {process.returncode}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def drop_cache(root: Path) -> None:
    for name in ("tokens.bin", "tokens.loongbin"):
        with open(root / name, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cases(root: Path) -> dict[str, Case]:
    dataset = lf_format.open_dataset(root / "tokens.loongbin")

    def ours(io: str, prefetch: int | str = 4) -> Case:
        def start() -> Iterator[Any]:
            arguments = {"io": io, "prefetch_factor": prefetch, "seed": time.time_ns()}
            with LoongDataLoader(dataset, global_batch=ROWS, **arguments) as loader:
                yield from loader

        return start

    def theirs(workers: int) -> Case:
        rows = Rows(root / "tokens.bin", LENGTH)
        return lambda: iter(
            DataLoader(rows, batch_size=ROWS, shuffle=True, num_workers=workers, collate_fn=keep)
        )

    return {
        "lf-iouring, buffered, hashes checked": ours("buffered"),
        "lf-iouring, buffered, prefetch_factor='auto'": ours("buffered", "auto"),
        "lf-iouring, direct, hashes checked": ours("direct"),
        "torch DataLoader, no workers": theirs(0),
        "torch DataLoader, 2 workers": theirs(2),
    }


def waits(batches: Iterator[Any], count: int) -> list[float]:
    """Seconds in next() of each batch but the first."""
    seconds = []
    for _ in range(count + UNCOUNTED):
        began = time.perf_counter()
        batch = next(batches)
        seconds.append(time.perf_counter() - began)
        time.sleep(STEP_S)
        del batch
    return seconds[UNCOUNTED:]


def row(seconds: list[float]) -> dict[str, Any]:
    p50, p99 = np.percentile(seconds, (50, 99))
    over = sum(wait > BAR_S for wait in seconds) / len(seconds)
    return {
        "batches": len(seconds), "p50_s": float(p50), "p99_s": float(p99), "max_s": max(seconds),
        "over_1_ms": over, "met": bool(p99 <= BAR_S),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--root", type=Path, help="where the data go; default a temporary directory")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--batches", type=int, default=400, help="of a pass")
    args = parser.parse_args()
    if shutil.which("fio") is None:
        print("SKIPPED: fio is not installed (apt install fio)")
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    info = machine()
    with tempfile.TemporaryDirectory(dir=args.root) as folder:
        root = Path(folder)
        prepare(root, RECORDS, LENGTH)
        made = cases(root)
        seconds: dict[str, list[float]] = {name: [] for name in made}
        with rival(root / "rival.bin"):
            for _ in range(args.repeat):
                for name, case in made.items():
                    drop_cache(root)
                    batches = case()
                    seconds[name] += waits(batches, args.batches)
                    del batches
    results = {name: row(taken) for name, taken in seconds.items()}
    print(heading(info))
    print("| case | ms of wait: p50 | p99 | max | waits over 1 ms | p99 <= 1 ms |\n|---|---|---|---|---|---|")
    for name, r in results.items():
        times = " | ".join(f"{r[key] * 1e3:.2f}" for key in ("p50_s", "p99_s", "max_s"))
        print(f"| {name} | {times} | {r['over_1_ms']:.1%} | {'yes' if r['met'] else 'no'} |")
    if args.json:
        args.json.write_text(json.dumps({"machine": info, "results": results}, indent=1))


if __name__ == "__main__":
    main()
