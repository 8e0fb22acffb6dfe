"""Backing a range of a region with pages: before its first use, by several threads.

A kernel thread clears a few GB/s of fresh pages at best and `fallocate` holds the inode's lock while it does,
so a large range is populated through the mapping instead (MADV_POPULATE_WRITE), which also fills the page
table that page-locking walks.
"""

import ctypes
import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ._region import HUGE, Region

CHUNK = 32 * HUGE  # bytes one thread takes at a time; small enough to share the work evenly
_MAX_THREADS = 16  # beyond, the page allocator's locks are what is waited for
_MADV_POPULATE_WRITE = 23  # Linux 5.14


def threads_for(nbytes: int) -> int:
    """Threads that populate a range: one per 64 MiB, no more than this process has cores."""
    return max(1, min(-(-nbytes // CHUNK), len(os.sched_getaffinity(0)), _MAX_THREADS))


def populate(region: Region, start: int, nbytes: int) -> None:
    """Back a range with memory now, or leave it without any and raise OSError.

    A kernel before 5.14 allocates the pages in one thread and leaves the page table to the first use.
    """
    try:
        _through_the_mapping(region, start, nbytes)
    except OSError as error:
        if error.errno == errno.EINVAL:
            _without_advice(region, start, nbytes)
            return
        region.punch(start, nbytes)
        # a fault that cannot be served (no page left of this size) is reported as EFAULT
        code = errno.ENOMEM if error.errno == errno.EFAULT else error.errno
        raise OSError(code, os.strerror(code or 0)) from None


def _without_advice(region: Region, start: int, nbytes: int) -> None:
    if region.fd is None:
        ctypes.memset(region.address + start, 0, nbytes)
    else:
        os.posix_fallocate(region.fd, start, nbytes)


def _through_the_mapping(region: Region, start: int, nbytes: int) -> None:
    def chunk(at: int) -> None:
        region.advise(_MADV_POPULATE_WRITE, at, min(CHUNK, start + nbytes - at))

    threads = threads_for(nbytes)
    if threads == 1:
        for at in _chunks(start, nbytes):
            chunk(at)
        return
    with ThreadPoolExecutor(threads, "lf-memory-populate") as executor:
        try:
            list(executor.map(chunk, _chunks(start, nbytes)))
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise


def _chunks(start: int, nbytes: int) -> Iterator[int]:
    return iter(range(start, start + nbytes, CHUNK))
