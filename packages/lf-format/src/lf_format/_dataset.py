"""Several files read as one data set."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from lf_format._errors import FormatError
from lf_format._index import cumulative
from lf_format._layout import xxh3
from lf_format._reader import Reader
from lf_format._records import Record

Source = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
Array = npt.NDArray[Any]


class Dataset:
    """Shards in a fixed order; record ids count through them. Threads, fork and pickling as for Reader.

    Attributes:
        readers: one Reader per shard.
        buckets, vocab_size, tokenizer, fields, token_dtype: common to all shards.
        meta: of the first shard (.lfg).
        fingerprint: 16 hex digits over the shards' fingerprints in order.

    Raises:
        FormatError: naming both files when shards disagree.
    """

    def __init__(self, readers: list[Reader]) -> None:
        if not readers:
            raise FormatError("a data set needs at least one file", expected=">= 1", found=0)
        self.readers = tuple(readers)
        first = self.readers[0]
        for other in self.readers[1:]:
            _check_same(first, other)
        self.buckets, self.vocab_size, self.tokenizer = first.buckets, first.vocab_size, first.tokenizer
        self.fields, self.token_dtype, self.meta = first.fields, first.token_dtype, first.meta
        digests = b"".join(int(r.fingerprint, 16).to_bytes(8, "little") for r in self.readers)
        self.fingerprint = f"{xxh3(digests):016x}"
        self._first = cumulative(np.array([len(r) for r in self.readers], np.int64))

    def __len__(self) -> int:
        return int(self._first[-1])

    @cached_property
    def lengths(self) -> npt.NDArray[np.uint32]:
        """Tokens per record, uint32[n], read-only."""
        return _joined([r.lengths for r in self.readers])

    @cached_property
    def bucket_of(self) -> Array:
        """Index into `buckets` per record, uint8[n] or uint16[n], read-only."""
        return _joined([r.bucket_of for r in self.readers])

    @cached_property
    def flags(self) -> npt.NDArray[np.uint8]:
        """Bit 0 starts, bit 1 ends a document, uint8[n], read-only."""
        return _joined([r.flags for r in self.readers])

    def record(self, i: int) -> Record:
        """Record `i` of the whole set, checked; IndexError or FormatError as Reader.record."""
        if not 0 <= i < len(self):
            raise IndexError(f"record {i} of {len(self)}")
        shard = int(np.searchsorted(self._first, i, "right")) - 1
        return self.readers[shard].record(i - int(self._first[shard]))

    def locate(self, ids: object) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Where global ids (integers, shape [n]) lie: (shard int32[n], record id in that shard int64[n]).

        Raises:
            FormatError: for ids that are not integers. IndexError: for ids outside 0..len-1.
        """
        rows = np.atleast_1d(np.asarray(ids))
        if rows.size == 0:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        if rows.dtype.kind not in "iu" or rows.ndim != 1:
            raise FormatError(
                "record ids", expected="integers of shape [n]", found=f"{rows.dtype} {rows.shape}"
            )
        if int(rows.min()) < 0 or int(rows.max()) >= len(self):
            raise IndexError(f"record ids must be in 0..{len(self) - 1}")
        wide = rows.astype(np.int64)
        shard = np.searchsorted(self._first, wide, "right") - 1
        return shard.astype(np.int32), wide - self._first[shard]

    def longest(self, field: str) -> int:
        """See Reader.longest; over all shards."""
        return max(reader.longest(field) for reader in self.readers)

    def max_id(self) -> int:
        """Largest token id present, -1 when there is no record; O(blocks)."""
        return max(r.max_id() for r in self.readers)

    def check_vocab(self, vocab_size: int) -> None:
        """FormatError naming file, record and id of the first id >= `vocab_size`."""
        for reader in self.readers:
            reader.check_vocab(vocab_size)

    def close(self) -> None:
        """Closes every shard."""
        for reader in self.readers:
            reader.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset, (list(self.readers),)


def _joined(parts: list[Array]) -> Array:
    out = parts[0] if len(parts) == 1 else np.concatenate(parts)
    out.flags.writeable = False
    return out


def _check_same(first: Reader, other: Reader) -> None:
    for name in ("vocab_size", "tokenizer", "fields", "buckets"):
        a, b = getattr(first, name), getattr(other, name)
        if a != b:
            raise FormatError(
                f"{name} differs from that of {first.path}", path=other.path, expected=a, found=b
            )


def open_dataset(source: Source, split: str | None = None) -> Dataset:
    """Opens a file, a directory (its *.loongbin and *.lfg sorted by name) or a list of files as one Dataset.

    Args:
        source: path or paths.
        split: with a directory, only the files `SPLIT.loongbin` and `SPLIT-*.loongbin`. Needed when it holds
            both train and eval files: reading held-out data as training data would be a silent fault.

    Raises:
        FormatError: nothing to open, an ambiguous directory, or shards that disagree.
    """
    paths = shard_paths(source, split)
    readers: list[Reader] = []
    try:
        readers.extend(Reader(path) for path in paths)
        return Dataset(readers)
    except BaseException:
        for reader in readers:
            reader.close()
        raise


def shard_paths(source: Source, split: str | None = None) -> list[Path]:
    """The files that `open_dataset` would open, in order."""
    if not isinstance(source, (str, os.PathLike)):
        return [Path(p) for p in source]
    path = Path(source)
    if not path.is_dir():
        return [path]
    found = sorted(
        p for p in path.iterdir() if p.suffix in (".loongbin", ".lfg") and not p.name.startswith(".")
    )
    splits = sorted({p.stem.split("-")[0] for p in found} & {"train", "eval"})
    if split is not None:
        found = [p for p in found if p.stem.split("-")[0] == split]
    elif len(splits) > 1:
        raise FormatError(
            "directory holds train and eval data; name a file or pass split=", path=path, found=splits
        )
    if not found:
        raise FormatError(
            "no .loongbin or .lfg file in this directory", path=path, expected=split or "*.loongbin", found=0
        )
    return found
