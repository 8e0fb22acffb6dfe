"""What a pool reports about itself; `dataclasses.asdict` makes JSON of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PoolStats:
    """A snapshot of one pool.

    Attributes:
        pages: "hugetlb", "thp" or "normal": the step of the ladder that was reached.
        reason: why that step, in words.
        slots: number of slots.
        slot_bytes: usable bytes of one slot.
        live: slots leased now.
        fenced: slots released whose fence has not passed yet.
        free: slots ready to be leased.
        waiting: threads in `acquire` now.
        peak: highest number of slots that were not free at one time.
        acquires: leases handed out.
        collected: leases that came back because nothing referred to them, not by `release`.
        waits: calls of `acquire` that had to wait.
        timeouts: those of them that ended in PoolTimeout.
        wait_s: seconds spent in `acquire` waiting for any slot, fences included.
        fence_wait_s: the part of `wait_s` during which a fenced slot existed and no slot was free.
        populate_s: seconds spent on getting the memory from the kernel.
        lock_s: seconds spent on page-locking it.
        bytes: size of the memory.
        waste_bytes: bytes of it that belong to no slot (rounding to pages; red zones in safety mode).
        pinned: page-locked for a device.
    """

    pages: str
    reason: str
    slots: int
    slot_bytes: int
    live: int
    fenced: int
    free: int
    waiting: int
    peak: int
    acquires: int
    collected: int
    waits: int
    timeouts: int
    wait_s: float
    fence_wait_s: float
    populate_s: float
    lock_s: float
    bytes: int
    waste_bytes: int
    pinned: bool


@dataclass(frozen=True)
class VariableStats:
    """A snapshot of one VariablePool.

    Attributes:
        pages, reason, pinned, waiting, collected, waits, timeouts, wait_s, fence_wait_s, populate_s, lock_s: as
            in PoolStats.
        max_bytes: the bound, rounded to pages.
        bytes: bytes allocated now.
        extents: pieces they were allocated in; no allocation spans two.
        grown: times the pool grew after it was made.
        trimmed: bytes given back so far, by `trim` or to grow elsewhere.
        live, fenced: allocations out, and those released whose fence has not passed yet.
        live_bytes: bytes asked for by allocations that are live or fenced.
        waste_bytes: bytes they take beyond that (rounding to pages).
        free_bytes: bytes of the holes.
        largest_free: bytes of the largest hole, which is the largest request that fits without growing.
        holes: number of them.
        fragmentation: share of the free bytes outside the largest hole, 0 to 1.
        peak_bytes: highest number of bytes that were not free at one time.
        acquires: allocations handed out.
    """

    pages: str
    reason: str
    pinned: bool
    max_bytes: int
    bytes: int
    extents: int
    grown: int
    trimmed: int
    live: int
    fenced: int
    waiting: int
    live_bytes: int
    waste_bytes: int
    free_bytes: int
    largest_free: int
    holes: int
    fragmentation: float
    peak_bytes: int
    acquires: int
    collected: int
    waits: int
    timeouts: int
    wait_s: float
    fence_wait_s: float
    populate_s: float
    lock_s: float
