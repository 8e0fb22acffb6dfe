"""Where the rows of consecutive batches lie on disk and in their slots: plain arrays that every engine reads."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._errors import DataError
from ._layout import Places, SlotLayout
from ._permute import Ids

# of csrc/lf_native.cdef
BLOCK = np.dtype(
    [
        ("offset", "<u8"), ("hash", "<u8"), ("raw", "<u8"), ("stored", "<u4"), ("fd", "<i4"),
        ("codec", "<u4"), ("coding", "<u4"), ("ids", "<u4"), ("reserved", "<u4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Reads:
    """Extents of k batches of r records; n = k * r.

    Attributes:
        records: int64[k, r] record ids, -1 for an empty one.
        fd: int32[n] descriptor, -1 for an empty record.
        block: int32[n] place in `blocks`, -1 for a record in a raw block.
        hash: uint32[n] record hash over all fields in order.
        offset: uint64[fields, n] byte where the field starts, in the file or in the decoded payload.
        nbytes: uint32[fields, n] bytes of it as stored.
        items: uint32[fields, n] values of it.
        kinds: uint8[fields] see SlotLayout.
        places: where it all goes.
        blocks: BLOCK[b] coded blocks.
        paths: file of each descriptor.
        verify: whether hashes are checked.
    """

    records: Ids
    fd: npt.NDArray[np.int32]
    block: npt.NDArray[np.int32]
    hash: npt.NDArray[np.uint32]
    offset: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint32]
    items: npt.NDArray[np.uint32]
    kinds: npt.NDArray[np.uint8]
    places: Places
    blocks: npt.NDArray[Any]
    paths: dict[int, str]
    verify: bool

    @property
    def rows(self) -> int:
        """Records of a batch."""
        return int(self.records.shape[1])

    @property
    def fields(self) -> int:
        """Number of stored fields."""
        return len(self.offset)

    def error(self, batch: int, row: int, field: int, expected: str, found: str) -> DataError:
        """A DataError about one record of one batch."""
        at = batch * self.rows + row
        block = int(self.block[at])
        offset = self.blocks["offset"][block] if block >= 0 else self.offset[field, at]
        path = self.paths.get(int(self.fd[at]), "?")
        return DataError(path, int(self.records[batch, row]), int(offset), expected, found)


def locate(dataset: Any, layout: SlotLayout, ids: Ids, edges: Ids, *, verify: bool) -> Reads:
    """Look up k batches of r rows in an lf-format data set.

    Args:
        ids: int64[k, r] records, -1 for an empty row.
        edges: int64[k] length that token ids are padded to.
    """
    records = layout.records(ids)
    flat = records.reshape(-1)
    fields, n = len(dataset.fields), flat.size
    fd = np.full(n, -1, np.int32)
    block = np.full(n, -1, np.int32)
    hashes = np.zeros(n, np.uint32)
    offset = np.zeros((fields, n), np.uint64)
    nbytes, counts = np.zeros((fields, n), np.uint32), np.zeros((fields, n), np.uint32)
    paths: dict[int, str] = {}
    tables: list[Any] = []
    for reader, at, local in _by_file(dataset, flat):
        found = reader.locations(local)
        number = reader.fileno()
        paths[number] = str(reader.path)
        fd[at], hashes[at] = number, found.hash
        offset[:, at], nbytes[:, at], counts[:, at] = found.start, found.nbytes, found.counts
        if reader.codecs_raw:
            offset[:, at] += found.payload
            continue
        coded = reader.opened.index.block_codec[found.block] != 0
        offset[:, at[~coded]] += found.payload[~coded]
        used, place = np.unique(found.block[coded], return_inverse=True)
        block[at[coded]] = place + sum(map(len, tables))
        tables.append(_table(reader, used, layout.first_coding[number]))
    items = layout.items(counts)
    places = layout.places(edges, ids.shape[1], counts)
    blocks = np.concatenate(tables) if tables else np.zeros(0, BLOCK)
    return Reads(
        records, fd, block, hashes, offset, nbytes, items, layout.kinds, places, blocks, paths, verify
    )


def _by_file(dataset: Any, flat: Ids) -> Iterator[tuple[Any, Ids, Ids]]:
    """For each file with records among `flat`: its reader, their places, their ids in the file."""
    filled = np.flatnonzero(flat >= 0)
    if len(dataset.readers) == 1:
        yield dataset.readers[0], filled, flat[filled]
        return
    shard, local = dataset.locate(flat[filled])
    for number in np.flatnonzero(np.bincount(shard)).tolist():
        chosen = shard == number
        yield dataset.readers[number], filled[chosen], local[chosen]


def _table(reader: Any, numbers: Ids, first_coding: int) -> npt.NDArray[Any]:
    """Rows of BLOCK for some coded blocks of one file."""
    blocks = reader.blocks(numbers)
    table = np.zeros(len(numbers), BLOCK)
    for name in ("hash", "raw", "stored", "codec", "ids"):
        table[name] = getattr(blocks, name)
    table["offset"], table["fd"] = blocks.payload, reader.fileno()
    table["coding"] = first_coding + blocks.dictionary
    return table
