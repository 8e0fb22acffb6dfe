"""The anchor: the bytes of a batch copied from memory-mapped arrays into reused ones, unchecked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from peers.frames import Batch, Job, run
from peers.serve import Case


def copied(job: Job, epoch: int) -> Iterator[Batch]:
    frames, rest = job.frames(), job.rest()
    pixels = np.empty((job.batch * 2, *frames.shape[1:]), np.uint8)
    out = [np.empty((job.batch, *array.shape[1:]), array.dtype) for array in rest]
    for ids in job.batches(epoch):
        np.take(frames, (ids[:, None] + [0, 1]).reshape(-1), axis=0, out=pixels, mode="clip")
        for array, target in zip(rest, out, strict=True):
            np.take(array, ids, axis=0, out=target, mode="clip")
        yield Batch(ids, pixels.reshape(job.batch, 2, *frames.shape[1:]), *out)


def indexed(job: Job, epoch: int) -> Iterator[Batch]:
    frames = job.frames()
    for ids in job.batches(epoch):
        yield job.with_rest(ids, frames[ids[:, None] + [0, 1]])


def prepare(job: Job) -> list[Case]:
    return [
        Case("np.take from memmap into reused arrays", lambda e: copied(job, e)),
        Case("memmap fancy index, new arrays", lambda e: indexed(job, e), tried=True),
    ]


if __name__ == "__main__":
    run(prepare, "numpy")
