"""Real Gloo ranks that stay alive over many tests: starting torch five times costs more than most tests.

Every call makes a process group of as many of them as it wants and leaves it again.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = 60.0  # seconds until a call that does not answer counts as hung
DIED = "died"


class RankError(Exception):
    """A rank raised or died; the message is its traceback."""


def serve(connection: Connection) -> None:
    """A rank: join the group that comes through `connection`, run the function in it, leave; until None comes."""
    torch.set_num_threads(1)
    while (job := connection.recv()) is not None:
        rank, world, store, fn, arguments = job
        try:
            patience = datetime.timedelta(seconds=30)
            dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world, timeout=patience)
            try:
                dist.barrier()  # a rank that left at once would close what others are still connecting to
                answer = (fn(rank, **arguments), "")
            finally:
                dist.destroy_process_group()
        except BaseException:
            answer = (None, traceback.format_exc())
            dist.distributed_c10d._world.group_count = 0  # a failed start would name the next group otherwise
        connection.send(answer)


class Ranks:
    """Up to `most` processes; `call` runs a function on some of them in one group."""

    def __init__(self, most: int) -> None:
        self._context = mp.get_context("forkserver")  # one import of torch for all ranks of all tests
        self._context.set_forkserver_preload(
            ["torch.distributed.fsdp", "torch.distributed.checkpoint", "lf_ckpt"]
        )
        self._folder = tempfile.TemporaryDirectory()
        self._calls = 0
        self._workers = [self._start() for _ in range(most)]

    def call(
        self, fn: Callable[..., Any], world: int, *, may_die: bool = False, **arguments: Any
    ) -> list[Any]:
        """`fn(rank, **arguments)` on ranks 0 .. world - 1; the results by rank.

        RankError if one raised, hung or died; with may_die its result is DIED and it is replaced.
        """
        self._calls += 1
        store = os.path.join(self._folder.name, f"store{self._calls}")
        for rank, (connection, _) in enumerate(self._workers[:world]):
            connection.send((rank, world, store, fn, arguments))
        answers = [self._answer(rank) for rank in range(world)]
        problems = [
            f"rank {rank}:\n{problem}"
            for rank, (_, problem) in enumerate(answers)
            if problem and not (may_die and problem == DIED)
        ]
        if problems:
            raise RankError("\n".join(problems))
        return [DIED if problem else result for result, problem in answers]

    def close(self) -> None:
        """End the processes."""
        for connection, _ in self._workers:
            with contextlib.suppress(BrokenPipeError):
                connection.send(None)
        for _, process in self._workers:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()

    def _start(self) -> tuple[Connection, ForkServerProcess]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def _answer(self, rank: int) -> tuple[Any, str]:
        connection, process = self._workers[rank]
        if not connection.poll(PATIENCE):
            process.kill()
            self._workers[rank] = self._start()
            return None, f"no answer in {PATIENCE:.0f} s"
        try:
            answer: tuple[Any, str] = connection.recv()
        except (EOFError, ConnectionResetError):
            process.join(10)
            self._workers[rank] = self._start()
            return None, DIED
        return answer
