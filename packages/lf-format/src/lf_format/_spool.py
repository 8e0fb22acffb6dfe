"""Tokenized documents on disk between tokenizing and writing."""

from __future__ import annotations

from array import array
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from lf_format._open import read_exact

Array = npt.NDArray[Any]


class Spool:
    """Append-only documents in an unnamed temporary file; 8 bytes of memory each.

    Args:
        file: open for reading and writing, empty.
        dtype: dtype of the ids.
        loss_mask: whether every document comes with a bool mask.
    """

    def __init__(self, file: IO[bytes], dtype: np.dtype[Any], loss_mask: bool) -> None:
        self._file, self._dtype, self._loss_mask = file, dtype, loss_mask
        self._ends = array("Q", [0])

    def add(self, ids: Array, mask: Array | None) -> None:
        """Stores one document: ids of the spool's dtype, shape [n], and bool[n] when it has masks."""
        self._file.write(ids.tobytes())
        if mask is not None:
            self._file.write(mask.tobytes())
        self._ends.append(self._ends[-1] + len(ids))

    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document, int64[documents]."""
        ends = np.array(self._ends, np.int64)
        return ends[1:] - ends[:-1]

    def get(self, i: int) -> tuple[Array, Array | None]:
        """Document `i` as it was added."""
        self._file.flush()
        start, length = self._ends[i], self._ends[i + 1] - self._ends[i]
        width = self._dtype.itemsize + self._loss_mask
        raw = read_exact(self._file.fileno(), length * width, start * width, "spool")
        ids = np.frombuffer(raw, self._dtype, length)
        return ids, np.frombuffer(raw, bool, length, ids.nbytes) if self._loss_mask else None
