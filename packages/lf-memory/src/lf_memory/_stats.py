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
