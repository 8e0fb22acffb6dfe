"""A .lfg of one record a frame, cut into the same batches, every hash checked unless the row says otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import lf_format as lff
from lf_iouring import LoongDataLoader
from peers.frames import HORIZON, SIZE, STATE, Batch, Job, run
from peers.serve import Case

QUEUED = 8  # batches read ahead by default, and those in the pipeline


def write(job: Job) -> Path:
    fields = [
        lff.Field.image("frame", (SIZE, SIZE, 3)),
        lff.Field.tensor("state", "float32", (STATE,)),
        lff.Field.tensor("action", "float32", (HORIZON, STATE)),
        lff.Field.bits("mask", (HORIZON,)),
    ]
    path = job.root / "frames.lfg"
    with lff.Writer(path, fields=fields) as writer:
        for number, values in enumerate(zip(job.frames(), *job.rest(), strict=True)):
            sample = dict(zip(("frame", "state", "action", "mask"), values, strict=True))
            writer.append(sample, document_start=number == 0, document_end=number == job.count - 1)
    return path


def loaded(loader: LoongDataLoader) -> Iterator[Batch]:
    """An epoch of a loader that stays open between passes."""
    for _ in range(loader.steps_per_epoch):
        batch = next(loader)
        yield Batch(batch.ids, *(batch[name] for name in ("frame", "state", "action", "mask")))


def gathered(job: Job, reader: lff.Reader, epoch: int, check: bool) -> Iterator[Batch]:
    """Reader.gather into reused memory."""
    pixels = np.empty((job.batch * 2, SIZE, SIZE, 3), np.uint8)
    for ids in job.batches(epoch):
        reader.gather((ids[:, None] + [0, 1]).reshape(-1), "frame", out=pixels, check=check)
        # the hash of a record covers all its fields, and has just been compared
        rest = (reader.gather(ids, name, check=False) for name in ("state", "action", "mask"))
        yield Batch(ids, pixels.reshape(job.batch, 2, SIZE, SIZE, 3), *rest)


def prepare(job: Job) -> list[Case]:
    """The first row is held against the bar."""
    path = write(job)
    dataset, reader = lff.open_dataset(path), lff.Reader(path)

    def loader(**options: Any) -> LoongDataLoader:
        return LoongDataLoader(dataset, global_batch=job.batch, deltas={"frame": [0, 1]}, **options)

    checked, unchecked, plain = loader(), loader(verify=False), loader(engine="pread")
    return [
        Case("lf-iouring", lambda e: loaded(checked), QUEUED),
        Case("lf-iouring, pread", lambda e: loaded(plain), QUEUED),
        Case("lf-iouring, unchecked", lambda e: loaded(unchecked), QUEUED),
        Case("lf-format, Reader.gather", lambda e: gathered(job, reader, e, True)),
        Case("lf-format, Reader.gather, unchecked", lambda e: gathered(job, reader, e, False)),
    ]


if __name__ == "__main__":
    run(prepare, "lf-iouring", "lf-format", "torch")
