"""A thread that makes collectives in order, behind the backward pass of DDP."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lf_comm._complete import require_gradients

EXIT_PATIENCE_S = 5.0  # for threads that a peer which is gone keeps waiting


class Behind:
    """Runs the sums of one hook: on the CPU in a thread, else at once in the current stream.

    One thread, so that every rank makes the same collectives in the same order.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self.summing: int | None = None  # the bucket that is being summed, or at which it failed

    def run(
        self, work: Callable[[], Tensor], device: torch.device, bucket: int
    ) -> torch.futures.Future[Tensor]:
        """A future of what `work` returns or raises."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()

        def job() -> None:
            self.summing = bucket
            try:
                result = work()
                self.summing = None
                future.set_result(result)
            except Exception as error:  # DDP raises what the future holds
                future.set_exception(error)  # type: ignore[arg-type]  # torch's own annotation is wrong

        if device.type == "cpu":
            self._thread().put(job)
        else:
            job()
        return future

    def _thread(self) -> queue.SimpleQueue[Callable[[], None] | None]:
        if self._jobs is None:
            jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            # A daemon, since a peer that is gone can keep it waiting until the group's timeout.
            thread = threading.Thread(target=_serve, args=(jobs,), name="lf-comm", daemon=True)
            at_exit(thread, lambda: jobs.put(None))
            thread.start()
            self._jobs = jobs
        return self._jobs


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


_to_end: weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]] = weakref.WeakKeyDictionary()


def at_exit(thread: threading.Thread, end: Callable[[], None]) -> None:
    """Call `end` and wait a while for `thread` when the interpreter exits.

    A daemon that comes back from C++ after that is ended in the middle of it, which aborts the process.
    """
    _to_end[thread] = end


@atexit.register
def _end_threads() -> None:
    left = list(_to_end.items())
    for _, end in left:
        end()
    deadline = time.monotonic() + EXIT_PATIENCE_S
    for thread, _ in left:
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))


def own_group(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    """A group of DDP's ranks, backend and timeout for a hook's own collectives; all ranks make it.

    RuntimeError when DDP has a hook already: it takes one only, and says so when the group is made.
    """
    if getattr(ddp, "_comm_hooks", None):
        raise RuntimeError("register_comm_hook was called on this module before, and DDP takes one hook only")
    theirs: Any = ddp.process_group
    device = next((p.device for p in ddp.parameters()), torch.device("cpu"))
    timeout = getattr(getattr(theirs._get_backend(device), "options", None), "_timeout", None)
    ranks, backend = dist.get_process_group_ranks(theirs), dist.get_backend(theirs)
    # None would be torch's default of minutes, and a lost peer would hold the thread for so long
    group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, timeout=timeout)
    return group


def register(ddp: DistributedDataParallel, state: object, hook: Callable[..., object]) -> None:
    """Make `hook` that of `ddp`, and have parameters that a backward pass leaves out named."""
    ddp.register_comm_hook(state, hook)
    require_gradients(ddp)
