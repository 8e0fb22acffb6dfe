"""Python calls that no dispatcher sees: waits for the device, random numbers of the host, writes to modules.

Seen through ``sys.setprofile``, so that a function imported under another name is seen as well, and on a machine
without a device too. Where another profiler is running, it is left alone and these calls are not seen.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Protocol

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lf_graph._frames import is_users
from lf_graph._refused_calls import REENTRANT_CHECKPOINT, reenters
from lf_graph._rules import HOST_CONSTANT, Verdict


class Sink(Protocol):
    """Who is told."""

    def call(self, op: str, verdict: Verdict, frame: FrameType) -> None:
        """A call that is a finding; ``frame`` is the function called, or the one that calls a C function."""

    def write(self, module: nn.Module, name: str, frame: FrameType) -> None:
        """An attribute of a module is about to be assigned."""

    def tensor_call(self, name: str, tensor: Tensor, frame: FrameType) -> None:
        """A method that hands values to Python is about to be called."""

    def drew(self, generator: random.Random) -> None:
        """A generator of Python is about to be used."""


WAIT = Verdict(
    "synchronize",
    "the host waits for the device, which a capture forbids",
    "leave the order of work to the streams, and wait outside of the graph",
)
EVENT_TIME = Verdict(
    "synchronize",
    "an event is read by the host, which a capture forbids",
    "let streams wait for events (stream.wait_event), and read times outside of the graph",
)
ALLOCATOR = Verdict(
    "synchronize",
    "freeing cached memory waits for the device and calls cudaFree, which a capture forbids",
    "call it before the capture",
)
RNG_STATE = Verdict(
    "rng_state",
    "the state of the device's generator cannot be read or set during a capture",
    "seed and restore generators outside of the graph",
)
CHECKPOINT = Verdict(
    "rng_state",
    "activation checkpointing with preserve_rng_state=True reads and sets the generators' states during the capture",
    "pass preserve_rng_state=False where the region has no dropout, or keep the region's activations (Piece(checkpoint="
    "True) and compile= with recompute= compute again with the same random numbers)",
)
SIDE_STREAM = Verdict(
    "side_stream",
    "work on another stream belongs to the capture only between a wait for the capturing stream and a wait by it",
    "call side.wait_stream(current) before and current.wait_stream(side) after, or stay on one stream",
    "warning",
)
REENTRANT = Verdict("reentrant", *REENTRANT_CHECKPOINT)
CREATE_GRAPH = Verdict(
    "double_backward",
    "create_graph=True asks for a backward through the backward, which captured pieces do not have",
    "compute the gradient of the gradient in a part that stays eager",
)
HOST_RANDOM = Verdict(
    "host_random",
    "random numbers of the host are drawn once, at the capture, and frozen",
    "draw on the device (torch.rand(..., device=x.device)), or pass the number in as a tensor",
)

Judge = Callable[[FrameType], Verdict | None]


def _always(verdict: Verdict) -> Judge:
    return lambda frame: verdict


def _checkpoint(frame: FrameType) -> Verdict | None:
    return CHECKPOINT if frame.f_locals["kwargs"].get("preserve_rng_state", True) else None


def _reenters(frame: FrameType) -> Verdict | None:
    return REENTRANT if reenters(frame.f_locals["ctx"]) else None


def _create_graph(frame: FrameType) -> Verdict | None:
    return CREATE_GRAPH if frame.f_locals["create_graph"] and not _by_functorch(frame) else None


def _by_functorch(frame: FrameType) -> bool:
    """Whether torch.func calls, which always asks for create_graph so that its transforms can be nested."""
    caller = frame.f_back
    while caller is not None and not is_users(caller.f_code.co_filename):
        if "_functorch" in caller.f_code.co_filename:
            return True
        caller = caller.f_back
    return False


def _forks(frame: FrameType) -> Verdict | None:
    """``fork_rng`` reads the states of all devices, unless it is given none or switched off."""
    devices = frame.f_locals["devices"]
    only_host = devices is not None and not list(devices)
    return None if only_host or not frame.f_locals["enabled"] else RNG_STATE


def _enters_stream(frame: FrameType) -> Verdict | None:
    return SIDE_STREAM if getattr(frame.f_locals["self"], "stream", None) is not None else None


def _calls() -> list[tuple[str, Any, Judge]]:
    cuda = torch.cuda
    return [
        ("torch.cuda.synchronize", cuda.synchronize, _always(WAIT)),
        ("torch.accelerator.synchronize", torch.accelerator.synchronize, _always(WAIT)),
        ("torch.cuda.Stream.synchronize", cuda.Stream.synchronize, _always(WAIT)),
        ("torch.cuda.Event.synchronize", cuda.Event.synchronize, _always(WAIT)),
        ("torch.cuda.Stream.query", cuda.Stream.query, _always(EVENT_TIME)),
        ("torch.cuda.Event.query", cuda.Event.query, _always(EVENT_TIME)),
        ("torch.cuda.Event.elapsed_time", cuda.Event.elapsed_time, _always(EVENT_TIME)),
        ("torch.cuda.empty_cache", cuda.empty_cache, _always(ALLOCATOR)),
        ("torch.cuda.get_rng_state", cuda.get_rng_state, _always(RNG_STATE)),
        ("torch.cuda.set_rng_state", cuda.set_rng_state, _always(RNG_STATE)),
        ("torch.cuda.manual_seed", cuda.manual_seed, _always(RNG_STATE)),
        ("torch.cuda.manual_seed_all", cuda.manual_seed_all, _always(RNG_STATE)),
        ("torch.cuda.initial_seed", cuda.initial_seed, _always(RNG_STATE)),
        ("torch.manual_seed", torch.manual_seed, _always(RNG_STATE)),
        ("torch.random.fork_rng", torch.random.fork_rng, _forks),
        ("torch.utils.checkpoint.checkpoint", torch.utils.checkpoint.checkpoint, _checkpoint),
        ("torch.utils.checkpoint.checkpoint", torch.utils.checkpoint.CheckpointFunction.forward, _reenters),
        ("torch.cuda.Stream", cuda.Stream.__new__, _always(SIDE_STREAM)),
        ("torch.cuda.stream", cuda.StreamContext.__enter__, _enters_stream),
        ("torch.autograd.grad", torch.autograd.grad, _create_graph),
        ("torch.autograd.backward", torch.autograd.backward, _create_graph),
    ]


def _by_code() -> dict[CodeType, tuple[str, Judge]]:
    functions = [(inspect.unwrap(fn), name, judge) for name, fn, judge in _calls()]
    return {fn.__code__: (name, judge) for fn, name, judge in functions if inspect.isfunction(fn)}


_SETATTR = nn.Module.__setattr__.__code__


@contextmanager
def host_calls(sink: Sink) -> Iterator[None]:
    """Tell ``sink`` of such calls made by this thread in the block."""
    if sys.getprofile() is not None:
        yield
        return
    with _numpy_draws(sink):
        sys.setprofile(_profile(sink, _by_code()))
        try:
            yield
        finally:
            sys.setprofile(None)


def _profile(
    sink: Sink, watched: Mapping[CodeType, tuple[str, Judge]]
) -> Callable[[FrameType, str, Any], None]:
    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            if frame.f_code is _SETATTR:
                sink.write(frame.f_locals["self"], frame.f_locals["name"], frame)
            elif frame.f_code in watched:
                name, judge = watched[frame.f_code]
                verdict = judge(frame)
                if verdict:
                    sink.call(name, verdict, frame)
        elif event == "c_call" and arg.__name__ in _C_CALLS:
            _c_call(sink, arg, frame)

    return profile


_C_CALLS = frozenset({"random", "getrandbits", "tolist", "numpy", "from_numpy"})


def _c_call(sink: Sink, fn: Any, frame: FrameType) -> None:
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, random.Random):
        sink.drew(owner)
        sink.call("random", HOST_RANDOM, frame)
    elif fn is torch.from_numpy:
        sink.call("torch.from_numpy", HOST_CONSTANT, frame)
    elif isinstance(owner, Tensor) and fn.__name__ in ("tolist", "numpy"):
        # also inside a backward, where no function mode is active
        sink.tensor_call(fn.__name__, owner, frame)


@contextmanager
def _numpy_draws(sink: Sink) -> Iterator[None]:
    """NumPy's functions are compiled so that a profiler does not see them; these are replaced by name."""
    of_global = {
        name: fn
        for name, fn in vars(np.random).items()
        if getattr(fn, "__self__", None) is np.random.mtrand._rand and not name.endswith("state")
    }
    for name, fn in of_global.items():
        setattr(np.random, name, _drawing(fn, f"numpy.random.{name}", sink))
    try:
        yield
    finally:
        for name, fn in of_global.items():
            setattr(np.random, name, fn)


def _drawing(fn: Callable[..., Any], name: str, sink: Sink) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        sink.call(name, HOST_RANDOM, sys._getframe())
        return fn(*args, **kwargs)

    return draw
