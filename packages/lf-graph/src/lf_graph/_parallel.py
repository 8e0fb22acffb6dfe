"""Models that come wrapped for several processes: DistributedDataParallel is taken over, sharded ones are refused.

A graph reads parameters by address. FSDP, tensor and pipeline parallelism move, gather or hand over tensors between
the operators of a forward, so one graph cannot hold it; data parallelism only sums gradients between the graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lf_graph._errors import GraphError, ShardedParameterError
from lf_graph._reduce import AllReduce

Reduce = Callable[[list[Tensor], Tensor], None]


def require_local(modules: Iterable[nn.Module]) -> None:
    """Refuse modules whose parameters live on several ranks.

    Raises:
        ShardedParameterError: naming the first such parameter, how it is sharded, and the way out.
    """
    for root in modules:
        for prefix, module in root.named_modules():
            by = _sharded_by(module)
            tensors = [*module.named_parameters(recurse=bool(by)), *module.named_buffers(recurse=bool(by))]
            for name, tensor in tensors:
                kind = _kind_of(tensor, by)
                if kind:
                    raise ShardedParameterError(f"{prefix}.{name}".removeprefix("."), kind)


def _sharded_by(module: nn.Module) -> str:
    """What shards this module's parameters, or "": whoever never imported FSDP cannot have used it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return ""
    if isinstance(module, fsdp.FSDPModule):
        return "fully_shard"
    return "FullyShardedDataParallel" if isinstance(module, fsdp.FullyShardedDataParallel) else ""


def _kind_of(tensor: Tensor, by: str) -> str:
    placed: Any = sys.modules.get("torch.distributed.tensor")
    if placed is not None and isinstance(tensor, placed.DTensor):
        return f"a DTensor {tuple(tensor.placements)} of {by or 'a device mesh'}"
    return f"managed by {by}" if by else ""


def require_module(model: object) -> None:
    """Refuse what is no module, such as a stage or a schedule of torch.distributed.pipelining.

    Raises:
        GraphError: with the way out.
    """
    if isinstance(model, nn.Module):
        return
    kind = type(model).__name__
    if type(model).__module__.startswith("torch.distributed.pipelining"):
        raise GraphError(
            f"{kind} sends and receives between micro-batches, which a graph cannot hold: keep the schedule, and "
            "capture the stage's own module with lf_graph.capture or a Chain of Pieces before the stage is built"
        )
    raise GraphError(f"the model is a {kind}, not a torch.nn.Module")


class Parallel:
    """What a model needs beyond its own forward and backward; here: nothing, it lives in one process.

    Attributes:
        module: the model itself.
        reduce: what sums gradients over ranks, or None.
    """

    def __init__(self, module: nn.Module, reduce: Reduce | None) -> None:
        self.module, self.reduce = module, reduce

    def before_update_begins(self) -> None:
        """Queued before the first micro-batch of each update, on the stream that reads the buffers first."""

    def require_even(self) -> None:
        """Refuse uses that came up after construction."""

    def bypassed(self) -> Any:
        """Context in which calling the wrapper calls the module."""
        return nullcontext()


class ReplicatedModel(Parallel):
    """A DistributedDataParallel model, whose part TrainStep does itself: its hooks never fire.

    The wrapper's construction has already sent rank 0's parameters and buffers to everybody. Its process group and
    bucket size are used, and with ``broadcast_buffers=True`` rank 0's buffers are sent before the first micro-batch of
    each update, which is when DistributedDataParallel does it with ``no_sync()`` around all but the last micro-batch.

    Raises:
        GraphError: the wrapper has options that change what is reduced or when.
    """

    def __init__(self, wrapper: DistributedDataParallel, reduce: Reduce | None) -> None:
        _require_plain(wrapper)
        own = AllReduce(wrapper.process_group, wrapper.bucket_bytes_cap)
        super().__init__(wrapper.module, own if reduce is None else reduce)
        self._wrapper = wrapper
        buffers = list(wrapper.modules_buffers) if wrapper.broadcast_buffers else []
        self._broadcast = BroadcastBuffers(buffers, wrapper.process_group)

    def before_update_begins(self) -> None:
        """Rank 0's buffers for everybody."""
        self._broadcast()

    def require_even(self) -> None:
        """Refuse uneven inputs: ranks without a batch would have to shadow collectives."""
        if self._wrapper._join_config.enable:
            raise GraphError(
                "DistributedDataParallel.join() lets ranks run out of batches, and TrainStep's collectives need all "
                "of them: leave join(), and give every rank the same number of updates (batches may be ragged: "
                "return (loss sum, count))"
            )

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """A loss function may go on calling the wrapper: during captures its forward is the module's."""
        own = self._wrapper.__dict__.get("forward")
        self._wrapper.__dict__["forward"] = self.module.__call__
        try:
            yield
        finally:
            del self._wrapper.__dict__["forward"]
            if own is not None:
                self._wrapper.__dict__["forward"] = own


def _require_plain(wrapper: DistributedDataParallel) -> None:
    left_out = sorted(
        name
        for name, p in wrapper.module.named_parameters()
        if p.requires_grad and name in wrapper.parameters_to_ignore
    )
    problems = {
        "static_graph=True": (wrapper.static_graph, "build it without; TrainStep's graph is static anyway"),
        "a communication hook": (wrapper._comm_hooks, "remove it, and pass TrainStep(reduce=...) instead"),
        "mixed_precision": (
            wrapper.mixed_precision is not None,
            "build it without; use TrainStep(autocast=...)",
        ),
        f"parameters that it does not reduce ({', '.join(left_out)})": (
            left_out,
            "freeze them, or let it have them",
        ),
    }
    for what, (present, fix) in problems.items():
        if present:
            raise GraphError(f"this DistributedDataParallel has {what}, which TrainStep cannot keep: {fix}")


class BroadcastBuffers:
    """Copies rank 0's module buffers to every rank of a group, as one collective of bytes.

    Args:
        buffers: of any dtypes, on one device.
        process_group: default: the default group.
    """

    def __init__(self, buffers: Sequence[Tensor], process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group
        self._buffers = [b for b in buffers if b.numel()]
        self._bytes, self._twins = _packed(self._buffers)

    def __call__(self) -> None:
        """Queue it on the current stream."""
        if not self._buffers:
            return
        with torch.no_grad():
            torch._foreach_copy_(self._twins, self._buffers)
            dist.broadcast(self._bytes, group=self._group, group_src=0)
            torch._foreach_copy_(self._buffers, self._twins)


def _packed(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One uint8 buffer, and views of it with the shapes and dtypes of ``tensors``, each 16-byte aligned."""
    sizes = [t.numel() * t.element_size() for t in tensors]
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // 16) * 16
    flat = torch.zeros(end, dtype=torch.uint8, device=tensors[0].device if tensors else None)
    parts = zip(starts, sizes, tensors, strict=True)
    return flat, [flat[s : s + n].view(t.dtype).view(t.shape) for s, n, t in parts]


def unwrap(model: nn.Module, reduce: Reduce | None) -> Parallel:
    """The model behind a wrapper, and what has to be done in the wrapper's place.

    Raises:
        GraphError: the model cannot be trained from graphs as it is wrapped.
    """
    require_module(model)
    require_local([model])
    if isinstance(model, DistributedDataParallel):
        return ReplicatedModel(model, reduce)
    return Parallel(model, reduce)
