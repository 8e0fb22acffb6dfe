"""What a bucket captures: a function's call, or a micro-batch of a training step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from lf_graph._capture import Captured, capture
from lf_graph._errors import GraphError
from lf_graph._padding import Call, positional_names
from lf_graph._pool import GraphPool
from lf_graph._registry import forget
from lf_graph._static import Signature
from lf_graph._train_step import TrainStep


@dataclass
class Bucket:
    """One edge: its graph while it is held, and its counts."""

    edge: int
    signature: Signature | None = None  # None: no graph is held
    captured: Captured | None = None
    places: list[Tensor] = field(default_factory=list)  # where the graph reads its inputs
    hits: int = 0
    captures: int = 0
    evictions: int = 0
    real: int = 0
    computed: int = 0
    bytes: int = 0
    predicted_bytes: int = 0


class Target(Protocol):
    """Something that can be captured for one padded call at a time."""

    positional: tuple[str, ...]

    def pool(self) -> GraphPool | None:
        """Where the graphs lie; None before the first."""
        ...

    def open(self, bucket: Bucket, call: Call, name: str) -> None:
        """Capture for ``call`` padded to the bucket's edge."""
        ...

    def run(self, bucket: Bucket, call: Call) -> Any:
        """Pad ``call`` into the graph's inputs and replay."""
        ...

    def eager(self, call: Call) -> Any:
        """Run without padding and without a graph."""
        ...

    def close(self, bucket: Bucket) -> None:
        """Free the bucket's graph."""
        ...


class FunctionTarget:
    """A function or module; every bucket is captured into one pool.

    Args:
        fn: the function.
        pool: shared memory; None makes one on the device of the first call.
        max_bytes: budget of that one.
        options: for :func:`lf_graph.capture`.
    """

    def __init__(
        self, fn: Callable[..., Any], pool: GraphPool | None, max_bytes: int | None, options: dict[str, Any]
    ) -> None:
        self.fn, self.options, self.positional = fn, options, positional_names(fn)
        self._pool, self._max_bytes = pool, max_bytes

    def pool(self) -> GraphPool | None:
        """See :class:`Target`."""
        return self._pool

    def open(self, bucket: Bucket, call: Call, name: str) -> None:
        """See :class:`Target`."""
        self._pool = self._pool or GraphPool(call.device, self._max_bytes)
        args, kwargs = call.arguments(call.sample(bucket.edge))
        bucket.captured = capture(self.fn, *args, name=name, pool=self._pool, **self.options, **kwargs)
        forget(bucket.captured)  # the buckets report for it
        bucket.places = bucket.captured.static_inputs

    def run(self, bucket: Bucket, call: Call) -> Any:
        """See :class:`Target`."""
        assert bucket.captured is not None
        call.write(bucket.places)
        args, kwargs = call.arguments(call.connect(bucket.places))
        return bucket.captured(*args, **kwargs)

    def eager(self, call: Call) -> Any:
        """See :class:`Target`."""
        args, kwargs = call.unpadded()
        with (self.options.get("autocast") or nullcontext)():
            return self.fn(*args, **kwargs)

    def close(self, bucket: Bucket) -> None:
        """See :class:`Target`."""
        if bucket.captured is not None:
            bucket.captured.close()
        bucket.captured, bucket.places = None, []


class StepTarget:
    """Micro-batches of a :class:`TrainStep`, which holds one graph for each signature by itself."""

    def __init__(self, step: TrainStep) -> None:
        self.step, self.positional = step, positional_names(step.loss)

    def pool(self) -> GraphPool | None:
        """See :class:`Target`."""
        return self.step.pool

    def open(self, bucket: Bucket, call: Call, name: str) -> None:
        """See :class:`Target`."""
        bucket.places = call.sample(bucket.edge)
        args, kwargs = call.arguments(bucket.places)
        self.step.capture(*args, **kwargs)

    def run(self, bucket: Bucket, call: Call) -> None:
        """See :class:`Target`; the step says when its streams may write."""

        def load(places: list[Tensor]) -> int:
            bucket.places = places
            return call.write(places)

        before = self.step.captures
        args, kwargs = call.arguments(bucket.places)
        self.step._micro(args, kwargs, load)
        bucket.captures += self.step.captures - before  # other batches of this step had displaced it

    def eager(self, call: Call) -> Any:
        """A step's gradients are added in its graphs only."""
        raise GraphError(f"length {call.length} is beyond the last edge, and a TrainStep has no eager way")

    def close(self, bucket: Bucket) -> None:
        """The graph belongs to the step."""
        bucket.places = []


def target_of(
    thing: Callable[..., Any] | TrainStep,
    edges: tuple[int, ...],
    pool: GraphPool | None,
    max_bytes: int | None,
    options: dict[str, Any],
) -> Target:
    """The target behind what the user gave.

    Raises:
        GraphError: nothing that can be called, options that belong to the step with a step, or its graphs are too few.
    """
    if not callable(thing):
        raise GraphError(f"the target is a {type(thing).__name__}: give a function, a module or a TrainStep")
    if not isinstance(thing, TrainStep):
        if pool is not None and max_bytes is not None:
            raise GraphError("give max_bytes to the pool, or leave the pool out")
        return FunctionTarget(thing, pool, max_bytes, options)
    if pool is not None or max_bytes is not None or options:
        given = sorted([*options, *(["pool"] if pool else []), *(["max_bytes"] if max_bytes else [])])
        raise GraphError(f"{given} belong to the TrainStep: give them to it")
    if thing.max_graphs < len(edges):
        raise GraphError(
            f"{len(edges)} buckets need TrainStep(max_graphs={len(edges)}) or more; it has {thing.max_graphs}"
        )
    return StepTarget(thing)
