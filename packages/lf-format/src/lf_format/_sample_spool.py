"""Samples on disk between decoding and writing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

from lf_format._errors import FormatError
from lf_format._fields import Field
from lf_format._index import plane_maps
from lf_format._journal import PARTS
from lf_format._reader import Reader
from lf_format._verify import verify
from lf_format._writer import Writer

BLOCK_BYTES = 1 << 20  # blocks of a part are raw and read once, in order


@dataclass(frozen=True)
class StoredSample:
    """A sample as a file holds it.

    Attributes:
        parts: bytes of every field, views of a block.
        length, flags: as in the index.
        counts: steps of the fields with a column of them.
    """

    parts: Sequence[memoryview]
    length: int
    flags: int
    counts: Sequence[int]


class SampleSpool:
    """Append-only samples in .lfg files of a folder, one a part, raw and in the order in which they came.

    Args:
        folder: where the parts lie; `take_up` finds those of an earlier run.
        fields: of every sample.
        options: of the Writer of a part, for token ids: vocab_size, tokenizer, and one bucket, which keeps the order.
    """

    def __init__(self, folder: Path, fields: Sequence[Field], **options: Any) -> None:
        self._folder = folder
        self._options = {"fields": fields, "block_bytes": BLOCK_BYTES, **options}
        self._parts: list[Path] = []
        self._records = self._bytes = 0
        self._digest = ""
        self._open: Writer | None = None
        self.tokens = 0  # ids of all complete parts

    def __len__(self) -> int:
        """Samples of all complete parts."""
        return self._records

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, of the open one its whole blocks."""
        return self._bytes + (0 if self._open is None else self._open.nbytes)

    @property
    def writer(self) -> Writer:
        """Takes samples for the part that `sync` ends."""
        if self._open is None:
            self._open = Writer(self._next(), **self._options)
        return self._open

    def sync(self) -> None:
        """Ends the part: it is complete and durable."""
        self._digest = ""
        if self._open is not None:
            path, report = self._next(), self._open.close()
            self._open = None
            self._digest = report.fingerprint
            self._count(path, report.records, report.tokens)

    def digest(self) -> str:
        """Hash of the part that was ended last; empty when it has no sample."""
        return self._digest

    def take_up(self, samples: int, digest: str) -> bool:
        """Counts in the next part of an earlier run, which makes `samples` in all.

        Returns:
            False, and nothing is counted in, when it is missing, damaged or another one.
        """
        if samples == len(self) and not digest:
            return True
        path = self._next()
        try:
            if not verify(path).ok:
                return False
            with Reader(path) as reader:
                if (reader.fingerprint, len(self) + len(reader)) != (digest, samples):
                    return False
                records, tokens = len(reader), int(reader.lengths.sum())
        except (FormatError, OSError):
            return False
        self._count(path, records, tokens)
        return True

    def _next(self) -> Path:
        return self._folder / f"{len(self._parts):06}.lfg"

    def _count(self, path: Path, records: int, tokens: int) -> None:
        self._parts.append(path)
        self._records += records
        self.tokens += tokens
        self._bytes += path.stat().st_size

    def cut(self) -> None:
        """Removes whatever the folder holds beyond the list of parts and the parts that are counted in."""
        known = {PARTS, *(path.name for path in self._parts)}
        for path in self._folder.iterdir():
            if path.name not in known:
                path.unlink()

    def samples(self) -> Iterator[StoredSample]:
        """Of all complete parts, in order; the hash of their block is checked."""
        for path in self._parts:
            with Reader(path) as reader:
                yield from _samples(reader)

    def close(self) -> None:
        """Drops the open part."""
        if self._open is not None:
            with contextlib.suppress(OSError):
                self._open.abort()


def _samples(reader: Reader) -> Iterator[StoredSample]:
    """Samples of a file, block by block, cut without decoding or copying their values."""
    index, schema = reader.opened.index, reader.opened.schema
    bounds = index.first_records()
    counts = index.counts_of(schema)
    planes, _ = plane_maps(reader.fields, counts, bounds)
    counted = [counts[schema.fields.index(field)] for field in schema.counted]
    for block, (first, end) in enumerate(pairwise(bounds.tolist())):
        payload = memoryview(reader.block_payload(block))
        rows = slice(first, end)
        values = []
        for plane in planes:
            starts = plane.within[first : end + 1] - plane.within[first] + plane.plane[block]
            values.append([payload[a:b] for a, b in pairwise(starts.tolist())])
        steps = zip(*(column[rows].tolist() for column in counted), strict=True) if counted else repeat(())
        parts = zip(*values, strict=True)
        yield from map(StoredSample, parts, reader.lengths[rows].tolist(), reader.flags[rows].tolist(), steps)
