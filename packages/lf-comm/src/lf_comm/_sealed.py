"""Memory of one process that others map: written once, sealed by the kernel, passed on as a file descriptor.

What is sealed can never be written, grown or cut again, by nobody; the kernel refuses it. A mapping is private: what a
process writes into it anyway goes to pages of its own, and nobody else sees it.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

_ALIGN = 64  # bytes; enough for vector loads of every dtype
# F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE of fcntl(2); the module has the names from Python 3.15 on
_ADD_SEALS, _GET_SEALS, _SEALS = 1033, 1034, 0x1 | 0x2 | 0x4 | 0x8
_PEERCRED = struct.Struct("3i")  # pid, uid, gid of unix(7)


@dataclass(frozen=True)
class Entry:
    """One tensor within the memory: contiguous, at offset, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def layout(tensors: Mapping[str, Tensor]) -> tuple[tuple[Entry, ...], int]:
    """Where each tensor lies, and the bytes of all. TypeError for what is not strided memory of the processor."""
    entries, at = [], 0
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise TypeError(
                f"{name}: {tensor.layout} of {tensor.dtype} on {tensor.device}; strided, on cpu, is wanted"
            )
        entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), at))
        at += -(-tensor.nbytes // _ALIGN) * _ALIGN
    return tuple(entries), at


def entries_to_json(entries: tuple[Entry, ...]) -> str:
    """For :func:`entries_of_json`."""
    return json.dumps([asdict(entry) for entry in entries])


def entries_of_json(text: str, nbytes: int) -> tuple[Entry, ...]:
    """Entries that lie within so many bytes. ValueError for anything else."""
    try:
        found = [Entry(**{**one, "shape": tuple(one["shape"])}) for one in json.loads(text)]
        for one in found:
            dtype = getattr(torch, one.dtype)
            whole = all(type(n) is int and n >= 0 for n in (*one.shape, one.offset))
            if not isinstance(dtype, torch.dtype) or not isinstance(one.name, str) or not whole:
                raise ValueError("no dtype, name or whole numbers")
            if one.offset % _ALIGN or one.offset + math.prod(one.shape) * dtype.itemsize > nbytes:
                raise ValueError(f"{one.name} lies outside of {nbytes} bytes")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"no table of shared tensors: {error}") from error
    return tuple(found)


def create(tensors: Mapping[str, Tensor], entries: tuple[Entry, ...], nbytes: int) -> int:
    """A file descriptor of sealed memory that holds copies of the tensors."""
    fd = os.memfd_create("lf-comm-peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, max(nbytes, 1))
        with mmap.mmap(fd, max(nbytes, 1)) as memory:
            bytes_ = torch.frombuffer(memory, dtype=torch.uint8)
            for entry, tensor in zip(entries, tensors.values(), strict=True):
                view(bytes_, entry).copy_(tensor.detach())
            del bytes_  # a mapping that is in use cannot be closed, nor its memory be sealed
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_sealed(fd: int) -> bool:
    """Whether nobody can write, grow or cut this memory any more."""
    try:
        return fcntl.fcntl(fd, _GET_SEALS) & _SEALS == _SEALS
    except OSError:  # no memory that has seals
        return False


def mapped(fd: int) -> Tensor:
    """uint8 [bytes] of a file descriptor, in a private mapping that lives as long as the tensor."""
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(fd, os.fstat(fd).st_size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def view(bytes_: Tensor, entry: Entry) -> Tensor:
    """The tensor of an entry, in place."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    count = math.prod(entry.shape)
    return bytes_[entry.offset : entry.offset + count * dtype.itemsize].view(dtype).view(entry.shape)


class Offer:
    """Hands a file descriptor to processes of the same user, at an address in the abstract namespace of sockets."""

    def __init__(self, fd: int, address: str) -> None:
        self._fd = fd
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{address}")
        self._socket.listen(64)
        self._thread = threading.Thread(target=self._serve, name="lf-comm-peer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody gets it any more."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection:
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
                if _PEERCRED.unpack(credentials)[1] == os.geteuid():
                    try:
                        socket.send_fds(connection, [b"1"], [self._fd])
                    except OSError:  # it went away
                        continue


def receive(address: str, timeout_s: float) -> int:
    """The file descriptor that an :class:`Offer` hands out. OSError when there is none within timeout_s."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{address}")
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
    if not fds:
        raise ConnectionResetError("the connection ended before the memory came")
    os.set_inheritable(fds[0], False)
    return fds[0]
