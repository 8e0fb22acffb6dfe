"""Spawned processes that run a transform: tasks out, answers in, and deaths noticed."""

import multiprocessing
import os
import pickle
import select
import socket
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from ._errors import LoaderError, WorkerDied
from ._transform_worker import Done, Task, serve
from .transforms import OutputSpec, Transform

_SIGNALS_MS = 100  # how often a wait looks for signals that the kernel gave to another thread
_LEAVE_S = 1.0  # an idle worker leaves at once; one in a transform is killed after this


class _Worker:
    """One process, the parent's end of its socket, and the tasks it has."""

    def __init__(
        self, transform: Transform, output: OutputSpec | None, fds: Sequence[int], number: int
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process: SpawnProcess = multiprocessing.get_context("spawn").Process(
                target=serve,
                args=(theirs, transform, output, os.getpid()),
                name=f"lf-transform-{number}",
                daemon=True,
            )
            try:
                self.process.start()
                socket.send_fds(ours, [b"m"], list(fds))
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                ours.close()
                raise LoaderError(
                    f"transform={transform!r} does not pickle ({error}): with transform_workers it must be a "
                    "function, or an object of a class, at the top level of a module"
                ) from error
            except BaseException:
                ours.close()
                raise
        self.connection = Connection(ours.detach())
        self.tasks: dict[int, tuple[int, object]] = {}  # by number: step, and what must live until the answer
        try:
            self.pidfd = os.pidfd_open(self.process.pid or 0)
        except OSError:
            self.pidfd = -1  # then only the closed socket tells


class WorkerPool:
    """`workers` processes with the same transform and the same memory.

    One thread at a time may use it. Garbage or closed, its processes end.

    Args:
        transform, output: see LoongDataLoader.
        fds: of the input and the output memory.
        workers: how many, at least 1.

    Raises LoaderError for a transform that does not pickle.
    """

    def __init__(
        self, transform: Transform, output: OutputSpec | None, fds: Sequence[int], workers: int
    ) -> None:
        self._workers: list[_Worker] = []
        self._stop = weakref.finalize(self, _stop, self._workers, os.getpid())
        for number in range(workers):
            self._workers.append(_Worker(transform, output, fds, number))
        self._by_fd: dict[int, _Worker] = {}
        self._poll = select.poll()
        for worker in self._workers:
            for fd in (worker.connection.fileno(), worker.pidfd):
                if fd >= 0:
                    self._by_fd[fd] = worker
                    self._poll.register(fd, select.POLLIN)
        self._tasks = self._forgotten = 0
        self._answers: dict[int, Done] = {}

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [worker.process.pid or 0 for worker in self._workers]

    @property
    def alive(self) -> bool:
        """Whether the processes are there, as far as is known."""
        return self._stop.alive

    def next_number(self) -> int:
        """A number for a new task."""
        self._tasks += 1
        return self._tasks

    def submit(self, task: Task, keep: object) -> None:
        """Give a task to the worker with the fewest; `keep` holds its memory. WorkerDied if it is gone."""
        worker = min(self._workers, key=lambda worker: len(worker.tasks))
        worker.tasks[task.number] = (task.context.step, keep)
        try:
            worker.connection.send_bytes(pickle.dumps(task))
        except ConnectionError:
            raise self._died(worker) from None
        except BaseException:
            self.close()  # a signal in the middle of a message
            raise

    def forget(self) -> None:
        """Drop the answers to all tasks submitted so far; their memory is held until the workers are done."""
        self._forgotten = self._tasks

    def wait(self, number: int) -> Done:
        """The answer to a task; those to earlier ones are dropped. WorkerDied as soon as any worker is gone."""
        for old in [answered for answered in self._answers if answered < number]:
            del self._answers[old]
        while number not in self._answers:
            for fd, _ in self._poll.poll(_SIGNALS_MS):
                worker = self._by_fd[fd]
                if fd == worker.pidfd:
                    raise self._died(worker)
                self._receive(worker)
        return self._answers[number]

    def close(self) -> None:
        """End the processes. Harmless when repeated."""
        self._stop()

    def _receive(self, worker: _Worker) -> None:
        try:
            done: Done = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise self._died(worker) from None
        except BaseException:
            self.close()  # a signal in the middle of a message
            raise
        del worker.tasks[done.number]
        if done.number > self._forgotten:
            self._answers[done.number] = done

    def _died(self, worker: _Worker) -> WorkerDied:
        worker.process.join(_LEAVE_S)
        pid, code = worker.process.pid or 0, worker.process.exitcode
        steps = sorted(step for other in self._workers for step, _ in other.tasks.values())
        self.close()
        return WorkerDied(pid, code, steps)


def _stop(workers: list[_Worker], pid: int) -> None:
    for worker in workers:
        worker.connection.close()
        if worker.pidfd >= 0:
            os.close(worker.pidfd)
    if os.getpid() != pid:
        return  # a forked child has copies of the descriptors, not of the processes
    until = time.monotonic() + _LEAVE_S
    for worker in workers:
        worker.process.join(max(0, until - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
    workers.clear()
