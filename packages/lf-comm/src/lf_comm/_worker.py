"""A thread that makes collectives in order, behind the backward pass of DDP."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class Behind:
    """Runs the sums of one hook: on the CPU in a thread, else at once in the current stream.

    One thread, so that every rank makes the same collectives in the same order.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] | None = None

    def run(self, work: Callable[[], Tensor], device: torch.device) -> torch.futures.Future[Tensor]:
        """A future of what `work` returns or raises."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()

        def job() -> None:
            try:
                future.set_result(work())
            except Exception as error:  # DDP raises what the future holds
                future.set_exception(error)  # type: ignore[arg-type]  # torch's own annotation is wrong

        if device.type == "cpu":
            self._thread().put(job)
        else:
            job()
        return future

    def _thread(self) -> queue.SimpleQueue[Callable[[], None]]:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            # A daemon, since a peer that is gone can keep it waiting until the group's timeout.
            threading.Thread(target=_serve, args=(self._jobs,), name="lf-comm", daemon=True).start()
        return self._jobs


def _serve(jobs: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()


def own_group(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    """A group of DDP's ranks and backend for a hook's own collectives; all ranks make it."""
    ranks = dist.get_process_group_ranks(ddp.process_group)
    group: dist.ProcessGroup = dist.new_group(ranks, backend=dist.get_backend(ddp.process_group))
    return group
