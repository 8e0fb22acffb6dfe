"""What of a tensor lives in this process: all of a plain one, a box of a DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from .boxes import Box, whole
from .errors import UnsupportedError


class Window(NamedTuple):
    """A part of a tensor in memory: plain local elements and the box of the whole tensor that they are."""

    local: torch.Tensor
    box: Box


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
    if tensor.numel() == 0:
        box = whole(tensor.shape)  # every part of nothing is all of it
    if tensor.numel() and tuple(local.shape) != box.shape:
        raise UnsupportedError(
            f"{name}: a local shard of shape {list(local.shape)} where {box.shape} belongs; pass full_tensor()"
        )
    return Window(local, box)


def require_memory(name: str, tensor: torch.Tensor) -> None:
    """UnsupportedError for a tensor that no value can be read into: none is kept, or one place stands for several."""
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"{name}: {tensor.layout} tensors cannot be filled in place; load it fresh")
    if tensor.is_meta:
        raise UnsupportedError(
            f"{name}: is on the meta device and keeps no values; call to_empty(device=...) first"
        )
    spread = zip(tensor.shape, tensor.stride(), strict=True)
    if tensor.numel() and any(length > 1 and stride == 0 for length, stride in spread):
        raise UnsupportedError(f"{name}: is expanded, so that elements share memory; clone() it first")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor; asked through the protocol of torch.distributed.checkpoint, which imports nothing."""
    return hasattr(tensor, "__create_chunk_list__")


def batches(places: Sequence[torch.Tensor]) -> list[range]:
    """Cut a sequence of plain tensors so that two of one batch share no memory: they may be filled at the same time.

    Those that share (tied here, saved apart) stay in order, so that the last one's values are kept and no mixture.
    Interleaved strides count as shared.
    """
    starts = {0}
    reach, widest = ("", 0), 0  # where the memory seen so far ends, and whose end that is
    spans = sorted((*_span(place), number) for number, place in enumerate(places) if place.numel())
    for device, begin, end, number in spans:
        if (device, begin) < reach:
            starts |= {widest, number}
        if (device, end) > reach:
            reach, widest = (device, end), number
    edges = [*sorted(starts), len(places)]
    return [range(begin, end) for begin, end in pairwise(edges) if begin < end]


def _span(place: torch.Tensor) -> tuple[str, int, int]:
    """(device, first address, address after the last byte)."""
    last = sum((length - 1) * stride for length, stride in zip(place.shape, place.stride(), strict=True))
    begin = place.data_ptr()
    return str(place.device), begin, begin + (last + 1) * place.element_size()
