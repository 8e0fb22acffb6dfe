"""CUDA graphs as a :class:`Backend`.

Captures run on one stream of our own with error mode "thread_local": a loader thread that page-locks memory
meanwhile must not break them. A capture that fails is undone: the stream leaves capture mode, the pool's memory goes
back to the allocator (pytorch#190308 leaks it until exit), and the cause is raised.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lf_graph._backend import Position, T
from lf_graph._errors import ClosedError, GraphCaptureError
from lf_graph._frames import is_users, user_line
from lf_graph._recorder import refusing


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a kept graph, by the driver's own count; -1 if the driver cannot be asked."""
    driver, count = _driver(), ctypes.c_size_t(0)
    if driver is None:
        return -1
    code = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    return -1 if code else count.value


class CudaGraph:
    """An instantiated CUDA graph and the number of its nodes."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self.operations = _count_nodes(graph)
        graph.instantiate()

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        if self._graph is None:
            raise ClosedError("this graph was closed")
        self._graph.replay()

    def close(self) -> None:
        """Destroy the graph; its memory returns to the pool."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


class CudaStream:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def wait(self, other: Any) -> None:
        """Let later work here start after everything queued on ``other`` so far."""
        if other.stream != self.stream:
            self.stream.wait_stream(other.stream)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Queue on this stream inside the ``with`` block."""
        with torch.cuda.stream(self.stream):
            yield


class _Recording:
    """A capture in progress on the backend's capture stream."""

    def __init__(self, owner: CudaBackend, pool: Any) -> None:
        self._owner, self._pool = owner, pool
        self._stack = contextlib.ExitStack()
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._stack.enter_context(torch.cuda.device(owner.device))
        self._stack.enter_context(owner.capture_stream.use())
        try:
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        except BaseException:
            self._stack.close()
            raise

    def end(self) -> CudaGraph:
        """Stop and instantiate."""
        try:
            self._graph.capture_end()
        except BaseException:
            self._forget()
            raise
        self._stack.close()
        return CudaGraph(self._graph)

    def abort(self) -> None:
        """Leave capture mode and give the memory back; never raises."""
        try:
            self._graph.capture_end()
        except RuntimeError:
            self._forget()
        else:
            self._graph.reset()
            self._stack.close()

    def _forget(self) -> None:
        """Undo what a failed ``capture_end`` leaves: the allocator would keep the pool until exit (pytorch#190308)."""
        index = self._owner.device.index
        for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with contextlib.suppress(RuntimeError):
                undo(index, self._pool)
        self._stack.close()
        self._owner.heal()


# by device: the highest number of allocated bytes that the allocator was told to forget
peaks_before: dict[int, int] = {}


class CudaBackend:
    """CUDA graphs on one device."""

    name = "cuda"
    executes_captures = False

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.capture_stream = CudaStream(torch.cuda.Stream(self.device))
        self._preparing = self._collected = (
            False  # whether this preparation has collected all garbage already
        )

    def new_pool(self) -> Any:
        """A memory pool for graphs that never run at the same time."""
        return torch.cuda.graph_pool_handle()

    def _begin(self, pool: Any) -> _Recording:
        """Start a capture; ``end()`` or ``abort()`` the result."""
        return _Recording(self, pool)

    def capture(self, fn: Callable[[], T], pool: Any) -> tuple[CudaGraph, T]:
        """See :class:`lf_graph._backend.Backend`."""
        self.synchronize()
        self._collect()
        self._make_room()
        recording = self._begin(pool)
        try:
            result = fn()
        except BaseException as e:
            recording.abort()
            raise self._undone(e, fn) from e.__cause__
        try:
            return recording.end(), result
        except RuntimeError as e:
            raise self._undone(e, fn) from e

    def _collect(self) -> None:
        """Free unreachable tensors: one that dies during the capture would free memory of another pool.

        All generations before the first capture of a preparation, 0.16 s beside a compiler's heap on an H200's host;
        then the young ones.
        """
        gc.collect(1 if self._collected else 2)
        self._collected = self._preparing

    def _make_room(self) -> None:
        """Give cached memory back if there may be too little without it: the allocator cannot during a capture.

        A capture needs about what the warm-up left in the cache, from which its own pool cannot take.
        """
        cached = self.reserved_bytes() - self.allocated_bytes()
        free, _ = torch.cuda.mem_get_info(self.device)
        if cached > free:
            torch.cuda.empty_cache()

    def _undone(self, error: BaseException, fn: Callable[[], object]) -> BaseException:
        """What to raise for a failed capture, after its memory went back to the allocator."""
        if isinstance(error, RuntimeError) and "captur" in str(error).lower():  # torch has no type for it
            error = _diagnose(fn) or _explain(error)
        traceback.clear_frames(error.__traceback__)  # the frames of fn hold tensors in the pool
        gc.collect()
        torch.cuda.empty_cache()
        return error

    def heal(self) -> None:
        """Let the generator leave the capturing state, in which a failed capture leaves it.

        Until then every random operator outside of a capture fails ("Offset increment outside graph capture"), in
        torch 2.11 and 2.13; a capture that succeeds ends it.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), self.capture_stream.use():
            something = torch.zeros(1, device=self.device)
            graph.capture_begin(capture_error_mode="thread_local")
            something.fill_(0)
            graph.capture_end()
        graph.reset()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Queue on the capture stream: lazily made handles, workspaces and gradient streams then belong to it."""
        caller, outer = self.current_stream(), (self._preparing, self._collected)
        self._preparing, self._collected = True, outer[1]
        self.capture_stream.wait(caller)
        try:
            with self.capture_stream.use():
                yield
        finally:
            self._preparing, self._collected = outer
        caller.wait(self.capture_stream)

    def watch_peak(self) -> Callable[[], int]:
        """Watches the allocator's peak, which begins anew; what it was is in ``peaks_before``."""
        before = torch.cuda.max_memory_allocated(self.device)
        peaks_before[self.device.index] = max(before, peaks_before.get(self.device.index, 0))
        torch.cuda.reset_peak_memory_stats(self.device)
        start = torch.cuda.memory_allocated(self.device)
        return lambda: torch.cuda.max_memory_allocated(self.device) - start

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def current_stream(self) -> CudaStream:
        """The stream the caller queues on."""
        return CudaStream(torch.cuda.current_stream(self.device))

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self.device)

    def allocated_bytes(self) -> int:
        """Bytes of live tensors."""
        return torch.cuda.memory_allocated(self.device)

    def reserved_bytes(self) -> int:
        """Bytes the allocator holds, in use or not."""
        return torch.cuda.memory_reserved(self.device)

    def rng_position(self) -> Position:
        """(seed, offset) of the device's default generator; host state, no wait."""
        generator: Any = torch.cuda.default_generators[self.device.index]
        return Position((generator.initial_seed(), generator.get_offset()))

    def set_rng_position(self, position: Position) -> None:
        """Put the default generator back."""
        generator: Any = torch.cuda.default_generators[self.device.index]
        seed, offset = position.value
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        generator.set_offset(offset)

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """An NVTX range."""
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def _diagnose(fn: Callable[[], object]) -> GraphCaptureError | None:
    """Run ``fn`` again without a capture, to learn the operator and the line that CUDA only calls a failure."""
    try:
        with refusing():
            fn()
    except GraphCaptureError as named:
        return named
    except Exception:
        return None  # a backward cannot run twice; the first error stands
    return None


def _explain(error: Exception) -> GraphCaptureError:
    first = str(error).strip().splitlines()[0]
    tb, where = error.__traceback__, ""
    while tb is not None:
        path = tb.tb_frame.f_code.co_filename
        if is_users(path):
            where = f"{path}:{tb.tb_lineno}"
        tb = tb.tb_next
    return GraphCaptureError(
        "capture",
        where or user_line(),
        first,
        "run lf_graph.check on the same inputs: it names the operation",
    )
