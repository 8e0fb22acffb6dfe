"""``torch.compile(model, backend="lf_hal")``: forward passes of inference by lf-hal's C, on this machine.

Parameters and buffers of the model are packed once. Each call looks at their versions and addresses, and packs anew
what was written or exchanged since. Source of the interface: torch's documentation of custom backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lf_hal.artifact import Artifact
from lf_hal.compiler import compile
from lf_hal.errors import BackendError
from lf_hal.lir.graph import Graph
from lf_hal.lir.trace import array_of, trace, weights_of

if TYPE_CHECKING:
    import torch

__all__ = ["backend"]

OPTIONS = ("threads", "target", "switches")


def backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """What ``torch.compile(..., backend="lf_hal", options={"threads": 2})`` calls for each graph.

    Args:
        options: ``threads`` (torch's, if not said), ``target`` and ``switches``, as :func:`lf_hal.compile` has them.

    Raises:
        BackendError: gradients are wanted, a shape is dynamic, a tensor is on another device, or an option is unknown.
        LirError, HalError: as :func:`lf_hal.trace` and :func:`lf_hal.compile`.
    """
    import torch

    given = {"threads": torch.get_num_threads(), **(options or {})}
    if unknown := sorted(given.keys() - set(OPTIONS)):
        raise BackendError(f"unknown options {', '.join(unknown)}; there are {', '.join(OPTIONS)}")
    if mode not in (None, "default"):
        raise BackendError(f"mode={mode!r}: lf_hal has no modes; leave it out")
    for value in example_inputs:
        _check(value)
    names = [node.target for node in gm.graph.nodes if node.op == "placeholder"]
    weights = [
        i
        for i, (name, value) in enumerate(zip(names, example_inputs, strict=True))
        if isinstance(value, torch.nn.Parameter) or "_buffers_" in str(name)
    ]
    return _Compiled(gm, list(example_inputs), weights, given)


def _check(value: Any) -> None:
    import torch

    if not isinstance(value, torch.Tensor):
        raise BackendError(
            f"an input is {type(value).__name__}: shapes are static here, use torch.compile(dynamic=False)"
        )
    if value.device.type != "cpu":
        raise BackendError(f"an input is on {value.device}: lf_hal runs on the CPU; move the model there")
    if value.requires_grad and torch.is_grad_enabled():
        raise BackendError(
            "gradients are wanted and lf_hal has none: call the model within torch.inference_mode()"
        )


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """Changes whenever the tensor is written or is another one."""
    if tensor.is_inference():
        raise BackendError(
            "a weight was made within torch.inference_mode() and does not count its writes; make it outside"
        )
    return tensor.data_ptr(), tensor._version


class _Compiled:
    """One graph, compiled for its shapes, with the weights that it was last called with."""

    def __init__(
        self, gm: torch.fx.GraphModule, inputs: list[Any], weights: list[int], options: Mapping[str, Any]
    ) -> None:
        self._gm, self._weights, self._options = gm, weights, options
        self._free = [i for i in range(len(inputs)) if i not in weights]
        self._built: tuple[Graph, Artifact] | None = None
        self._states: list[tuple[int, int]] = []
        self._build(inputs)

    def _build(self, inputs: Sequence[Any]) -> tuple[Graph, Artifact]:
        states = [_state(inputs[i]) for i in self._weights]
        module = _bound(self._gm, {i: inputs[i] for i in self._weights}, len(inputs))
        free = tuple(inputs[i].detach() for i in self._free)
        graph = trace(module, free, "dynamo")
        artifact = compile(graph, weights_of(module, graph), **{"target": "native", **self._options})
        if self._built is not None:
            self._built[1].close()
        self._built, self._states = (graph, artifact), states
        return self._built

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        import torch

        for value in inputs:
            _check(value)
        stale = [_state(inputs[i]) for i in self._weights] != self._states
        graph, artifact = self._build(inputs) if stale or self._built is None else self._built
        found = artifact.run([array_of(inputs[i].detach()) for i in self._free])
        types = graph.types()
        return tuple(
            torch.from_numpy(found[name]).view(torch.bfloat16)
            if types[name].dtype == "bf16"
            else torch.from_numpy(found[name])
            for name in graph.outputs
        )


def _bound(gm: torch.fx.GraphModule, weights: Mapping[int, torch.Tensor], count: int) -> torch.nn.Module:
    """The graph as a module in eval mode whose weights are buffers and whose inputs are the others."""
    import torch

    class Bound(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = gm
            for i, tensor in weights.items():
                self.register_buffer(f"weight_{i}", tensor.detach())

        def forward(self, *free: torch.Tensor) -> Any:
            left = iter(free)
            return self.inner(
                *(getattr(self, f"weight_{i}") if i in weights else next(left) for i in range(count))
            )

    return Bound().eval()
