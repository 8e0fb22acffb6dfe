"""What a device must be able to do for lf-graph. Two implementations: CUDA and the CPU recorder.

A graph is a list of device operations on fixed addresses. ``capture`` runs a function once and keeps what it did;
``replay`` does it again, on whatever values lie at those addresses then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from lf_graph._errors import GraphError

T = TypeVar("T")


@dataclass(frozen=True)
class Position:
    """Where a random generator stands; taken and set on the host, without waiting for the device."""

    value: Any


class Graph(Protocol):
    """A captured sequence of operations."""

    @property
    def operations(self) -> int:
        """Kernels and copies (CUDA) or recorded operators (recorder) in one replay; -1 when it is not known."""
        ...

    def replay(self) -> None:
        """Queue the whole sequence on the current stream."""
        ...

    def close(self) -> None:
        """Free the graph; its outputs must not be used any more."""
        ...


class Stream(Protocol):
    """An ordered queue of device work; the recorder's streams do nothing, because it runs everything in order."""

    def wait(self, other: Any) -> None:
        """Let later work here start after everything queued on ``other`` so far."""
        ...


class Backend(Protocol):
    """One device's way to capture and replay."""

    @property
    def name(self) -> str:
        """``cuda`` or ``recorder``."""
        ...

    @property
    def executes_captures(self) -> bool:
        """Whether a captured function also runs during its capture (recorder), or is only written down (CUDA)."""
        ...

    @property
    def device(self) -> torch.device:
        """The device with its index."""
        ...

    def new_pool(self) -> Any:
        """A memory pool that several graphs may share when they never run at the same time."""
        ...

    def capture(self, fn: Callable[[], T], pool: Any) -> tuple[Graph, T]:
        """Run ``fn`` once under capture; returns the graph and what ``fn`` returned (tensors at fixed addresses).

        On any error the capture is undone, nothing stays allocated, and the error is raised: operations that
        cannot be captured as :class:`GraphCaptureError`, everything else as it is.
        """
        ...

    def preparing(self) -> AbstractContextManager[None]:
        """Queue warm-up work where captures will queue theirs; later work of the caller waits for it."""
        ...

    def watch_peak(self) -> Callable[[], int]:
        """Start watching memory; the result tells the highest rise in bytes since (0 where nobody counts)."""
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        ...

    def current_stream(self) -> Stream:
        """The stream the caller queues on."""
        ...

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        ...

    def allocated_bytes(self) -> int:
        """Device memory in live tensors; 0 where nobody counts."""
        ...

    def reserved_bytes(self) -> int:
        """Device memory held by the allocator; 0 where nobody counts."""
        ...

    def rng_position(self) -> Position:
        """Where the device's default generator stands."""
        ...

    def set_rng_position(self, position: Position) -> None:
        """Put the device's default generator where it stood."""
        ...

    def named(self, name: str) -> AbstractContextManager[None]:
        """A named range in the profiler (NVTX on CUDA)."""
        ...


def backend_for(device: torch.device) -> Backend:
    """The backend of a device; one per device and process.

    Raises:
        GraphError: there are no graphs for this kind of device.
    """
    index: int | None = device.index
    if device.type == "cuda" and index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = str(device)
    if key not in _BACKENDS:
        _BACKENDS[key] = _make(device)
    return _BACKENDS[key]


_BACKENDS: dict[str, Backend] = {}


def _make(device: torch.device) -> Backend:
    kind: str = device.type
    if kind == "cuda":
        from lf_graph._cuda import CudaBackend

        return CudaBackend(device)
    if kind == "cpu":
        from lf_graph._recorder import RecordBackend

        return RecordBackend()
    raise GraphError(f"no graphs on {kind}: cuda and cpu (recorder, for tests) are known")
