"""How large the slab is. Pure."""

from __future__ import annotations

from .errors import CkptError
from .format import EXTENT_BYTES, align
from .plan import CHUNK_BYTES

MIN_SLAB = 4 * EXTENT_BYTES
_SHARE_OF_FREE = 4  # a quarter: the page cache of the file being written wants memory too


def choose_slab(state_bytes: int, asked: int | None, available: int | None) -> tuple[int, str]:
    """(bytes, reason) of the slab for a state that needs `state_bytes` with alignment. Pure.

    asked: budget of the caller, None for automatic. available: free memory in bytes, None when unknown.
    """
    if asked is not None:
        if asked < MIN_SLAB:
            raise CkptError(f"slab_bytes={asked}: at least {MIN_SLAB} bytes (4 MiB)")
        limit, why = asked // 4096 * 4096, f"slab_bytes={asked}"
    elif available is None:
        limit, why = 1 << 30, "1 GiB, free memory is unknown"
    else:
        limit, why = max(available // _SHARE_OF_FREE // 4096 * 4096, MIN_SLAB), "a quarter of free memory"
    need = max(align(state_bytes), MIN_SLAB)
    if need <= limit:
        return need, f"whole state, {need} bytes"
    return limit, f"{limit} bytes ({why}) for a state of {need}: staging waits for the disk"


def predict_stall(state_bytes: int, slab_bytes: int, rate: float | None) -> float | None:
    """Seconds of waiting for the disk while a state is staged: what does not fit, at `rate` bytes/s. Pure.

    0.0 when all fits; None when it does not and no rate is known.
    """
    excess = state_bytes - slab_bytes
    if excess <= 0:
        return 0.0
    return None if rate is None else excess / rate


def chunk_bytes_for(slab_bytes: int) -> int:
    """Bytes staged at a time: 16 MiB, or a quarter of a small slab, in whole extents."""
    return max(min(CHUNK_BYTES, slab_bytes // 4 // EXTENT_BYTES * EXTENT_BYTES), EXTENT_BYTES)
