"""``TrainStep``: a whole optimizer step as a handful of graph launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lf_graph._adamw import Launch
from lf_graph._alone import Alone
from lf_graph._backend import backend_for
from lf_graph._compile import CompileMode, Recompute, require_no_own_graphs
from lf_graph._errors import ClosedError, GraphError, SignatureError
from lf_graph._members import LoadHook
from lf_graph._modes import require_gradients_on
from lf_graph._parallel import Reduce, unwrap
from lf_graph._pool import GraphPool
from lf_graph._registry import NotCopied, forget, register
from lf_graph._sandbox import restored
from lf_graph._segment import Autocast
from lf_graph._shadows import autocast_of, shadowed
from lf_graph._static import StaticInputs, copy_into, signature_of, tensors_of
from lf_graph._stats import GraphStats
from lf_graph._step_hooks import call_after, call_before, require_none
from lf_graph._step_options import (
    ANOTHER_SIGNATURE,
    Release,
    require_batch,
    require_optimizer,
    require_options,
    require_release,
)
from lf_graph._step_result import StepResult
from lf_graph._step_state import StepState, choices_of, stats_of
from lf_graph._train_graph import MicroGraph, Recipe
from lf_graph._update import make_update

Load = Callable[[list[Tensor]], int]


class TrainStep(NotCopied):
    """Forward, backward, gradient accumulation, clipping and the optimizer, captured at the first batch.

    The model is used as it is. Under bf16 autocast, parameters that the forward reads only through their bf16 cast
    get a bf16 shadow that the optimizer writes: the same numbers without the casts. Masters and optimizer state stay
    fp32, ``model.state_dict()`` and ``optimizer.state_dict()`` as usual.

    Args:
        model: the module whose parameters the optimizer trains; of a ``DistributedDataParallel`` the module inside,
            with its process group and bucket size: the step then sums gradients over ranks by itself.
        optimizer: ``torch.optim.AdamW`` or ``Adam``; others run as they are, without shadows and gate.
        loss: called with the batch, returns a mean loss or (loss sum, count); default: the model itself.
        accumulate: most micro-batches per update. 1 lets the optimizer read gradients where the backward made them.
        clip: largest global gradient norm; 0 does not clip.
        gate: leave an update out when its gradients are not finite, and count it; None: on where possible.
        autocast: dtype of autocast, such as ``torch.bfloat16``; None for none.
        compile: "blocks" compiles the children of ModuleLists, "model" the whole loss, "off" nothing.
        compile_options: for Inductor.
        recompute: what compiled code computes again in its backward in the place of keeping it. "default": what torch
            chooses for speed. "cheap": also what takes no matrix product (normed inputs, activation functions, casts,
            short runs of residual sums). A number up to 1 is torch's ``activation_memory_budget``, which below about
            0.6 computes products again, the cheapest for their memory first.
        release: "exact" keeps gradients until the backward is over. "fused" updates each parameter within it, as soon
            as its gradient is complete, and frees the gradient: ``micro`` is the update then, one micro-batch long,
            without clip and gate. Name and bits of lf_memory.gradients.
        shadows: False keeps all parameters as they are.
        fused: True insists on the flat AdamW, False on the optimizer as it is.
        max_graphs: most signatures held; the least recently used is closed.
        max_bytes: budget of graph memory in bytes.
        reduce: called with flat gradient buffers and the totals [loss sum, count] before every update, on the
            stream of the step; must sum both over ranks in place. See :class:`lf_graph.AllReduce`. Its ``bind``, if
            any, gets the gradients by name first. When it raises, sums are incomplete: the step can only be closed.
        launch: sizes of the optimizer's kernels.
        name: for errors and statistics.

    Raises:
        GraphError: options without meaning, a model compiled with graphs of its own, or one wrapped in a way that
            the step cannot take over.
        ShardedParameterError: a parameter is spread over ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Callable[..., Any] | None = None,
        accumulate: int = 1,
        clip: float = 0.0,
        gate: bool | None = None,
        autocast: torch.dtype | None = None,
        compile: CompileMode = "off",
        compile_options: dict[str, Any] | None = None,
        recompute: Recompute = "default",
        release: Release = "exact",
        shadows: bool = True,
        fused: bool | None = None,
        max_graphs: int = 1,
        max_bytes: int | None = None,
        reduce: Reduce | None = None,
        launch: Launch | None = None,
        name: str = "step",
    ) -> None:
        require_options(
            accumulate=accumulate,
            max_graphs=max_graphs,
            clip=clip,
            autocast=autocast,
            compile=compile,
            recompute=recompute,
            loss=loss,
            gate=gate,
            max_bytes=max_bytes,
        )
        require_optimizer(optimizer)
        self._parallel = unwrap(model, reduce)
        model, reduce = self._parallel.module, self._parallel.reduce
        require_release(
            release, accumulate=accumulate, clip=clip, gate=gate, fused=fused, ranks=reduce is not None
        )
        require_no_own_graphs([model])
        self.model, self.optimizer, self.name = model, optimizer, name
        self.accumulate, self.max_graphs = accumulate, max_graphs
        self.loss: Callable[..., Any] = loss or model
        self._reduce, self._launch = reduce, launch
        self._release = release
        self._clip, self._gate, self._fused = clip, gate, fused
        if (
            release == "fused"
        ):  # one parameter at a time, which only the flat AdamW takes; no gate: see require_release
            self._gate, self._fused = False, True
        self._dtype, self._shadows = autocast, shadows
        self._compile, self._options = compile, dict(compile_options or {})
        self._recompute: Recompute = recompute
        self._max_bytes = max_bytes
        self._state: StepState | None = None
        self._pending = 0
        self._broken, self._closed = "", False
        self._alone = Alone()
        self._counts: dict[str, Any] = {"captures": 0, "replays": 0, "copies": 0}
        self._hooks = [model.register_load_state_dict_post_hook(LoadHook(self._require_members))]
        register(self)

    # -- the step ---------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> StepResult:
        """One update from one micro-batch; the arguments are the loss function's.

        Args:
            args, kwargs: tensors in any nesting, copied to where the graph reads them (any strides), and constants,
                which are part of the signature. The host waits for nothing.

        Raises:
            SignatureError: shapes, dtypes or constants that were not captured, with ``max_graphs`` 1.
            GraphCaptureError: at the first batch, naming the operation that a graph cannot hold.
            BudgetError: at the first batch, more graph memory than allowed.
            OptimizerError: at the first batch, an optimizer or parameter that no graph can update.
            AddressError: a parameter or optimizer state got other memory since.
            ClosedError: after :meth:`close`.
        """
        self.micro(*args, **kwargs)
        return self.update()

    def micro(self, *args: Any, **kwargs: Any) -> None:
        """Forward and backward of one micro-batch; its gradients add to those since the last update.

        Raises as a call does, and a GraphError for more of them than ``accumulate``.
        """
        tensors = tensors_of(args, kwargs)
        self._micro(args, kwargs, lambda places: copy_into(places, tensors))

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture for batches like this one, which is not trained on; raises as a call does."""
        self._require_whole()
        self._require_graph(args, kwargs)

    def _micro(self, args: tuple[Any, ...], kwargs: dict[str, Any], load: Load) -> None:
        """A micro-batch of the signature of ``args``; ``load`` writes it to its static places."""
        with self._alone(self.name):
            self._micro_alone(args, kwargs, load)

    def _micro_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any], load: Load) -> None:
        self._require_whole()
        if self._pending >= self.accumulate:
            raise GraphError(
                f"{self._pending} micro-batches since the last update and accumulate={self.accumulate}: "
                "call update() first, or give a larger accumulate"
            )
        state, graph = self._require_graph(args, kwargs)
        state.update.before_forward()
        if state.early:
            require_none(self.optimizer)
            state.update.before_replay()
        state.pool.follow()
        if not self._pending:
            self._parallel.before_update_begins()
        self._counts["copies"] += load(graph.static.tensors)
        with self._whole("a micro-batch was interrupted"):
            graph.replay()
        self._pending += 1
        self._counts["replays"] += len(graph.all_graphs())

    def update(self) -> StepResult:
        """Reduce, clip and step on the gradients since the last update; the host waits for nothing.

        Raises:
            GraphError: no micro-batch since the last update, or a sum over ranks that failed before.
            OptimizerError: a hyper-parameter changed that the optimizer's graph holds as it was; nothing has happened.
        """
        with self._alone(self.name):
            return self._update_alone()

    def _update_alone(self) -> StepResult:
        self._require_whole()
        state = self._state
        if state is None or not self._pending:
            raise GraphError("update() needs a micro-batch first")
        state.pool.follow()
        if not state.early:
            state.update.before_replay()  # it may refuse, and then nothing has happened yet
            call_before(self.optimizer)
        self._reduce_gradients(state)
        with self._whole("the last update was interrupted"):
            report = state.end()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers warn without it
        self._pending = 0
        self._counts["replays"] += 0 if state.early else 2
        if not state.early:
            call_after(self.optimizer)
        return StepResult(report[0], report[1])

    def refresh(self) -> None:
        """Follow writes to the weights that torch does not count, such as those through ``.data``: see `_shadows`."""
        if self._state is not None:
            self._state.update.refresh()

    def _reduce_gradients(self, state: StepState) -> None:
        if self._reduce is None:
            return
        with self._whole("the gradients of the last update were not summed on every rank"):
            state.sum_over_ranks(self._reduce)

    @contextmanager
    def _whole(self, otherwise: str) -> Iterator[None]:
        """What must not happen by half: after an error inside, sums and gradients do not belong together."""
        try:
            yield
        except BaseException as e:
            self._broken = f"{otherwise} ({type(e).__name__}: {e})"
            raise

    def _require_members(self) -> None:
        if self._state is not None:
            self._state.require_members(self.name, self.model)

    def _require_whole(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.name} was closed: make a new TrainStep")
        if self._broken:
            raise GraphError(
                f"{self.name}: {self._broken}; close this step, form the process group anew if there is one, and "
                "continue from a checkpoint"
            )
        self._parallel.require_even()

    @property
    def captures(self) -> int:
        """Captures made so far, closed ones included."""
        count: int = self._counts["captures"]
        return count

    @property
    def pool(self) -> GraphPool | None:
        """Where the micro-batch graphs lie; None before the first batch."""
        return None if self._state is None else self._state.pool

    @property
    def norm(self) -> Tensor:
        """float32 []: global gradient norm of the last update before clipping."""
        found: Tensor = self._open().update.norm
        return found

    @property
    def skipped(self) -> Tensor:
        """int64 []: updates left out because of gradients that were not finite."""
        found: Tensor = self._open().update.skipped
        return found

    # -- setting up -------------------------------------------------------------------------------------------

    def _open(self) -> StepState:
        if self._state is None:
            raise ClosedError(f"{self.name}: nothing is captured yet, or it was closed")
        return self._state

    def _require_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[StepState, MicroGraph]:
        if self._state is None:
            self._state = self._build(args, kwargs)
        try:
            return self._state, self._graph_for(self._state, args, kwargs)
        except BaseException:
            if not self._state.graphs:  # nothing was ever captured: leave nothing behind
                self._state.close()
                self._state = None
            raise

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepState:
        require_gradients_on(self.name)
        backend = backend_for(require_batch(self.name, args, kwargs)[0].device)
        autocast = autocast_of(self._dtype, backend)
        names = {id(p): n for n, p in self.model.named_parameters()}
        update = make_update(
            self.optimizer,
            self._shadowed(autocast, args, kwargs),
            names,
            clip=self._clip,
            gate=self._gate,
            fused=self._fused,
            launch=self._launch,
        )
        compile = "off" if backend.executes_captures else self._compile
        recipe = Recipe(
            (self.model,), self.loss, autocast, compile, self._options, self._recompute, update.stand_ins()
        )
        pool = GraphPool(backend, self._max_bytes)
        return StepState(backend, recipe, update, pool, early=self._release == "fused")

    def _shadowed(self, autocast: Autocast, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        if not self._shadows or self._dtype is not torch.bfloat16:
            return []

        def forward(*a: Any, **k: Any) -> Any:
            with autocast(), self._parallel.bypassed():
                return self.loss(*a, **k)

        return shadowed(self.model, self.optimizer, forward, args, kwargs)

    def _graph_for(self, state: StepState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MicroGraph:
        signature = signature_of(args, kwargs)
        found = state.find(signature)
        if found is not None:
            found.require_mode(self.name)
            return found
        if state.graphs and self.max_graphs == 1:
            differences = state.graphs[-1].static.signature.differences(signature)
            raise SignatureError(self.name, differences, ANOTHER_SIGNATURE)
        while len(state.graphs) >= self.max_graphs:
            state.backend.synchronize()
            state.graphs.pop(0).close()
        require_gradients_on(self.name)
        state.backend.synchronize()
        graph = MicroGraph(state.recipe, StaticInputs(args, kwargs), state.totals, state.pool)
        direct = self.accumulate == 1 and self.max_graphs == 1 and self._reduce is None
        try:
            with self._parallel.bypassed(), restored(state.backend, state.touched_by_capture()):
                graph.capture(
                    lambda used: state.choose_sink(used, self.accumulate, direct), state.capture_begin
                )
            state.capture_update()
        except BaseException:
            graph.close()
            raise
        state.graphs.append(graph)
        self._counts["captures"] += 1
        return graph

    # -- the rest -----------------------------------------------------------------------------------------------

    def stats(self) -> GraphStats:
        """Counts and bytes so far."""
        return stats_of(self.name, self._state, self._counts)

    def info(self) -> dict[str, str]:
        """What was chosen automatically, and why; a ClosedError before the first batch."""
        return choices_of(self._open(), self._compile, self._recompute)

    def close(self) -> None:
        """Wait, free the graphs and let the model be used without this object; call it before
        ``destroy_process_group``."""
        if self._state is not None:
            self._state.backend.synchronize()
            self._state.close()
            self._state = None
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        forget(self)

    def __enter__(self) -> TrainStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
