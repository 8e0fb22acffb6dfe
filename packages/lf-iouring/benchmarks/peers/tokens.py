"""The token job of bench_iouring.py, as each of its processes sees it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peers.serve import Case, serve

VOCAB = 50_257


@dataclass(frozen=True)
class Job:
    """Batches of `batch` rows from `records` rows of `length` uint16 ids, stored raw in ROOT/tokens.bin.

    The first id of a row is its number, so that a delivered row can be compared with the stored one.
    """

    root: Path
    records: int
    length: int
    batch: int

    def tokens(self) -> np.ndarray:
        """uint16 [records, length], mapped."""
        return np.memmap(self.root / "tokens.bin", np.uint16, "r").reshape(-1, self.length)

    def fresh(self, name: str) -> Path:
        """An empty folder for a store."""
        folder = self.root / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def batches(self, epoch: int, rows: int | None = None) -> np.ndarray:
        """Row numbers of an epoch in random order, int64 [n, rows]; the rest that fills no batch is left out."""
        rows = rows or self.batch
        order = np.random.default_rng(epoch).permutation(self.records)
        return order[: len(order) // rows * rows].reshape(-1, rows)

    def cut(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Batches of this job, as views of larger ones."""
        for large in batches:
            for at in range(0, len(large), self.batch):
                yield large[at : at + self.batch]


def write(job: Job) -> None:
    """tokens.bin: Zipf-like ids, about as hard to compress as the order-0 statistics of BPE text; and job.json."""
    if job.records > VOCAB:
        raise SystemExit(f"--records is at most {VOCAB}: a row carries its number as its first id")
    random = np.random.default_rng(0)
    shares = np.cumsum(1.0 / (np.arange(VOCAB) + 2.7))
    with open(job.root / "tokens.bin", "wb") as file:
        for first in range(0, job.records, 1024):
            rows = min(1024, job.records - first)
            ids = np.searchsorted(shares, random.random((rows, job.length)) * shares[-1]).astype(np.uint16)
            ids[:, 0] = np.arange(first, first + rows)
            file.write(ids.tobytes())
    (job.root / "job.json").write_text(json.dumps(asdict(job) | {"root": ""}))


def run(prepare: Callable[[Job], list[Case]], *packages: str) -> None:
    """Main function of a process: serve the job of the folder named on the command line."""
    root = Path(sys.argv[1])
    job = Job(**json.loads((root / "job.json").read_text()) | {"root": root})
    stored = job.tokens()

    def check(batch: Any) -> None:
        rows = np.asarray(batch)
        if rows.shape != (job.batch, job.length) or not np.array_equal(rows, stored[rows[:, 0]]):
            raise RuntimeError(f"a batch {rows.dtype} {rows.shape} is not as stored")

    serve(lambda: prepare(job), check, job.batch * job.length, packages)
