#!/usr/bin/env python3
"""What a batch costs on its way through a Python transform: in the thread, in our workers, in torch's.

    bench_transform.py [--json OUT] [--repeat N] [--root DIR]

Job: batches of 8 x 2048 uint16 ids (32 KiB), page cache warm, through a function that adds 1 to one id of each
row. Time = wall microseconds a batch of an endless consumer that does nothing else, so with workers it is the
throughput of the hop, and CPU = microseconds of CPU a batch of the consumer's process alone. The peers are torch's
DataLoader over a memmap with __getitems__, unchecked, whose workers send tensors through shared memory. Passes take
turns.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from random_ids import Rows, heading, keep, prepare
from torch.utils.data import DataLoader

import lf_format
from lf_iouring import LoongDataLoader
from peers.report import machine

ROWS, LENGTH, SECONDS = 8, 2048, 1.0


def touch(arrays: dict[str, Any], context: Any) -> None:
    """One id of each row, in place."""
    arrays["tokens"][:, 0] += 1


class Touched(Rows):
    """The same for torch."""

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        tokens = self.tokens[indices]
        tokens[:, 0] += 1
        return torch.from_numpy(tokens)


def endless(loader: DataLoader[Any]) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def cases(root: Path) -> dict[str, Iterator[Any]]:
    dataset = lf_format.open_dataset(root / "tokens.loongbin")
    made: dict[str, Iterator[Any]] = {}
    for name, arguments in {
        "lf-iouring, no transform": {},
        "lf-iouring, transform in the thread": {"transform": touch},
        "lf-iouring, transform in 1 worker": {"transform": touch, "transform_workers": 1},
        "lf-iouring, transform in 2 workers": {"transform": touch, "transform_workers": 2},
    }.items():
        loader = LoongDataLoader(dataset, global_batch=ROWS, **arguments)  # type: ignore[arg-type]
        made[name] = (batch.tokens for batch in loader)
    rows = Touched(root / "tokens.bin", LENGTH)
    for workers in (0, 1, 2):
        loader = DataLoader(
            rows, batch_size=ROWS, shuffle=True, drop_last=True, collate_fn=keep, num_workers=workers,
            persistent_workers=workers > 0,
        )  # fmt: skip
        made[f"torch DataLoader, {workers} workers"] = endless(loader)
    return made


def one_pass(batches: Iterator[Any]) -> tuple[float, float]:
    """Wall and CPU seconds a batch."""
    next(batches)
    began, cpu, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < SECONDS:
        next(batches)
        count += 1
    return (time.perf_counter() - began) / count, (time.process_time() - cpu) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--root", type=Path, help="where the data go; default a temporary directory")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    info = machine()
    with tempfile.TemporaryDirectory(dir=args.root) as folder:
        prepare(Path(folder), 8192, LENGTH)
        made = cases(Path(folder))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
        for number in range(args.repeat + 1):  # the first pass starts workers and warms caches up
            for name, case in made.items():
                taken = one_pass(case)
                times[name] += [taken] if number else []
    results = {
        name: {
            "wall_s": statistics.median(wall for wall, _ in taken),
            "min_s": min(wall for wall, _ in taken),
            "max_s": max(wall for wall, _ in taken),
            "cpu_s": statistics.median(cpu for _, cpu in taken),
        }
        for name, taken in times.items()
    }
    print(heading(info))
    print("| case | us a batch, median | min - max | CPU us of the consumer's process |\n|---|---|---|---|")
    for name, r in results.items():
        wall, low, high, cpu = (f"{r[key] * 1e6:.0f}" for key in ("wall_s", "min_s", "max_s", "cpu_s"))
        print(f"| {name} | {wall} | {low} - {high} | {cpu} |")
    if args.json:
        args.json.write_text(json.dumps({"machine": info, "results": results}, indent=1))


if __name__ == "__main__":
    main()
