"""The CPU recorder: a :class:`Backend` without a device, which carries every semantic test.

A capture keeps each dispatched operator with its arguments and outputs. A replay runs the operators again and
copies fresh results into the storages of the first run, so addresses are as fixed as in a CUDA graph, Python values
are as frozen, and random operators draw anew. There are no streams, and what CUDA refuses during capture (a read-back,
a result of unknown size) is refused here by the operator's name. It proves logic; it says nothing about speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from lf_graph._backend import Position, T
from lf_graph._collectives import refused_collective
from lf_graph._errors import ClosedError, GraphCaptureError
from lf_graph._frames import user_line
from lf_graph._modes import inside_a_capture
from lf_graph._refused_calls import refusing_calls, refusing_generator_states
from lf_graph._replaced import replaced
from lf_graph._rules import GENERATOR, has_own_generator

_aten = torch.ops.aten
_READ_BACK = "it needs the value on the host, and a graph cannot wait for the device"
_UNKNOWN_SIZE = "the size of its result depends on the data, and a graph has fixed sizes"
# operator -> (why, fix); the same list on every backend, checked by name so that overloads are covered
REFUSED: dict[str, tuple[str, str]] = {
    "aten::_local_scalar_dense": (_READ_BACK, "keep the value in a tensor, or compute it before the capture"),
    "aten::is_nonzero": (_READ_BACK, "use torch.where instead of a Python condition"),
    "aten::equal": (_READ_BACK, "compare with == and keep the result on the device"),
    "aten::nonzero": (_UNKNOWN_SIZE, "multiply by the mask or use torch.where(mask, a, b)"),
    "aten::masked_select": (_UNKNOWN_SIZE, "multiply by the mask or use torch.where(mask, a, b)"),
    "aten::_unique2": (_UNKNOWN_SIZE, "compute it before the capture"),
    "aten::unique_dim": (_UNKNOWN_SIZE, "compute it before the capture"),
    "aten::unique_consecutive": (_UNKNOWN_SIZE, "compute it before the capture"),
    "aten::bincount": (_UNKNOWN_SIZE, "use zeros(n).index_add_(0, ids, ones) with a fixed n"),
}


def refused_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """(why, fix) when this operator with these arguments cannot be part of a graph, else None."""
    name = func._schema.name
    if name in REFUSED:
        return REFUSED[name]
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        return _UNKNOWN_SIZE, "pass output_size="
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if masks and not _is_masked_fill(name, args, kwargs):
            return _UNKNOWN_SIZE, "index with integers, or use torch.where(mask, a, b)"
    if has_own_generator(kwargs.values()):
        return GENERATOR.why, GENERATOR.fix
    return refused_collective(func) or _copy_across(name, args, kwargs)


def _is_masked_fill(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``x[mask] = number`` needs no positions: torch fills under the mask."""
    accumulate = kwargs.get("accumulate", args[3] if len(args) > 3 else False)
    return name != "aten::index" and not accumulate and args[2].numel() == 1 and args[2].device.type == "cpu"


def _crosses(source: Tensor, target: torch.device) -> tuple[str, str] | None:
    """A copy between host and device that would have to wait for the device."""
    if source.device.type == "cpu" and target.type == "cuda" and not source.is_pinned():
        return "it copies from pageable host memory", "pin the tensor, or make it on the device"
    if source.device.type == "cuda" and target.type == "cpu":
        return _READ_BACK, "copy it after the replay"
    return None


def _copy_across(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
    if name == "aten::_to_copy":
        return _crosses(args[0], kwargs.get("device") or args[0].device)
    if name == "aten::copy_":
        return _crosses(args[1], args[0].device)
    return None


class Refusing(TorchDispatchMode):
    """Raises :class:`GraphCaptureError` at the first operator that a graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        _raise_if_refused(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextmanager
def as_if_capturing() -> Iterator[None]:
    """Let code that asks whether a capture is on take the branch of a capture (Hugging Face masks do)."""
    with replaced(torch.cuda, "is_current_stream_capturing", lambda _: lambda: True), inside_a_capture():
        yield


@contextmanager
def refusing() -> Iterator[None]:
    """Run the branch of a capture without one, and raise at what a graph could not hold."""
    with as_if_capturing(), refusing_calls(), Refusing():
        yield


def _raise_if_refused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    problem = refused_call(func, args, kwargs)
    if problem is not None:
        name = func._schema.name.replace("::", ".")
        raise GraphCaptureError(name, user_line(), *problem)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _alias(leaf: Any) -> Any:
    """The same memory with a version counter of its own: autograd must not notice replays, as on CUDA."""
    return leaf.data if isinstance(leaf, Tensor) else leaf


def _storages(tensors: list[Tensor]) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors}


@dataclass
class _Call:
    """One operator of a recording; ``fresh`` are the results that no argument shares memory with."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: list[tuple[int, Tensor]]
    grad_mode: bool  # some operators, such as oneDNN's LSTM, keep less without it

    def run(self) -> None:
        with torch.set_grad_enabled(self.grad_mode):
            found = _tensors(self.func(*self.args, **self.kwargs))
        for i, target in self.fresh:
            target.copy_(found[i])


class _Mode(TorchDispatchMode):
    """Keeps the operators that compute something; views stay valid because their storages stay."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _raise_if_refused(func, args, kwargs)
        outputs = func(*args, **kwargs)
        taken = _storages(_tensors((args, kwargs)))
        results = _tensors(outputs)
        fresh = [(i, t) for i, t in enumerate(results) if t.untyped_storage()._cdata not in taken]
        if fresh or func._schema.is_mutable:
            args, kwargs = tree_map(_alias, (args, kwargs))
            fixed = [(i, t.data) for i, t in fresh]
            self.calls.append(_Call(func, args, kwargs, fixed, torch.is_grad_enabled()))
        return outputs


@dataclass
class RecordedGraph:
    """A list of operators on fixed storages."""

    calls: list[_Call] | None

    @property
    def operations(self) -> int:
        """Operators run by one replay."""
        return len(self._open())

    def replay(self) -> None:
        """Run the operators in order, now, as they were captured: no autocast around a replay reaches a graph."""
        with torch.no_grad(), torch._C._DisableAutocast():
            for call in self._open():
                call.run()

    def close(self) -> None:
        """Forget the operators and the memory they hold."""
        self.calls = None

    def _open(self) -> list[_Call]:
        if self.calls is None:
            raise ClosedError("this graph was closed")
        return self.calls


class _NullStream:
    """Everything here runs in order already."""

    def wait(self, other: object) -> None:
        """Nothing to wait for."""


@dataclass
class _Recording:
    """A capture in progress."""

    owner: RecordBackend
    mode: _Mode = field(default_factory=_Mode)
    entered: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.entered.enter_context(as_if_capturing())
        self.entered.enter_context(refusing_generator_states())
        self.entered.enter_context(self.mode)
        self.owner.depth += 1

    def end(self) -> RecordedGraph:
        """Stop and keep what was recorded."""
        self.abort()
        return RecordedGraph(self.mode.calls)

    def abort(self) -> None:
        """Stop; nothing is kept by this object's owner."""
        self.owner.depth -= 1
        self.entered.close()


class RecordBackend:
    """Capture and replay on the CPU, operator by operator; emulates the semantics of CUDA graphs, not their speed."""

    name = "recorder"
    executes_captures = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.depth = 0

    def new_pool(self) -> None:
        """The recorder keeps every tensor by itself."""

    def _begin(self, pool: Any) -> _Recording:
        """Start recording; ``end()`` or ``abort()`` the result."""
        return _Recording(self)

    def capture(self, fn: Callable[[], T], pool: Any) -> tuple[RecordedGraph, T]:
        """See :class:`lf_graph._backend.Backend`; the function really runs once."""
        recording = self._begin(pool)
        try:
            result = fn()
        except BaseException:
            recording.abort()
            raise
        return recording.end(), result

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """No change: there is one order of work."""
        yield

    def watch_peak(self) -> Callable[[], int]:
        """Nobody counts here."""
        return lambda: 0

    def is_capturing(self) -> bool:
        """Whether a capture is in progress."""
        return self.depth > 0

    def current_stream(self) -> _NullStream:
        """The only order there is."""
        return _NullStream()

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def allocated_bytes(self) -> int:
        """Not counted on the CPU."""
        return 0

    def reserved_bytes(self) -> int:
        """Not counted on the CPU."""
        return 0

    def rng_position(self) -> Position:
        """The state of torch's CPU generator."""
        return Position(torch.get_rng_state())

    def set_rng_position(self, position: Position) -> None:
        """Set the state of torch's CPU generator."""
        torch.set_rng_state(position.value)

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """A named range of torch's profiler."""
        with torch.profiler.record_function(name):
            yield
