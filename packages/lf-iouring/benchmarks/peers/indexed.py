"""torch's DataLoader around anything that returns a whole batch for an array of row numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from peers.tokens import Job

Read = Callable[[np.ndarray], Any]
MANY = 64  # batches in a large one: 2 MiB of a transfer between processes instead of 32 KiB

# Arrow's arrays are read-only; nobody writes to the tensors made of them.
warnings.filterwarnings("ignore", "The given NumPy array is not writable")


class Indexed:
    """Map-style data set whose item for an array of row numbers is a whole batch; opened in each process."""

    def __init__(self, opener: Callable[[], Read], records: int) -> None:
        self.opener, self.records = opener, records
        self.read: Read | None = None

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, rows: np.ndarray) -> Any:
        self.read = self.read or self.opener()
        return as_sent(self.read(rows))


class Arrays:
    """Sampler whose items are arrays of row numbers."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.rows)


def keep(batch: Any) -> Any:
    """A collate function for what is a batch already."""
    return batch


def as_sent(batch: np.ndarray) -> Any:
    """As a worker should send it: small arrays by value in a fifth of the time that tensors take by descriptor."""
    return batch if batch.nbytes <= 1 << 18 else torch.from_numpy(batch)


def by_number(job: Job, epoch: int, read: Read, many: int = 1) -> Iterable[Any]:
    """Without a DataLoader: one call a batch, or one for `many` of them."""
    batches = map(read, job.batches(epoch, many * job.batch))
    return batches if many == 1 else job.cut(batches)


def by_array(job: Job, epoch: int, opener: Callable[[], Read], workers: int, many: int = 1) -> Iterable[Any]:
    """Through a DataLoader without automatic batching: an item is a batch, or `many` of them."""
    torch.set_num_threads(1)
    loader = DataLoader(
        Indexed(opener, job.records), batch_size=None, sampler=Arrays(job.batches(epoch, many * job.batch)),
        num_workers=workers, collate_fn=keep, prefetch_factor=ahead(workers, many),
    )  # fmt: skip
    return tensors(job, loader, many)


def tensors(job: Job, batches: Iterable[Any], many: int) -> Iterable[torch.Tensor]:
    """What a loader gives, as tensors of one batch."""
    return map(torch.as_tensor, batches if many == 1 else job.cut(batches))


def ahead(workers: int, many: int = 1) -> int | None:
    """prefetch_factor of a DataLoader; more than 16 batches a worker gained nothing."""
    return (2 if many > 1 else 16) if workers else None


def queued(workers: int, many: int = 1) -> int:
    """Batches that may be there when the first one comes."""
    return ((ahead(workers, many) or 0) * workers + 1) * many
