"""WebDataset: tar files in random order, rows through a shuffle buffer; it has no access by row number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import webdataset

from peers.indexed import MANY, ahead, queued
from peers.serve import LARGE, WORKERS, Case
from peers.tokens import Job, run

ROWS_A_TAR = 4096
BUFFER = 1000


def write(job: Job) -> None:
    folder = job.fresh("wds")
    with webdataset.ShardWriter(str(folder / "t-%05d.tar"), maxcount=ROWS_A_TAR, verbose=0) as writer:
        for number, row in enumerate(job.tokens()):
            writer.write({"__key__": f"{number:08d}", "t.bin": row.tobytes()})


def joined(samples: list[dict[str, Any]]) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(b"".join([s["t.bin"] for s in samples])), dtype=torch.uint16)
    return flat.view(len(samples), -1)


def batches(job: Job, epoch: int, workers: int, many: int = 1, buffer: int = BUFFER) -> Iterable[Any]:
    torch.set_num_threads(1)
    tars = sorted(map(str, (job.root / "wds").glob("*.tar")))
    data = webdataset.WebDataset(tars, shardshuffle=len(tars), seed=epoch, empty_check=False)
    data = data.shuffle(buffer, initial=buffer) if buffer else data
    data = data.batched(many * job.batch, collation_fn=joined, partial=False)
    if workers:
        data = webdataset.WebLoader(
            data, batch_size=None, num_workers=workers, prefetch_factor=ahead(workers, many)
        )
    return data if many == 1 else job.cut(data)


def prepare(job: Job) -> list[Case]:
    write(job)
    return [
        Case("WebDataset", lambda e: batches(job, e, 0)),
        Case("WebDataset, buffer of 100", lambda e: batches(job, e, 0, buffer=100), tried=True),
        Case("WebDataset, no buffer", lambda e: batches(job, e, 0, buffer=0), tried=True),
        Case("WebDataset, 2 workers", lambda e: batches(job, e, 2), queued(2), WORKERS),
        Case("WebDataset, 2 workers", lambda e: batches(job, e, 2, MANY), queued(2, MANY), LARGE),
    ]


if __name__ == "__main__":
    run(prepare, "webdataset")
