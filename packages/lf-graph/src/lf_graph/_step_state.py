"""What a training step holds once its first batch is known: pools, totals, graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lf_graph._backend import Backend, Graph
from lf_graph._compile import CompileMode, Recompute
from lf_graph._early import Applied
from lf_graph._errors import AddressError, GraphError
from lf_graph._pool import GraphPool
from lf_graph._sandbox import restored
from lf_graph._sinks import Direct, Into, require_all_used
from lf_graph._static import Signature
from lf_graph._stats import GraphStats
from lf_graph._train_graph import MicroGraph, Recipe
from lf_graph._update import FlatUpdate, Update


class StepState:
    """Everything that exists once the first batch is known."""

    def __init__(
        self, backend: Backend, recipe: Recipe, update: Update, pool: GraphPool, early: bool = False
    ) -> None:
        self.backend, self.recipe, self.update, self.pool = backend, recipe, update, pool
        self.early = early  # parameters are updated within the backward
        self.update_pool = backend.new_pool()
        self.totals = torch.zeros(2, dtype=torch.float32, device=backend.device)
        self.report = torch.zeros(2, dtype=torch.float32, device=backend.device)
        self.scale = torch.ones((), dtype=torch.float32, device=backend.device)
        self.graphs: list[MicroGraph] = []  # one per signature; the last one was used last
        self.finish: Graph | None = None
        self.optimize: Graph | None = None
        self.buffers: list[Tensor] = []
        self.views: list[Tensor] = []
        self._bound = False  # whether what sums over ranks knows the gradients by name
        self.sink: Direct | Into | Applied | None = None
        stand_ins = update.stand_ins()
        # a loss may also read a parameter that it holds itself, which no swap reaches
        self.index = {id(p): i for i, p in enumerate(update.parameters)}
        self.index |= {
            id(stand_ins[p]): i for p, i in zip(update.parameters, self.index.values(), strict=True)
        }

    def require_members(self, name: str, model: nn.Module) -> None:
        """``load_state_dict(assign=True)`` gives the model parameters that neither optimizer nor graphs know.

        Raises:
            AddressError: it has.
        """
        mine = {id(p) for p in model.parameters()}
        pairs = zip(self.update.names, self.update.parameters, strict=True)
        lost = [n for n, p in pairs if id(p) not in mine]
        if lost:
            raise AddressError(
                f"{name}: {lost[0]} of the model is another parameter than the optimizer's: load with assign=False, "
                "which copies"
            )

    def find(self, signature: Signature) -> MicroGraph | None:
        """The graph of a signature, now the most recently used."""
        for i, graph in enumerate(self.graphs):
            if graph.static.signature.same(signature):
                self.graphs.append(self.graphs.pop(i))
                return graph
        return None

    def choose_sink(self, used: Sequence[Tensor], accumulate: int, direct: bool) -> Direct | Into | Applied:
        """Where the gradients of ``used`` go: to the optimizer as they are made (``direct``), or into the buffers.

        Raises as :func:`require_all_used` does.
        """
        require_all_used(used, self.index, self.update.names)
        if self.early:
            self.sink = self._apply(used)
            return self.sink
        if direct:
            self.sink = Direct(self.index, len(self.update.parameters))
            return self.sink
        if not self.buffers:
            self.make_buffers(used, accumulate)
        self.sink = Into(self.index, self.views, "write" if accumulate == 1 else "add")
        return self.sink

    def _apply(self, used: Sequence[Tensor]) -> Applied:
        assert isinstance(self.update, FlatUpdate)  # nothing else takes one parameter at a time
        fused = self.update.fused
        dtypes: dict[int, torch.dtype] = {}
        for p in used:
            i = self.index[id(p)]
            if i in dtypes:
                raise GraphError(
                    f"the loss reads {self.update.names[i]} through its module and by a reference of its own, which "
                    "are two gradients, and release='fused' updates from the first: use release='exact'"
                )
            dtypes[i] = p.dtype
        fused.prepare([dtypes[i] for i in range(len(dtypes))])
        sink = Applied(fused, self.index)
        with restored(self.backend, [fused.flat.steps, self.totals]):  # nothing lazy is left for the capture
            self._finish_step()
            sink.begin(self.scale)
        return sink

    def capture_begin(self) -> Graph | None:
        """Capture what early updates need between forward and backward; None where there are none."""
        sink = self.sink
        if not isinstance(sink, Applied):
            return None

        def begin() -> None:
            self._finish_step()
            sink.begin(self.scale)

        graph, _ = self.backend.capture(begin, self.pool.handle)
        return graph

    def make_buffers(self, used: Sequence[Tensor], accumulate: int) -> None:
        """Flat gradient buffers, one per dtype; several micro-batches are summed in fp32."""
        by_index = {self.index[id(p)]: p for p in used}
        dtypes = [torch.float32 if accumulate > 1 else by_index[i].dtype for i in range(len(by_index))]
        views: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(dtypes):
            mine = [i for i, d in enumerate(dtypes) if d == dtype]
            flat, cut = _flat_views([by_index[i] for i in mine], dtype)
            self.buffers.append(flat)
            views |= dict(zip(mine, cut, strict=True))
        self.views = [views[i] for i in range(len(dtypes))]

    def sum_over_ranks(self, reduce: Callable[[list[Tensor], Tensor], None]) -> None:
        """Call ``reduce`` on buffers and totals; at first tell it which gradient lies where, if it wants to know."""
        bind = getattr(reduce, "bind", None)
        if not self._bound and bind is not None:
            bind(dict(zip(self.update.names, self.views, strict=True)))
        self._bound = True
        reduce(self.buffers, self.totals)

    def capture_update(self) -> None:
        """Capture the end of the step, once: gradients have their addresses now."""
        if isinstance(self.sink, Applied):  # the end is in the backward of each graph
            self.sink.settle()
            return
        if self.optimize is not None:
            return
        assert self.sink is not None
        self.update.set_gradients(self.sink.gradients)
        with self.backend.preparing():
            self._finish_step()
            self.update.rehearse(self.backend, self.scale)
            self._clear()
        self.finish, _ = self.backend.capture(self._finish_step, self.update_pool)
        with self._untouched():
            self.optimize, _ = self.backend.capture(self._optimize, self.update_pool)
        self._clear()

    def _untouched(self) -> Any:
        """On a backend that executes captures, close the gate: the capture must not be an update."""
        touched = self.update_state() if self.backend.executes_captures else []
        return restored(self.backend, touched)

    def update_state(self) -> list[Tensor]:
        """Everything an update writes."""
        states = self.update.optimizer.state.values()
        state = [t for s in states for t in s.values() if isinstance(t, Tensor)]
        stand_ins = [s.data for s in self.update.stand_ins().values()]
        return [
            *[p.data for p in self.update.parameters],
            *state,
            *stand_ins,
            self.update.norm,
            self.update.skipped,
        ]

    def _finish_step(self) -> None:
        """Mean loss and the factor that turns summed gradients into those of the mean; totals start anew."""
        count = torch.where(self.totals[1] > 0, self.totals[1], 1.0)  # nothing counted: zero gradients
        self.scale.copy_(1 / count)
        self.report.copy_(torch.stack((self.totals[0] / count, self.totals[1])))
        self.totals.zero_()

    def _optimize(self) -> None:
        self.update.step(self.scale)
        if isinstance(self.sink, Into) and self.sink.adds:
            for buffer in self.buffers:
                buffer.zero_()

    def _clear(self) -> None:
        self.totals.zero_()
        for buffer in self.buffers:
            buffer.zero_()

    def all_graphs(self) -> list[Graph]:
        """All graphs."""
        ends = [g for g in (self.finish, self.optimize) if g is not None]
        return [g for m in self.graphs for g in m.all_graphs()] + ends

    def end(self) -> Tensor:
        """Mean loss and count [2] of the micro-batches that were run, after an update from their gradients."""
        if self.early:
            return self.report.clone()
        assert self.finish is not None
        assert self.optimize is not None
        self.finish.replay()
        report = self.report.clone()
        self.optimize.replay()
        return report

    def touched_by_capture(self) -> list[Tensor]:
        """What a capture that executes must not change: sums of earlier micro-batches, and what early updates write."""
        if not self.backend.executes_captures:
            return []
        return self.update_state() if self.early else self.buffers

    def close(self) -> None:
        """Free all graphs."""
        for graph in self.graphs:
            graph.close()
        for end in (self.finish, self.optimize):
            if end is not None:
                end.close()
        self.graphs, self.finish, self.optimize = [], None, None
        self.update.close()


def stats_of(name: str, state: StepState | None, counts: dict[str, Any]) -> GraphStats:
    """Counts and bytes of a step so far."""
    if state is None:
        return GraphStats(name, "", **counts)
    return GraphStats(
        name,
        state.backend.name,
        graphs=len(state.all_graphs()),
        operations=sum(g.operations for g in state.all_graphs()),
        bytes=state.pool.bytes,
        predicted_bytes=state.pool.predicted_bytes,
        **counts,
    )


def choices_of(state: StepState, compile: CompileMode, recompute: Recompute) -> dict[str, str]:
    """What was chosen by itself, and why; ``compile`` and ``recompute`` were asked for."""
    asked = f"compile={compile!r}" + (f", recompute={recompute!r}" if recompute != "default" else "")
    without = f"off: no compiler on {state.backend.name}"
    return {
        "optimizer": state.update.kind,
        "compile": asked if state.recipe.compile == compile else without,
        "gradients": f"{type(state.sink).__name__}, {copies_of(state)}",
    }


def copies_of(state: StepState) -> str:
    """How many gradients a backward copies, by reason."""
    reasons = [why for g in state.graphs[-1:] for why, _ in g.segment.copies]
    counts = {why: reasons.count(why) for why in reasons}
    return ", ".join(f"{n} copied ({why})" for why, n in counts.items()) or "none copied"


def _flat_views(parameters: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """One buffer for gradients of ``parameters``, each part beginning at a multiple of 256 bytes."""
    unit = 256 // dtype.itemsize
    starts, end = [], 0
    for p in parameters:
        starts.append(end)
        end += -(-p.numel() // unit) * unit
    flat = torch.zeros(end, dtype=dtype, device=parameters[0].device)
    return flat, [flat[s : s + p.numel()].view(p.shape) for s, p in zip(starts, parameters, strict=True)]
