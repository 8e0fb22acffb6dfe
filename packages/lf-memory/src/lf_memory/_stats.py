"""What a pool reports about itself."""

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
        peak: highest number of slots that were not free at one time.
        acquires: leases handed out.
        collected: leases that came back because nothing referred to them, not by `release`.
        wait_s: seconds spent in `acquire` waiting for any slot, fences included.
        fence_wait_s: the part of `wait_s` during which a fenced slot existed and no slot was free.
        bytes: size of the memfd.
        waste_bytes: bytes of it that belong to no slot (rounding to pages).
        pinned: page-locked for a device.
    """

    pages: str
    reason: str
    slots: int
    slot_bytes: int
    live: int
    fenced: int
    free: int
    peak: int
    acquires: int
    collected: int
    wait_s: float
    fence_wait_s: float
    bytes: int
    waste_bytes: int
    pinned: bool


@dataclass(frozen=True)
class VariableStats:
    """A snapshot of one VariablePool.

    Attributes:
        pages, reason, pinned: as in PoolStats.
        bytes: size of the memfd: `max_bytes` rounded to pages.
        live, fenced: allocations out, and those released whose fence has not passed yet.
        live_bytes: bytes asked for by allocations that are live or fenced.
        waste_bytes: bytes they take beyond that (rounding to pages).
        free_bytes: bytes of the holes.
        largest_free: bytes of the largest hole, which is the largest request that fits now.
        holes: number of them.
        peak_bytes: highest number of bytes that were not free at one time.
        acquires: allocations handed out.
        collected: those that came back because nothing referred to them.
        wait_s, fence_wait_s: as in PoolStats.
    """

    pages: str
    reason: str
    pinned: bool
    bytes: int
    live: int
    fenced: int
    live_bytes: int
    waste_bytes: int
    free_bytes: int
    largest_free: int
    holes: int
    peak_bytes: int
    acquires: int
    collected: int
    wait_s: float
    fence_wait_s: float
