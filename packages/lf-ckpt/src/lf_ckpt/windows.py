"""Which extents a part of a tensor needs, and where their elements go. The tensors of a rank are such parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from .boxes import Box, boxes_of_range, intersect, relative, whole
from .dtypes import ITEM_SIZE
from .errors import UnsupportedError
from .format import Extent
from .manifest import Shard, TensorEntry
from .reader import OpenFile, StepReader


class Window(NamedTuple):
    """A part of a tensor in memory: plain local elements and the box of the whole tensor that they are."""

    local: torch.Tensor
    box: Box


class Needed(NamedTuple):
    """What a window needs of one shard: the box that both have, and the extents that hold an element of it."""

    shard: Shard
    shared: Box
    extents: list[tuple[OpenFile, int, Extent]]


def window_of(name: str, tensor: torch.Tensor) -> Window:
    """The elements of `tensor` that live here: all of a plain one, the local shard of a DTensor.

    UnsupportedError for a DTensor whose local elements are no box of it, such as one with partial sums.
    """
    if not is_sharded(tensor):
        return Window(tensor.detach(), whole(tensor.shape))
    if any(placement.is_partial() for placement in tensor.placements):  # type: ignore[attr-defined]
        fix = "redistribute it to Replicate() or Shard() first, which adds the partial sums up"
        raise UnsupportedError(f"{name}: a DTensor with a Partial placement has no values yet; {fix}")
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    local = tensor.detach().to_local()  # type: ignore[attr-defined]
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    if tuple(local.shape) != box.shape:
        raise UnsupportedError(
            f"{name}: a local shard of shape {list(local.shape)} where {box.shape} belongs; pass full_tensor()"
        )
    return Window(local, box)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor; asked through the protocol of torch.distributed.checkpoint, which imports nothing."""
    return hasattr(tensor, "__create_chunk_list__")


def windows_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Window]:
    """`window_of` by name."""
    return {name: window_of(name, tensor) for name, tensor in tensors.items()}


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

    flat: (n,) contiguous on the host; to a CUDA device the copies are queued, so it must keep its bytes until then.
    """
    for at, box in boxes_of_range(shard.shape, begin, begin + flat.numel()):
        placed = Box(tuple(o + z for o, z in zip(box.offsets, shard.offsets, strict=True)), box.shape)
        shared = intersect(placed, window.box)
        if shared is not None:
            source = flat[at - begin : at - begin + box.volume].view(box.shape)
            part_of(window.local, relative(shared, window.box.offsets)).copy_(
                part_of(source, relative(shared, placed.offsets)),
                non_blocking=window.local.device.type == "cuda",
            )


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of a box, sharing memory."""
    for dim, (at, length) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, at, length)
    return tensor


def _touches(shard: Box, extent: Extent, itemsize: int, inside: Box) -> bool:
    begin, end = extent.start // itemsize, (extent.start + extent.raw_bytes) // itemsize
    return any(intersect(box, inside) is not None for _, box in boxes_of_range(shard.shape, begin, end))
