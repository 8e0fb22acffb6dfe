"""A file read past the page cache (O_DIRECT) into aligned memory, or through it where the system refuses, with why.

A model's weights are read once and then packed, so a copy in the page cache only takes memory from others. Offsets,
lengths and memory are multiples of 4096 bytes, which every block device takes; the last read asks for more than there
is and comes back short (open(2), O_DIRECT).
"""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lf_hal.errors import ArtifactError

__all__ = ["IO_STRATEGIES", "ReadReport", "check_strategy", "read_file"]

IO_STRATEGIES = ("mmap", "direct")
BLOCK = 4096
PIECE = 8 << 20
"""Bytes of one read: large enough to keep a disk busy, small enough not to pin much at a time."""
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class ReadReport:
    """How a file came into memory.

    Attributes:
        asked: what was asked for, of :data:`IO_STRATEGIES`.
        used: ``mmap``, ``direct``, or ``buffered`` where direct reads were refused.
        reason: why ``used`` is not what was asked for; empty where it is.
        nbytes: bytes of the file.
        direct_bytes: how many of them were read past the page cache.
    """

    asked: str
    used: str
    reason: str = ""
    nbytes: int = 0
    direct_bytes: int = 0


def check_strategy(name: str) -> str:
    """``name`` if it is one of :data:`IO_STRATEGIES`; raises :class:`ValueError` with those there are."""
    if name not in IO_STRATEGIES:
        raise ValueError(f"io_strategy={name!r}; give one of {', '.join(IO_STRATEGIES)}")
    return name


def read_file(path: Path) -> tuple[npt.NDArray[np.uint8], ReadReport]:
    """All bytes of a file, page-aligned and in private memory, and how they were read.

    Raises:
        ArtifactError: the file is not there, is empty, or ends before its size.
        OSError: a read failed for another reason than that direct ones are refused.
    """
    try:
        plain = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ArtifactError(path, "is not there") from None
    try:
        size = os.fstat(plain).st_size
        if size == 0:
            raise ArtifactError(path, "is empty")
        memory = mmap.mmap(-1, -(-size // BLOCK) * BLOCK)
        done, reason = _read_direct(path, memory, size)
        direct_bytes = done
        while done < size:
            done += _some(path, plain, memory, done, min(done + PIECE, size))
    finally:
        os.close(plain)
    used = "buffered" if reason else "direct"
    report = ReadReport("direct", used, reason, size, direct_bytes)
    return np.frombuffer(memory, np.uint8)[:size], report


def _read_direct(path: Path, memory: mmap.mmap, size: int) -> tuple[int, str]:
    """Bytes read, and why the rest was refused."""
    done = 0
    try:
        direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return 0, f"opening with O_DIRECT: {error.strerror}"
    try:
        while done < size:
            if done % BLOCK:
                return done, f"a direct read ended at byte {done}, within a block"
            done += _some(path, direct, memory, done, min(done + PIECE, len(memory)))
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return done, f"a direct read at byte {done}: {error.strerror}"
    finally:
        os.close(direct)
    return size, ""


def _some(path: Path, file: int, memory: mmap.mmap, begin: int, end: int) -> int:
    """Reads into [begin, end) of ``memory``; how many bytes came."""
    with memoryview(memory)[begin:end] as part:
        count = os.preadv(file, [part], begin)
    if count == 0:
        raise ArtifactError(path, "is cut", offset=begin)
    return count
