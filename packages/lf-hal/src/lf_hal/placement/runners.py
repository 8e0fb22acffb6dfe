"""What runs segments: torch functions on a torch device, or artefacts of lf-hal's compiler.

Values in the host's memory are numpy arrays, bf16 as uint16 bits. In another memory they are whatever its runner says.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lf_hal.artifact import Artifact
from lf_hal.compiler import compile
from lf_hal.lir.graph import Graph, TensorType
from lf_hal.passes import PassOptions
from lf_hal.placement.errors import EmulationNotAllowedError, PoolError
from lf_hal.placement.pool import HOST, Device
from lf_hal.placement.torch_ops import apply
from lf_hal.targets import resolve_target

__all__ = ["CRunner", "Runner", "TorchRunner", "runner_for"]

Array = npt.NDArray[Any]
Segment = Callable[[Mapping[str, Any]], dict[str, Any]]


class Runner(Protocol):
    """One device that segments run on. A vendor's own runtime may be given to the executor in the place of ours."""

    def prepare(self, graph: Graph, stored: Mapping[str, Array]) -> Segment:
        """A function from the graph's inputs to its outputs, by name, all in the device's memory."""

    def receive(self, array: Array, kind: TensorType) -> Any:
        """A copy of a host array in the device's memory."""

    def give(self, value: Any) -> Array:
        """A copy of a value as a host array."""

    def wait(self) -> None:
        """Return when all that was begun has ended."""

    def close(self) -> None:
        """Free what was prepared."""


class TorchRunner:
    """LIR ops as torch functions, one after another, without gradients."""

    def __init__(self, device: Device) -> None:
        import torch

        self.here = device.space == HOST
        try:
            self.device = torch.device(device.where)
            torch.empty(1, device=self.device)
        except Exception as error:
            raise PoolError(device.name, f"torch cannot use {device.where}: {error}") from error

    def prepare(self, graph: Graph, stored: Mapping[str, Array]) -> Segment:
        import torch

        place = _tensor if self.here else self.receive
        fixed = {v.name: place(stored[v.name], v.type) for v in graph.weights}
        for op in graph.ops:
            if not op.inputs:  # made once
                fixed[op.output.name] = place(_array(apply(op, (), "cpu")), op.output.type)
        last = {n: i for i, o in enumerate(graph.ops) for n in o.inputs}
        drops: dict[int, list[str]] = {}
        for name, i in last.items():
            if name not in graph.outputs:
                drops.setdefault(i, []).append(name)

        def run(inputs: Mapping[str, Any]) -> dict[str, Any]:
            known = dict(fixed)
            for v in graph.inputs:
                known[v.name] = _tensor(inputs[v.name], v.type) if self.here else inputs[v.name]
            with torch.no_grad():
                for i, op in enumerate(graph.ops):
                    if op.inputs:
                        known[op.output.name] = apply(op, [known[n] for n in op.inputs], self.device)
                    for name in drops.get(i, ()):
                        del known[name]
            return {n: _array(known[n]) if self.here else known[n] for n in graph.outputs}

        return run

    def receive(self, array: Array, kind: TensorType) -> Any:
        return _tensor(array, kind).to(self.device, copy=True)

    def adopt(self, value: Any) -> Any:
        """A copy of a tensor of another torch device, without a way by the host where torch knows one."""
        return value.to(self.device, copy=True)

    def give(self, value: Any) -> Array:
        return _array(value.to("cpu", copy=True))

    def wait(self) -> None:
        import torch

        module: Any = getattr(torch, self.device.type, None)
        if self.device.type != "cpu" and hasattr(module, "synchronize"):
            module.synchronize(self.device)

    def close(self) -> None:
        """Nothing is kept beyond the functions that :meth:`prepare` gave."""


def _tensor(array: Array, kind: TensorType) -> Any:
    import torch

    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(torch.bfloat16) if kind.dtype == "bf16" else tensor


def _array(tensor: Any) -> Array:
    import torch

    tensor = tensor.contiguous()
    found: Array = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return found


class CRunner:
    """Segments compiled as they stand, so that their bits are those of one artefact of the whole graph."""

    def __init__(self, device: Device, *, threads: int = 1, allow_emulated: bool = False) -> None:
        target = resolve_target(device.where)
        if target.machine != platform.machine() and not allow_emulated:
            raise EmulationNotAllowedError(device.name, target.name)
        self.target, self.threads = target, threads
        self._made: list[Artifact] = []

    def prepare(self, graph: Graph, stored: Mapping[str, Array]) -> Segment:
        made = compile(graph, stored, self.target.name, self.threads, passes=PassOptions.none())
        made.open()
        self._made.append(made)
        return made.run

    def receive(self, array: Array, kind: TensorType) -> Any:
        return np.array(array)

    def give(self, value: Any) -> Array:
        return np.array(value)

    def wait(self) -> None:
        """A run has ended when it returns."""

    def close(self) -> None:
        while self._made:
            self._made.pop().close()


def runner_for(device: Device, *, threads: int = 1, allow_emulated: bool = False) -> Runner:
    """The runner of a device of a pool.

    Raises:
        EmulationNotAllowedError: a target of another machine, and ``allow_emulated`` is not given.
        PoolError: torch cannot use the device; nothing else is used in its place.
    """
    if device.runs == "c":
        return CRunner(device, threads=threads, allow_emulated=allow_emulated)
    return TorchRunner(device)
