"""Host buffer pools: fixed slots in one memfd, on huge pages where there are any, with leases and fences."""

from ._errors import PoolError, PoolTimeout
from ._pool import AttachedPool, HostPool
from ._slots import Fence, Lease
from ._stats import PoolStats
from ._trace import TraceEvent

__all__ = [
    "AttachedPool",
    "Fence",
    "HostPool",
    "Lease",
    "PoolError",
    "PoolStats",
    "PoolTimeout",
    "TraceEvent",
]
__version__ = "0.1.0"
