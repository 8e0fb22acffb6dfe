"""Which pages a pool gets: reserved huge pages, transparent huge pages, or normal ones."""

import errno
import os
import time
from pathlib import Path

from ._errors import PoolError
from ._limits import available_bytes
from ._populate import populate
from ._region import HUGE, PAGE, Region, create_memfd, no_memory, round_up

CHOICES = ("auto", "hugetlb", "thp", "off")

_MADV_HUGEPAGE = 14
_THP_DIR = Path("/sys/kernel/mm/transparent_hugepage")
_MAP_HUGE_2MB = 0x40000 | 21 << 26  # MAP_HUGETLB, and the size as a power of two: <linux/mman.h>
_HUGE_DIR = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_HUGE_FIX = "reserve pages with: echo N > /proc/sys/vm/nr_hugepages (as root)"
_REFUSED = (errno.ENOMEM, errno.ENOSPC, errno.EINVAL, errno.EPERM)


class _UnavailableError(Exception):
    """A step of the ladder is not to be had; the text says why."""


class Backing:
    """A region, how it was obtained, and the way to back more of it.

    Attributes:
        pages: "hugetlb", "thp" or "normal".
        reason: why these.
        size: bytes of the region.
        populate_s: seconds spent on allocating pages so far.
    """

    def __init__(self, region: Region, pages: str) -> None:
        self.pages, self.reason, self.size = pages, "", region.size
        self.populate_s = 0.0
        self._region: Region | None = region

    @property
    def region(self) -> Region:
        """Address space for the whole pool; PoolError after `let_go`."""
        if self._region is None:
            raise PoolError("the pool is closed")
        return self._region

    @property
    def open(self) -> bool:
        """Whether the region is still held."""
        return self._region is not None

    def let_go(self) -> None:
        """Hold the region no longer."""
        self._region = None

    @property
    def unit(self) -> int:
        """Bytes of one page; ranges to back are multiples of it."""
        return PAGE if self.pages == "normal" else HUGE

    def commit(self, start: int, nbytes: int) -> None:
        """Back a range with pages; PoolError, and nothing backed, if they cannot be had."""
        began = time.monotonic()
        if self.pages != "hugetlb":
            _require_available(nbytes)
        try:
            populate(self.region, start, nbytes)
        except OSError as error:
            raise no_memory(nbytes, error) from error
        finally:
            self.populate_s += time.monotonic() - began


def build(size: int, hugepages: str, first: int, name: str | None) -> Backing:
    """Map `size` bytes and back the `first` of them with the best pages that `hugepages` allows.

    Both are rounded up to pages; `name` is the memfd's, None asks for memory of this process alone. Raises
    PoolError if an explicit choice cannot be had or memory does not suffice.
    """
    if hugepages not in CHOICES:
        raise PoolError(f"hugepages={hugepages!r}: choose one of {', '.join(CHOICES)}")
    if hugepages == "off":
        return _because("hugepages='off'", _normal(size, first, name))
    if hugepages == "auto":
        return _best(size, first, name)
    step = _hugetlb if hugepages == "hugetlb" else _transparent
    try:
        return _because("asked for by name", step(size, first, name))
    except _UnavailableError as why:
        raise PoolError(f"hugepages={hugepages!r} cannot be had: {why}", needed=first) from None


def _best(size: int, first: int, name: str | None) -> Backing:
    if size < HUGE:
        return _because("the pool is smaller than one 2 MiB page", _normal(size, first, name))
    refused: list[str] = []
    for pages, step in (("hugetlb", _hugetlb), ("thp", _transparent)):
        try:
            return _because("; ".join([*refused, f"{pages} available"]), step(size, first, name))
        except _UnavailableError as why:
            refused.append(f"{pages}: {why}")
    return _because("; ".join(refused), _normal(size, first, name))


def _because(reason: str, backing: Backing) -> Backing:
    backing.reason = reason
    return backing


def _normal(size: int, first: int, name: str | None) -> Backing:
    backing = _mapped(round_up(size, PAGE), "normal", name)
    backing.commit(0, round_up(first, PAGE))
    return backing


def _hugetlb(size: int, first: int, name: str | None) -> Backing:
    size, first = round_up(size, HUGE), round_up(first, HUGE)
    free = _read_int(_HUGE_DIR / "free_hugepages") - _read_int(_HUGE_DIR / "resv_hugepages")
    if free * HUGE < size:  # also what comes later has to have a chance
        raise _UnavailableError(f"{size // HUGE} pages of 2 MiB needed, {free} free; {_HUGE_FIX}")
    try:
        backing = _mapped(size, "hugetlb", name)
        backing.commit(0, first)
    except PoolError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in _REFUSED:
            raise _UnavailableError(f"{cause.strerror} for {first} bytes; {_HUGE_FIX}") from None
        raise
    return backing


def _transparent(size: int, first: int, name: str | None) -> Backing:
    setting, fix = ("enabled", "madvise") if name is None else ("shmem_enabled", "advise")
    policy = _thp_policy(setting)
    if policy in ("never", "deny", "absent"):
        raise _UnavailableError(
            f"{setting} is {policy}; allow it with: echo {fix} > {_THP_DIR / setting} (as root)"
        )
    backing = _mapped(round_up(size, HUGE), "thp", name)
    region = backing.region
    region.advise(_MADV_HUGEPAGE, 0, region.size)
    backing.commit(0, round_up(first, HUGE))
    if first and _huge_bytes(region) == 0:
        raise _UnavailableError("advised, but the kernel gave no huge page (memory is fragmented)")
    return backing


def _mapped(size: int, pages: str, name: str | None) -> Backing:
    huge = pages == "hugetlb"
    try:
        if name is None:
            return Backing(Region(None, size, flags=_MAP_HUGE_2MB if huge else 0), pages)
        fd = create_memfd(size, name, os.MFD_HUGETLB | os.MFD_HUGE_2MB if huge else 0)
        return Backing(Region(fd, size), pages)
    except OSError as error:
        raise no_memory(size, error) from error


def _require_available(nbytes: int) -> None:
    """The kernel hands out pages of a memfd until the out-of-memory killer comes; refuse before that."""
    available = available_bytes()
    if available is not None and nbytes > available:
        message = f"a pool needs {nbytes} bytes and {available} are available: use fewer or smaller slots"
        raise PoolError(message, needed=nbytes, available=available)


def _read_int(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _thp_policy(setting: str) -> str:
    try:
        text = (_THP_DIR / setting).read_text()
    except OSError:
        return "absent"
    return text[text.find("[") + 1 : text.find("]")]


def _huge_bytes(region: Region) -> int:
    """Bytes of the region that are mapped by huge pages, from /proc/self/smaps."""
    start, found = f"{region.address:x}-", False
    key = "AnonHugePages:" if region.fd is None else "ShmemPmdMapped:"
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith(start):
            found = True
        elif found and line.startswith(key):
            return int(line.split()[1]) << 10
    return 0
