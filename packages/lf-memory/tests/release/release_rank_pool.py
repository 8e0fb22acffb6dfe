"""Real Gloo ranks that stay alive over many tests: starting torch twice costs more than most tests."""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = (
    240.0  # seconds until a call that does not answer counts as hung; a loaded machine starts ranks slowly
)


class RankError(Exception):
    """A rank raised; the message is its traceback."""


def serve(rank, world, store, connection, backend):
    """A rank: run the functions that come through `connection` until None comes."""
    torch.set_num_threads(1)
    if backend == "nccl":
        os.environ.setdefault(
            "NCCL_NVLS_ENABLE", "0"
        )  # NVLink multicast needs a fabric manager that allows it
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, f"file://{store}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=120)
    )
    while (job := connection.recv()) is not None:
        fn, arguments = job
        try:
            connection.send((fn(rank, **arguments), ""))
        except BaseException:
            connection.send((None, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """`world` processes in one group; `call` runs a function on all of them."""

    def __init__(self, world, backend="gloo"):
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        context = mp.get_context("forkserver")  # one import of torch for all ranks
        context.set_forkserver_preload(["torch.distributed.fsdp", "lf_memory.gradients"])
        self._ours, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, world, store, theirs, backend), daemon=True)
            process.start()
            theirs.close()
            self._ours.append(ours)
            self._processes.append(process)

    def call(self, fn, **arguments):
        """`fn(rank, **arguments)` on every rank; the results by rank. RankError if a rank raised or hung."""
        for connection in self._ours:
            connection.send((fn, arguments))
        answers = [self._answer(connection) for connection in self._ours]
        problems = [f"rank {rank}:\n{problem}" for rank, (_, problem) in enumerate(answers) if problem]
        if problems:
            raise RankError("\n".join(problems))
        return [result for result, _ in answers]

    def close(self):
        """End the processes."""
        for connection in self._ours:
            with contextlib.suppress(BrokenPipeError):
                connection.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()

    @staticmethod
    def _answer(connection):
        if not connection.poll(PATIENCE):
            return None, f"no answer in {PATIENCE:.0f} s"
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            return None, "died"
