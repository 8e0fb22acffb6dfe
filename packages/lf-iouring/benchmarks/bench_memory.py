#!/usr/bin/env python3
"""Memory of a long run, and the time to resume in a plan of 10^9 records.

    bench_memory.py [--json OUT] [--records N] [--epochs N] [--root DIR]

Memory: PSS of the process (/proc/self/smaps_rollup: pages shared with others count in part) over all epochs of a set
of small records, in batches of 512, a sample every 100 batches; flat means that after the first epoch it never rises
more than 5 % above what it was then. Resume: a state_dict as JSON to the first batch of record ids, with the runs of
the data set's blocks in memory, as they are once it is open; best and median of 20; the bar is 50 ms.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from random_ids import VOCAB, heading

import lf_format
from lf_iouring import BucketRuns, LoongDataLoader, Plan
from peers.report import machine

LENGTH, ROWS, EVERY = 16, 512, 100
BIG, BLOCKS, EDGES = 10**9, 10**6, (512, 1024, 2048)


def prepare(path: Path, records: int) -> None:
    info = lf_format.TokenizerInfo("random", "00")
    ids = np.random.default_rng(0).integers(0, VOCAB, (1024, LENGTH), dtype=np.uint16)
    with lf_format.Writer(path, vocab_size=VOCAB, tokenizer=info, buckets=(LENGTH,)) as writer:
        for number in range(records):
            writer.append(ids[number % 1024])


def pss() -> int:
    """Proportional set size of this process in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def measure_pss(path: Path, epochs: int) -> dict[str, Any]:
    """The samples of every epoch."""
    samples: list[list[int]] = [[] for _ in range(epochs)]
    with lf_format.open_dataset(path) as dataset:
        records = len(dataset)
        with LoongDataLoader(dataset, global_batch=ROWS, epochs=epochs, return_type="numpy") as loader:
            for batch in loader:
                if batch.step % EVERY == 0:
                    samples[batch.epoch].append(pss())
    first, later = samples[0][-1], [sample for epoch in samples[1:] for sample in epoch]
    rise = max(later) / first - 1
    return {
        "records": records, "epochs": epochs, "samples": sum(map(len, samples)),
        "end_of_each_epoch": [epoch[-1] for epoch in samples], "lowest": min(later), "highest": max(later),
        "rise": rise, "met": rise <= 0.05,
    }  # fmt: skip


def measure_resume() -> dict[str, Any]:
    buckets = np.random.default_rng(0).integers(0, len(EDGES), BLOCKS)
    runs = BucketRuns(np.full(BLOCKS, BIG // BLOCKS), buckets)
    state = json.dumps(Plan(None, runs, EDGES, ROWS, 3, fingerprint="f").state(10**8))
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        plan = Plan(None, runs, EDGES, ROWS, 3, fingerprint="f")
        plan.batch(plan.check_state(json.loads(state)))
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    return {
        "records": BIG, "blocks": BLOCKS, "best_s": min(seconds), "median_s": median, "met": median < 0.05
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--root", type=Path, help="where the data go; default a temporary directory")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    info = machine()
    with tempfile.TemporaryDirectory(dir=args.root) as folder:
        prepare(Path(folder) / "small.loongbin", args.records)
        memory = measure_pss(Path(folder) / "small.loongbin", args.epochs)
    resume = measure_resume()
    ends = ", ".join(f"{size / 2**20:.1f}" for size in memory["end_of_each_epoch"])
    print(heading(info))
    print(
        f"PSS of {memory['epochs']} epochs of {memory['records']} records, MiB at their ends: {ends}; after the first "
        f"{memory['lowest'] / 2**20:.1f} to {memory['highest'] / 2**20:.1f} in {memory['samples']} samples, "
        f"{memory['rise']:+.1%}; within 5 %: {'yes' if memory['met'] else 'no'}"
    )
    print(
        f"Resume in a plan of 10^9 records in {BLOCKS} blocks: median {resume['median_s'] * 1e3:.1f} ms, best "
        f"{resume['best_s'] * 1e3:.1f}; below 50 ms: {'yes' if resume['met'] else 'no'}"
    )
    if args.json:
        report = {"machine": info, "memory": memory, "resume": resume}
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
