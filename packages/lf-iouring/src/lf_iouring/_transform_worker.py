"""The process that runs a transform: it maps the slots once and then gets their numbers.

Messages are pickled tuples of numbers, names and small arrays; the arrays of a batch stay where they are.
"""

import mmap
import os
import pickle
import select
import signal
import socket
import threading
import traceback
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from .packing import Packing, varlen
from .transforms import Array, Arrays, OutputSpec, Transform, TransformContext, apply, read_only

MAPPED = 2  # descriptors sent at the start: of the input pool, and of the output pool or the input pool again


class Placed(NamedTuple):
    """An array in the input pool: `offset` from the start of the pool."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Task(NamedTuple):
    """One batch. Arrays are Placed, or small and sent as they are; out_base is where the output slot starts."""

    number: int
    arrays: dict[str, "Placed | Array"]
    context: TransformContext
    capacity: int | None
    out_base: int


class Done(NamedTuple):
    """Answer to a task: shapes of the outputs in order, None for work in place; or the traceback."""

    number: int
    shapes: list[tuple[int, ...]] | None
    error: str | None


def serve(channel: socket.socket, transform: Transform, output: OutputSpec | None, parent: int) -> None:
    """Work until the parent closes its end or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    _, fds, _, _ = socket.recv_fds(channel, 1, MAPPED)
    memory = [mmap.mmap(fd, os.fstat(fd).st_size) for fd in fds]
    for fd in fds:
        os.close(fd)
    connection = Connection(channel.detach())
    while True:
        try:
            task: Task = pickle.loads(connection.recv_bytes())
            connection.send_bytes(pickle.dumps(_work(task, transform, output, memory)))
        except (EOFError, ConnectionError):
            return


def _work(task: Task, transform: Transform, output: OutputSpec | None, memory: list[mmap.mmap]) -> Done:
    try:
        arrays = _arrays(task, memory[0])
        result = apply(transform, arrays, task.context, output, copies=True)
        if result is None or output is None:
            return Done(task.number, None, None)
        for field, array in zip(output.fields, result.values(), strict=True):
            place: Array = np.ndarray(array.shape, field.dtype, memory[1], task.out_base + field.offset)
            place[...] = array
        return Done(task.number, [array.shape for array in result.values()], None)
    except Exception:
        return Done(task.number, None, traceback.format_exc())


def _arrays(task: Task, memory: mmap.mmap) -> Arrays:
    arrays: Arrays = {}
    for name, array in task.arrays.items():
        if isinstance(array, Placed):
            arrays[name] = np.ndarray(array.shape, array.dtype, memory, array.offset)
        else:
            arrays[name] = read_only(array)
    if task.capacity is not None:
        arrays |= borders(arrays["cu_seqlens"], arrays["lengths"], task.capacity)
    return arrays


def borders(cu_seqlens: Array, lengths: Array, capacity: int) -> Arrays:
    """position_ids and segment_ids, which follow from the others and are too large for a message."""
    row, place = np.divmod(cu_seqlens[:-1].astype(np.int64), capacity)
    used = np.flatnonzero(place < lengths[row])
    row, place, length = row[used], place[used], np.diff(cu_seqlens)[used].astype(np.int64)
    found = varlen(Packing(len(lengths), row, place, row, place, length), capacity)
    return {"position_ids": read_only(found.position_ids), "segment_ids": read_only(found.segment_ids)}


def _leave_with(parent: int) -> None:
    """End this process when the parent does, also in the middle of a transform."""
    try:
        poll = select.poll()
        poll.register(os.pidfd_open(parent), select.POLLIN)
    except OSError:
        if os.getppid() != parent:
            os._exit(1)
        return  # a kernel or container without pidfd: the closed socket ends us after the transform
    if os.getppid() == parent:
        poll.poll()
    os._exit(1)


def describe(array: Array, pool_address: int, size: int) -> "Placed | Array":
    """How a task names an array: by place if it lies in the pool of `size` bytes, else as it is."""
    offset = array.ctypes.data - pool_address
    if offset >= 0 and offset + array.nbytes <= size:
        return Placed(array.dtype.str, array.shape, offset)
    return np.ascontiguousarray(array)
