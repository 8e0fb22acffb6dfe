"""What torch has for a kind of device: streams and events of CUDA, and of every device that offers the same names."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Protocol

import torch

_STREAMS = ("Stream", "Event", "stream", "current_stream", "device")
_GENERATORS = ("device_count", "get_rng_state_all", "get_rng_state", "set_rng_state")


class DeviceEvent(Protocol):
    """What is used of torch.cuda.Event and its like."""

    def query(self) -> bool:
        """Whether what it was recorded behind is done."""

    def synchronize(self) -> None:
        """Block until then."""


@functools.cache
def streams_of(kind: str) -> Any:
    """The module of a device type ("cuda", "npu", ...) whose copies are queued on streams; None where they are made
    at once, as on the CPU, and where torch does not know the type or its streams."""
    if kind == "cpu":  # torch.cpu has the names, and nothing behind them
        return None
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return None
    return module if all(hasattr(module, name) for name in _STREAMS) else None


def queues(device: torch.device) -> bool:
    """Whether a copy from or to a device may return before it is made."""
    return streams_of(device.type) is not None


def generators() -> Iterator[tuple[str, int, Any]]:
    """(type, index, module) of each accelerator of this process whose generator can be read and set."""
    kind = "cuda" if torch.cuda.is_available() else _current()
    module: Any = torch.get_device_module(kind) if kind else None
    if module is not None and all(hasattr(module, name) for name in _GENERATORS):
        yield from ((kind, index, module) for index in range(module.device_count()))


def _current() -> str:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "" if found is None else found.type
