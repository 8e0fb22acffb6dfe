"""Real Gloo ranks that stay alive over many tests; each call makes a group of some of them and leaves it again."""

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

PATIENCE = 60.0  # seconds until a rank that does not answer counts as hung


def serve(connection: Connection) -> None:
    """A rank: join the group that comes, run the function in it, leave; until None comes."""
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
        context = mp.get_context("forkserver")  # one import of torch for all ranks
        context.set_forkserver_preload(["torch.nn.parallel", "lf_comm"])
        self._folder = tempfile.TemporaryDirectory()
        self._calls = 0
        self._workers = []
        for _ in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((ours, process))

    def call(self, fn: Callable[..., Any], world: int, **arguments: Any) -> list[Any]:
        """`fn(rank, **arguments)` on ranks 0 .. world - 1; the results by rank. RuntimeError if one raised or hung."""
        self._calls += 1
        store = os.path.join(self._folder.name, f"store{self._calls}")
        for rank, (connection, _) in enumerate(self._workers[:world]):
            connection.send((rank, world, store, fn, arguments))
        answers = []
        for rank, (connection, process) in enumerate(self._workers[:world]):
            if not connection.poll(PATIENCE):
                process.kill()
                raise RuntimeError(f"rank {rank}: no answer in {PATIENCE:.0f} s")
            answers.append(connection.recv())
        problems = [f"rank {rank}:\n{text}" for rank, (_, text) in enumerate(answers) if text]
        if problems:
            raise RuntimeError("\n".join(problems))
        return [result for result, _ in answers]

    def close(self) -> None:
        """End the processes."""
        for connection, process in self._workers:
            with contextlib.suppress(BrokenPipeError):
                connection.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
