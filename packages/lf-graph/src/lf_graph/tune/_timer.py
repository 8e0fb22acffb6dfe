"""How long work takes on a device: many calls in one CUDA graph, several replays, the median.

One call in one graph would not do: a replay varies by 5-7 us (pytorch#196413, measured there on a GB200), and a
launch from Python costs more than many kernels take (a tuner that timed so chose a kernel of 6.19 us over one of
4.14 us, pytorch#179246).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]
MIN_CALLS = 20
_MAX_CALLS = 400
_WINDOW_US = 2000.0  # a replay of this length makes its 5-7 us of noise 0.3 %
_WARM_UP = 2
_LAUNCHES_US = 500.0  # more than the launches of a call from Python take


@dataclass(frozen=True)
class Timing:
    """Of one call.

    Attributes:
        us: median over the windows, in microseconds.
        spread: (slowest - fastest window) / median.
        calls: calls in a window; 1 if it was given up after a single call.
    """

    us: float
    spread: float
    calls: int


class Timer(Protocol):
    """Measures work; the real one is :class:`GraphTimer`."""

    def time(self, copies: Sequence[Call], windows: int, give_up_us: float = math.inf) -> Timing:
        """The time of one call of ``copies``, which do the same on different memory and take turns.

        A call that clearly takes longer than ``give_up_us`` may be measured less carefully.
        """
        ...


def summary(windows_us: Sequence[float], calls: int) -> Timing:
    """Median and spread of windows, each of so many calls."""
    each = [us / calls for us in windows_us]
    median = statistics.median(each)
    return Timing(median, (max(each) - min(each)) / median if median else 0.0, calls)


def calls_for(us: float, copies: int) -> int:
    """How many calls of about ``us`` make a window: at least 20, and every copy equally often."""
    wanted = min(_MAX_CALLS, max(MIN_CALLS, round(_WINDOW_US / max(us, 0.1))))
    return -(-wanted // copies) * copies


class GraphTimer:
    """Captures at least 20 calls in one CUDA graph and times replays of it.

    Everything runs on a stream of its own; build autograd graphs inside ``on_stream()``, for a backward runs on the
    stream of its forward and could not be captured elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Work inside is queued on the timer's stream; the caller's stream waits for it."""
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def time(self, copies: Sequence[Call], windows: int, give_up_us: float = math.inf) -> Timing:
        """See :class:`Timer`; raises what the call raises, and RuntimeError where it cannot be captured."""
        with self.on_stream():
            for call in copies:
                for _ in range(_WARM_UP):
                    call()
            once = self._elapsed_us(copies[0])
            if once > _LAUNCHES_US + give_up_us:
                return Timing(once, 0.0, 1)  # a graph of many such calls would take seconds
            graph, calls = self._right_graph(copies)
            try:
                return summary([self._elapsed_us(graph.replay) for _ in range(windows)], calls)
            finally:
                self._stream.synchronize()
                graph.reset()

    def _right_graph(self, copies: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, int]:
        """A graph that runs long enough, replayed once; short calls show how short they are in a graph only."""
        calls = calls_for(math.inf, len(copies))
        graph = self._graph(copies, calls)
        graph.replay()
        wanted = calls_for(self._elapsed_us(graph.replay) / calls, len(copies))
        if wanted > calls:
            graph.reset()
            calls, graph = wanted, self._graph(copies, wanted)
            graph.replay()
        return graph, calls

    def _graph(self, copies: Sequence[Call], calls: int) -> torch.cuda.CUDAGraph:
        """So many calls as one graph; as many results stay alive as there are copies, so their memory differs too."""
        graph, kept = torch.cuda.CUDAGraph(), deque[object](maxlen=len(copies))
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            for i in range(calls):
                if len(kept) == len(copies):
                    kept.popleft()  # before the call: so its memory may be taken again
                kept.append(copies[i % len(copies)]())
        return graph

    def _elapsed_us(self, call: Call) -> float:
        self._stream.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self._stream)
        call()
        end.record(self._stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000
