"""A computation as small graphs with ordinary code between them, usable like any differentiable function."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lf_graph._backend import backend_for
from lf_graph._edges import Edge, edges_of, places_of
from lf_graph._elements import (
    Eager,
    Element,
    Stage,
    call_eager,
    require_elements,
    require_given,
    require_like,
    require_names,
    resolve,
    run_eager,
    stages_of,
)
from lf_graph._errors import ClosedError, GraphCaptureError, GraphError, SignatureError, StaleReplayError
from lf_graph._gradients import InPlace
from lf_graph._members import AssignedBuffers, Members, require_no_gradient_hooks
from lf_graph._modes import TrainingModes, require_no_capture, require_no_inference_mode
from lf_graph._parallel import require_local
from lf_graph._pool import GraphPool
from lf_graph._registry import NotCopied, forget, register
from lf_graph._sandbox import aliases, buffers_of, restored, swapped
from lf_graph._segment import Autocast, Piece, Segment
from lf_graph._static import StaticInputs, copy_into
from lf_graph._stats import GraphStats


class _Replay(torch.autograd.Function):
    """A segment as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, stage: Stage, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = chain._replay_forward(stage, tensors)
        ctx.chain, ctx.stage, ctx.token, ctx.done = chain, stage, chain._token, False
        ctx.set_materialize_grads(False)
        segment = stage.captured()
        given = tuple(o.detach() for o in outputs)
        ctx.mark_non_differentiable(
            *[g for g, n in zip(given, stage.outputs, strict=True) if n not in segment.seeds]
        )
        return given

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.done:
            raise StaleReplayError(
                f"{ctx.chain.name}: a second backward of one replay (retain_graph=True): the first one has reused the "
                "memory of the saved tensors; add the losses and run one backward"
            )
        ctx.done = True
        return (None, None, None, *ctx.chain._replay_backward(ctx.stage, ctx.token, grads))


class Chain(NotCopied):
    """Pieces and eager elements in order, captured for one set of input shapes.

    After :meth:`capture` it is called like a function and takes part in autograd. Parameter gradients are added in
    place to ``.grad`` inside the graphs. Outputs are copied out unless ``copy_outputs`` is False; then they lie in
    graph memory, good until the chain's backward or its next call.

    Args:
        elements: :class:`Piece` and :class:`Eager` in order of execution.
        inputs: names of the call's arguments; default: as many as the first element takes, or one.
        outputs: names of what a call returns; default: what the last element gives.
        name: for errors and statistics.
        autocast: context factory for forwards, such as ``lambda: torch.autocast("cuda", torch.bfloat16)``.
        pool: share graph memory with other chains that never run between this one's forward and backward.
        max_bytes: budget of a pool of its own.
        copy_outputs: whether a call returns tensors that stay valid.

    Raises:
        GraphError: no elements, or names that do not fit together.
        ShardedParameterError: a parameter behind an element is spread over ranks.
    """

    def __init__(
        self,
        elements: Sequence[Element],
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
        *,
        name: str = "chain",
        autocast: Autocast | None = None,
        pool: GraphPool | None = None,
        max_bytes: int | None = None,
        copy_outputs: bool = True,
    ) -> None:
        require_elements(elements)
        require_names(inputs, f"inputs of {name}")
        require_names(outputs, f"outputs of {name}")
        self.inputs = tuple(inputs) or elements[0].inputs or ("input",)
        self.elements = resolve(elements, self.inputs)
        self.outputs = tuple(outputs) or self.elements[-1].outputs
        require_given(self.outputs, self.elements, self.inputs)
        self.name, self.copy_outputs = name, copy_outputs
        self.autocast: Autocast = autocast or nullcontext
        self._pool, self._max_bytes = pool, max_bytes
        require_local(m for e in self.elements if isinstance(e, Piece) for m in e.modules())
        self._stages = stages_of(self.elements, self.outputs)
        self._static: StaticInputs | None = None
        self._sink = InPlace()
        self._token: object = None
        self._anchor: Tensor | None = None
        self._between = {n for s in self._stages if isinstance(s.elements[0], Piece) for n in s.outputs}
        self._modes, self._members = TrainingModes(()), Members(())
        self._with_gradients = True
        self._captures = self._replays = self._copies = 0

    @property
    def modules(self) -> list[nn.Module]:
        """The modules behind all elements."""
        return [m for e in self.elements for m in e.modules()]

    @property
    def _captured_modules(self) -> list[nn.Module]:
        return [m for e in self.elements if isinstance(e, Piece) for m in e.modules()]

    @property
    def static_inputs(self) -> list[Tensor]:
        """Where the graphs read the inputs: what is written there before a call need not be copied by it."""
        return self._require_open().tensors

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters that get gradients inside the graphs; known after the capture."""
        return self._sink.parameters

    # -- capture ----------------------------------------------------------------------------------------------

    def capture(self, *args: Tensor, warm_up: int = 2) -> Chain:
        """Capture for inputs like ``args``; leaves parameters, buffers, gradients and generators as they were.

        Args:
            args: sample inputs; the graph fixes their shapes, dtypes and whether they want a gradient.
            warm_up: eager runs of forward and backward before the capture.

        Raises:
            GraphCaptureError: an operation that a graph cannot hold; everything made so far is freed.
            BudgetError: the graphs would need more memory than allowed.
            GraphError: another number of tensors than the chain has inputs.
        """
        self._release()
        if len(args) != len(self.inputs):
            raise GraphError(f"{self.name} takes {list(self.inputs)}, got {len(args)} tensors")
        if strange := [type(a).__name__ for a in args if not isinstance(a, Tensor)]:
            raise GraphError(
                f"{self.name} takes tensors, got {strange}: bind other values with functools.partial"
            )
        require_no_inference_mode(self.name)
        require_no_gradient_hooks(self._captured_modules)
        self._with_gradients = torch.is_grad_enabled()
        pool = self._pool = self._pool or GraphPool(backend_for(args[0].device), self._max_bytes)
        modes = TrainingModes(self.modules)
        try:
            with modes.watching(), restored(pool.backend, buffers_of(self.modules)), pool.backend.preparing():
                stand_ins = aliases(p for m in self.modules for p in m.parameters())
                self._sink = InPlace(stand_ins)
                with swapped(self.modules, stand_ins):
                    self._capture(pool, StaticInputs(args, {}), warm_up)
        except BaseException:
            self._release()
            raise
        self._modes, self._members = modes, Members(self._captured_modules)
        self._captures += 1
        register(self)
        return self

    def _capture(self, pool: GraphPool, static: StaticInputs, runs: int) -> None:
        self._static = static
        values = dict(zip(self.inputs, static.tensors, strict=True))
        peak = pool.backend.watch_peak()
        assigned = AssignedBuffers(self._captured_modules)
        versions = [t._version for t in static.tensors]
        self._sink.prepare(self._warm_up(pool, values, runs))
        assigned.settle()
        _require_untouched(self.inputs, versions, static.tensors)
        pool.check_budget(self.name, peak())
        touched = self._sink.buffers if pool.backend.executes_captures else []
        with restored(pool.backend, touched), pool.counting(self):
            self._capture_stages(dict(zip(self.inputs, static.tensors, strict=True)))
        assigned.require_settled()
        self._anchor = torch.zeros((), device=pool.backend.device, requires_grad=True)

    def _warm_up(self, pool: GraphPool, values: dict[str, Tensor], runs: int) -> list[Tensor]:
        parameters: dict[int, Tensor] = {}
        for stage in self._stages:
            if isinstance(stage.elements[0], Eager):
                values |= run_eager(stage.elements[0], values)
                continue
            pieces = [e for e in stage.elements if isinstance(e, Piece)]
            segment = stage.segment = Segment(pieces, stage.outputs, pool, self.autocast)
            segment.dry_run({n: values[n] for n in stage.inputs})
            used = segment.warm_up({n: values[n] for n in stage.inputs}, runs)
            parameters |= {id(p): p for p in used}
            values |= {n: segment.values[n] for n in stage.outputs}
        return list(parameters.values())

    def _capture_stages(self, values: dict[str, Tensor]) -> None:
        for stage in self._stages:
            if isinstance(stage.elements[0], Eager):
                values |= run_eager(stage.elements[0], values)
            else:
                segment = stage.captured()
                segment.capture_forward({n: values[n] for n in stage.inputs})
                segment.replay_forward()  # what follows may look at the values
                values |= {n: segment.values[n] for n in stage.outputs}
                stage.fixed = [values[n] for n in stage.inputs]
        for stage in reversed(self._stages):
            if stage.segment is not None:
                stage.segment.make_seeds()
                stage.segment.capture_backward(self._sink)

    # -- calls ------------------------------------------------------------------------------------------------

    def __call__(self, *args: Tensor) -> Any:
        """Replay; differentiable, once.

        Args:
            args: tensors of the shapes, dtypes and device of the capture, in the order of the inputs; any strides.
                Each is copied to its static place, unless it lies there.

        Returns:
            One tensor, or a tuple when several outputs are named.

        Raises:
            SignatureError: other shapes, dtypes, devices or training mode than at capture.
            AddressError: a parameter was moved since.
            ClosedError: before :meth:`capture`, or after :meth:`close`.
            StaleReplayError: in the backward, when another forward was replayed in the pool in between.
        """
        require_no_capture(self.name)
        static = self._require_open()
        tensors = static.require(self.name, args, {})
        self._modes.require(self.name)
        self._members.require(self.name)
        self._sink.verify(self.name)
        self._require_gradients(tensors)
        assert self._pool is not None
        with self._pool.alone(self.name):
            self._pool.follow()
            self._token = object()
            self._copies += copy_into(static.tensors, tensors)
            values = dict(zip(self.inputs, tensors, strict=True))
            for stage in self._stages:
                values |= self._run_stage(stage, values)
        results = tuple(values[n] for n in self.outputs)
        return results[0] if len(results) == 1 else results

    def _require_gradients(self, tensors: Sequence[Tensor]) -> None:
        """A graph captured under ``no_grad`` has no backward."""
        wanted = torch.is_grad_enabled() and not self._with_gradients
        if wanted and (self._members.trains or any(t.requires_grad for t in tensors)):
            fix = "call it inside torch.no_grad(), or capture outside of it"
            raise SignatureError(self.name, ["gradients (torch.no_grad): off -> on"], fix)

    def _run_stage(self, stage: Stage, values: dict[str, Tensor]) -> dict[str, Tensor]:
        element = stage.elements[0]
        if isinstance(element, Eager):
            return call_eager(element, values)
        tensors = [values[n] for n in stage.inputs]
        outputs: tuple[Tensor, ...] = _Replay.apply(self, stage, self._anchor, *tensors)  # type: ignore[no-untyped-call]
        given = dict(zip(stage.outputs, outputs, strict=True))
        if not self.copy_outputs:
            return given
        return {n: o.clone() if n in self.outputs else o for n, o in given.items()}

    def _replay_forward(self, stage: Stage, tensors: Sequence[Tensor]) -> list[Tensor]:
        assert self._pool is not None
        self._pool.claim(self._token)
        segment = stage.captured()
        if self._pool.poison:
            self._pool.spoil(segment.grads.values(), self._lasting(stage))
        # the chain's own inputs are there already; a second copy would look like a change to what eager code saved
        new = [i for i, n in enumerate(stage.inputs) if n not in self.inputs]
        for i in new:
            require_like(stage.fixed[i], tensors[i], f"{self.name}: {stage.inputs[i]}")
        self._copies += copy_into([stage.fixed[i] for i in new], [tensors[i] for i in new])
        segment.replay_forward()
        self._replays += len(segment.captured)
        return [segment.values[n] for n in stage.outputs]

    def _replay_backward(
        self, stage: Stage, token: object, grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        self._require_open()
        assert self._pool is not None
        with self._pool.alone(self.name):
            self._pool.follow()
            self._pool.require(token, self.name)
            return self._replay_backward_alone(stage, grads, self._pool)

    def _replay_backward_alone(
        self, stage: Stage, grads: Sequence[Tensor | None], pool: GraphPool
    ) -> list[Tensor | None]:
        self._sink.attach()
        segment = stage.captured()
        for name, grad in zip(stage.outputs, grads, strict=True):
            if name in segment.seeds:
                _load(segment.seeds[name], grad)
        segment.replay_backward()
        self._replays += sum(c.backward is not None for c in segment.captured)
        if pool.poison:
            pool.spoil(segment.made(), self._lasting(stage))
        return [self._edge_gradient(segment, n) for n in stage.inputs]

    def _lasting(self, stage: Stage) -> list[Tensor]:
        """What may share memory with a stage's values and is good beyond its backward."""
        owned = [t for m in self.modules for t in (*m.parameters(), *m.buffers())]
        return [*owned, *self.parameters, *self._sink.buffers, *stage.fixed, *self._require_open().tensors]

    def _edge_gradient(self, segment: Segment, name: str) -> Tensor | None:
        grad = segment.grads.get(name)
        if grad is None or not segment.values[name].requires_grad:
            return None
        # autograd may keep what it is given as a leaf's .grad; between segments it is copied at once
        return grad.detach() if name in self._between else grad.clone()

    def _require_open(self) -> StaticInputs:
        if self._static is None:
            raise ClosedError(f"{self.name} is not captured: call capture() with sample inputs first")
        return self._static

    # -- the rest -----------------------------------------------------------------------------------------------

    def edges(self) -> tuple[Edge, ...]:
        """The values between elements, and how long each is needed; ClosedError before a capture."""
        static = dict(zip(self.inputs, self._require_open().tensors, strict=True))
        return edges_of(self.elements, self.inputs, self.outputs, places_of(self._stages, static))

    def stats(self) -> GraphStats:
        """Counts and bytes so far."""
        graphs = [g for s in self._stages if s.segment is not None for g in s.segment.graphs()]
        return GraphStats(
            self.name,
            "" if self._pool is None else self._pool.backend.name,
            graphs=len(graphs),
            operations=sum(g.operations for g in graphs),
            captures=self._captures,
            replays=self._replays,
            copies=self._copies,
            bytes=0 if self._pool is None else self._pool.bytes,
            predicted_bytes=0 if self._pool is None else self._pool.predicted_bytes,
        )

    def close(self) -> None:
        """Free all graphs of the chain together; gradients stay where they are."""
        if self._pool is not None:
            self._pool.backend.synchronize()
        self._release()

    def _release(self) -> None:
        for stage in self._stages:
            if stage.segment is not None:
                stage.segment.close()
            stage.segment, stage.fixed = None, []
        self._static, self._sink, self._members = None, InPlace(), Members(())
        if self._pool is not None:
            self._pool.release(self)
        forget(self)

    def __enter__(self) -> Chain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _require_untouched(names: Sequence[str], versions: Sequence[int], tensors: Sequence[Tensor]) -> None:
    for name, version, tensor in zip(names, versions, tensors, strict=True):
        if tensor._version != version:
            raise GraphCaptureError(
                f"in-place change of input {name}",
                "",
                "a graph works on a copy of its inputs, and the caller's tensor would stay as it was",
                "work on a clone(), and return what the caller should get",
            )


def _load(seed: Tensor, grad: Tensor | None) -> None:
    if grad is None:
        seed.zero_()
    else:
        copy_into([seed], [grad])
