#!/usr/bin/env python3
"""Loader rates against plain peers, on one machine and in one run.

    bench_iouring.py [--json OUT] [--repeat N] [--records N] [--length TOKENS] [--batch ROWS] [--root DIR]

Job: batches of ROWS random records of TOKENS uint16 ids each, delivered as torch tensors, page cache warm,
one epoch a pass; the clock starts after the first batch. Passes of all cases take turns, so that a busy
machine slows all of them. Rate = tokens delivered / wall seconds; median and spread over the passes.

The cold part drops the file from the page cache before each pass (buffered reads, random records).
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import lf_format
from lf_iouring import LoongDataLoader

VOCAB = 50_257


def prepare(root: Path, records: int, length: int) -> None:
    """The same ids as a raw array for the peers and as .loongbin for us."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (records, length), dtype=np.uint16)
    tokens.tofile(root / "tokens.bin")
    info = lf_format.TokenizerInfo("random", "00")
    with lf_format.Writer(
        root / "tokens.loongbin", vocab_size=VOCAB, tokenizer=info, buckets=(length,)
    ) as writer:
        for row in tokens:
            writer.append(row)


class Rows:
    """Map-style data set over a memmap whose __getitems__ gathers a whole batch at once."""

    def __init__(self, path: Path, length: int) -> None:
        self.tokens = np.memmap(path, np.uint16, "r").reshape(-1, length)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.tokens[index].copy())

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.from_numpy(self.tokens[indices])


def keep(batch: torch.Tensor) -> torch.Tensor:
    return batch


def memmap_gather(rows: Rows, batch: int, epoch: int) -> Iterator[torch.Tensor]:
    order = np.random.default_rng(epoch).permutation(len(rows))
    for ids in order[: len(order) // batch * batch].reshape(-1, batch):
        yield torch.from_numpy(rows.tokens[ids])


def torch_loader(rows: Rows, batch: int, epoch: int, workers: int) -> Iterable[torch.Tensor]:
    generator = torch.Generator().manual_seed(epoch)
    return DataLoader(
        rows,
        batch_size=batch,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        collate_fn=keep,
        generator=generator,
    )


class Ours:
    """One epoch of a loader that stays open between passes."""

    def __init__(self, dataset: Any, batch: int, engine: str, verify: bool = True) -> None:
        self.loader = LoongDataLoader(dataset, global_batch=batch, engine=engine, verify=verify)

    def __call__(self, epoch: int) -> Iterator[torch.Tensor]:
        for _ in range(self.loader.steps_per_epoch):
            yield next(self.loader).tokens


def tokens_per_second(batches: Iterable[torch.Tensor], limit_s: float) -> float:
    """Tokens a second after the first batch."""
    iterator = iter(batches)
    next(iterator)
    began, tokens = time.perf_counter(), 0
    for batch in iterator:
        tokens += batch.numel()
        if time.perf_counter() - began > limit_s:
            break
    return tokens / (time.perf_counter() - began)


Case = Callable[[int], Iterable[torch.Tensor]]


def warm_cases(root: Path, dataset: Any, length: int, batch: int) -> dict[str, Case]:
    rows = Rows(root / "tokens.bin", length)
    return {
        "numpy memmap gather, unchecked": lambda e: memmap_gather(rows, batch, e),
        "torch DataLoader, __getitems__, no workers, unchecked": lambda e: torch_loader(rows, batch, e, 0),
        "torch DataLoader, __getitems__, 2 workers, unchecked": lambda e: torch_loader(rows, batch, e, 2),
        "lf-iouring io_uring, hashes checked": Ours(dataset, batch, "io_uring"),
        "lf-iouring pread, hashes checked": Ours(dataset, batch, "pread"),
        "lf-iouring python, hashes checked": Ours(dataset, batch, "python"),
        "lf-iouring io_uring, unchecked": Ours(dataset, batch, "io_uring", verify=False),
    }


def cold_cases(dataset: Any, batch: int) -> dict[str, Case]:
    """Large batches, so that a ring has reads to queue."""
    return {
        f"cold: lf-iouring {engine}, {rows} rows, hashes checked": Ours(dataset, rows, engine)
        for engine in ("io_uring", "pread", "python")
        for rows in (batch * 16,)
    }


def drop_cache(dataset: Any) -> None:
    for reader in dataset.readers:
        os.fsync(reader.fileno())
        os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(
    cases: dict[str, Case], repeat: int, limit_s: float, before: Callable[[], None]
) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for epoch in range(repeat + 1):  # the first pass warms caches and allocators up
        for name, case in cases.items():
            before()
            rate = tokens_per_second(case(epoch), limit_s)
            if epoch:
                rates[name].append(rate)
    return {
        name: {"median": statistics.median(r), "min": min(r), "max": max(r), "passes": len(r)}
        for name, r in rates.items()
    }


def machine() -> dict[str, Any]:
    cpu = next(
        (
            x.split(":")[1].strip()
            for x in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in x
        ),
        "?",
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def table(results: dict[str, Any], baseline: str) -> str:
    base = results[baseline]["median"]
    lines = ["| case | Mtok/s, median | min - max | of the gather |", "|---|---|---|---|"]
    for name, r in results.items():
        spread = f"{r['min'] / 1e6:.1f} - {r['max'] / 1e6:.1f}"
        lines.append(f"| {name} | {r['median'] / 1e6:.1f} | {spread} | {r['median'] / base:.2f}x |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--root", type=Path, help="where the data go; default a temporary directory")
    parser.add_argument("--records", type=int, default=32_768)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--limit", type=float, default=3.0, help="seconds a pass at most")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.root) as folder:
        root = Path(folder)
        prepare(root, args.records, args.length)
        dataset = lf_format.open_dataset(root / "tokens.loongbin")
        results = measure(
            warm_cases(root, dataset, args.length, args.batch), args.repeat, args.limit, lambda: None
        )
        cold = measure(cold_cases(dataset, args.batch), 3, args.limit, lambda: drop_cache(dataset))
    report = {
        "machine": machine(),
        "job": vars(args) | {"json": None, "root": None},
        "results": results | cold,
    }
    info = report["machine"]
    print(
        f"{info['cores']} x {info['cpu']}, Linux {info['kernel']}, load {info['load']:.1f}; Python {info['python']}, "
        f"torch {info['torch']}, numpy {info['numpy']}; {info['date']}; {args.batch} x {args.length} uint16 of "
        f"{args.records * args.length * 2 / 1e6:.0f} MB"
    )
    print(table(results | cold, "numpy memmap gather, unchecked"))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
