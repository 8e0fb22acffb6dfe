"""A communication hook for DistributedDataParallel that sums sparse gradients by rows and the rest as DDP does.

    reducer = lf_comm.SparseGradReducer.attach(ddp)      # every rank, once
    ...train as before...
    reducer.report()                                      # by parameter: how its last gradient was summed

Gradients are found sparse, or not, by looking: tables of embeddings, parameters by embodiment, experts that no token
reached. What is dense in a bucket stays one all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lf_comm._shards import ShardView, cut_shards, shards_of
from lf_comm._worker import Behind, own_group, register
from lf_comm.cost import Rates
from lf_comm.rows import MIN_BYTES, Decision, Item, RowReducer


class SparseGradReducer:
    """State of the hook: averages the gradients of one DDP module over its group."""

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        rates: Rates | None = None,
        min_bytes: int = MIN_BYTES,
        only: Iterable[str] | None = None,
    ) -> None:
        """module: whose ``named_parameters`` name gradients; group: of the hook's own collectives (None: all ranks).
        only: names of the parameters whose rows are looked at; None: all with at least two dimensions.

        Raises ValueError for a name in `only` that the module does not have.
        """
        named = dict(module.named_parameters())
        self._only = None if only is None else frozenset([only] if isinstance(only, str) else only)
        if unknown := sorted((self._only or frozenset()) - set(named)):
            raise ValueError(f"only: the module has no parameter {unknown[0]}")
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._rows = RowReducer(group, rates=rates, min_bytes=min_bytes)
        self._decisions: dict[str, Decision] = {}
        self._behind = Behind()

    @classmethod
    def attach(
        cls,
        ddp: DistributedDataParallel,
        *,
        rates: Rates | None = None,
        min_bytes: int = MIN_BYTES,
        only: Iterable[str] | None = None,
    ) -> SparseGradReducer:
        """Make one for `ddp` and register its hook; all ranks. Sums get a group of their own, on DDP's backend.

        Raises RuntimeError when `ddp` has a hook already.
        """
        reducer = cls(ddp.module, own_group(ddp), rates=rates, min_bytes=min_bytes, only=only)
        register(ddp, reducer, hook)
        return reducer

    def apply(self, fsdp: nn.Module) -> None:
        """Average the gradients of FSDP2 shards over this reducer's group: the replicas of each shard; all ranks.

        fsdp: the module of the constructor, as :meth:`lf_comm.SparseGradientReducer.apply` wants it. Rows are those of
        a shard. Raises ShardError for other modules, meshes and groups.
        """
        for part, views in shards_of(fsdp, self._rows.channel.group):
            part.set_all_reduce_hook(partial(self._average_shards, views))

    @property
    def bytes_sent(self) -> int:
        """Payload that this rank has sent since the hook was made, questions included."""
        return self._rows.channel.sent

    @property
    def summing(self) -> int | None:
        """The bucket that is being summed, or whose sum failed last; None when all are done."""
        return self._behind.summing

    def report(self) -> dict[str, Decision]:
        """How the last gradient of each parameter that was looked at was summed, by name."""
        return dict(self._decisions)

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a bucket. On the CPU in a thread behind the backward pass, else in the current stream."""
        return self._behind.run(self.work(bucket), bucket.buffer().device, bucket.index())

    def work(self, bucket: Any) -> partial[Tensor]:
        """What averages a bucket when it is called."""
        return partial(self._average, bucket.buffer(), bucket.gradients(), self._named(bucket.parameters()))

    def _average_shards(self, views: Sequence[ShardView], flat: Tensor) -> None:
        spans = cut_shards(views, flat)
        self._average(flat, spans, [view.name for view in views])

    def _named(self, parameters: Iterable[Tensor]) -> list[str]:
        return [self._names.get(id(parameter), "") for parameter in parameters]

    def _average(self, buffer: Tensor, gradients: list[Tensor], names: list[str]) -> Tensor:
        if buffer.layout is not torch.strided:
            work = self._rows.all_reduce(buffer, names[0] or None, op="avg")
            self._decisions[names[0]] = work.decision
            return work.result
        looked = [(name, g) for name, g in zip(names, gradients, strict=True) if self._looks(name, g)]
        sums = self._rows.prepare([Item(g, name) for name, g in looked])
        alone = [one for one in sums if one.path != "dense"]
        for span in rest_of(buffer, [one.item.tensor for one in alone]):
            span.div_(self._rows.channel.size)
            if self._rows.channel.size > 1:
                self._rows.channel.all_reduce(span)
        for (name, _), one in zip(looked, sums, strict=True):
            if one.path != "dense":
                self._decisions[name] = self._rows.run(one, "avg").decision
            else:
                self._decisions[name] = Decision("dense", one.reason, 0, 0, 0.0, one.predicted)
        return buffer

    def _looks(self, name: str, gradient: Tensor) -> bool:
        if not name or not gradient.is_contiguous():
            return False
        return gradient.dim() >= 2 if self._only is None else name in self._only


def hook(state: SparseGradReducer, bucket):  # type: ignore[no-untyped-def]  # DDP wants none but its own annotations
    """For ``DistributedDataParallel.register_comm_hook(state, hook)``; :meth:`SparseGradReducer.attach` does it."""
    return state.reduce(bucket)


def rest_of(buffer: Tensor, taken: list[Tensor]) -> list[Tensor]:
    """What of a flat buffer lies outside of some contiguous views of it."""
    start = int(buffer.storage_offset())
    cuts = sorted((int(t.storage_offset()) - start, t.numel()) for t in taken)
    spans, at = [], 0
    for begin, count in [*cuts, (buffer.numel(), 0)]:
        if begin > at:
            spans.append(buffer[at:begin])
        at = begin + count
    return spans
