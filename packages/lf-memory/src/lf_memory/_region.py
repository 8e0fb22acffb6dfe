"""Memory mapped at a 2 MiB boundary, of a memfd or of this process alone; its pages come later, range by range.

`mmap.mmap` can neither choose an address nor be kept alive by the views made from it without also
refusing to close, so the mapping is made through libc: reserve address space, then place the file in it.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from ._errors import PoolError
from ._pin import Registrar, lock, pieces

HUGE = 2 << 20
PAGE = mmap.PAGESIZE

# <sys/mman.h>, <linux/mman.h>, <linux/falloc.h>; the mmap module has some of them only in newer Pythons.
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclass(frozen=True)
class _Mapping:
    address: int
    size: int
    reserved: int
    base: int

    def parts(self) -> list[tuple[int, int]]:
        """(start, end) of the pages before it, of itself (hugetlb has a granularity of its own), and behind it."""
        end = self.address + round_up(self.size, PAGE)
        return [(self.base, self.address), (self.address, end), (end, self.base + self.reserved)]


def round_up(value: int, unit: int) -> int:
    """Smallest multiple of `unit` that is >= `value`."""
    return -(-value // unit) * unit


def _mmap(address: int | None, size: int, prot: int, flags: int, fd: int) -> int:
    got = _libc.mmap(address, size, prot, flags, fd, 0)
    if got == _MAP_FAILED:
        raise _os_error()
    return int(got)


def _os_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _map(fd: int | None, size: int, writable: bool, flags: int) -> _Mapping:
    """Map a whole file shared, or memory without one: at a 2 MiB boundary, between pages that nobody may touch."""
    reserved = round_up(size, PAGE) + HUGE + PAGE
    base = _mmap(None, reserved, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = round_up(base + PAGE, HUGE)
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags |= _MAP_FIXED | _MAP_NORESERVE
    flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if fd is None else mmap.MAP_SHARED
    try:
        _mmap(address, size, prot, flags, -1 if fd is None else fd)
    except OSError:
        _libc.munmap(base, reserved)
        raise
    return _Mapping(address, size, reserved, base)


def _drop(fd: int | None, mapping: _Mapping, locked: dict[int, Callable[[], None]]) -> None:
    with contextlib.ExitStack() as steps:  # last first, and each even if one before it fails
        if fd is not None:
            steps.callback(os.close, fd)
        # Each byte once: where it is free, another thread may have mapped something of its own by the next call.
        for start, end in mapping.parts():
            steps.callback(_libc.munmap, start, end - start)
        for unlock in locked.values():
            steps.callback(unlock)


class Region:
    """Mapped memory; unmapped, and its memfd closed, when the last slot made from it is garbage.

    Attributes:
        fd: the memfd, close-on-exec; None for memory of this process alone.
        address: first byte, a multiple of 2 MiB.
        size: bytes.
    """

    def __init__(self, fd: int | None, size: int, *, writable: bool = True, flags: int = 0) -> None:
        """Take over `fd` and map `size` bytes of it; OSError if the kernel refuses (fd is then closed).

        `flags` are of mmap(2).
        """
        try:
            mapping = _map(fd, size, writable, flags)
        except OSError:
            if fd is not None:
                os.close(fd)
            raise
        self.fd = fd
        self.address = mapping.address
        self.size = size
        self._locked: dict[int, Callable[[], None]] = {}  # first byte of a piece -> what unlocks it
        # Not at exit: engine threads may still read, and the kernel frees everything anyway.
        weakref.finalize(self, _drop, fd, mapping, self._locked).atexit = False

    def lock(self, registrar: Registrar, start: int, nbytes: int, unit: int) -> None:
        """Page-lock a range, piece by piece, until `unlock` or the end of the region.

        `unit` is what one copy may span: no piece ends inside one. All or nothing; PoolError if the registrar
        refuses.
        """
        try:
            for offset, length in pieces(start, nbytes, unit):
                self._locked[offset] = lock(registrar, self.address + offset, length)
        except BaseException:
            self.unlock(start, nbytes)
            raise

    def unlock(self, start: int, nbytes: int) -> None:
        """Undo `lock` for the pieces that begin in a range."""
        for offset in [o for o in self._locked if start <= o < start + nbytes]:
            self._locked.pop(offset)()

    def advise(self, advice: int, start: int, nbytes: int) -> None:
        """madvise(2) over a range; the GIL is free meanwhile. OSError if refused."""
        if _libc.madvise(self.address + start, nbytes, advice) != 0:
            raise _os_error()

    def punch(self, start: int, nbytes: int) -> None:
        """Give the pages of a range back to the kernel; it reads as zeros afterwards. OSError if refused."""
        if self.fd is None:
            self.advise(mmap.MADV_DONTNEED, start, nbytes)
        elif _libc.fallocate(self.fd, _PUNCH_HOLE_KEEP_SIZE, start, nbytes) != 0:
            raise _os_error()


def create_memfd(size: int, name: str, flags: int = 0) -> int:
    """New memfd of `size` bytes, without pages, whose size no holder of the descriptor can change later.

    The seals keep a process that attaches from being killed by SIGBUS after a truncation. OSError if refused.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def no_memory(size: int, error: OSError) -> PoolError:
    """The error for a refused allocation of `size` bytes."""
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    hint = {
        "EFBIG": "RLIMIT_FSIZE (ulimit -f) is lower",
        "EMFILE": "the process has no free descriptor (ulimit -n)",
    }.get(name, "ask for fewer or smaller slots, free memory, or raise RLIMIT_AS (ulimit -v) if it is set")
    return PoolError(f"a pool needs {size} bytes, the kernel refused with {name}: {hint}", needed=size)
