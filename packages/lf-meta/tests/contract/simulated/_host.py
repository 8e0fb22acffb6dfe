"""One piece of memory under two device labels: host memory as a tensor of the simulated device, and back.

DLPack's code 12 (kDLExtDev) is what torch maps to PrivateUse1, whatever it is renamed to. Only the label in the capsule
is changed, so the tensor on the device has a real storage, strides, views and version counter, and no byte is copied.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

_HOST, _EXTENSION = 1, 12
SMALLEST = 16  # an empty tensor has memory too: DLPack gives nothing at all a stride of 0


class _Head(ctypes.Structure):
    """The first fields of DLManagedTensor, as dlpack.h has them."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int), ("device_id", ctypes.c_int)]


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _labelled(tensor: Tensor, kind: int) -> Tensor:
    capsule = torch._C._to_dlpack(tensor)
    _Head.from_address(_pointer_of(capsule, b"dltensor")).device_type = kind
    found: Tensor = torch._C._from_dlpack(capsule)
    return found


def allocate(nbytes: int, freed: Callable[[int], None]) -> Tensor:
    """(nbytes,) uint8 on the device, aligned as torch aligns host memory; `freed(nbytes)` when its storage goes."""
    return adopt(torch.empty(nbytes, dtype=torch.uint8), freed)


def adopt(flat: Tensor, freed: Callable[[int], None]) -> Tensor:
    """The same for (n,) uint8 host memory that nobody else will use."""
    flat = flat if flat.numel() else torch.empty(SMALLEST, dtype=torch.uint8)
    owner = flat.numpy()  # unlike a storage, an array can be watched
    weakref.finalize(owner, freed, flat.numel()).atexit = False
    return _labelled(torch.from_numpy(owner), _EXTENSION)


def on_host(tensor: Tensor) -> Tensor:
    """A host tensor over the memory of a device tensor, with its shape and strides. Below autograd only."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if tensor.dtype in _UNKNOWN:  # dtypes that DLPack or torch's reader of it does not have
        return _labelled(tensor.view(torch.uint8), _HOST).view(tensor.dtype)
    return _labelled(tensor, _HOST)


_UNKNOWN = frozenset(
    dtype
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if (dtype := getattr(torch, name, None)) is not None
)
