"""A device named npu or mlu that computes on the host: what LoongForge does with an accelerator, seen from below.

Evidence: contract-only. It proves what our packages ask of a device and in which order, never what torch_npu, torch_mlu
or a chip answers.

Real: storages, strides, views, autograd, torch's dispatch to PrivateUse1 (torch 2.13's experimental Python backend).
Simulated: streams and events (`_streams`), memory limits, the generator. Not possible from Python: more than one
device, `torch.accelerator` streams and synchronize, pinned memory, generators in C++, resizing a storage,
process groups, graphs. One name per process: torch renames PrivateUse1 once.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch.utils import backend_registration

from ._autocast import register_autocast
from ._cuda_calls import watch_cuda
from ._log import Call, CallLog, ContractError
from ._memory import Memory
from ._module import fill
from ._ops import Operators
from ._streams import Streams

__all__ = ["Call", "CallLog", "ContractError", "Simulated", "install"]


class Simulated:
    """The device of this process: its name, call log, memory, operators and streams."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log = CallLog()
        self.memory = Memory(self.log)
        self.streams = Streams(self.log)
        self.operators = Operators(name, self.memory, self.streams)
        self.module: Any = types.ModuleType(f"torch.{name}")
        fill(self.module, self)
        sys.modules[self.module.__name__] = self.module
        self.watch = watch_cuda(self.log)

    @property
    def device(self) -> torch.device:
        """The only one there is."""
        return torch.device(self.name, 0)


_installed: list[Simulated] = []


def install(name: str) -> Simulated:
    """Make `name` a device of torch in this process; the same one again when it is there already."""
    if not _installed:
        device = Simulated(name)
        backend_registration._setup_privateuseone_for_python_backend(name, device.module)
        device.operators.register()
        register_autocast()
        _follow_backward(device.streams)
        _make_generators(name)
        _installed.append(device)
    if _installed[0].name != name:
        raise RuntimeError(f"this process has {_installed[0].name}; torch renames PrivateUse1 once")
    return _installed[0]


def _make_generators(name: str) -> None:
    """`torch.Generator(device=name)`, which torch cannot make for a backend in Python, as one of the host."""
    real = torch.Generator

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, real)

        def __call__(cls, device: Any = "cpu") -> torch.Generator:
            return real("cpu" if torch.device(device).type == name else device)

    torch.Generator = Kind("Generator", (), {})  # type: ignore[assignment, misc]


def _follow_backward(streams: Streams) -> None:
    """torch gives autograd's threads the stream of each forward operator; from Python only the caller's is known."""
    run = torch.autograd.graph._engine_run_backward

    def engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        before, streams.of_backward = streams.of_backward, streams.current()
        try:
            return run(*args, **kwargs)
        finally:
            streams.of_backward = before

    for module in (torch.autograd.graph, torch.autograd):
        module._engine_run_backward = engine_run_backward  # type: ignore[attr-defined]
