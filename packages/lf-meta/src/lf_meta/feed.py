"""Batches for the loop, from lf-iouring or from torch's own DataLoader; both follow the same plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import lf_format as lff
import lf_iouring as lfi
from lf_memory import PoolError
from lf_meta.config import LoaderSection
from lf_meta.dist import World
from lf_meta.errors import ConfigError
from lf_meta.optim import MicroBatch


class Batch(Protocol):
    """This rank's rows of a global batch.

    Attributes:
        tokens: [rows, edge] in the stored dtype (uint8, uint16 or uint32), zero past each row's length.
        lengths: [rows] tokens in each row; 0 for an empty row.
        loss_mask: [rows, edge], or None when every token is a target.
        ids: int64 [rows] record numbers; -1 for an empty row.
    """

    @property
    def tokens(self) -> Tensor: ...

    @property
    def lengths(self) -> Tensor: ...

    @property
    def loss_mask(self) -> Tensor | None: ...

    @property
    def ids(self) -> Tensor: ...

    @property
    def epoch(self) -> int: ...

    def release(self) -> None: ...


class Feed(Protocol):
    """What the loop needs of a loader."""

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def info(self) -> object: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Order:
    """Which records come when: equal orders give equal batches from every loader and rank count."""

    global_batch: int
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None


def make_feed(dataset: lff.Dataset, section: LoaderSection, order: Order, world: World) -> Feed:
    """The feed chosen by ``loader.backend``, cut to this rank's rows.

    Raises:
        ConfigError: the loader cannot be had as configured (an engine that was asked for by name, memory).
    """
    try:
        return _make_feed(dataset, section, order, world)
    except (lfi.LoaderError, PoolError) as e:
        raise ConfigError("loader", str(e)) from e


def describe(feed: Feed) -> str:
    """One line about a feed: engine or workers, and why."""
    info = feed.info()
    if not isinstance(info, lfi.LoaderInfo):
        return str(info)
    engine = info.engine
    return f"{engine.name} ({engine.reason}), {engine.threads} thread(s), {info.slots} slots on {info.pages} pages"


def _make_feed(dataset: lff.Dataset, section: LoaderSection, order: Order, world: World) -> Feed:
    if section.backend == "torch":
        from lf_meta.feed_torch import TorchFeed

        return TorchFeed(dataset, section, order, world)
    return lfi.LoongDataLoader(
        dataset,
        global_batch=order.global_batch,
        seed=order.seed,
        shuffle=order.shuffle,
        epochs=order.epochs,
        rank=world.rank,
        world_size=world.size,
        engine=section.engine,
        num_workers=section.threads,
        prefetch_factor=section.prefetch,
    )


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without a host wait; the source may change as soon as this returns.

    From pageable memory cudaMemcpyAsync waits for the stream before it copies (CUDA runtime API, "API
    synchronization behavior"), so the few kilobytes go through page-locked memory of torch's host allocator,
    which keeps them until the copy is over. Other accelerators are waited for: whether theirs reads pageable memory
    before the call returns, and whether it has other memory, is not known here.
    """
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_micro_batches(batch: Batch, accum: int, device: torch.device) -> list[MicroBatch]:
    """Copy a batch to the device and cut its rows into ``accum`` micro-batches.

    Tokens travel in their stored width (1, 2 or 4 bytes) and become int64 on the device.
    """
    tokens = _to_device(batch.tokens, device).to(torch.int64)
    lengths = _to_device(batch.lengths, device)
    mask = None if batch.loss_mask is None else _to_device(batch.loss_mask, device).bool()
    rows = tokens.shape[0] // accum
    cuts = [slice(i * rows, (i + 1) * rows) for i in range(accum)]
    return [(tokens[c], lengths[c], None if mask is None else mask[c]) for c in cuts]
