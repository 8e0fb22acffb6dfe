"""predict: the memory of a backward pass before it runs."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)

from ._errors import PlanError
from ._fake import FakeWorld
from ._hooks import following, gradient_bytes
from ._infer import completions, count_slots, infer
from ._json import VERSION
from ._layout import Completed, lay_out
from ._losses import Models, losses_of, models_of, named_parameters
from ._plan import Lifetime, Method, Plan
from ._policy import BUCKET_BYTES, Mode, Policy
from ._record import Recorder
from ._store import Store
from ._sums import after_node
from ._walk import Graph, is_leaf, leaf_of, walk


def predict(
    fn: Callable[..., Any] | torch.Tensor,
    *args: Any,
    model: Models | None = None,
    mode: Mode = "fused",
    bucket_bytes: int = BUCKET_BYTES,
    accumulation: int = 1,
    device: torch.device | str | None = None,
    dag_cache_path: str | Path | None = None,
    rebuild: bool = False,
) -> Plan:
    """Predict every buffer of a backward pass, when it lives, and where parameter gradients may lie.

    The function and the backward pass run once on fake tensors (no memory, no arithmetic, no kernel): the real
    engine, the real formulas, hooks, checkpoints and custom functions. The model, its gradients and the random state
    stay as they are. Temporaries inside a kernel are not seen; `verify` measures what they amount to.

    Args:
        fn: returns the loss, a scalar tensor; several losses, or an object with a `loss`, will do. Usually a module.
            A loss tensor whose graph exists is not run: its graph is read, and what shares memory is inferred.
        args: arguments for `fn`; tensors real, fake, or on the meta device. Only shapes and types count.
        model: the module or modules that `fn` trains, unless `fn` is that module.
        mode: what becomes of a parameter's gradient when it is complete, see Policy: "fused", "bucket", "all-alive".
        bucket_bytes: size of a bucket of mode "bucket".
        accumulation: micro-batches of a step; beyond 1 gradients of earlier ones live throughout.
        device: the device that meta tensors stand for.
        dag_cache_path: a file for this plan, or a directory for any number. Read if it holds the plan of this very
            graph; else, also if it is damaged, the plan is made anew and written there. JSON, whatever its name.
        rebuild: make the plan anew in any case.

    Returns:
        The plan. `plan.origin` says whether it came from the cache, and if not, why not.

    Raises:
        PlanError: the function needs values, trains what `model` does not hold, or cannot be planned.
    """
    policy = Policy(mode, bucket_bytes, accumulation)
    if isinstance(fn, torch.Tensor):
        return _read_graph(fn, models_of(lambda: None, model), policy)
    models = models_of(fn, model)
    world = FakeWorld(models, args, device)
    store = None if dag_cache_path is None else Store(dag_cache_path, rebuild)
    try:
        return world.run(lambda: _dry_run(fn, world, policy, store))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise PlanError(
            f"the function needs the values of tensors, which fake ones have not ({error}): keep .item(), nonzero "
            "and the like out of it, or read the graph of a real loss with predict(loss)"
        ) from error
    except NotImplementedError as error:
        raise PlanError(
            f"an operator does not run on fake tensors ({error}): register a fake kernel for it, or read the graph of "
            "a real loss with predict(loss)"
        ) from error


def _read_graph(loss: torch.Tensor, models: Sequence[nn.Module], policy: Policy) -> Plan:
    graph = walk([loss], {id(parameter): name for name, parameter in named_parameters(models)})
    completed = {graph.label(node): (at, nbytes) for node, nbytes, at, _ in completions(graph, policy)}
    return _assemble(
        graph, policy, "graph walk", _Recorded(infer(graph, policy), completed, len(graph.order), 0)
    )


def _dry_run(fn: Callable[..., Any], world: FakeWorld, policy: Policy, store: Store | None) -> Plan:
    recorder = Recorder()
    with recorder:
        losses = losses_of(fn(*world.args))
    graph = walk(losses, {id(parameter): name for name, parameter in world.parameters.items()})
    _refuse_strangers(graph)

    def build() -> Plan:
        return _assemble(graph, policy, "dry run", _record_backward(losses, graph, world, policy, recorder))

    return build() if store is None else store.get(_key(graph, policy, "dry run"), build)


@dataclass(frozen=True)
class _Recorded:
    """What a dry run, or a reading of the graph, found."""

    lifetimes: tuple[Lifetime, ...]
    completed: Completed
    steps: int
    forward_peak: int


def _record_backward(
    losses: Sequence[torch.Tensor], graph: Graph, world: FakeWorld, policy: Policy, recorder: Recorder
) -> _Recorded:
    """Run the backward pass on fake tensors; every node of the graph tells the recorder that its turn has come."""
    completed: dict[str, tuple[int, int]] = {}

    def complete(name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        recorder.name_gradient(parameter.grad, name)
        completed[name] = (recorder.step, gradient_bytes(parameter.grad))

    for node in graph.order:
        node.register_prehook(_entering(recorder, graph.label(node)))
        if not is_leaf(node):
            after_node(node, recorder.leave)
    with recorder:
        recorder.begin_backward()
        with following(world.parameters, policy, complete):
            torch.autograd.backward(list(losses))
        lifetimes = recorder.finish()
    return _Recorded(lifetimes, completed, recorder.steps, recorder.forward_peak)


def _entering(recorder: Recorder, label: str) -> Callable[[tuple[torch.Tensor, ...]], None]:
    return lambda _: recorder.enter(label)


def _assemble(graph: Graph, policy: Policy, method: Method, found: _Recorded) -> Plan:
    return Plan(
        key=_key(graph, policy, method),
        method=method,
        policy=policy,
        torch_version=torch.__version__,
        device=str(graph.order[0]._input_metadata[0].device),
        steps=found.steps,
        forward_peak_bytes=found.forward_peak,
        lifetimes=found.lifetimes,
        placements=lay_out(found.completed, policy, found.steps),
        slots=count_slots(graph, policy),
    )


def _key(graph: Graph, policy: Policy, method: Method) -> str:
    text = repr((VERSION, graph.fingerprint(), policy, method, torch.__version__))
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse_strangers(graph: Graph) -> None:
    """A real leaf would get a fake gradient."""
    for node in graph.order:
        if is_leaf(node) and not isinstance(leaf := leaf_of(node), FakeTensor):
            raise PlanError(
                f"the loss depends on a tensor of shape {tuple(leaf.shape)} that requires a gradient and belongs to no "
                "module given: pass the modules as model=, and such inputs as arguments"
            )
