"""Autocast for the simulated device: matrix operators in the lower precision, everything else as it comes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

LOWER = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "scaled_dot_product_attention", "conv2d")
_KEY = torch._C.DispatchKey.AutocastPrivateUse1
_library, _all = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")


def register_autocast() -> None:
    """Once per process; operators that are not in LOWER fall through."""
    _all.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in LOWER:
        packet = getattr(torch.ops.aten, name)
        _library.impl(name, _lowered(packet.default), "AutocastPrivateUse1")


def _lowered(op: Any) -> Any:
    def lowered(*args: Any, **kwargs: Any) -> Any:
        kind = torch._C._get_privateuse1_backend_name()
        dtype = torch.get_autocast_dtype(kind)

        def cast(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point() and value.device.type == kind:
                return value.to(dtype)
            return value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            return op(*tree_map(cast, args), **tree_map(cast, kwargs))

    return lowered
