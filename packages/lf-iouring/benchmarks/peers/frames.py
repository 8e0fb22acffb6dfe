"""The robot job of bench_multimodal.py, as each of its processes sees it: samples of two consecutive frames."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from peers.serve import Case, serve

SIZE = 224
STATE, HORIZON = 7, 16
LOSSY = (
    4.0  # mean difference of pixels that decoding JPEG or H.264 may leave; another frame differs by far more
)


class Batch(NamedTuple):
    """Arrays or tensors; `ids` number the first frame of each sample."""

    ids: Any  # int64 [batch]
    frames: Any  # uint8 [batch, 2, SIZE, SIZE, 3]
    state: Any  # float32 [batch, STATE]
    action: Any  # float32 [batch, HORIZON, STATE]
    mask: Any  # bool [batch, HORIZON]


@dataclass(frozen=True)
class Job:
    """Batches of `batch` samples from a video of `count` frames, stored raw in ROOT."""

    root: Path
    count: int
    batch: int

    def frames(self) -> np.ndarray:
        """uint8 [count, SIZE, SIZE, 3], mapped."""
        return np.load(self.root / "frames.npy", mmap_mode="r")

    def rest(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """State, action and mask of every frame, mapped."""
        state, action, mask = (
            np.load(self.root / f"{n}.npy", mmap_mode="r") for n in ("state", "action", "mask")
        )
        return state, action, mask

    def batches(self, epoch: int) -> np.ndarray:
        """First frames of the samples of an epoch in random order, int64 [n, batch]."""
        order = np.random.default_rng(epoch).permutation(self.count - 1)
        return order[: len(order) // self.batch * self.batch].reshape(-1, self.batch)

    def with_rest(self, ids: np.ndarray, frames: Any) -> Batch:
        """What comes beside the pixels, gathered from its arrays."""
        return Batch(ids, frames, *(array[ids] for array in self.rest()))


def write(job: Job) -> None:
    """A smooth texture that drifts, with some noise, and random numbers beside it; and job.json."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (16, 32, 3)).astype(np.float32)
    rows, columns = np.linspace(0, 15, SIZE), np.linspace(0, 31, 2 * SIZE)
    canvas = np.stack([_bilinear(coarse[..., c], rows, columns) for c in range(3)], axis=-1)
    shape = (job.count, SIZE, SIZE, 3)
    frames = np.lib.format.open_memmap(job.root / "frames.npy", "w+", np.uint8, shape)
    for number in range(job.count):
        shifted = np.roll(canvas, -3 * number, axis=1)[:, :SIZE]
        frames[number] = np.clip(shifted + random.integers(-2, 3, (SIZE, SIZE, 1)), 0, 255)
    np.save(job.root / "state.npy", random.random((job.count, STATE), np.float32))
    np.save(job.root / "action.npy", random.random((job.count, HORIZON, STATE), np.float32))
    np.save(job.root / "mask.npy", random.random((job.count, HORIZON)) < 0.9)
    (job.root / "job.json").write_text(json.dumps(asdict(job) | {"root": ""}))


def _bilinear(coarse: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    wide = np.stack([np.interp(columns, np.arange(coarse.shape[1]), row) for row in coarse])
    return np.stack([np.interp(rows, np.arange(len(wide)), column) for column in wide.T], axis=1)


def run(prepare: Callable[[Job], list[Case]], *packages: str, exact: bool = True) -> None:
    """Main function of a process: serve the job of the folder named on the command line."""
    root = Path(sys.argv[1])
    job = Job(**json.loads((root / "job.json").read_text()) | {"root": root})
    stored = job.frames()

    def check(batch: Batch) -> None:
        ids = np.asarray(batch.ids)
        pairs = np.minimum(ids[:, None] + [0, 1], job.count - 1)  # the last frame stands in for the next one
        wanted = Batch(ids, stored[pairs], *(array[ids] for array in job.rest()))
        for name, found, right in zip(Batch._fields, map(np.asarray, batch), wanted, strict=True):
            same = found.shape == right.shape and found.dtype == right.dtype
            if same and name == "frames" and not exact:
                same = float(np.abs(found.astype(np.int16) - right).mean()) <= LOSSY
            elif same:
                same = np.array_equal(found, right)
            if not same:
                raise RuntimeError(f"{name} {found.dtype} {found.shape} of a batch are not as stored")

    serve(lambda: prepare(job), check, job.batch, packages)
