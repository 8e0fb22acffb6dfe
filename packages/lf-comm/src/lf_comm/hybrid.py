"""A hook for DDP that averages small buckets one way and large ones another; the border is measured.

    hybrid = lf_comm.hybrid_comm("dense", "rows").attach(ddp)    # every rank, once
    ...ten steps...
    hybrid.decision                                               # HybridDecision(cut=...), the same on all ranks

Both ways are tried in turns on the buckets of the first steps, with the gradients that the run has; every one of those
steps is a whole step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lf_comm._channel import Channel
from lf_comm._cut import SizeTimes, Timed, best_cut, by_size
from lf_comm._oneshot import OneShotReducer
from lf_comm._paths import dense
from lf_comm._worker import Behind, own_group, register
from lf_comm.ddp import SparseGradReducer
from lf_comm.reduce import AccurateReducer
from lf_comm.rows import LayoutError
from lf_comm.topk import SparseGradientReducer

Way: TypeAlias = Literal["dense", "accurate", "rows", "topk", "oneshot"]
# Steps that try ways. DDP makes new buckets after the first, and rows measures its rates in it.
_WARM, _ROUNDS = 2, 8


class BucketReducer(Protocol):
    """What averages buckets: the reducers of this package, or yours."""

    def work(self, bucket: Any) -> Callable[[], Tensor]:
        """What averages a ``GradBucket`` in place when it is called, and returns its buffer."""
        ...


Make: TypeAlias = Callable[[nn.Module, dist.ProcessGroup], BucketReducer]


class DenseReducer:
    """The backend's all-reduce of whole buckets, as DDP makes it."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._channel = Channel(group)

    def work(self, bucket: Any) -> Callable[[], Tensor]:
        """What averages a bucket when it is called."""
        return lambda: self._average(bucket.buffer())

    def _average(self, buffer: Tensor) -> Tensor:
        if buffer.layout is not torch.strided:
            raise LayoutError(f"{buffer.layout} in a bucket; the way 'rows' sums sparse gradients")
        if self._channel.size > 1:
            dense(buffer, None, self._channel, self._channel.size)
        return buffer


_WAYS: dict[str, Make] = {
    "dense": lambda module, group: DenseReducer(group),
    "accurate": lambda module, group: AccurateReducer(group),
    "rows": lambda module, group: SparseGradReducer(module, group),
    "topk": lambda module, group: SparseGradientReducer(module, group=group),
    "oneshot": OneShotReducer,
}


@dataclass(frozen=True)
class HybridDecision:
    """Buckets of `cut` bytes and more go the way `large`, others `small`. measured: of each size of bucket, of the
    rank that was ready last; empty when the cut was given."""

    cut: int
    small: str
    large: str
    reason: str
    measured: tuple[SizeTimes, ...] = ()


@dataclass(frozen=True)
class HybridComm:
    """What :func:`hybrid_comm` was asked for; `attach` makes it."""

    small: Way | Make
    large: Way | Make
    cut: int | Literal["measured"]

    def attach(self, ddp: DistributedDataParallel) -> HybridReducer:
        """Register the hook; all ranks. RuntimeError when `ddp` has a hook already."""
        reducer = HybridReducer(ddp.module, own_group(ddp), self)
        register(ddp, reducer, hybrid_hook)
        return reducer


def hybrid_comm(
    small: Way | Make = "dense", large: Way | Make = "rows", cut: int | Literal["measured"] = "measured"
) -> HybridComm:
    """Average small buckets one way and large ones another.

    small, large: "dense" (as DDP), "accurate" (:class:`AccurateReducer`), "rows" (:class:`SparseGradReducer`), "topk"
        (:class:`SparseGradientReducer`, lossy), each with its defaults; "oneshot" (one kernel over torch's symmetric
        memory where all ranks are GPUs of one host, else dense; the decision names why); or a function of
        (module, group) that makes a :class:`BucketReducer`.
    cut: bytes from which on a bucket is large; "measured": found in the first ten steps.

    Raises ValueError for other words and for a cut below 0.
    """
    for name, way in (("small", small), ("large", large)):
        if not callable(way) and way not in _WAYS:
            raise ValueError(f"{name}={way!r}: choose one of {', '.join(get_args(Way))}, or give a function")
    if cut != "measured" and not (isinstance(cut, int) and cut >= 0):
        raise ValueError(f"cut={cut!r}: 'measured', or bytes from 0 on")
    return HybridComm(small, large, cut)


class HybridReducer:
    """State of the hook. small, large: the two reducers, whose reports and states are theirs."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, asked: HybridComm) -> None:
        self.small, self.large = (_make(way)(module, group) for way in (asked.small, asked.large))
        self._names = _name_of(asked.small, self.small), _name_of(asked.large, self.large)
        self._channel, self._behind = Channel(group), Behind()
        self._steps = 0
        self._samples: list[tuple[int, bool, Callable[[], float]]] = []
        self._decision: HybridDecision | None = None
        if asked.cut != "measured":
            self._decision = HybridDecision(asked.cut, *self._names, "as asked")
        elif self._channel.size == 1:
            self._decision = HybridDecision(0, *self._names, "one rank")

    @property
    def decision(self) -> HybridDecision | None:
        """Which buckets go which way, the same on all ranks; None while the ways are tried."""
        return self._decision

    @property
    def summing(self) -> int | None:
        """The bucket that is being summed, or whose sum failed last; None when all are done."""
        return self._behind.summing

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a bucket. On the CPU in a thread behind the backward pass, else in the current stream."""
        buffer, last = bucket.buffer(), bucket.is_last()
        small, large = self.small.work(bucket), self.large.work(bucket)
        return self._behind.run(
            lambda: self._average(buffer, small, large, last), buffer.device, bucket.index()
        )

    def _average(
        self, buffer: Tensor, small: Callable[[], Tensor], large: Callable[[], Tensor], last: bool
    ) -> Tensor:
        nbytes = _size_of(buffer)
        if self._decision is not None:
            return (small if nbytes < self._decision.cut else large)()
        is_small = self._steps % 2 == 0
        result, seconds = _timed(small if is_small else large, buffer.device)
        if self._steps >= _WARM:
            self._samples.append((nbytes, is_small, seconds))
        if last:
            self._steps += 1
            if self._steps == _WARM + _ROUNDS:
                self._decide(buffer.device)
        return result

    def _decide(self, device: torch.device) -> None:
        """Choose the cut from what every bucket took on the rank that was ready last: the others waited for it."""
        seconds = torch.tensor([read() for _, _, read in self._samples], dtype=torch.float64, device=device)
        self._channel.all_reduce(seconds, dist.ReduceOp.MIN)
        agreed = zip(self._samples, seconds.tolist(), strict=True)
        measured = by_size(Timed(nbytes, is_small, took) for (nbytes, is_small, _), took in agreed)
        self._samples = []
        self._decision = HybridDecision(
            best_cut(measured),
            *self._names,
            f"measured in {_ROUNDS} steps on {self._channel.size} ranks",
            measured,
        )


def hybrid_hook(state: HybridReducer, bucket):  # type: ignore[no-untyped-def]  # DDP wants none but its own
    """For ``register_comm_hook(state, hybrid_hook)``; :meth:`HybridComm.attach` does it."""
    return state.reduce(bucket)


def _make(way: Way | Make) -> Make:
    return way if callable(way) else _WAYS[way]


def _name_of(way: Way | Make, made: BucketReducer) -> str:
    if isinstance(made, OneShotReducer):
        return made.name
    return str(getattr(way, "__name__", type(way).__name__)) if callable(way) else way


def _size_of(buffer: Tensor) -> int:
    """Bytes of the dense tensor, whatever the layout: ranks have different numbers of entries."""
    return buffer.numel() * buffer.element_size()


def _timed(work: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, Callable[[], float]]:
    """(its result, what reads its seconds; on a GPU those of its stream, waited for when read)."""
    if device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        result = work()
        ended.record()

        def read() -> float:
            ended.synchronize()
            return float(began.elapsed_time(ended)) / 1e3

        return result, read
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    return result, lambda: seconds
