"""Host buffer pools in one memfd: fixed slots or exact sizes, huge pages, page-locking, leases and fences.

The gradient half, `lf_memory.gradients`, needs torch; its main names are found here too and imported
when first used; they are not in `__all__`, so that a star import does without torch.
"""

from typing import TYPE_CHECKING

from ._attach import AttachedPool
from ._errors import Holder, PoolError, PoolTimeout
from ._lease import Fence, Lease
from ._pin import CudaRegistrar, Registrar, TorchRegistrar
from ._pool import HostPool
from ._share import recv_pool, send_pool
from ._stats import PoolStats, VariableStats
from ._trace import TraceEvent
from ._variable import VariablePool

if TYPE_CHECKING:
    from .gradients import GradientArena as GradientArena
    from .gradients import Plan as Plan
    from .gradients import offload as offload
    from .gradients import predict as predict
    from .gradients import release as release
    from .gradients import verify as verify

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

_GRADIENTS = frozenset(
    {
        "GradientArena",
        "Plan",
        "offload",
        "predict",
        "release",
        "verify",
    }
)


def __getattr__(name: str) -> object:
    """The names of the gradient half, so that `import lf_memory` does not import torch."""
    if name not in _GRADIENTS:
        raise AttributeError(f"module 'lf_memory' has no attribute {name!r}")
    try:
        from . import gradients
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"lf_memory.{name} needs torch: pip install lf-memory[torch]") from error
    return getattr(gradients, name)
