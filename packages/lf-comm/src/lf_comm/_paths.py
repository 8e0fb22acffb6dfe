"""Four ways to the same sum of tensors whose ranks have set few rows. All know every rank's rows beforehand.

In `gather` and `split` a row is summed in the order of ranks, so every rank gets the same bits in every run; `dense`
and `union` have the order of the backend's all-reduce. Rows that a rank has not set count as +0.0, as they do in a
dense sum, so a row of -0.0 stays one only where all ranks have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lf_comm._channel import Channel


@dataclass(frozen=True)
class Known:
    """Which rows each rank has set: ``lives``, bool [P, N]."""

    lives: Tensor

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each rank."""
        return [int(count) for count in self.lives.sum(1).tolist()]

    @cached_property
    def union(self) -> Tensor:
        """Rows that any rank has set, int64, ascending."""
        return self.lives.any(0).nonzero().flatten()

    @cached_property
    def owned(self) -> list[int]:
        """Rows of the union by owner; row i belongs to rank i mod P, so that neighbours spread."""
        ranks = len(self.lives)
        found: list[int] = torch.bincount(self.union % ranks, minlength=ranks).tolist()
        return found

    @cached_property
    def everywhere(self) -> Tensor:
        """Rows that all ranks have set, bool [N]."""
        return self.lives.all(0)

    def rows_of(self, rank: int) -> Tensor:
        """Rows of one rank, int64, ascending."""
        return self.lives[rank].nonzero().flatten()


Path = Callable[[Tensor, Known, Channel, int], None]


def dense(rows: Tensor, known: Known | None, channel: Channel, divisor: int) -> None:
    """The backend's all-reduce of everything."""
    if divisor != 1:
        rows.div_(divisor)
    channel.all_reduce(rows)


def gather(rows: Tensor, known: Known, channel: Channel, divisor: int) -> None:
    """Every rank gets the rows of all and sums them itself."""
    most, mine = max(known.counts), known.rows_of(channel.rank)
    if most == 0:
        return
    send = channel.room("packed", (most, rows.shape[1]), rows)
    torch.index_select(rows, 0, mine, out=send[: len(mine)])
    send[len(mine) :].zero_()
    if divisor != 1:
        send.div_(divisor)
    got = channel.all_gather(send)
    _clear(rows, known.union, known.everywhere)
    for rank, count in enumerate(known.counts):
        rows.index_add_(0, known.rows_of(rank), got[rank, :count])


def union(rows: Tensor, known: Known, channel: Channel, divisor: int) -> None:
    """The backend's all-reduce of the rows that any rank has set."""
    if not len(known.union):
        return
    packed = channel.room("packed", (len(known.union), rows.shape[1]), rows)
    torch.index_select(rows, 0, known.union, out=packed)
    if divisor != 1:
        packed.div_(divisor)
    channel.all_reduce(packed)
    rows.index_copy_(0, known.union, packed)


def split(rows: Tensor, known: Known, channel: Channel, divisor: int) -> None:
    """Each row goes to its owner, which sums it and sends the sum to all."""
    ranks, rank = channel.size, channel.rank
    if not len(known.union):
        return
    ids = known.rows_of(rank)
    ids = ids[torch.argsort(ids % ranks, stable=True)]
    here = known.lives[:, rank::ranks]  # what each rank has of my rows
    out = torch.bincount(ids % ranks, minlength=ranks).tolist()
    packed = channel.room("packed", (len(ids), rows.shape[1]), rows)
    torch.index_select(rows, 0, ids, out=packed)
    if divisor != 1:
        packed.div_(divisor)
    arrived = channel.all_to_all(packed, out, here.sum(1).tolist())
    union = here.any(0)
    place = union.cumsum(0) - 1
    sums = channel.room("sums", (max(known.owned), rows.shape[1]), rows)
    sums[int(union.sum()) :].zero_()
    _clear(sums, torch.arange(int(union.sum()), device=rows.device), known.everywhere[rank::ranks][union])
    begin = 0
    for other in here:
        at = place[other]
        sums.index_add_(0, at, arrived[begin : begin + len(at)])
        begin += len(at)
    got = channel.all_gather(sums)
    owner = known.union % ranks
    for other, count in enumerate(known.owned):
        rows.index_copy_(0, known.union[owner == other], got[other, :count])


def _clear(rows: Tensor, ids: Tensor, everywhere: Tensor) -> None:
    """Prepare rows `ids` for being added to: +0.0, or where all ranks add -0.0, which any summand replaces exactly."""
    rows.index_fill_(0, ids, 0)
    if not rows.is_floating_point():
        return
    full = everywhere.nonzero().flatten()
    if len(full):
        rows.index_fill_(0, full, -0.0)


PATHS: dict[str, Path] = {"gather": gather, "union": union, "split": split}
