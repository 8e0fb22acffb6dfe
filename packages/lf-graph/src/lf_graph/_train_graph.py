"""One micro-batch, forward and backward, for one signature of inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lf_graph._backend import Graph
from lf_graph._compile import CompileMode, Recompute, blocks_of, compile_function, compiled
from lf_graph._errors import GraphError
from lf_graph._frugal import in_parts
from lf_graph._gradients import GradientSink
from lf_graph._members import AssignedBuffers, Members, require_no_gradient_hooks
from lf_graph._modes import TrainingModes
from lf_graph._outside import Outside
from lf_graph._pool import GraphPool
from lf_graph._refused_calls import refusing_own_backward
from lf_graph._sandbox import buffers_of, restored, swapped
from lf_graph._segment import Autocast, Piece, Segment
from lf_graph._static import Signature, StaticInputs

Loss = Callable[..., Any]


@dataclass(frozen=True)
class Recipe:
    """What every micro-batch graph of a step shares.

    Attributes:
        roots: the modules that are trained; their buffers are put back after warm-up.
        loss: called with the batch; returns a mean loss, or (loss sum, count).
        autocast: context factory for the forward.
        compile: what runs compiled.
        options: for Inductor.
        recompute: what compiled code computes again in its backward.
        stand_ins: what the forward reads in the place of parameters.
    """

    roots: tuple[nn.Module, ...]
    loss: Loss
    autocast: Autocast
    compile: CompileMode
    options: dict[str, Any]
    recompute: Recompute
    stand_ins: dict[Tensor, Tensor]


class LossFunction:
    """A batch's loss as a function of tensors that also adds to the step's totals.

    Args:
        loss: see :class:`Recipe`.
        signature: of the batch; everything but tensors is a constant.
        totals: float32 [2] on the device: summed loss and count since the last update.
    """

    def __init__(self, loss: Loss, signature: Signature, totals: Tensor) -> None:
        self.loss, self.signature, self.totals = loss, signature, totals

    def __call__(self, *tensors: Tensor) -> Tensor:
        total, count = as_sum_and_count(self._call(tensors))
        with torch.no_grad():
            self.totals.add_(torch.stack((total.detach().float(), count.float())))
        return total

    def _call(self, tensors: Sequence[Tensor]) -> Any:
        args, kwargs = self.signature.filled(tensors)
        return self.loss(*args, **kwargs)


def as_sum_and_count(result: Any) -> tuple[Tensor, Tensor]:
    """(loss sum, count) of what a loss function returned; a single loss counts as one.

    Raises:
        GraphError: it is neither a scalar tensor nor a pair of them.
    """
    pair = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    scalars = [x for x in pair if isinstance(x, Tensor) and x.numel() == 1]
    if len(scalars) != len(pair) or len(pair) not in (1, 2):
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in pair]
        raise GraphError(
            f"the loss must be a scalar, or (loss sum, count) as tensors; it returned {shapes}. Give "
            "loss=lambda ...: the part of the result that is the loss"
        )
    total = pair[0].reshape(())
    count = (
        pair[1].reshape(()) if len(pair) == 2 else torch.ones((), dtype=torch.float32, device=total.device)
    )
    return total, count


class MicroGraph:
    """Graphs of one micro-batch. Replay order: load ``static.tensors``, :meth:`replay`."""

    def __init__(self, recipe: Recipe, static: StaticInputs, totals: Tensor, pool: GraphPool) -> None:
        self.recipe, self.static, self.pool = recipe, static, pool
        self._totals = totals
        self._kept: list[Any] = []
        self._modes, self._members = TrainingModes(recipe.roots), Members(())
        self.segment = self._segment(recipe.loss)
        self._begin: Graph | None = None

    def _segment(self, loss: Loss) -> Segment:
        fn = LossFunction(loss, self.static.signature, self._totals)
        names = tuple(f"batch{i}" for i in range(len(self.static.tensors)))
        piece = Piece(fn, names, ("loss",), "micro_batch", owners=self.recipe.roots)
        return Segment([piece], ["loss"], self.pool, self.recipe.autocast)

    def capture(
        self,
        prepare: Callable[[Sequence[Tensor]], GradientSink],
        capture_begin: Callable[[], Graph | None] = lambda: None,
    ) -> None:
        """Warm up, compile, capture.

        Args:
            prepare: called after the warm-up with the tensors that got gradients (stand-ins in the place of
                parameters); returns where gradients go.
            capture_begin: called between the captures of forward and backward; its graph is replayed there.
        """
        backend, recipe = self.pool.backend, self.recipe
        require_no_gradient_hooks(recipe.roots)
        outside = Outside(recipe.roots)
        outside.assigned.append(AssignedBuffers(recipe.roots))
        values = dict(zip(self.segment.pieces[0].inputs, self.static.tensors, strict=True))
        with ExitStack() as stack:
            stack.enter_context(self._modes.watching())
            stack.enter_context(restored(backend, [*buffers_of(recipe.roots), self._totals]))
            stack.enter_context(swapped(recipe.roots, recipe.stand_ins))
            stack.enter_context(backend.preparing())
            with restored(backend, self.static.tensors), outside.watching(), refusing_own_backward():
                self._dry_run(values)  # a loss may change its batch in place
            self._modes.add(outside.modules)
            stack.enter_context(restored(backend, buffers_of(outside.modules)))
            stack.enter_context(self._compiling())
            peak = backend.watch_peak()
            for _ in range(2):
                with restored(backend, self.static.tensors):
                    used = self.segment.warm_up(values, runs=1)
            for assigned in outside.assigned:
                assigned.settle()
            self.pool.check_budget("this step", peak())
            sink = prepare(used)
            with self.pool.counting(self):
                self.segment.capture_forward(values)
                self.segment.make_seeds()
                self._begin = capture_begin()
                self.segment.capture_backward(sink)
        for assigned in outside.assigned:
            assigned.require_settled()
        self._members = Members(recipe.roots, outside.modules)

    def _dry_run(self, values: dict[str, Tensor]) -> None:
        """Uncompiled code, in no more memory than compiled code will need."""
        if self.recipe.compile == "off":
            self.segment.dry_run(values)
        else:
            in_parts(blocks_of(self.recipe.roots), lambda: self.segment.dry_run(values))

    def _compiling(self) -> Any:
        recipe = self.recipe
        if recipe.compile == "blocks":
            return self._keep(compiled(blocks_of(recipe.roots), recipe.options, recipe.recompute))
        if recipe.compile == "model":
            fast = compile_function(recipe.loss, recipe.options, recipe.recompute)
            self._kept.append(fast)
            self.segment = self._segment(fast)
        return nullcontext()

    def _keep(self, context: Any) -> Any:
        stack = ExitStack()
        self._kept.append(stack.enter_context(context))
        return stack

    def require_mode(self, name: str) -> None:
        """See :meth:`TrainingModes.require` and :meth:`Members.require`."""
        self._modes.require(name, "evaluate with the model itself, or make a TrainStep in this mode")
        self._members.require(name, "make a new TrainStep after freezing or unfreezing parameters")

    def replay(self) -> None:
        """Forward and backward."""
        self.segment.replay_forward()
        if self._begin is not None:
            self._begin.replay()
        self.segment.replay_backward()

    def all_graphs(self) -> list[Graph]:
        """All graphs."""
        return self.segment.graphs() + ([] if self._begin is None else [self._begin])

    def close(self) -> None:
        """Free the graphs."""
        self.segment.close()
        if self._begin is not None:
            self._begin.close()
            self._begin = None
        self.pool.release(self)
        self._kept.clear()
