"""One memfd, allocated in full and mapped at a 2 MiB boundary.

`mmap.mmap` can neither choose an address nor be kept alive by the views made from it without also
refusing to close, so the mapping is made through libc: reserve address space, then place the file in it.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from ._errors import PoolError
from ._pin import Registrar, lock

HUGE = 2 << 20
PAGE = mmap.PAGESIZE

# <sys/mman.h>, <linux/mman.h>; the mmap module has some of them only in newer Pythons.
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value

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


@dataclass(frozen=True)
class _Mapping:
    address: int
    size: int
    reserved: int
    base: int


def round_up(value: int, unit: int) -> int:
    """Smallest multiple of `unit` that is >= `value`."""
    return -(-value // unit) * unit


def _mmap(address: int | None, size: int, prot: int, flags: int, fd: int) -> int:
    got = _libc.mmap(address, size, prot, flags, fd, 0)
    if got == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(got)


def _map(fd: int, size: int, writable: bool) -> _Mapping:
    """Map a whole file shared, its first byte at a 2 MiB boundary."""
    reserved = round_up(size, PAGE) + HUGE
    base = _mmap(None, reserved, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = round_up(base, HUGE)
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        _mmap(address, size, prot, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(base, reserved)
        raise
    return _Mapping(address, size, reserved, base)


def _drop(fd: int, mapping: _Mapping, unlock: list[Callable[[], None]]) -> None:
    for undo in unlock:
        undo()
    # A hugetlb part must be unmapped at its own (2 MiB) granularity, before the reservation around it.
    _libc.munmap(mapping.address, mapping.size)
    _libc.munmap(mapping.base, mapping.reserved)
    os.close(fd)


class Region:
    """A mapped memfd; unmapped and closed when the last slot made from it is garbage.

    Attributes:
        fd: the memfd, close-on-exec.
        address: first byte, a multiple of 2 MiB.
        size: bytes.
    """

    def __init__(self, fd: int, size: int, *, writable: bool = True) -> None:
        """Take over `fd` and map `size` bytes of it; OSError if the kernel refuses (fd is then closed)."""
        try:
            mapping = _map(fd, size, writable)
        except OSError:
            os.close(fd)
            raise
        self.fd = fd
        self.address = mapping.address
        self.size = size
        # Not at exit: engine threads may still read, and the kernel frees everything anyway.
        self._unlock: list[Callable[[], None]] = []
        weakref.finalize(self, _drop, fd, mapping, self._unlock).atexit = False

    def lock(self, registrar: Registrar) -> None:
        """Page-lock the region until it is unmapped; PoolError if the registrar refuses."""
        self._unlock.append(lock(registrar, self.address, self.size))

    def advise(self, advice: int) -> None:
        """madvise(2) over the whole region; OSError if refused."""
        if _libc.madvise(self.address, self.size, advice) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


def create_memfd(size: int, flags: int) -> int:
    """New memfd of `size` bytes whose size other holders of the descriptor cannot change later.

    The growth seals keep a process that attaches from being killed by SIGBUS after a truncation.
    """
    fd = os.memfd_create("lf-memory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        os.close(fd)
        raise no_memory(size, error) from error
    return fd


def allocate(fd: int, size: int) -> None:
    """Back every byte of a memfd with memory now; PoolError with the size needed if there is not enough."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        raise no_memory(size, error) from error


def no_memory(size: int, error: OSError) -> PoolError:
    """The error for a refused allocation of `size` bytes."""
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    hint = {
        "EFBIG": "RLIMIT_FSIZE (ulimit -f) is lower",
        "EMFILE": "the process has no free descriptor (ulimit -n)",
    }.get(name, "ask for fewer or smaller slots, or free memory")
    return PoolError(f"a pool needs {size} bytes, the kernel refused with {name}: {hint}", needed=size)
