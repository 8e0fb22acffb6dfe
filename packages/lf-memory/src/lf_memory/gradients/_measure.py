"""What a forward and a backward pass really allocate, from the events of the allocator."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ._errors import PlanError

T = TypeVar("T")
Event = tuple[bool, int, int]  # (in the backward pass, address, bytes: negative when freed)
MARK = "lf_memory.gradients: backward"


@dataclass(frozen=True)
class Measured:
    """Bytes asked for, above the level before the forward pass. The names are those of Plan.

    Attributes:
        forward_peak_bytes: highest level of the forward pass.
        saved_bytes: level when the backward pass begins.
        gradient_peak_bytes: the most that was allocated since the backward pass began and not freed.
        backward_peak_bytes: highest level of the backward pass.
        workspace_bytes: what a first step left allocated for good: cuBLAS workspaces and caches; part of no other
            number. 0 on CPU.
    """

    forward_peak_bytes: int
    saved_bytes: int
    gradient_peak_bytes: int
    backward_peak_bytes: int
    workspace_bytes: int = 0


def tally(events: Iterable[Event], workspace_bytes: int = 0) -> Measured:
    """Levels and peaks; memory allocated before the first event does not count, nor does its release."""
    live: dict[int, tuple[int, bool]] = {}
    level = saved = made = forward_peak = backward_peak = made_peak = 0
    for backward, address, change in events:
        nbytes, since = (change, backward) if change > 0 else live.pop(address, (0, False))
        if change > 0:
            live[address] = (nbytes, since)
        level += nbytes if change > 0 else -nbytes
        if since:
            made += nbytes if change > 0 else -nbytes
        if backward:
            backward_peak, made_peak = max(backward_peak, level), max(made_peak, made)
        else:
            forward_peak, saved = max(forward_peak, level), level
    return Measured(forward_peak, saved, made_peak, max(backward_peak, saved), workspace_bytes)


def measure(forward: Callable[[], T], backward: Callable[[T], object], device: torch.device) -> Measured:
    """Run both passes once and watch the allocator; on CUDA once before, so that workspaces are there.

    Raises:
        PlanError: this device's allocator cannot be watched, or is being watched already.
    """
    if device.type == "cpu":
        return tally(_cpu_events(forward, backward))
    if device.type == "cuda":
        return _measure_cuda(forward, backward, device)
    raise PlanError(f"allocations on {device.type} cannot be watched: verify on cpu or cuda")


def _cpu_events(forward: Callable[[], T], backward: Callable[[T], object]) -> list[Event]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made = forward()
        with record_function(MARK):
            backward(made)
    found = list(_memory_events(profiler))
    mark = next(start for start, name, _ in found if name == MARK)
    return [
        (start >= mark, fields.ptr, fields.alloc_size) for start, name, fields in found if name == "[memory]"
    ]


def _memory_events(profiler: profile) -> list[tuple[int, str, Any]]:
    """(nanosecond, name, fields) of what concerns us, by time."""
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    todo = list(profiler.profiler.kineto_results.experimental_event_tree())
    found = []
    while todo:
        event = todo.pop()
        todo.extend(event.children)
        fields: Any = event.extra_fields
        if event.name == MARK or (event.name == "[memory]" and fields.device.type == "cpu"):
            found.append((event.start_time_ns, event.name, fields))
    return sorted(found, key=lambda one: one[0])


def _measure_cuda(
    forward: Callable[[], T], backward: Callable[[T], object], device: torch.device
) -> Measured:
    if torch._C._cuda_isHistoryEnabled():
        raise PlanError("the history of CUDA's allocator is being recorded: end that before verify")
    index = torch.cuda.current_device() if device.index is None else device.index
    before = _requested(index)
    backward(forward())
    workspaces = max(0, _requested(index) - before)
    with _cuda_history():
        start = len(_cuda_trace(index))  # what an earlier recording left
        made = forward()
        mark = len(_cuda_trace(index))
        backward(made)
        trace = _cuda_trace(index)
    return tally(_cuda_events(trace, start, mark), workspaces)


def _requested(index: int) -> int:
    """Bytes asked for and not given back; gradients of the step are gone by now."""
    return int(torch.cuda.memory_stats(index).get("requested_bytes.all.current", 0))


@contextmanager
def _cuda_history() -> Iterator[None]:
    torch.cuda.memory._record_memory_history(context=None, stacks="python")
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _cuda_trace(index: int) -> list[dict[str, Any]]:
    traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot(index)["device_traces"]
    return traces[index]


def _cuda_events(trace: list[dict[str, Any]], start: int, mark: int) -> Iterator[Event]:
    """From entry `start` on. Sizes are those asked for: CUDACachingAllocator.cpp records them and not the blocks'."""
    for at, entry in enumerate(trace[start:], start):
        if entry["action"] == "alloc":
            yield at >= mark, entry["addr"], entry["size"]
        elif entry["action"] == "free_requested":
            yield at >= mark, entry["addr"], -entry["size"]
