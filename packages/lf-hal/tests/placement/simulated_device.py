"""A device of any name in plain Python, on torch's experimental backend for PrivateUse1: host memory, relabelled.

DLPack has a code for extension devices, which torch reads as PrivateUse1: a capsule whose device field is rewritten
gives a tensor of the device over the same bytes, and back. An operator that gets tensors of the device and of the host
together raises, as on a real device; scalars may join. One name can be taken in a process. It holds our side of the
contract; nothing of a vendor's stack is in here. lf-meta's contract suite has a fuller one.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["LOG", "register"]

LOG: list[tuple[str, int]] = []
"""("to device" or "from device", bytes) of every copy between the host and the device."""
HOST_CODE, DEVICE_CODE = 1, 12  # kDLCPU and kDLExtDev of dlpack.h
VIEWS = ("as_strided", "view", "_reshape_alias")
WHOLE = ("native_layer_norm", "gelu_backward")  # which torch would compose of others, with other roundings
_kept: list[Any] = []


class _Head(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int), ("device_id", ctypes.c_int)]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _relabelled(tensor: torch.Tensor, code: int) -> torch.Tensor:
    capsule = torch._C._to_dlpack(tensor.detach())
    _Head.from_address(_pointer(capsule, b"dltensor")).device_type = code
    return torch._C._from_dlpack(capsule)  # type: ignore[no-any-return]


def _ours(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == _kept[0]


def _host(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return _relabelled(value, HOST_CODE) if _ours(value) else value


def _everything(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator, by the host's kernel on the same memory."""
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if any(not _ours(t) and t.dim() for t in given):
        raise RuntimeError(f"{op} of tensors on two devices")
    known: dict[int, torch.Tensor] = {}

    def there(value: Any) -> Any:
        found = _host(value)
        if _ours(value):
            known[id(found)] = value
        return found

    out = op(*tree_map(there, args), **tree_map(there, kwargs))

    def back(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return known[id(value)] if id(value) in known else _relabelled(value, DEVICE_CODE)

    return tree_map(back, out)


def _view(op: Any, *args: Any) -> Any:
    return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if _ours(source) != _ours(target):
        LOG.append(("from device" if _ours(source) else "to device", source.nbytes))
    _host(target).copy_(_host(source))
    return target


def _empty(op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    plain = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    return _relabelled(op(*args, **plain, device="cpu"), DEVICE_CODE)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def register(name: str) -> None:
    """Make ``torch.device(name)`` a device of this process."""
    backend_registration._setup_privateuseone_for_python_backend(name)
    rest, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _kept.extend((name, rest, aten))
    rest.fallback(_everything, "PrivateUse1")
    aten.impl("_copy_from", _copy, "PrivateUse1")
    for rule, names in (
        (_view, VIEWS),
        (_everything, WHOLE),
        (_empty, ("empty.memory_format", "empty_strided")),
    ):
        for op in names:
            aten.impl(op, functools.partial(rule, _overload(op)), "PrivateUse1")
