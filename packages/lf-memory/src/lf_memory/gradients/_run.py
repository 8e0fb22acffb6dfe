"""Run a forward and a backward pass on stand-ins or for real, and make a plan of what they allocate."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from ._errors import PlanError
from ._hooks import following, gradient_bytes
from ._infer import completions, count_slots, infer
from ._json import VERSION
from ._layout import Completed, lay_out
from ._losses import losses_of
from ._plan import Lifetime, Method, Plan
from ._policy import Policy
from ._record import Recorder
from ._store import Store
from ._sums import after_node
from ._walk import Graph, is_leaf, leaf_of, walk

T = TypeVar("T")


class World(Protocol):
    """Parameters and arguments of a step, fake or real, and a place to run it in."""

    args: Any

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """By name, each once."""

    def run(self, work: Callable[[], T]) -> T:
        """Do something with them in place."""


def read_graph(loss: torch.Tensor, names: Mapping[int, str], policy: Policy) -> Plan:
    """The plan of a loss whose graph exists, from the graph alone."""
    graph = walk([loss], names)
    completed = {graph.label(node): (at, nbytes) for node, nbytes, at, _ in completions(graph, policy)}
    found = _Recorded(infer(graph, policy), completed, len(graph.order), 0)
    return _assemble(graph, policy, "graph walk", _key(graph, policy, "graph walk", []), found)


def run_step(
    fn: Callable[..., Any], world: World, policy: Policy, method: Method, store: Store | None
) -> Plan:
    """The plan of a step that is run in a world; the backward pass is left out if the store knows the plan."""
    recorder = Recorder(method == "dry run", _device_of(world))
    with recorder:
        losses = losses_of(fn(*world.args))
    graph = walk(losses, {id(parameter): name for name, parameter in world.parameters.items()})
    _refuse_strangers(graph, [*world.parameters.values(), *tree_leaves(world.args)])

    key = _key(graph, policy, method, recorder.saved_sizes())

    def build() -> Plan:
        return _assemble(graph, policy, method, key, _record_backward(losses, graph, world, policy, recorder))

    return build() if store is None else store.get(key, build)


@dataclass(frozen=True)
class _Recorded:
    """What a dry run, or a reading of the graph, found."""

    lifetimes: tuple[Lifetime, ...]
    completed: Completed
    steps: int
    forward_peak: int


def _record_backward(
    losses: Sequence[torch.Tensor], graph: Graph, world: World, policy: Policy, recorder: Recorder
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


def _assemble(graph: Graph, policy: Policy, method: Method, key: str, found: _Recorded) -> Plan:
    return Plan(
        key=key,
        graph=graph.fingerprint(),
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


def _key(graph: Graph, policy: Policy, method: Method, saved: list[int]) -> str:
    text = repr((VERSION, graph.fingerprint(), policy, method, torch.__version__, saved))
    return hashlib.sha256(text.encode()).hexdigest()


def _device_of(world: World) -> torch.device:
    """The one device of everything trained."""
    leaves = [
        x for x in (*world.parameters.values(), *tree_leaves(world.args)) if isinstance(x, torch.Tensor)
    ]
    devices = {leaf.device for leaf in leaves if leaf.requires_grad}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise PlanError(
            f"parameters are on {names}: a plan is of one device; plan the part on each by itself"
        )
    return devices.pop() if devices else torch.device("cpu")


def _refuse_strangers(graph: Graph, leaves: Sequence[object]) -> None:
    """The gradient of a real leaf that nobody named would be changed, or become a fake one."""
    known = set(map(id, leaves))
    for node in graph.order:
        if is_leaf(node) and id(leaf := leaf_of(node)) not in known and not isinstance(leaf, FakeTensor):
            raise PlanError(
                f"the loss depends on a tensor of shape {tuple(leaf.shape)} that requires a gradient and belongs to no "
                "module given: pass the modules as model=, and such inputs as arguments"
            )
