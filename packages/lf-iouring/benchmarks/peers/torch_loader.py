"""torch DataLoader over a memory-mapped array, whole batches at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from peers.indexed import MANY, Indexed, Read, ahead, by_array, keep, queued, tensors
from peers.serve import LARGE, WORKERS, Case
from peers.tokens import Job, run


class Rows(Indexed):
    """The documented way to fetch a batch at once: a list of row numbers to `__getitems__`."""

    def __getitems__(self, rows: list[int]) -> Any:
        return self[np.array(rows)]


class TensorRows(Rows):
    """The same, sending tensors."""

    def __getitem__(self, rows: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(super().__getitem__(rows))


def shuffled(job: Job, epoch: int, workers: int, kind: type[Rows] = Rows) -> Iterable[torch.Tensor]:
    torch.set_num_threads(1)
    loader: Iterable[Any] = DataLoader(
        kind(lambda: mapped(job), job.records), job.batch, True, num_workers=workers, collate_fn=keep,
        drop_last=True, generator=torch.Generator().manual_seed(epoch), prefetch_factor=ahead(workers),
    )  # fmt: skip
    return tensors(job, loader, 1)


def mapped(job: Job) -> Read:
    """A plain array over the mapping gathers faster than np.memmap, `take` faster than an index."""
    tokens = np.asarray(job.tokens())
    return lambda rows: tokens.take(rows, axis=0)


def prepare(job: Job) -> list[Case]:
    def arrays(epoch: int, workers: int, many: int = 1) -> Iterable[torch.Tensor]:
        return by_array(job, epoch, lambda: mapped(job), workers, many)

    def sending_tensors(epoch: int) -> Iterable[torch.Tensor]:
        return shuffled(job, epoch, 2, TensorRows)

    return [
        Case("torch DataLoader, __getitems__", lambda e: shuffled(job, e, 0)),
        Case("torch DataLoader, sampler of index arrays", lambda e: arrays(e, 0)),
        Case("torch DataLoader, __getitems__, 1 worker", lambda e: shuffled(job, e, 1), queued(1), WORKERS),
        Case("torch DataLoader, __getitems__, 2 workers", lambda e: shuffled(job, e, 2), queued(2), WORKERS),
        Case("torch DataLoader, index arrays, 2 workers", lambda e: arrays(e, 2), queued(2), WORKERS),
        Case("torch DataLoader, tensors from 2 workers", sending_tensors, queued(2), WORKERS),
        Case("torch DataLoader", lambda e: arrays(e, 0, MANY), MANY, LARGE),
        Case("torch DataLoader, 2 workers", lambda e: arrays(e, 2, MANY), queued(2, MANY), LARGE),
    ]


if __name__ == "__main__":
    run(prepare, "torch")
