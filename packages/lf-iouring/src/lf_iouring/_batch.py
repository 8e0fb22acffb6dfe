"""What a loader hands out, and how slots become arrays or tensors."""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lf_memory import Lease

from ._errors import LoaderError
from ._layout import ALIGN, HeapSlot, Slot
from ._permute import Ids
from .engine import Target
from .packing import Borders

Array = npt.NDArray[Any]
Convert = Callable[[Any], Any]


class Batch:
    """One rank's rows of a global batch; tensors with return_type "torch", numpy arrays otherwise.

    Attributes:
        tokens: [rows, edge] in the stored dtype (uint8, uint16 or uint32), zero padded; memory of the pool.
        loss_mask: uint8[rows, edge] of 0 and 1, or None if the data set has no such field.
        step: number of the global batch.
        epoch: pass over the data set.
        lease: the pool slot, or None when the batch has memory of its own.
    """

    __slots__ = ("_convert", "_ids", "_lengths", "epoch", "lease", "loss_mask", "step", "tokens")

    def __init__(
        self, tokens: Any, loss_mask: Any, lengths: Ids, ids: Ids, step: int, epoch: int,
        lease: Lease | None, convert: "Convert",
    ) -> None:  # fmt: skip
        self.tokens = tokens
        self.loss_mask = loss_mask
        self.step = step
        self.epoch = epoch
        self.lease = lease
        self._lengths = lengths
        self._ids = ids
        self._convert = convert

    @property
    def lengths(self) -> Any:
        """Tokens of each row, int64[rows]; 0 for an empty row."""
        return self._convert(self._lengths)

    @property
    def ids(self) -> Any:
        """Record ids, int64[rows]; -1 for an empty row."""
        return self._convert(self._ids)

    def release(self) -> None:
        """Give the slot back now instead of when the tensors are garbage.

        `tokens` and `loss_mask` are gone afterwards, and other references to them show the next batch.
        PoolError if that was done before.
        """
        self.tokens = self.loss_mask = None
        if self.lease is not None:
            self.lease.release()

    def __repr__(self) -> str:
        shape = None if self.tokens is None else tuple(self.tokens.shape)
        return f"Batch(step={self.step}, epoch={self.epoch}, tokens={shape})"


class PackedBatch(Batch):
    """One rank's packed rows of a global batch; every row has the same capacity.

    Attributes, beyond those of Batch:
        tokens: [rows, capacity], segments one after another, zeros after the last.
        loss_mask: uint8[rows, capacity], 1 where the token may be a target: it is in a segment, not its first
            token (nothing in the row leads to it), and not masked out in the data set.
        cu_seqlens: int32[k + 1] borders of the segments in tokens.reshape(-1); the unused end of a row is a
            segment too, so the last border is rows * capacity.
        max_seqlen: the longest of these segments.
        position_ids: int32[rows, capacity] from 0 in every segment, 0 in unused ends.
        segment_ids: int32[rows, capacity] from 1 in every row, 0 in unused ends.
        lengths: int64[rows] tokens in use.
        ids: int64[s] record of each segment, unused ends not counted.
    """

    __slots__ = ("_borders",)

    def __init__(
        self, tokens: Any, loss_mask: Any, borders: Borders, ids: Ids, step: int, epoch: int,
        lease: Lease | None, convert: "Convert",
    ) -> None:  # fmt: skip
        super().__init__(tokens, loss_mask, borders.lengths, ids, step, epoch, lease, convert)
        self._borders = borders

    @property
    def cu_seqlens(self) -> Any:
        """See the class."""
        return self._convert(self._borders.cu_seqlens)

    @property
    def max_seqlen(self) -> int:
        """See the class."""
        return self._borders.max_seqlen

    @property
    def position_ids(self) -> Any:
        """See the class."""
        return self._convert(self._borders.position_ids)

    @property
    def segment_ids(self) -> Any:
        """See the class."""
        return self._convert(self._borders.segment_ids)


class Layout(NamedTuple):
    """Token rows of one edge in a slot: tokens first, then the mask at a 64-byte boundary, as SlotLayout has them."""

    rows: int
    dtype: np.dtype[Any]
    masked: bool

    def mask_offset(self, edge: int) -> int:
        """Byte where the mask starts."""
        return -(-self.rows * edge * self.dtype.itemsize // ALIGN) * ALIGN

    def slot_bytes(self, edge: int) -> int:
        """Bytes a batch of this edge takes."""
        return self.mask_offset(edge) + (self.rows * edge if self.masked else 0)

    def target(self, slot: Slot, edge: int) -> Target:
        """Views of a slot; they keep its memory."""
        shape = (self.rows, edge)
        tokens = slot.view(shape, self.dtype)
        return Target(tokens, slot.view(shape, np.uint8, self.mask_offset(edge)) if self.masked else None)

    def on_heap(self, edge: int) -> Target:
        """The same in fresh memory."""
        return self.target(HeapSlot(self.slot_bytes(edge)), edge)


def token_rows(dataset: Any, rows: int) -> Layout:
    """`rows` packed rows of a data set of token ids; LoaderError for one with other fields."""
    names = [field.name for field in dataset.fields]
    if names not in (["tokens"], ["tokens", "loss_mask"]):
        raise LoaderError(f"fields {names}: pack= lays tokens, or tokens and loss_mask, into rows")
    return Layout(rows, np.dtype(dataset.token_dtype), True)


def converter(return_type: str) -> Convert:
    """Array to what the user wants: torch.from_numpy, or the array itself.

    Raises LoaderError when torch is asked for by name and missing.
    """
    if return_type not in ("auto", "torch", "numpy"):
        raise LoaderError(f"return_type={return_type!r}: choose auto, torch or numpy")
    if return_type == "numpy":
        return _same
    if importlib.util.find_spec("torch") is None:
        if return_type == "torch":
            raise LoaderError("return_type='torch', but torch is not installed: pip install 'torch>=2.6'")
        return _same
    import torch

    return torch.from_numpy


def _same(array: Array) -> Array:
    return array
