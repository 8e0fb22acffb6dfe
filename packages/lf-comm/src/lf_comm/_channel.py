"""The collectives used here, by names that torch 2.11 and 2.13 both have, and what each rank sends in them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renames it, and warns of the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Channel:
    """One process group. ``sent`` counts the payload bytes that this rank sends by the formula of a ring."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is no member of the group")
        self.sent = 0
        self.calls = 0
        self._rooms: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def room(self, use: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Memory of an earlier sum for the same use, content undefined; grown when it is too small.

        Large tensors are given back to the system when they are freed, and their pages cost as much as a copy.
        """
        count, key = math.prod(shape), (use, like.dtype, like.device)
        held = self._rooms.get(key)
        if held is None or held.numel() < count:
            held = self._rooms[key] = torch.empty(count, dtype=like.dtype, device=like.device)
        return held[:count].view(*shape)

    def forget(self) -> None:
        """Free what `room` keeps."""
        self._rooms.clear()

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """In place, contiguous."""
        self._count(2 * (self.size - 1) * tensor.nbytes // self.size)
        dist.all_reduce(tensor, op=op, group=self.group)

    def all_gather(self, mine: Tensor) -> Tensor:
        """[n, ...] of each rank as [P, n, ...], in memory that the next call uses again."""
        out = self.room("gathered", (self.size, *mine.shape), mine)
        self._count((self.size - 1) * mine.nbytes)
        _all_gather(out.flatten(0, 1) if mine.dim() else out, mine, group=self.group)
        return out

    def all_to_all(self, mine: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """``send[p]`` rows go to rank p, ``receive[p]`` come from it; [sum(receive), ...], used again."""
        out = self.room("received", (sum(receive), *mine.shape[1:]), mine)
        row = mine[0].nbytes if len(mine) else 0
        self._count((sum(send) - send[self.rank]) * row)
        dist.all_to_all_single(out, mine, list(receive), list(send), group=self.group)
        return out

    def _count(self, nbytes: int) -> None:
        self.sent += nbytes
        self.calls += 1
