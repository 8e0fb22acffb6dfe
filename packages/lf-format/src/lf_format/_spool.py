"""Tokenized documents on disk between tokenizing and writing."""

from __future__ import annotations

import contextlib
import os
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from lf_format._open import read_exact

_CHUNK = 1 << 20
Array = npt.NDArray[Any]


class Spool:
    """Append-only documents in two files of a folder, their values and their lengths; 8 bytes of memory each.

    Args:
        folder: where `values` and `lengths` lie; opened as they are, empty when new.
        dtype: dtype of the ids.
        loss_mask: whether every document comes with a bool mask.
    """

    def __init__(self, folder: Path, dtype: np.dtype[Any], loss_mask: bool) -> None:
        self._dtype, self._loss_mask = dtype, loss_mask
        self._values = (folder / "values").open("a+b")
        self._sizes = (folder / "lengths").open("a+b")
        self._ends = array("Q", [0])
        self._digest = xxhash.xxh3_64()

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def tokens(self) -> int:
        """Ids of all documents."""
        return self._ends[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of ids and masks of all documents."""
        return self._ends[-1] * (self._dtype.itemsize + self._loss_mask)

    def add(self, ids: Array, mask: Array | None) -> None:
        """Stores one document: ids of the spool's dtype, shape [n], and bool[n] when it has masks."""
        for part in (ids,) if mask is None else (ids, mask):
            raw = part.tobytes()
            self._values.write(raw)
            self._digest.update(raw)
        self._sizes.write(len(ids).to_bytes(8, "little"))
        self._ends.append(self._ends[-1] + len(ids))

    def digest(self) -> str:
        """Hash of everything added since this was asked last."""
        found, self._digest = self._digest.hexdigest(), xxhash.xxh3_64()
        return found

    def sync(self) -> None:
        """Makes the documents durable."""
        for file in (self._values, self._sizes):
            file.flush()
            os.fsync(file.fileno())

    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document, int64[documents]."""
        ends = np.array(self._ends, np.int64)
        return ends[1:] - ends[:-1]

    def get(self, i: int) -> tuple[Array, Array | None]:
        """Document `i` as it was added."""
        self._values.flush()
        start, length = self._ends[i], self._ends[i + 1] - self._ends[i]
        width = self._dtype.itemsize + self._loss_mask
        raw = read_exact(self._values.fileno(), length * width, start * width, "spool")
        ids = np.frombuffer(raw, self._dtype, length)
        return ids, np.frombuffer(raw, bool, length, ids.nbytes) if self._loss_mask else None

    def take_up(self, documents: int, digest: str) -> bool:
        """Counts in the next documents that lie in the files already, up to `documents` in all.

        Returns:
            False, and nothing is counted in, when their hash is not `digest`.
        """
        wanted = 8 * (documents - len(self))
        raw = os.pread(self._sizes.fileno(), wanted, 8 * len(self))
        ends = self._ends[-1] + np.cumsum(np.frombuffer(raw[: len(raw) // 8 * 8], "<u8"), dtype=np.uint64)
        width = self._dtype.itemsize + self._loss_mask
        end = int(ends[-1]) * width if len(ends) else self.nbytes
        whole = len(raw) == wanted and end <= os.fstat(self._values.fileno()).st_size
        if not whole or self._hash(self.nbytes, end) != digest:
            return False
        self._ends.extend(ends.tolist())
        return True

    def _hash(self, start: int, end: int) -> str:
        state = xxhash.xxh3_64()
        for at in range(start, end, _CHUNK):
            state.update(os.pread(self._values.fileno(), min(_CHUNK, end - at), at))
        return state.hexdigest()

    def cut(self) -> None:
        """Drops whatever the files hold beyond the documents that are counted in."""
        self._values.truncate(self.nbytes)
        self._sizes.truncate(8 * len(self))

    def close(self) -> None:
        """Closes both files. What was not synced may be lost, on a full disk for example."""
        for file in (self._values, self._sizes):
            with contextlib.suppress(OSError):
                file.close()
