"""The plain twin of LoongDataLoader: torch's DataLoader over the same plan, with the same state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

import lf_format as lff
import lf_iouring as lfi
from lf_meta.config import LoaderSection
from lf_meta.dist import World
from lf_meta.feed import Order


@dataclass(frozen=True)
class TorchBatch:
    """A batch in memory of its own; nothing to give back."""

    tokens: Tensor
    lengths: Tensor
    loss_mask: Tensor | None
    ids: Tensor
    step: int
    epoch: int

    def release(self) -> None:
        """Does nothing: the memory belongs to the tensors."""


class _Steps(Dataset[TorchBatch]):
    """Map-style data set whose items are whole batches: index = step."""

    def __init__(self, dataset: lff.Dataset, plan: lfi.Plan, world: World) -> None:
        self._dataset, self._plan, self._rank, self._size = dataset, plan, world.rank, world.size

    def __getitem__(self, step: int) -> TorchBatch:
        spec = self._plan.batch(step)
        ids = self._plan.rank_slice(spec, self._rank, self._size)
        tokens = np.zeros((len(ids), spec.bucket_edge), self._dataset.token_dtype)
        lengths = np.zeros(len(ids), np.int64)
        mask = np.zeros(tokens.shape, bool) if _has_mask(self._dataset) else None
        for row, i in enumerate(ids.tolist()):
            if i < 0:
                continue  # an empty row fills up the epoch's last batch
            record = self._dataset.record(i)
            lengths[row] = n = len(record.tokens)
            tokens[row, :n] = record.tokens
            if mask is not None:
                mask[row, :n] = record.loss_mask
        masks = None if mask is None else torch.from_numpy(mask)
        return TorchBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(lengths),
            masks,
            torch.from_numpy(ids.copy()),
            step,
            spec.epoch,
        )


def _has_mask(dataset: lff.Dataset) -> bool:
    return any(f.name == "loss_mask" for f in dataset.fields)


class _From(Sampler[int]):
    """Steps from ``first`` up to ``end``, or without end."""

    def __init__(self, first: int, end: int | None) -> None:
        self._first, self._end = first, end

    def __iter__(self) -> Iterator[int]:
        if self._end is None:
            return itertools.count(self._first)
        return iter(range(self._first, self._end))


class TorchFeed:
    """A Feed over ``torch.utils.data.DataLoader``; ``loader.threads`` are its worker processes (0: in-process)."""

    def __init__(self, dataset: lff.Dataset, section: LoaderSection, order: Order, world: World) -> None:
        self._plan = lfi.plan_of(
            dataset, global_batch=order.global_batch, seed=order.seed, shuffle=order.shuffle
        )
        self._steps = _Steps(dataset, self._plan, world)
        self._section, self._epochs, self._next = section, order.epochs, 0

    def __iter__(self) -> Iterator[TorchBatch]:
        end = None if self._epochs is None else self._epochs * self._plan.steps_per_epoch
        workers = self._section.threads
        loader = DataLoader(
            self._steps,
            batch_size=None,
            sampler=_From(self._next, end),
            num_workers=workers,
            prefetch_factor=self._section.prefetch if workers else None,
            generator=torch.Generator(),  # its own, so that it draws nothing from the trainer's
        )
        for batch in loader:
            self._next += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Position after the batches that were delivered."""
        return self._plan.state(self._next)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after ``state``; lf_iouring.StateError if it belongs to another order."""
        self._next = self._plan.check_state(state)

    def info(self) -> str:
        """What was chosen."""
        return f"torch DataLoader, {self._section.threads} workers"

    def close(self) -> None:
        """Nothing is held open between iterations."""
