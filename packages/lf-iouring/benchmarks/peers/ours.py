"""LoongDataLoader: raw and zstd blocks, every hash checked unless the row says otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import lf_format
from lf_iouring import LoongDataLoader
from peers.indexed import MANY
from peers.serve import COLD, LARGE, Case
from peers.tokens import VOCAB, Job, run

COLD_BATCHES = 16  # as large as a ring needs to have reads to queue
FEW = 4 << 20  # of decoded blocks: each is decoded once when read in order
QUEUED = 8  # batches read ahead by default, and those in the pipeline


def write(job: Job, name: str, codec: str = "raw") -> Any:
    path = job.root / f"{name}.loongbin"
    tokenizer = lf_format.TokenizerInfo("Zipf-like", "00")
    with lf_format.Writer(
        path, vocab_size=VOCAB, tokenizer=tokenizer, buckets=(job.length,), codec=codec
    ) as writer:
        for row in job.tokens():
            writer.append(row)
    return lf_format.open_dataset(path)


class Loading:
    """Epochs of one loader, which stays open between passes."""

    def __init__(self, job: Job, dataset: Any, many: int = 1, cold: bool = False, **options: Any) -> None:
        self.job, self.dataset, self.many, self.cold = job, dataset, many, cold
        self.loader = LoongDataLoader(dataset, global_batch=many * job.batch, **options)

    def __call__(self, epoch: int) -> Iterable[Any]:
        if self.cold:
            drop_cache(self.dataset)
        batches = (next(self.loader).tokens for _ in range(self.loader.steps_per_epoch))
        return batches if self.many == 1 else self.job.cut(batches)


def drop_cache(dataset: Any) -> None:
    for reader in dataset.readers:
        os.fsync(reader.fileno())
        os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def prepare(job: Job) -> list[Case]:
    raw, zstd = write(job, "raw"), write(job, "zstd", "zstd")
    dropped = write(job, "cold")  # a file of its own, so that the others stay in the page cache

    def cold(engine: str) -> Case:
        # buffered: what is mapped does not leave the page cache
        loading = Loading(job, dropped, COLD_BATCHES, cold=True, engine=engine, io="buffered")
        return Case(f"lf-iouring, {engine}", loading, COLD_BATCHES, COLD)

    return [
        Case("lf-iouring, raw", Loading(job, raw), QUEUED),
        Case("lf-iouring, zstd, decoded blocks kept", Loading(job, zstd), QUEUED),
        Case("lf-iouring, zstd, in file order", Loading(job, zstd, shuffle=False, cache_bytes=FEW), QUEUED),
        Case("lf-iouring, raw, not mapped", Loading(job, raw, io="buffered"), QUEUED),
        Case("lf-iouring, raw, pread, not mapped", Loading(job, raw, engine="pread", io="buffered"), QUEUED),
        Case("lf-iouring, raw, python", Loading(job, raw, engine="python"), QUEUED),
        Case("lf-iouring, raw, unchecked", Loading(job, raw, verify=False), QUEUED),
        Case("lf-iouring, raw", Loading(job, raw, MANY), QUEUED * MANY, LARGE),
        *map(cold, ("io_uring", "pread", "python")),
    ]


if __name__ == "__main__":
    run(prepare, "lf-iouring", "torch")
