"""Host buffer pools in one memfd: fixed slots or exact sizes, huge pages, page-locking, leases and fences."""

from ._attach import AttachedPool
from ._errors import Holder, PoolError, PoolTimeout
from ._lease import Fence, Lease
from ._pin import CudaRegistrar, Registrar, TorchRegistrar
from ._pool import HostPool
from ._share import recv_pool, send_pool
from ._stats import PoolStats, VariableStats
from ._trace import TraceEvent
from ._variable import VariablePool

__all__ = [
    "AttachedPool",
    "CudaRegistrar",
    "Fence",
    "Holder",
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
    "recv_pool",
    "send_pool",
]
__version__ = "0.1.0"
