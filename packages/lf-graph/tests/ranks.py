"""Real Gloo or NCCL ranks that stay alive over many tests: starting torch twice costs more than most tests."""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = (
    240.0  # seconds until a call that does not answer counts as hung; a loaded machine starts ranks slowly
)


class RankError(Exception):
    """A rank raised; the message is its traceback."""


def serve(rank: int, world: int, store: str, connection: Connection, backend: str) -> None:
    """A rank: run the functions that come through ``connection`` until None comes."""
    torch.set_num_threads(1)
    if backend == "nccl":
        os.environ.setdefault(
            "NCCL_NVLS_ENABLE", "0"
        )  # NVLink multicast needs a fabric manager that allows it
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )
    while (job := connection.recv()) is not None:
        fn, arguments = job
        try:
            connection.send((fn(rank, **arguments), ""))
        except BaseException:
            connection.send((None, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """``world`` processes in one group; :meth:`call` runs a function on all of them."""

    def __init__(self, world: int = 2, backend: str = "gloo") -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        context = mp.get_context("forkserver")  # one import of torch for all ranks of all tests
        context.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "lf_graph"])
        self._ours: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, world, store, theirs, backend), daemon=True)
            process.start()
            theirs.close()
            self._ours.append(ours)
            self._processes.append(process)

    def call(self, fn: Callable[..., Any], **arguments: Any) -> list[Any]:
        """``fn(rank, **arguments)`` on every rank; the results by rank, None for a rank that died meanwhile.

        Raises:
            RankError: a rank raised, or did not answer in time.
        """
        for connection in self._ours:
            connection.send((fn, arguments))
        answers = [self._answer(rank) for rank in range(len(self._ours))]
        problems = [f"rank {rank}:\n{problem}" for rank, (_, problem) in enumerate(answers) if problem]
        if problems:
            raise RankError("\n".join(problems))
        return [result for result, _ in answers]

    def _answer(self, rank: int) -> tuple[Any, str]:
        if not self._ours[rank].poll(PATIENCE):
            return None, f"no answer in {PATIENCE:.0f} s"
        try:
            answer: tuple[Any, str] = self._ours[rank].recv()
        except (EOFError, ConnectionResetError):
            return None, ""
        return answer

    def close(self) -> None:
        """End the processes."""
        for connection in self._ours:
            with contextlib.suppress(BrokenPipeError):  # it died
                connection.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
