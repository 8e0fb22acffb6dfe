"""A sum that travels in 16 bits and is made in 32: each rank sums a share of the tensor and sends it to all.

    lf_comm.accurate_all_reduce(gradient)             # in place; float32, bfloat16 or float16
    lf_comm.AccurateReducer.attach(ddp)               # as DDP's hook

A ring of bfloat16 sums rounds once for every rank, in an order of its own. Here the shares are added as float32 in the
order of ranks and rounded once, so the result does not depend on how many ranks there are beyond that rounding, and
is the same to the bit on every rank and in every run. Bytes on the wire are those of a 16-bit ring.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lf_comm._channel import Channel
from lf_comm._shards import shards_of
from lf_comm._worker import Behind, own_group, register
from lf_comm.rows import Op

Wire: TypeAlias = Literal["bfloat16", "float16"]
_WIRES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_SUMMED = (torch.float32, torch.bfloat16, torch.float16)


def accurate_all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    op: Op = "sum",
    wire: Wire | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum `tensor` over a group, in place unless `out_dtype` differs; returns the sum.

    tensor: strided, float32, bfloat16 or float16. A float32 one is rounded to `wire` on every rank before it is sent.
    wire: what travels; None: the tensor's own dtype if it has 16 bits, else bfloat16.
    out_dtype: of the result. float32 keeps what the sum has more than 16 bits, and sends the second half of the bytes
        in 32; None: the tensor's dtype, sums rounded once to `wire`.
    op: "sum", or "avg", which divides the float32 sum.

    Every rank calls it with the same shape, dtype and options. Raises TypeError for other dtypes and layouts.
    """
    return _reduce(tensor, Channel(group), op, wire, out_dtype)


def _reduce(
    tensor: Tensor, channel: Channel, op: Op, wire: Wire | None, out_dtype: torch.dtype | None
) -> Tensor:
    if op not in get_args(Op):
        raise ValueError(f"op={op!r}: choose sum or avg")
    if wire is not None and wire not in _WIRES:
        raise ValueError(f"wire={wire!r}: choose {' or '.join(_WIRES)}")
    if tensor.layout is not torch.strided or tensor.dtype not in _SUMMED:
        raise TypeError(
            f"{tensor.layout} of {tensor.dtype}: a strided tensor of {', '.join(map(str, _SUMMED))} is wanted"
        )
    out_dtype = out_dtype or tensor.dtype
    if out_dtype not in _SUMMED:
        raise TypeError(f"out_dtype {out_dtype}: one of {', '.join(map(str, _SUMMED))} is wanted")
    narrow = _WIRES[wire] if wire else (torch.bfloat16 if tensor.dtype is torch.float32 else tensor.dtype)
    flat = tensor.detach().reshape(-1)
    if channel.size > 1 and flat.numel():
        # With more bits in the result than on the wire the sums themselves are sent; else their one rounding.
        second = torch.float32 if out_dtype is torch.float32 and tensor.dtype is not torch.float32 else narrow
        flat = _share_and_collect(flat, channel, op, narrow, second)
    result = flat.view(tensor.shape)
    if out_dtype is tensor.dtype:
        return tensor.detach().copy_(result)
    return result.to(out_dtype, copy=True)


def _share_and_collect(
    flat: Tensor, channel: Channel, op: Op, narrow: torch.dtype, second: torch.dtype
) -> Tensor:
    """The sum of flat tensors as `second`, [n]: a share of each to each rank, summed there, and sent to all."""
    ranks, count = channel.size, flat.numel()
    share = -(-count // ranks)
    sent = channel.room("shares", (ranks * share,), torch.empty(0, dtype=narrow, device=flat.device))
    sent[:count].copy_(flat)
    sent[count:].zero_()
    arrived = channel.all_to_all(sent, [share] * ranks, [share] * ranks).view(ranks, share)
    summed = sum_in_order(arrived)
    if op == "avg":
        summed.div_(ranks)
    return channel.all_gather(summed.to(second)).flatten()[:count]


def sum_in_order(parts: Tensor) -> Tensor:
    """float32 [n], the sum of [P, n] from the first row to the last."""
    total = parts[0].float()
    for part in parts[1:]:
        total += part  # a 16-bit summand is widened, exactly
    return total


class AccurateReducer:
    """The hook of DDP that averages buckets by :func:`accurate_all_reduce`, on the CPU behind the backward pass."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, wire: Wire | None = None) -> None:
        self._channel, self._wire, self._behind = Channel(group), wire, Behind()

    @classmethod
    def attach(cls, ddp: DistributedDataParallel, *, wire: Wire | None = None) -> AccurateReducer:
        """Make one for `ddp` and register its hook; all ranks. RuntimeError when `ddp` has a hook already."""
        reducer = cls(own_group(ddp), wire=wire)
        register(ddp, reducer, accurate_hook)
        return reducer

    def apply(self, fsdp: nn.Module) -> None:
        """Average the gradients of FSDP2 shards over this reducer's group: the replicas of each shard; all ranks.

        fsdp: a module as :meth:`lf_comm.SparseGradientReducer.apply` wants it. Raises ShardError for others.
        """
        for part, _ in shards_of(fsdp, self._channel.group):
            part.set_all_reduce_hook(self._average)

    def _average(self, flat: Tensor) -> None:
        _reduce(flat, self._channel, "avg", self._wire, None)

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a bucket."""
        return self._behind.run(self.work(bucket), bucket.buffer().device, bucket.index())

    def work(self, bucket: Any) -> partial[Tensor]:
        """What averages a bucket when it is called."""
        return partial(_reduce, bucket.buffer(), self._channel, "avg", self._wire, None)

    @property
    def summing(self) -> int | None:
        """The bucket that is being summed, or whose sum failed last; None when all are done."""
        return self._behind.summing


def accurate_hook(state: AccurateReducer, bucket):  # type: ignore[no-untyped-def]  # DDP wants none but its own
    """For ``register_comm_hook(state, accurate_hook)``; :meth:`AccurateReducer.attach` does it."""
    return state.reduce(bucket)
