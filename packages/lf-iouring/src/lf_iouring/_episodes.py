"""Neighbours of a record in time, inside its episode."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ._errors import LoaderError
from ._permute import Ids

_STARTS = 1  # flag bit 0 of lf-format: the record begins a document, here an episode


class Episodes:
    """Borders of the episodes of a data set whose records follow each other as they were recorded.

    Raises LoaderError for a data set of several length buckets, where neighbours in time are not neighbours
    in the file.
    """

    def __init__(self, dataset: Any) -> None:
        if len(dataset.buckets) > 1:
            raise LoaderError(
                f"deltas need samples in the order of time, and this data set sorts them into "
                f"{len(dataset.buckets)} length buckets: write it with one"
            )
        self._starts = np.flatnonzero(_starts(dataset))
        self._ends = np.append(self._starts[1:], len(dataset)) - 1

    def neighbours(self, ids: Ids, deltas: tuple[int, ...]) -> Ids:
        """The record `delta` steps from each, or the first or last of its episode where it has no such.

        Args:
            ids: int64[...], -1 for none.
            deltas: d of them.

        Returns int64[..., d], -1 where `ids` is.
        """
        flat = ids.reshape(-1)
        episode = np.maximum(np.searchsorted(self._starts, flat, side="right") - 1, 0)
        moved = flat[:, None] + np.array(deltas, np.int64)
        moved = np.clip(moved, self._starts[episode][:, None], self._ends[episode][:, None])
        moved[flat < 0] = -1
        return moved.reshape(*ids.shape, len(deltas))


def _starts(dataset: Any) -> npt.NDArray[np.bool_]:
    """Whether each record begins an episode, bool[records]; a file does not go on with that of another."""
    starts: npt.NDArray[np.bool_] = (
        np.concatenate([reader.flags for reader in dataset.readers]) & _STARTS
    ) != 0
    first = 0
    for reader in dataset.readers:
        if len(reader):
            starts[first] = True
        first += len(reader)
    return starts
