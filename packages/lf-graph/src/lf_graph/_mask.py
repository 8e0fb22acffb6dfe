"""Attention masks in a preallocated buffer, rewritten from lengths on the device: the address never changes.

A mask built anew for each batch allocates, and a mask built from host lengths freezes them in a captured graph. Here
one buffer is filled by operations with ``out=``, so a replay reads the lengths that lie in their tensor then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lf_graph._errors import GraphError


class Pattern(Protocol):
    """Which key positions a query position may see, whatever the lengths are."""

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """bool [Q, K] for query int64 [Q, 1] and key int64 [1, K] positions."""
        ...


@dataclass(frozen=True)
class Full:
    """Every key."""

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """bool [Q, K], all True; see :meth:`Pattern.allowed`."""
        return (query >= 0) & (key >= 0)


@dataclass(frozen=True)
class Causal:
    """Keys up to the query's own position."""

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """bool [Q, K], True where key <= query; see :meth:`Pattern.allowed`."""
        return key <= query


@dataclass(frozen=True)
class BlockSparse:
    """A local window and some global blocks (Longformer arXiv 2004.05150, BigBird arXiv 2007.14062).

    Positions are cut into blocks. A query sees the keys of its own block, of the ``window - 1`` blocks nearest to it
    (before it, and after it when not causal), and of the first ``global_blocks`` blocks. This decides what is seen;
    a dense attention kernel still computes every pair.

    Attributes:
        block: positions in a block.
        window: blocks on each side of a query that it sees, its own included.
        global_blocks: first blocks that everyone sees and, when not causal, that see everyone.
        causal: never a key after the query.

    Raises:
        GraphError: a block or window below 1, or a negative number of global blocks.
    """

    block: int = 64
    window: int = 4
    global_blocks: int = 1
    causal: bool = True

    def __post_init__(self) -> None:
        if self.block < 1 or self.window < 1 or self.global_blocks < 0:
            raise GraphError(f"{self}: block and window must be at least 1, global_blocks at least 0")

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """bool [Q, K], True in the window, at the global blocks and, when causal, never after the query."""
        q, k = query // self.block, key // self.block
        near = (q - k).abs() < self.window
        if self.causal:
            return (near | (k < self.global_blocks)) & (key <= query)
        return near | (k < self.global_blocks) | (q < self.global_blocks)


class DynamicMaskBuffer:
    """An attention mask [B, 1, C, C] at a fixed address, C the capacity of the batch at hand.

    ``buffer[b, 0, q, k]`` says whether query q may see key k: the pattern allows it or k < prefix[b], and
    k < lengths[b]. Every query sees itself, so that no row is empty (a softmax over nothing is NaN); the rows of
    queries past the length are of no use and see real keys only besides.

    The buffer is as large as ``batch`` rows of ``max_len`` need, and never grows. Smaller batches and capacities use
    the beginning of it: one address for each (batch, capacity). Writing queues device work on the current stream, reads
    nothing back and allocates nothing, so it can be captured; do not write between a forward and its backward, which
    needs the mask (torch raises an error when the version of the buffer has changed).

    Args:
        max_len: largest capacity, positions.
        dtype: ``torch.bool`` (True = seen), or a float type (0 = seen, -inf = not), as scaled_dot_product_attention
            takes them.
        batch: largest number of sequences.
        causal: shorthand for ``pattern=Causal()``; False for ``Full()``.
        pattern: :class:`Full`, :class:`Causal`, :class:`BlockSparse`, or anything with their method.
        device: where the buffer lies.

    Raises:
        GraphError: sizes that are not positive, a dtype that is no mask, or both causal and pattern.
    """

    def __init__(
        self,
        max_len: int,
        dtype: torch.dtype = torch.bool,
        *,
        batch: int = 1,
        causal: bool | None = None,
        pattern: Pattern | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_len < 1 or batch < 1:
            raise GraphError(f"max_len {max_len} and batch {batch} must be at least 1")
        if dtype != torch.bool and not dtype.is_floating_point:
            raise GraphError(f"a mask is torch.bool or a float type, not {dtype}")
        if causal is not None and pattern is not None:
            raise GraphError("give causal or pattern, not both")
        self.max_len, self.dtype, self.batch = max_len, dtype, batch
        self.pattern: Pattern = pattern or (Full() if causal is False else Causal())
        self._position = torch.arange(max_len, device=device)
        self._allowed = self.pattern.allowed(self._position[:, None], self._position[None, :])
        self._self = self._position[:, None] == self._position[None, :]
        self._lengths = torch.zeros(2, batch, dtype=torch.int64, device=device)  # lengths, prefixes
        self._inside = torch.zeros(2, batch * max_len, dtype=torch.bool, device=device)
        self._seen = torch.zeros(batch * max_len * max_len, dtype=torch.bool, device=device)
        self._additive = None if dtype == torch.bool else torch.zeros_like(self._seen, dtype=dtype)

    @property
    def device(self) -> torch.device:
        """Where the buffer lies."""
        return self._seen.device

    @property
    def nbytes(self) -> int:
        """Bytes of everything preallocated: the mask, and what writing it needs."""
        held = (
            self._position,
            self._allowed,
            self._self,
            self._lengths,
            self._inside,
            self._seen,
            self._additive,
        )
        return sum(t.nbytes for t in held if t is not None)

    def view(self, batch: int, capacity: int) -> Tensor:
        """The mask [batch, 1, capacity, capacity] in the buffer's dtype, as it was last written.

        Raises:
            GraphError: batch or capacity beyond the buffer.
        """
        self._check(batch, capacity)
        whole = self._seen if self._additive is None else self._additive
        return whole[: batch * capacity * capacity].view(batch, 1, capacity, capacity)

    @torch.no_grad()
    def write(self, lengths: Tensor, capacity: int | None = None, prefix: Tensor | None = None) -> Tensor:
        """Rewrite the mask for a batch.

        Args:
            lengths: int32 or int64 [B] on the buffer's device; keys from there on are hidden. Longer than the
                capacity counts as full.
            capacity: positions the batch is padded to; default ``max_len``. A host number: it is the shape.
            prefix: int32 or int64 [B]; keys before it are seen by every query (prefix language models,
                arXiv 1910.10683).

        Returns:
            The view [B, 1, capacity, capacity]; the same address for the same shape.

        Raises:
            GraphError: too large, or lengths of another device, dtype or shape.
        """
        capacity = self.max_len if capacity is None else capacity
        batch = self._checked_lengths("lengths", lengths)
        self._check(batch, capacity)
        allowed = self._allowed[:capacity, :capacity].expand(batch, 1, capacity, capacity)
        seen = self._seen[: batch * capacity * capacity].view(batch, 1, capacity, capacity)
        if prefix is not None:
            self._checked_lengths("prefix", prefix, batch)
            allowed = torch.logical_or(allowed, self._before(1, prefix, capacity), out=seen)
        torch.logical_and(allowed, self._before(0, lengths, capacity), out=seen)
        torch.logical_or(seen, self._self[:capacity, :capacity], out=seen)
        if self._additive is None:
            return seen
        additive = self.view(batch, capacity)
        return additive.fill_(-torch.inf).masked_fill_(seen, 0.0)

    def _before(self, which: int, limits: Tensor, capacity: int) -> Tensor:
        """bool [B, 1, 1, capacity]: key positions below the limit of each row."""
        batch = limits.shape[0]
        own = self._lengths[which, :batch].copy_(limits)  # one dtype: a mixed comparison would make a copy
        inside = self._inside[which, : batch * capacity].view(batch, capacity)
        return torch.lt(self._position[:capacity], own[:, None], out=inside)[:, None, None, :]

    def _checked_lengths(self, name: str, lengths: Tensor, batch: int | None = None) -> int:
        if not isinstance(lengths, Tensor):
            raise GraphError(
                f"{name} are a {type(lengths).__name__}: give an int32 or int64 tensor on {self.device}, which a graph "
                "reads again at every replay"
            )
        if lengths.device != self.device or lengths.dtype not in (torch.int32, torch.int64):
            raise GraphError(
                f"{name} are {lengths.dtype} on {lengths.device}; they must be int32 or int64 on {self.device}"
            )
        if lengths.dim() != 1 or batch not in (None, lengths.shape[0]):
            raise GraphError(f"{name} have shape {tuple(lengths.shape)}, expected ({batch or 'batch'},)")
        return lengths.shape[0]

    def _check(self, batch: int, capacity: int) -> None:
        if not 1 <= capacity <= self.max_len or not 1 <= batch <= self.batch:
            raise GraphError(
                f"batch {batch} x capacity {capacity} does not fit into the mask buffer of batch {self.batch} x "
                f"max_len {self.max_len}; make a larger one, it never grows"
            )
