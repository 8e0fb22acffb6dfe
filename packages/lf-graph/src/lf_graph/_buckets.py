"""``Buckets``: one graph per length bucket, so that any length replays and none is captured twice unnoticed."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import nn
from torch.utils import _pytree as pytree

from lf_graph._bucket_stats import BucketsStats, BucketStats
from lf_graph._bucket_targets import Bucket, StepTarget, target_of
from lf_graph._errors import BudgetError, ClosedError, GraphError, SignatureError
from lf_graph._padding import (
    FILL,
    Call,
    Dims,
    PaddingPlan,
    Pads,
    argument_names,
    bucket_of,
    checked_edges,
    cut_outputs,
    is_tensor,
    length_of,
    make_plan,
)
from lf_graph._pool import GraphPool
from lf_graph._registry import NotCopied, forget, register
from lf_graph._step_result import StepResult
from lf_graph._train_step import TrainStep


class Buckets(NotCopied):
    """A function, module or :class:`TrainStep` for inputs of any length up to the last edge.

    A call is padded to the smallest edge that holds it, by writing it into the static inputs of that edge's graph:
    nothing is allocated and nothing is waited for. The graph is captured at the first call of its bucket (or by
    :meth:`prepare`), all of them in one pool. What the target returns is padded too, unless ``unpad`` says otherwise.

    The numbers of real positions are right when the target masks the rest: by a pad value such as a label of -100,
    or by ``lengths``, a tensor on the device that a :class:`DynamicMaskBuffer` reads inside the graph.

    Args:
        target: what to capture. A ``TrainStep`` keeps its gradient buffers and its optimizer graph for all buckets
            and must have ``max_graphs >= len(edges)``; its options stay with it.
        edges: bucket lengths in rising order.
        dims: the dimension that is the length: one for every tensor of the call, or ``{argument: dimension}`` for
            those that are padded. Arguments go by parameter name or position, with the path for nested ones
            (``"batch.ids"``).
        pad: what fills the end: one value, or ``{argument: value}`` with 0 for the others; default: 0. A step needs it
            or ``lengths``: nothing else tells its loss what does not count.
        lengths: name of an argument that gets the true length of each row, int64 [B] ([1] when the padded dimension is
            the first), where the caller leaves it out or gives None.
        unpad: the output dimension to cut back to the true length: one for every output, or ``{name: dimension}``.
        policy: "pad", or "eager" to run every call as it comes, without graphs.
        longer: what to do beyond the last edge: "error", or "eager", which is counted.
        max_graphs: most graphs held; the least recently used is closed. Default: one per edge.
        max_bytes: budget of graph memory. The least recently used are closed until a new one fits; one that cannot
            fit at all is refused before its capture.
        pool: memory shared with other chains, in the place of ``max_bytes``.
        modules, autocast, copy_outputs, checkpoint: see :func:`lf_graph.capture`.
        name: for errors and statistics.

    Raises:
        GraphError: options that contradict each other.
    """

    def __init__(
        self,
        target: Callable[..., Any] | TrainStep,
        edges: Sequence[int],
        *,
        dims: Dims = 1,
        pad: Pads | None = None,
        lengths: str | None = None,
        unpad: Dims | None = None,
        policy: Literal["pad", "eager"] = "pad",
        longer: Literal["error", "eager"] = "error",
        max_graphs: int | None = None,
        max_bytes: int | None = None,
        pool: GraphPool | None = None,
        modules: Sequence[nn.Module] = (),
        autocast: Callable[[], AbstractContextManager[Any]] | None = None,
        copy_outputs: bool = True,
        checkpoint: bool = False,
        name: str = "",
    ) -> None:
        self.edges = checked_edges(edges)
        options: dict[str, Any] = {"modules": tuple(modules), "autocast": autocast, "checkpoint": checkpoint}
        options = {k: v for k, v in options.items() if v} | ({} if copy_outputs else {"copy_outputs": False})
        self._target = target_of(target, self.edges, pool, max_bytes, options)
        self.name = name or str(getattr(target, "name", getattr(target, "__name__", type(target).__name__)))
        self.policy, self.longer, self.max_graphs = (
            policy,
            longer,
            len(self.edges) if max_graphs is None else max_graphs,
        )
        self._dims, self._lengths, self._unpad = dims, lengths, unpad
        self._pad: Pads = 0 if pad is None else pad
        self._check_policies(max_graphs)
        if isinstance(self._target, StepTarget) and pad is None and lengths is None:
            raise GraphError(
                "the loss of a TrainStep would count what is padded: name the argument that gets the true lengths "
                "(lengths=), or the value that the loss leaves out (pad={'labels': -100}; pad=0 for zeros)"
            )
        self._buckets = {e: Bucket(e) for e in self.edges}
        self._recent: list[Bucket] = []  # those with a graph; the last was used last
        self._plans: list[tuple[pytree.TreeSpec, list[bool], PaddingPlan]] = []
        self._eager = self._longest_eager = 0
        self._warned = self._closed = False
        register(self)

    def _check_policies(self, max_graphs: int | None) -> None:
        if self.policy not in ("pad", "eager") or self.longer not in ("error", "eager"):
            raise GraphError(
                f'policy={self.policy!r} is "pad" or "eager", longer={self.longer!r} "error" or "eager"'
            )
        if self.max_graphs < 1:
            raise GraphError("max_graphs is at least 1")
        unfit = "eager" in (self.policy, self.longer) or max_graphs is not None or self._unpad is not None
        if isinstance(self._target, StepTarget) and unfit:
            raise GraphError(
                "a TrainStep has no eager way, no outputs, and its own max_graphs: leave them out"
            )

    # -- calls ------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pad, replay, and return what the target returns (for a step: one micro-batch and the update).

        Raises:
            GraphError: longer than the last edge, or lengths that disagree.
            SignatureError: anything but the length and the values differs from the bucket's first call.
            BudgetError: a new bucket does not fit.
            GraphCaptureError: an operation that a graph cannot hold, at the first call of a bucket.
        """
        if isinstance(self._target, StepTarget):
            self.micro(*args, **kwargs)
            return self.update()
        call = self._read(args, kwargs)
        edge = self._edge(call.length)
        if edge is None:
            self._eager += 1
            self._longest_eager = max(self._longest_eager, call.length)
            return self._target.eager(call)
        result = self._run(edge, call)
        return result if self._unpad is None else cut_outputs(result, self._unpad, edge, call.length)

    def micro(self, *args: Any, **kwargs: Any) -> None:
        """One micro-batch of the step, padded; see :meth:`TrainStep.micro`.

        Raises:
            GraphError: the target is no TrainStep; else as a call, and as :meth:`TrainStep.micro`.
        """
        self._step()
        call = self._read(args, kwargs)
        edge = self._edge(call.length)
        assert edge is not None  # a step has no eager way
        self._run(edge, call)

    def update(self) -> StepResult:
        """See :meth:`TrainStep.update`.

        Raises:
            GraphError: the target is no TrainStep, or no micro-batch came before.
        """
        return self._step().update()

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Capture all buckets now, from one sample call of any length, and run none of them.

        The largest comes first: smaller ones then find their memory in the pool. With fewer ``max_graphs`` than edges,
        the smallest are captured.

        Raises:
            GraphError, BudgetError, GraphCaptureError: as a call.
        """
        call = self._read(args, kwargs)
        for edge in reversed(self.edges[: self.max_graphs]):
            part = call.shortened(edge)
            if self._buckets[edge].signature is None:
                self._open(self._buckets[edge], part, part.signature(edge))

    def _step(self) -> TrainStep:
        if not isinstance(self._target, StepTarget):
            raise GraphError(f"{self.name} is no TrainStep: call it, and use its outputs")
        return self._target.step

    def _edge(self, length: int) -> int | None:
        """The edge to pad to; None to run eagerly."""
        if self.policy == "eager":
            return None
        edge = bucket_of(length, self.edges)
        if edge is None and self.longer == "error":
            raise GraphError(
                f"{self.name}: length {length} is beyond the last edge {self.edges[-1]}: add an edge, cut the input, "
                'or give longer="eager"'
            )
        return edge

    def _run(self, edge: int, call: Call) -> Any:
        bucket, signature = self._buckets[edge], call.signature(edge)
        if bucket.signature is None:
            self._open(bucket, call, signature)
        else:
            if differences := bucket.signature.differences(signature):
                raise SignatureError(f"{self.name}[{edge}]", differences)
            bucket.hits += 1
            self._recent.remove(bucket)
            self._recent.append(bucket)
        bucket.real += call.rows * call.length
        bucket.computed += call.rows * edge
        return self._target.run(bucket, call)

    # -- reading a call -----------------------------------------------------------------------------------------

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if self._closed:
            raise ClosedError(f"{self.name} was closed")
        leaves, structure = pytree.tree_flatten(self._with_lengths(args, kwargs))
        plan = self._plan(structure, leaves)
        tensors = [x for x in leaves if is_tensor(x)]
        length = length_of(plan, tensors)
        first, pad = next((t, p) for t, p in zip(tensors, plan.pads, strict=True) if p is not None)
        rows = 1 if pad.dim % first.dim() == 0 else first.shape[0]
        return Call(structure, tuple(leaves), plan, length, rows)

    def _with_lengths(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with :data:`FILL` where lengths are wanted and not given."""
        name, positional = self._lengths, self._target.positional
        if name is None:
            return args, kwargs
        if name in positional[: len(args)]:
            at = positional.index(name)
            return (*args[:at], FILL if args[at] is None else args[at], *args[at + 1 :]), kwargs
        return args, kwargs if kwargs.get(name) is not None else {**kwargs, name: FILL}

    def _plan(self, structure: pytree.TreeSpec, leaves: list[Any]) -> PaddingPlan:
        which = [is_tensor(x) for x in leaves]
        for known, kinds, plan in self._plans:
            if kinds == which and known == structure:
                return plan
        names = argument_names(structure, self._target.positional)
        tensors = [n for n, yes in zip(names, which, strict=True) if yes]
        plan = make_plan(tensors, self._dims, self._pad, self._lengths, self._target.positional)
        self._plans.append((structure, which, plan))
        return plan

    # -- captures -------------------------------------------------------------------------------------------------

    def _open(self, bucket: Bucket, call: Call, signature: Any) -> None:
        self._warn_if_again(bucket)
        while len(self._recent) >= self.max_graphs:
            self._evict()
        before = self._bytes()
        while True:
            try:
                self._target.open(bucket, call, f"{self.name}[{bucket.edge}]")
                break
            except BudgetError:
                if not self._recent or not self._may_ever_fit():
                    raise
                self._evict()
                before = self._bytes()
        pool = self._target.pool()
        bucket.signature = signature
        bucket.captures += 1
        bucket.bytes = max(0, self._bytes() - before)
        bucket.predicted_bytes = 0 if pool is None else pool.predicted_bytes
        self._recent.append(bucket)

    def _may_ever_fit(self) -> bool:
        pool = self._target.pool()
        return pool is not None and pool.max_bytes is not None and pool.predicted_bytes <= pool.max_bytes

    def _evict(self) -> None:
        bucket = self._recent.pop(0)
        self._target.close(bucket)
        bucket.signature = None
        bucket.evictions += 1

    def _warn_if_again(self, bucket: Bucket) -> None:
        if not bucket.evictions or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{self.name}: bucket {bucket.edge} was evicted and is captured again, which takes seconds each time: "
            f"raise max_graphs={self.max_graphs} or max_bytes, or use fewer edges; stats() counts further ones",
            RuntimeWarning,
            stacklevel=5,
        )

    def _bytes(self) -> int:
        pool = self._target.pool()
        return 0 if pool is None else pool.bytes

    # -- the rest -----------------------------------------------------------------------------------------------

    def stats(self) -> BucketsStats:
        """Counts and bytes so far; prints as a table."""
        pool = self._target.pool()
        fields = [f.name for f in dataclasses.fields(BucketStats) if f.name != "open"]
        buckets = [
            BucketStats(open=b.signature is not None, **{n: getattr(b, n) for n in fields})
            for b in self._buckets.values()
        ]
        name = "" if pool is None else pool.backend.name
        return BucketsStats(self.name, name, tuple(buckets), self._eager, self._longest_eager, self._bytes())

    def close(self) -> None:
        """Free the graphs of all buckets; a TrainStep stays open, with its own graphs."""
        for bucket in self._recent:
            self._target.close(bucket)
            bucket.signature = None
        self._recent, self._closed = [], True
        forget(self)

    def __enter__(self) -> Buckets:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
