"""The anchor: rows of a memory-mapped array, gathered by one fancy index a batch, unchecked."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from peers.serve import Case
from peers.tokens import Job, run


def gather(job: Job, epoch: int) -> Iterator[np.ndarray]:
    tokens = job.tokens()
    for rows in job.batches(epoch):
        yield tokens[rows]


def take(job: Job, epoch: int) -> Iterator[np.ndarray]:
    tokens, out = job.tokens(), np.empty((job.batch, job.length), np.uint16)
    for rows in job.batches(epoch):
        yield np.take(tokens, rows, axis=0, out=out, mode="clip")


def preadv(job: Job, epoch: int) -> Iterator[np.ndarray]:
    out = np.empty((job.batch, job.length), np.uint16)
    views = [memoryview(row).cast("B") for row in out]
    descriptor = os.open(job.root / "tokens.bin", os.O_RDONLY)
    try:
        for rows in job.batches(epoch):
            for view, row in zip(views, rows.tolist(), strict=True):
                os.preadv(descriptor, [view], row * job.length * 2)
            yield out
    finally:
        os.close(descriptor)


def prepare(job: Job) -> list[Case]:
    return [
        Case("numpy memmap gather", lambda e: gather(job, e)),
        Case("numpy memmap, np.take into a reused array", lambda e: take(job, e), tried=True),
        Case("preadv of each row into a reused array", lambda e: preadv(job, e), tried=True),
    ]


if __name__ == "__main__":
    run(prepare, "numpy")
