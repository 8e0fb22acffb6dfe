"""A simulated device: tensors that carry its name, and refuse to meet tensors of another memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from lf_hal.lir import TensorType
from lf_hal.placement import Device, TorchRunner

__all__ = ["MixedDevicesError", "TaggedRunner"]


class MixedDevicesError(RuntimeError):
    """Tensors of two memories met in one operator."""


class Tagged(torch.Tensor):
    """A CPU tensor said to lie on ``tag``. Index tensors and scalars may join it, as on a real device."""

    inner: torch.Tensor
    tag: str

    @staticmethod
    def __new__(cls, inner: torch.Tensor, tag: str) -> Tagged:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner, made.tag = inner, tag
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)]
        places = {t.tag if isinstance(t, Tagged) else "host" for t in tensors if _counts(t)}
        if len(places) > 1:
            raise MixedDevicesError(f"{func} of tensors on {', '.join(sorted(places))}")
        tag = next(t.tag for t in tensors if isinstance(t, Tagged))

        def inside(t: Any) -> Any:
            return t.inner if isinstance(t, Tagged) else t

        out = func(*tree_map(inside, args), **tree_map(inside, kwargs or {}))
        return tree_map(lambda t: Tagged(t, tag) if isinstance(t, torch.Tensor) else t, out)


def _counts(t: torch.Tensor) -> bool:
    return isinstance(t, Tagged) or (t.dim() > 0 and t.is_floating_point())


class TaggedRunner(TorchRunner):
    """A torch runner whose values are tagged; it notes every copy in ``log``."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.tag, self.log = device.name, []

    def receive(self, array: np.ndarray[Any, Any], kind: TensorType) -> Any:
        self.log.append(("receive", array.nbytes))
        return Tagged(super().receive(array, kind), self.tag)

    def adopt(self, value: Any) -> Any:
        self.log.append(("adopt", value.inner.nbytes))
        return Tagged(value.inner.clone(), self.tag)

    def give(self, value: Any) -> np.ndarray[Any, Any]:
        if not isinstance(value, Tagged) or value.tag != self.tag:
            raise MixedDevicesError(f"{self.tag} was asked for a tensor that it does not have")
        self.log.append(("give", value.inner.nbytes))
        return super().give(value.inner)
