"""Packing documents into rows of fixed length: a pure function of their lengths, and what follows from it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._compiled import ffi, lib
from ._errors import PlanError
from ._permute import Ids

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Packing:
    """Segments in rows, sorted by row and place; each is a piece of one document.

    Attributes:
        rows: number of rows.
        row, place: int64[s] where the segment starts.
        item: int64[s] index of its document.
        start, length: int64[s] which of the document's tokens it holds.
    """

    rows: int
    row: Ids
    place: Ids
    item: Ids
    start: Ids
    length: Ids

    def part(self, first: int, stop: int) -> "Packing":
        """Rows first .. stop - 1, counted from 0; those beyond the last row are empty."""
        low, high = np.searchsorted(self.row, (first, stop))
        cut = slice(int(low), int(high))
        return Packing(
            stop - first,
            self.row[cut] - first,
            self.place[cut],
            self.item[cut],
            self.start[cut],
            self.length[cut],
        )


@dataclass(frozen=True, eq=False)
class Borders:
    """What variable-length attention needs to know about packed rows; see PackedBatch."""

    cu_seqlens: npt.NDArray[np.int32]
    max_seqlen: int
    position_ids: npt.NDArray[np.int32]
    segment_ids: npt.NDArray[np.int32]
    lengths: Ids


@dataclass(frozen=True, eq=False)
class Varlen(Borders):
    """Borders, and uint8[rows, capacity] of 1 where something in the same segment leads to the token."""

    targets: npt.NDArray[np.uint8]


def pack(lengths: npt.ArrayLike, capacity: int, keys: Ids | None = None) -> Packing:
    """First-fit decreasing (Johnson, 1973): at most 11/9 of the fewest rows, plus 6/9 of one (Dosa, 2007).

    Documents longer than a row are cut into full rows and a rest. Empty ones take no place. Equal lengths are
    placed in the order of the documents. The time is O(documents x log rows) with the C module.

    Args:
        lengths: int[n] tokens of each document, >= 0.
        capacity: tokens of a row, >= 1.
        keys: int64[rows] sort keys for the rows in the order they were opened, which needs their number (see
            `first_fit`); None keeps the order of the documents as far as packing does. Full rows of a long
            document directly precede the row of its rest, so its tokens stay in order.

    Raises PlanError for a capacity below 1 or a negative length.
    """
    return arrange(*first_fit(lengths, capacity), keys)


def first_fit(lengths: npt.ArrayLike, capacity: int) -> tuple[Packing, npt.NDArray[np.bool_]]:
    """The packing in the order in which rows were opened; and which segments are the last of their document."""
    sizes = np.asarray(lengths).astype(np.int64)
    if capacity < 1 or (sizes.size and int(sizes.min()) < 0):
        raise PlanError(f"packing into rows of {capacity}: capacity must be >= 1 and no length negative")
    pieces = -(-sizes // capacity)
    item = np.repeat(np.arange(len(sizes)), pieces)
    number = np.arange(len(item)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = number * capacity
    length = np.minimum(capacity, sizes[item] - start)
    order = np.argsort(-length, kind="stable")
    row, rows = _rows(length[order], capacity)
    # back to segments by row, within a row as placed
    by_row = np.argsort(row, kind="stable")
    order, row = order[by_row], row[by_row]
    length = length[order]
    ends = np.cumsum(length)
    first = np.searchsorted(row, np.arange(rows))
    place = ends - length - (ends - length)[first][row] if rows else ends
    last = number[order] == pieces[item[order]] - 1
    return Packing(rows, row, place, item[order], start[order], length), last


def arrange(packing: Packing, last: npt.NDArray[np.bool_], keys: Ids | None) -> Packing:
    """Put the rows in the order of `keys` int64[rows], or of their documents; see `pack`."""
    rows, row, item = packing.rows, packing.row, packing.item
    key = np.full(rows, np.iinfo(np.int64).max) if keys is None else keys.astype(np.int64)
    if keys is None:
        np.minimum.at(key, row, item)
    # A piece that is not its document's last fills a row alone; that row follows the key of the last one's.
    home = np.zeros(int(item.max(initial=-1)) + 1, np.int64)
    home[item[last]] = row[last]
    part, place = np.ones(rows, np.int64), np.zeros(rows, np.int64)
    early = ~last
    part[row[early]] = 0
    place[row[early]] = packing.start[early]
    owner = np.zeros(rows, np.int64)
    owner[row[early]] = item[early]
    key[row[early]] = key[home[item[early]]]
    rank = np.empty(rows, np.int64)
    rank[np.lexsort((place, owner, part, key))] = np.arange(rows)
    order = np.argsort(rank[row], kind="stable")
    return Packing(
        rows, rank[row][order], packing.place[order], item[order], packing.start[order], packing.length[order]
    )


def varlen(packing: Packing, capacity: int) -> Varlen:
    """Boundaries, positions and masks of packed rows, over rows * capacity tokens."""
    total = packing.rows * capacity
    at = packing.row * capacity + packing.place
    used = np.bincount(packing.row, packing.length, packing.rows).astype(np.int64)
    pad = (np.arange(packing.rows) * capacity + used)[used < capacity]
    cuts = np.unique(np.concatenate((at, pad, [total])))
    real = np.arange(capacity) < used[:, None]
    sizes = np.diff(cuts)
    position = np.arange(total) - np.repeat(cuts[:-1], sizes)
    starts = np.zeros(total, np.int32)
    starts[at] = 1
    segment = np.cumsum(starts.reshape(packing.rows, capacity), axis=1, dtype=np.int32)
    position = np.where(real, position.reshape(packing.rows, capacity), 0)
    return Varlen(
        cuts.astype(np.int32),
        int(sizes.max(initial=0)),
        position.astype(np.int32),
        np.where(real, segment, 0).astype(np.int32),
        used,
        (position > 0).astype(np.uint8),
    )


def _rows(lengths: Ids, capacity: int) -> tuple[Ids, int]:
    """The row of each length by first fit, int64 like `lengths`, which descend; and the number of rows."""
    if lib is None:
        return rows_by_length(lengths, capacity)
    row = np.empty(len(lengths), np.int64)
    sizes = ffi.from_buffer("int64_t[]", np.ascontiguousarray(lengths))
    rows = lib.lf_first_fit(sizes, len(lengths), capacity, ffi.from_buffer("int64_t[]", row))
    if rows < 0:
        raise MemoryError(f"packing {len(lengths)} documents")
    return row, int(rows)


def rows_by_length(lengths: Ids, capacity: int) -> tuple[Ids, int]:
    """The same without the C module, in O(distinct lengths x rows).

    Equal lengths fill the first row that has room until it has none, then the next: their counts a row follow
    from the room alone.
    """
    row = np.empty(len(lengths), np.int64)
    room = np.empty(len(lengths), np.int64)
    rows = done = 0
    values, counts = np.unique(-lengths, return_counts=True)
    for length, count in zip((-values).tolist(), counts.tolist(), strict=True):
        # each of these rows takes at least one, so no more than `count` are needed
        open_rows = np.flatnonzero(room[:rows] >= length)[:count]
        fits = room[open_rows] // length
        taken = np.clip(count - (np.cumsum(fits) - fits), 0, fits)
        left = count - int(taken.sum())
        room[open_rows] -= taken * length
        each = capacity // length
        opened = -(-left // each)
        fresh = np.full(opened, each)
        if opened:
            fresh[-1] = left - (opened - 1) * each
        room[rows : rows + opened] = capacity - fresh * length
        chosen = np.concatenate((open_rows, np.arange(rows, rows + opened)))
        row[done : done + count] = np.repeat(chosen, np.concatenate((taken, fresh)))
        rows += opened
        done += count
    return row, rows
