"""A .lfg of one record a frame, cut into the same batches, every hash checked unless the row says otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import lf_format as lff
from peers.frames import HORIZON, SIZE, STATE, Batch, Job, run
from peers.serve import Case


def write(job: Job) -> lff.Reader:
    fields = [
        lff.Field.image("frame", (SIZE, SIZE, 3)),
        lff.Field.tensor("state", "float32", (STATE,)),
        lff.Field.tensor("action", "float32", (HORIZON, STATE)),
        lff.Field.bits("mask", (HORIZON,)),
    ]
    path = job.root / "frames.lfg"
    with lff.Writer(path, fields=fields) as writer:
        for values in zip(job.frames(), *job.rest(), strict=True):
            writer.append(dict(zip(("frame", "state", "action", "mask"), values, strict=True)))
    return lff.Reader(path)


def gathered(job: Job, reader: lff.Reader, epoch: int, check: bool) -> Iterator[Batch]:
    """Reader.gather into reused memory."""
    pixels = np.empty((job.batch * 2, SIZE, SIZE, 3), np.uint8)
    for ids in job.batches(epoch):
        reader.gather((ids[:, None] + [0, 1]).reshape(-1), "frame", out=pixels, check=check)
        # the hash of a record covers all its fields, and has just been compared
        rest = (reader.gather(ids, name, check=False) for name in ("state", "action", "mask"))
        yield Batch(ids, pixels.reshape(job.batch, 2, SIZE, SIZE, 3), *rest)


def ours_loader(job: Job, reader: lff.Reader) -> list[Case]:
    """The rows of this repository; the first one is held against the bar."""
    return [
        Case("lf-format, Reader.gather", lambda e: gathered(job, reader, e, True)),
        Case("lf-format, Reader.gather, unchecked", lambda e: gathered(job, reader, e, False)),
    ]


def prepare(job: Job) -> list[Case]:
    return ours_loader(job, write(job))


if __name__ == "__main__":
    run(prepare, "lf-format")
