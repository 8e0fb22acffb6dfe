"""Which extents a part of a tensor needs, and where their elements go. The tensors of a rank are such parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .accelerators import queues
from .boxes import Box, boxes_of_range, intersect, relative
from .dtypes import ITEM_SIZE
from .format import Extent
from .local import Window
from .manifest import Shard, TensorEntry
from .reader import OpenFile, StepReader


class Needed(NamedTuple):
    """What a window needs of one shard: the box that both have, and the extents that hold an element of it."""

    shard: Shard
    shared: Box
    extents: list[tuple[OpenFile, int, Extent]]


def needed(reader: StepReader, entry: TensorEntry, box: Box) -> Iterator[Needed]:
    """The extents that hold an element of `box`, shard by shard; others need not be read."""
    itemsize = ITEM_SIZE[entry.dtype]
    for shard in entry.shards:
        shared = intersect(shard.box, box)
        if shared is None:
            continue
        extents = list(reader.extents_of(shard.placed))
        if shared != shard.box:
            inside = relative(shared, shard.box.offsets)
            extents = [found for found in extents if _touches(shard.box, found[2], itemsize, inside)]
        yield Needed(shard, shared, extents)


def scatter(shard: Box, window: Window, flat: torch.Tensor, begin: int) -> None:
    """Copy elements `begin .. begin + len(flat)` of a shard into those places of a window that they have.

    flat: (n,) contiguous on the host; to a device with streams copies are queued: it must keep its bytes until then.
    """
    for at, box in boxes_of_range(shard.shape, begin, begin + flat.numel()):
        placed = Box(tuple(o + z for o, z in zip(box.offsets, shard.offsets, strict=True)), box.shape)
        shared = intersect(placed, window.box)
        if shared is not None:
            source = flat[at - begin : at - begin + box.volume].view(box.shape)
            part_of(window.local, relative(shared, window.box.offsets)).copy_(
                part_of(source, relative(shared, placed.offsets)),
                non_blocking=queues(window.local.device),
            )


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of a box, sharing memory."""
    for dim, (at, length) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, at, length)
    return tensor


def _touches(shard: Box, extent: Extent, itemsize: int, inside: Box) -> bool:
    begin, end = extent.start // itemsize, (extent.start + extent.raw_bytes) // itemsize
    return any(intersect(box, inside) is not None for _, box in boxes_of_range(shard.shape, begin, end))
