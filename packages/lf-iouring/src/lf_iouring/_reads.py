"""Where the rows of consecutive batches lie on disk: plain arrays that every engine understands."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._errors import DataError
from ._permute import Ids

FIELDS = ("tokens", "loss_mask")  # in the order of the record hash


@dataclass(frozen=True, eq=False)
class Reads:
    """Extents of k batches of r rows, row after row.

    Attributes:
        ids: int64[k, r] record ids, -1 for an empty row.
        lengths: int64[k, r] tokens in each row.
        fd: int32[k * r] descriptor, -1 for an empty row.
        offset: uint64[f, k * r] byte in the file where field f of the row starts.
        nbytes: uint32[f, k * r] bytes of it.
        hash: uint32[k * r] record hash over the fields in order.
        items: uint32[k * r] tokens again, as the engines want them.
        paths: file of each descriptor.
        verify: whether hashes are checked.
    """

    ids: Ids
    lengths: Ids
    fd: npt.NDArray[np.int32]
    offset: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint32]
    hash: npt.NDArray[np.uint32]
    items: npt.NDArray[np.uint32]
    paths: dict[int, str]
    verify: bool

    @property
    def rows(self) -> int:
        """Rows of a batch."""
        return int(self.ids.shape[1])

    @property
    def fields(self) -> int:
        """Number of fields: 1, or 2 with a loss mask."""
        return len(self.offset)

    def error(self, batch: int, row: int, field: int, expected: str, found: str) -> DataError:
        """A DataError about one row of one batch."""
        at = batch * self.rows + row
        path = self.paths.get(int(self.fd[at]), "?")
        return DataError(path, int(self.ids[batch, row]), int(self.offset[field, at]), expected, found)


def locate(dataset: Any, ids: Ids, *, raw: bool, masked: bool, verify: bool) -> Reads:
    """Look up the extents of `ids` int64[k, r] in an lf-format data set.

    Data sets with coded blocks have no extents: everything but ids and lengths is then zero.
    """
    flat = ids.reshape(-1)
    filled = np.flatnonzero(flat >= 0)
    lengths = np.zeros(flat.shape, np.int64)
    lengths[filled] = dataset.lengths[flat[filled]]
    fields = FIELDS[: 2 if masked else 1]
    fd = np.full(flat.shape, -1, np.int32)
    offset = np.zeros((len(fields), flat.size), np.uint64)
    nbytes = np.zeros((len(fields), flat.size), np.uint32)
    hashes = np.zeros(flat.shape, np.uint32)
    paths: dict[int, str] = {}
    for reader, at, local in _by_shard(dataset, flat, filled) if raw else ():
        fd[at] = reader.fileno()
        paths[reader.fileno()] = str(reader.path)
        for i, field in enumerate(fields):
            extents = reader.extents(local, field)
            offset[i, at], nbytes[i, at], hashes[at] = extents.offset, extents.nbytes, extents.hash
    return Reads(
        ids=ids,
        lengths=lengths.reshape(ids.shape),
        fd=fd,
        offset=offset,
        nbytes=nbytes,
        hash=hashes,
        items=lengths.astype(np.uint32),
        paths=paths,
        verify=verify,
    )


def _by_shard(dataset: Any, flat: Ids, filled: Ids) -> Iterator[tuple[Any, Ids, Ids]]:
    """For each file with records among `flat[filled]`: its reader, their places, their ids in the file."""
    if len(dataset.readers) == 1:
        yield dataset.readers[0], filled, flat[filled]
        return
    shard, local = dataset.locate(flat[filled])
    for number in np.flatnonzero(np.bincount(shard)).tolist():
        chosen = shard == number
        yield dataset.readers[number], filled[chosen], local[chosen]
