"""WebDataset: tar files in random order, rows through a shuffle buffer; it has no access by row number."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import webdataset
from webdataset.tariterators import tar_file_expander, url_opener

from peers.indexed import MANY, ahead, as_sent, keep, queued, tensors
from peers.serve import LARGE, WORKERS, Case
from peers.tokens import Job, run

ROWS_A_TAR = 4096
BUFFER = 1000
FILE_BUFFER = 1 << 17


def write(job: Job) -> None:
    folder = job.fresh("wds")
    with webdataset.ShardWriter(str(folder / "t-%05d.tar"), maxcount=ROWS_A_TAR, verbose=0) as writer:
        for number, row in enumerate(job.tokens()):
            writer.write({"__key__": f"{number:08d}", "t.bin": row.tobytes()})


def joined(samples: list[dict[str, Any]]) -> Any:
    data = bytearray(b"".join([sample["data"] for sample in samples]))
    return as_sent(np.frombuffer(data, np.uint16).reshape(len(samples), -1))


def batches(job: Job, epoch: int, workers: int, many: int = 1, buffer: int = BUFFER) -> Iterable[Any]:
    """A pipeline of its parts without the grouping by key, which a sample of one file does not need."""
    torch.set_num_threads(1)
    tars = sorted(map(str, (job.root / "wds").glob("*.tar")))
    random.Random(epoch).shuffle(tars)
    data = webdataset.DataPipeline(
        webdataset.SimpleShardList(tars),
        webdataset.split_by_worker,
        functools.partial(url_opener, bufsize=FILE_BUFFER),
        functools.partial(tar_file_expander, eof_value=None),
        webdataset.shuffle(buffer, initial=buffer),
        webdataset.batched(many * job.batch, collation_fn=joined, partial=False),
    )
    return tensors(job, loaded(data, workers, many), many)


def grouped(job: Job, epoch: int, buffer: int) -> Iterable[Any]:
    """The documented way."""
    tars = sorted(map(str, (job.root / "wds").glob("*.tar")))
    data = webdataset.WebDataset(tars, shardshuffle=len(tars), seed=epoch, empty_check=False)
    data = data.shuffle(buffer, initial=buffer).map(lambda sample: {"data": sample["t.bin"]})
    return data.batched(job.batch, collation_fn=joined, partial=False)


def loaded(data: Any, workers: int, many: int) -> Iterable[Any]:
    if not workers:
        return data
    return webdataset.WebLoader(
        data, batch_size=None, num_workers=workers, collate_fn=keep, prefetch_factor=ahead(workers, many)
    )


def prepare(job: Job) -> list[Case]:
    write(job)
    return [
        Case("WebDataset", lambda e: batches(job, e, 0)),
        Case("WebDataset, buffer of 100", lambda e: batches(job, e, 0, buffer=100), tried=True),
        Case("WebDataset, grouped", lambda e: grouped(job, e, BUFFER), tried=True),
        Case("WebDataset, 2 workers", lambda e: batches(job, e, 2), queued(2), WORKERS),
        Case("WebDataset, 2 workers", lambda e: batches(job, e, 2, MANY), queued(2, MANY), LARGE),
    ]


if __name__ == "__main__":
    run(prepare, "webdataset")
