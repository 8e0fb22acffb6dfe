"""Gradients summed over ranks between the micro-batch graphs and the optimizer's graph.

Collectives stay outside of the graphs: a graph that holds NCCL operations must be freed before the process group
(pytorch#158029), cannot time out, and ties every rank to the same launch. Here each is a queued operation on a slice
of a flat buffer, in one fixed order, and the host waits for none of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lf_graph._errors import GraphError

_MIB = 1024 * 1024
DEFAULT_BUCKET_BYTES = 25 * _MIB  # DistributedDataParallel's default


def cut_buckets(numel: int, itemsize: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """(start, end) in elements of the buckets of a flat buffer: all of ``bucket_bytes`` but the last."""
    length = max(1, bucket_bytes // itemsize)
    return [(start, min(start + length, numel)) for start in range(0, numel, length)]


class AllReduce:
    """Sums gradients and totals over the ranks of a process group: the ``reduce=`` of :class:`TrainStep`.

    Flat buffers are reduced bucket by bucket, all queued at once and waited for in order on the stream of the step
    (with NCCL the device waits, not the host; Gloo's wait is the host's). The order of buckets and of ranks within a
    collective is the same at every step, so equal runs give equal bits. Because the totals [loss sum, count] are
    summed too and the optimizer multiplies by 1 / count, gradients are those of the mean over all tokens of all ranks,
    also when ranks hold different numbers of tokens.

    Every rank calls ``update()`` equally often, each with at least one micro-batch.

    Args:
        process_group: default: the default group, looked up at the first call.
        bucket_bytes: largest collective; a bucket never spans two dtypes.
        dtype: what travels and what is summed; None: the gradients' own (float32 with several micro-batches per
            update; bfloat16 for shadowed parameters with one). torch.bfloat16 halves the traffic of float32 gradients,
            torch.float32 keeps the sum of bfloat16 gradients from being rounded at every hop.

    Attributes:
        collectives: how many were queued so far, the check of the first update included.

    Raises:
        GraphError: at construction for a bad size or dtype; at the first call when no group exists, or when ranks
            have different buffers or options. A lost peer is the process group's error, as it is; the step can then
            only be closed.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        if bucket_bytes < 1:
            raise GraphError(f"bucket_bytes={bucket_bytes}: use a positive number of bytes")
        if dtype is not None and not dtype.is_floating_point:
            raise GraphError(f"dtype={dtype}: gradients travel as floating point, such as torch.bfloat16")
        self.process_group, self.bucket_bytes, self.dtype = process_group, bucket_bytes, dtype
        self.collectives = 0
        self._agreed: set[str] = set()

    def buckets(self, buffers: Sequence[Tensor]) -> Iterator[Tensor]:
        """The slices that travel as one collective each, in order."""
        for buffer in buffers:
            itemsize = (self.dtype or buffer.dtype).itemsize
            for start, end in cut_buckets(buffer.numel(), itemsize, self.bucket_bytes):
                yield buffer[start:end]

    def __call__(self, buffers: Sequence[Tensor], totals: Tensor) -> None:
        """Sum over ranks in place.

        Args:
            buffers: flat gradient buffers, contiguous, of any floating dtype.
            totals: float32 [2], loss sum and count.
        """
        self._require_agreement(buffers, totals.device)
        parts = [*self.buckets(buffers), totals]
        wires = [self._wire(part) for part in parts[:-1]] + [totals]
        self._sum_all(wires)
        for part, wire in zip(parts, wires, strict=True):
            if wire is not part:
                part.copy_(wire)

    def _wire(self, part: Tensor) -> Tensor:
        return part if self.dtype in (None, part.dtype) else part.to(self.dtype)

    def _sum_all(self, wires: Sequence[Tensor]) -> None:
        works: list[Any] = []
        try:
            for wire in wires:
                works.append(self._start(wire))
        finally:
            _wait_for_all(works)

    def _start(self, wire: Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        self.collectives += 1
        return dist.all_reduce(wire, op, group=self.process_group, async_op=True)

    def _require_agreement(self, buffers: Sequence[Tensor], device: torch.device) -> None:
        """Once per set of buffers: different layouts would hang, or sum what does not belong together."""
        layout = repr([(b.numel(), str(b.dtype)) for b in buffers])
        mine = f"{layout}, bucket_bytes={self.bucket_bytes}, dtype={self.dtype}"
        if mine in self._agreed:
            return
        if not dist.is_initialized():
            raise GraphError(
                "AllReduce needs a process group: call torch.distributed.init_process_group first"
            )
        number = int.from_bytes(hashlib.sha256(mine.encode()).digest()[:7], "big")
        extremes = torch.tensor([number, -number], device=device)
        _wait_for_all([self._start(extremes, dist.ReduceOp.MAX)])
        if extremes.tolist() != [number, -number]:
            raise GraphError(
                f"ranks differ in what they reduce; this one has buffers {mine}: build the same model, freeze the "
                "same parameters and give the same options on every rank"
            )
        self._agreed.add(mine)


def _wait_for_all(works: Sequence[Any]) -> None:
    """Wait in order, also past an error (a collective in flight must not outlive its buffer); raise the first."""
    first: Exception | None = None
    for work in works:
        try:
            work.wait()
        except Exception as e:
            first = first or e
    if first is not None:
        raise first
