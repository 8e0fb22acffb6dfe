"""Which pages a pool gets: reserved huge pages, transparent huge pages, or normal ones."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from ._errors import PoolError
from ._region import HUGE, PAGE, Region, allocate, create_memfd, no_memory, round_up

CHOICES = ("auto", "hugetlb", "thp", "off")

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_SHMEM_POLICY = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGE_DIR = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_HUGE_FIX = "reserve pages with: echo N > /proc/sys/vm/nr_hugepages (as root)"
_THP_FIX = f"allow it with: echo advise > {_SHMEM_POLICY} (as root)"
_REFUSED = (errno.ENOMEM, errno.ENOSPC, errno.EINVAL, errno.EPERM)


class _UnavailableError(Exception):
    """A step of the ladder is not to be had; the text says why."""


@dataclass(frozen=True)
class Backing:
    """A region and how it was obtained."""

    region: Region
    pages: str
    reason: str


def build(size: int, hugepages: str) -> Backing:
    """Allocate and map `size` bytes on the best pages that `hugepages` allows.

    Raises PoolError if an explicit choice cannot be had or memory does not suffice.
    """
    if hugepages not in CHOICES:
        raise PoolError(f"hugepages={hugepages!r}: choose one of {', '.join(CHOICES)}")
    if hugepages == "off":
        return Backing(_normal(size), "normal", "hugepages='off'")
    if hugepages == "auto":
        return _best(size)
    step = _hugetlb if hugepages == "hugetlb" else _transparent
    try:
        return Backing(step(size), hugepages, "asked for by name")
    except _UnavailableError as why:
        raise PoolError(f"hugepages={hugepages!r} cannot be had: {why}", needed=size) from None


def _best(size: int) -> Backing:
    if size < HUGE:
        return Backing(_normal(size), "normal", "the pool is smaller than one 2 MiB page")
    refused: list[str] = []
    for name, step in (("hugetlb", _hugetlb), ("thp", _transparent)):
        try:
            return Backing(step(size), name, "; ".join([*refused, f"{name} available"]))
        except _UnavailableError as why:
            refused.append(f"{name}: {why}")
    return Backing(_normal(size), "normal", "; ".join(refused))


def _normal(size: int) -> Region:
    size = round_up(size, PAGE)
    available = _available_bytes()
    # fallocate on a memfd takes pages until the out-of-memory killer comes; refuse before that.
    if available is not None and size > available:
        message = f"a pool needs {size} bytes and {available} are available: use fewer or smaller slots"
        raise PoolError(message, needed=size, available=available)
    fd = create_memfd(size, 0)
    try:
        allocate(fd, size)
    except PoolError:
        os.close(fd)
        raise
    return _mapped(fd, size)


def _hugetlb(size: int) -> Region:
    size = round_up(size, HUGE)
    free = _read_int(_HUGE_DIR / "free_hugepages") - _read_int(_HUGE_DIR / "resv_hugepages")
    if free * HUGE < size:
        raise _UnavailableError(f"{size // HUGE} pages of 2 MiB needed, {free} free; {_HUGE_FIX}")
    try:
        fd = os.memfd_create("lf-memory", os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    except OSError as error:
        raise _UnavailableError(f"memfd_create: {os.strerror(error.errno or 0)}; {_HUGE_FIX}") from None
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        if error.errno not in _REFUSED:
            raise no_memory(size, error) from error
        raise _UnavailableError(f"{os.strerror(error.errno)} for {size} bytes; {_HUGE_FIX}") from None
    return _mapped(fd, size)


def _transparent(size: int) -> Region:
    policy = _shmem_policy()
    if policy in ("never", "deny", "absent"):
        raise _UnavailableError(f"{_SHMEM_POLICY.name} is {policy}; {_THP_FIX}")
    size = round_up(size, HUGE)
    region = _mapped(create_memfd(size, 0), size)
    try:
        region.advise(_MADV_HUGEPAGE)
        region.advise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise _UnavailableError("the kernel has no MADV_POPULATE_WRITE (Linux 5.14)") from None
        raise no_memory(size, error) from error
    if _huge_bytes(region) == 0:
        raise _UnavailableError("advised, but the kernel gave no huge page (memory is fragmented)")
    return region


def _mapped(fd: int, size: int) -> Region:
    try:
        return Region(fd, size)
    except OSError as error:
        raise no_memory(size, error) from error


def _read_int(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _shmem_policy() -> str:
    try:
        text = _SHMEM_POLICY.read_text()
    except OSError:
        return "absent"
    return text[text.find("[") + 1 : text.find("]")]


def _huge_bytes(region: Region) -> int:
    """Bytes of the region that are mapped by huge pages, from /proc/self/smaps."""
    start = f"{region.address:x}-"
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith(start):
            found = True
        elif found and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) << 10
    return 0


def _available_bytes() -> int | None:
    """Memory that can be had without swapping, by the kernel's own estimate and the cgroup's limit."""
    limits = [_meminfo("MemAvailable"), _cgroup_room()]
    return min((value for value in limits if value is not None), default=None)


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":")), None)


def _cgroup_room() -> int | None:
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        cache = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return int(limit) - used + int(cache.get("inactive_file", 0))
