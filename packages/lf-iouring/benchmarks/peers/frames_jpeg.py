"""A JPEG file a frame, decoded by PIL in torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from peers.frames import SIZE, Batch, Job, run
from peers.indexed import Arrays, keep
from peers.serve import WORKERS, Case

AHEAD = 2  # batches of 4.8 MB a worker


def write(job: Job) -> None:
    (job.root / "jpeg").mkdir(exist_ok=True)
    for number, pixels in enumerate(job.frames()):
        Image.fromarray(pixels).save(job.root / "jpeg" / f"{number:06d}.jpg", quality=95)


class Samples:
    """Map-style data set whose item for an array of numbers is a whole batch."""

    def __init__(self, job: Job) -> None:
        self.job, self.rest = job, job.rest()

    def __len__(self) -> int:
        return self.job.count - 1

    def __getitem__(self, ids: np.ndarray) -> Batch:
        frames = np.empty((len(ids), 2, SIZE, SIZE, 3), np.uint8)
        for number, pair in zip(ids.tolist(), frames, strict=True):
            for later in (0, 1):
                with Image.open(self.job.root / "jpeg" / f"{number + later:06d}.jpg") as image:
                    pair[later] = np.asarray(image)
        arrays = (ids, frames, *(array[ids] for array in self.rest))
        return Batch(*map(torch.from_numpy, arrays))


def loaded(job: Job, epoch: int, workers: int) -> Iterable[Batch]:
    torch.set_num_threads(1)
    return DataLoader(
        Samples(job), batch_size=None, sampler=Arrays(job.batches(epoch)), num_workers=workers,
        collate_fn=keep, prefetch_factor=AHEAD if workers else None,
    )  # fmt: skip


def prepare(job: Job) -> list[Case]:
    write(job)
    return [
        Case("JPEG + PIL, torch DataLoader", lambda e: loaded(job, e, 0)),
        Case("JPEG + PIL, torch DataLoader, 2 workers", lambda e: loaded(job, e, 2), 2 * AHEAD + 1, WORKERS),
    ]


if __name__ == "__main__":
    run(prepare, "torch", "pillow", exact=False)
