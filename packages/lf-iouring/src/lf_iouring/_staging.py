"""What a packed window reads for one rank: records in groups of like length, and where each segment lies there.

Pure: computed from the packed window and the index of the data set, all batches of the window at once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._layout import SlotLayout
from ._permute import Ids
from ._reads import Reads, locate
from .pack_window import PackedWindow

# A batch's records are staged in groups, padded to lengths that differ by this factor.
_STEP = 4
MAX_GROUPS = 5
# Bytes of padding a batch below which a group is not worth its own request to the engine: clearing them takes
# a few microseconds, a request some ten.
_CHEAP = 1 << 16


@dataclass(frozen=True, eq=False)
class Group:
    """Records of like length: batch b of the window reads row b of `reads.records`, padded to `edge` tokens."""

    edge: int
    reads: Reads
    used: npt.NDArray[np.bool_]  # [batches] whether the batch has any of them


@dataclass(frozen=True, eq=False)
class Staged:
    """A rank's part of a packed window; segments by batch, row and place.

    Attributes:
        epoch: of the window.
        cuts: int64[batches + 1] segments before each batch.
        ids: int64[s] record of each segment.
        row, place, length: int64[s] row of the rank, where in it, and tokens.
        group: int32[s] number of the group its record is in.
        at: int64[s] token in the group's staging memory where it starts.
        tokens: int64[batches] tokens of each batch.
        groups: at most MAX_GROUPS.
    """

    epoch: int
    cuts: Ids
    ids: Ids
    row: Ids
    place: Ids
    length: Ids
    group: npt.NDArray[np.int32]
    at: Ids
    tokens: Ids
    groups: tuple[Group, ...]


def stage(
    dataset: Any, layout: SlotLayout, window: PackedWindow, epoch: int, rows: slice, global_batch: int, *, verify: bool
) -> Staged:  # fmt: skip
    """Where the rank with `rows` of every batch finds what its rows hold.

    Args:
        layout: of all fields of the data set.
        verify: whether hashes are checked.
    """
    packing = window.packing
    batch, row = np.divmod(packing.row, global_batch)
    mine = np.flatnonzero((row >= rows.start) & (row < rows.stop))
    batch, row, length = batch[mine], row[mine] - rows.start, packing.length[mine]
    ids = window.ids[packing.item[mine]]
    # a record that several rows of a batch hold parts of is read once
    keys, which = np.unique(batch * len(dataset) + ids, return_inverse=True)
    reading, records = np.divmod(keys, len(dataset))
    sizes = dataset.lengths[records].astype(np.int64)
    edges = group_edges(sizes, window.batches, sum(value.step_bytes for value in layout.values))
    kind = np.searchsorted(edges, sizes)
    place = _places(kind, reading)
    groups = tuple(
        _group(dataset, layout, edge, kind == number, reading, place, records, window.batches, verify)
        for number, edge in enumerate(edges)
    )
    return Staged(
        epoch=epoch,
        cuts=np.searchsorted(batch, np.arange(window.batches + 1)),
        ids=ids,
        row=row,
        place=packing.place[mine],
        length=length,
        group=kind[which].astype(np.int32),
        at=place[which] * np.array(edges)[kind[which]] + packing.start[mine],
        tokens=np.bincount(batch, length, window.batches).astype(np.int64),
        groups=groups,
    )


def group_edges(sizes: Ids, batches: int, itemsize: int) -> list[int]:
    """Ascending padded lengths of at most MAX_GROUPS groups for records of `sizes` int64[n] tokens.

    The last is the longest record; a shorter one exists where it saves each of the `batches` enough padding.
    """
    edges = [int(sizes.max(initial=1))]
    for _ in range(MAX_GROUPS - 1):
        edge = -(-edges[0] // _STEP)
        saved = int(np.count_nonzero(sizes <= edge)) * (edges[0] - edge) * itemsize
        if saved < _CHEAP * batches or edge == edges[0]:
            break
        edges.insert(0, edge)
    return edges


def _places(kind: Ids, batch: Ids) -> Ids:
    """The number of each record among those of the same kind and batch, int64[n]."""
    order = np.lexsort((batch, kind))
    new = np.flatnonzero(np.diff(kind[order], prepend=-1) | np.diff(batch[order], prepend=-1))
    counts = np.diff(new, append=len(order))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) - np.repeat(new, counts)
    return place


def _group(
    dataset: Any, layout: SlotLayout, edge: int, chosen: npt.NDArray[np.bool_], batch: Ids, place: Ids,
    records: Ids, batches: int, verify: bool,
) -> Group:  # fmt: skip
    batch, place = batch[chosen], place[chosen]
    ids = np.full((batches, int(place.max(initial=-1)) + 1), -1, np.int64)
    ids[batch, place] = records[chosen]
    reads = locate(dataset, layout, ids, np.full(batches, edge), verify=verify)
    return Group(edge, reads, np.bincount(batch, minlength=batches) > 0)
