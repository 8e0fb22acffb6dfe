"""Host buffer pools in one memfd: fixed slots or exact sizes, huge pages, page-locking, leases and fences."""

from ._errors import PoolError, PoolTimeout
from ._pin import CudaRegistrar, Registrar, TorchRegistrar
from ._pool import AttachedPool, HostPool
from ._slots import Fence, Lease
from ._stats import PoolStats, VariableStats
from ._trace import TraceEvent
from ._variable import VariablePool

__all__ = [
    "AttachedPool",
    "CudaRegistrar",
    "Fence",
    "HostPool",
    "Lease",
    "PoolError",
    "PoolStats",
    "PoolTimeout",
    "Registrar",
    "TorchRegistrar",
    "TraceEvent",
    "VariablePool",
    "VariableStats",
]
__version__ = "0.1.0"
