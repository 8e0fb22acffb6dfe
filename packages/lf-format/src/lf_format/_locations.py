"""Where the fields of records lie, for engines that read and decode on their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format import _layout as lay
from lf_format._index import Index, PlaneMap

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Extents:
    """Where field bytes of records lie in the file.

    Attributes:
        offset: byte offset, uint64[n].
        nbytes: bytes of the field, uint32[n].
        hash: record hash (over all fields of the record, see SPEC.md section 5.4), uint32[n].
    """

    offset: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint32]
    hash: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Locations:
    """Places of n records with f fields, in schema order.

    Attributes:
        block: number of the block that holds the record, int64[n].
        payload: where that block's stored payload begins in the file, uint64[n].
        hash: record hash over all fields (SPEC.md section 5.4), uint32[n].
        start: where the field begins in the decoded payload, uint64[f, n]; in a raw block that is `payload` + start
            in the file.
        nbytes: bytes of the field, uint32[f, n].
        counts: steps of the field's first axis, uint32[f, n]; for a field of a fixed shape it means nothing.
    """

    block: npt.NDArray[np.int64]
    payload: npt.NDArray[np.uint64]
    hash: npt.NDArray[np.uint32]
    start: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Blocks:
    """Some blocks of a file, as their headers and the index describe them.

    Attributes:
        payload: where the stored payload begins in the file, uint64[b].
        stored, raw: bytes of it, and decoded, uint64[b].
        hash: of the stored payload, uint64[b].
        codec: 0 raw, 1 zstd, 2 packed ids, 3 ranks and zstd, uint8[b].
        dictionary: number of the dictionary, 0 = none, uint32[b]; index into `Reader.codings()`.
        ids: token ids of a .loongbin block, which come first in the payload, uint32[b].
    """

    payload: npt.NDArray[np.uint64]
    stored: npt.NDArray[np.uint64]
    raw: npt.NDArray[np.uint64]
    hash: npt.NDArray[np.uint64]
    codec: npt.NDArray[np.uint8]
    dictionary: npt.NDArray[np.uint32]
    ids: npt.NDArray[np.uint32]


def find(
    rows: npt.NDArray[np.int64], index: Index, first: Array, maps: Sequence[PlaneMap], counts: Sequence[Array]
) -> Locations:
    """Locations of the records `rows`, which exist.

    Args:
        first: record at which each block starts, int64[blocks + 1].
        maps, counts: of every field.
    """
    block = np.searchsorted(first, rows, "right") - 1
    lead = first[block]
    start = np.empty((len(maps), len(rows)), np.uint64)
    nbytes = np.empty((len(maps), len(rows)), np.uint32)
    steps = np.empty((len(maps), len(rows)), np.uint32)
    for k, (plane, count) in enumerate(zip(maps, counts, strict=True)):
        before = plane.within[rows]
        start[k] = plane.plane[block] + before - plane.within[lead]
        nbytes[k] = plane.within[rows + 1] - before
        steps[k] = count[rows]
    payload = index.block_offset[block] + np.uint64(lay.BLOCK_HEADER_SIZE)
    return Locations(block, payload, index.hashes[rows], start, nbytes, steps)
