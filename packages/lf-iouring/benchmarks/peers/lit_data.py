"""litdata: chunks of tokens by row number, and through its own iterator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming.cache import Cache
from litdata.streaming.item_loader import TokensLoader

from peers.indexed import MANY, Read, ahead, as_sent, by_array, by_number, queued, tensors
from peers.serve import LARGE, WORKERS, Case
from peers.tokens import Job, run


def write(job: Job, kind: str) -> None:
    """`numpy` and `tensor`: its loader for fixed blocks of ids; `items`: a tree a sample. One chunk each."""
    cache = Cache(str(job.fresh(f"lit-{kind}")), item_loader=loader(job, kind), chunk_bytes="1GB")
    for number, row in enumerate(job.tokens()):
        cache[number] = np.array(row) if kind == "numpy" else torch.from_numpy(np.array(row))
    cache.done()
    cache.merge()


def loader(job: Job, kind: str) -> TokensLoader | None:
    return None if kind == "items" else TokensLoader(job.length)


def dataset(job: Job, kind: str, **options: Any) -> StreamingDataset:
    return StreamingDataset(str(job.root / f"lit-{kind}"), item_loader=loader(job, kind), **options)


def reader(job: Job, kind: str) -> Read:
    data, join = dataset(job, kind), joined if kind == "numpy" else torch.stack
    return lambda rows: join([data[row] for row in rows.tolist()])


def joined(rows: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(rows).reshape(len(rows), -1)


def joined_for_sending(rows: list[np.ndarray]) -> Any:
    return as_sent(joined(rows))


def iterated(job: Job, epoch: int, kind: str, workers: int, many: int = 1) -> Iterable[torch.Tensor]:
    torch.set_num_threads(1)
    options = {"prefetch_factor": ahead(workers, many)} if workers else {}
    batches = StreamingDataLoader(
        dataset(job, kind, shuffle=True, seed=epoch, drop_last=True), batch_size=many * job.batch,
        num_workers=workers, collate_fn=joined_for_sending if kind == "numpy" else torch.stack, **options,
    )  # fmt: skip
    return tensors(job, batches, many)


def bare(job: Job, epoch: int) -> Iterable[np.ndarray]:
    """Its iterator without a loader, rows collected here."""
    rows = []
    for row in dataset(job, "numpy", shuffle=True, seed=epoch, drop_last=True):
        rows.append(row)
        if len(rows) == job.batch:
            yield joined(rows)
            rows = []


def prepare(job: Job) -> list[Case]:
    torch.set_num_threads(1)
    for kind in ("numpy", "tensor", "items"):
        write(job, kind)

    def numbers(many: int) -> Any:
        return lambda e: by_array(job, e, lambda: reader(job, "numpy"), 2, many)

    return [
        Case("litdata, by row number", lambda e: by_number(job, e, reader(job, "numpy"))),
        Case("litdata, by row number, tensors", lambda e: by_number(job, e, reader(job, "tensor")), tried=True),
        Case("litdata, by row number, items", lambda e: by_number(job, e, reader(job, "items")), tried=True),
        Case("litdata, its iterator", lambda e: bare(job, e)),
        Case("litdata, its loader", lambda e: iterated(job, e, "numpy", 0)),
        Case("litdata, its loader, tensors", lambda e: iterated(job, e, "tensor", 0), tried=True),
        Case("litdata, its loader, items", lambda e: iterated(job, e, "items", 0), tried=True),
        Case("litdata, its loader, 2 workers", lambda e: iterated(job, e, "numpy", 2), queued(2), WORKERS),
        Case("litdata, by row number, 2 workers", numbers(1), queued(2), WORKERS),
        Case(
            "litdata, its loader, 2 workers", lambda e: iterated(job, e, "numpy", 2, MANY),
            queued(2, MANY), LARGE, tried=True,
        ),
        Case("litdata, by row number, 2 workers", numbers(MANY), queued(2, MANY), LARGE),
    ]  # fmt: skip


if __name__ == "__main__":
    run(prepare, "litdata")
