"""Whether the engine adds a gradient to another in place: never under a dispatch mode, so its rule is asked."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

Holders = tuple[
    int, int
]  # (references to a tensor, tensors that share its memory), as counted from a dispatch mode


def adds_in_place(before: torch.Tensor, unshared: Holders) -> bool:
    """Whether the engine, about to add to `before`, would write there without us.

    input_buffer.cpp, can_accumulate_inplace: dense, held by nothing but the buffer, memory not shared. Holders are
    counted from here, where some more hold it; `unshared` is what is counted for a tensor that nobody else holds.
    """
    if before.layout is not torch.strided:
        return False
    alone = all(now <= then for now, then in zip(_holders(before), unshared, strict=True))
    return alone and _is_dense(before)


def after_node(node: Node, act: Callable[[], None]) -> None:
    """Call `act` when the node has run and its outputs have not been added to what their consumers have."""
    node.register_hook(lambda _inputs, _outputs: act())


def _holders(tensor: torch.Tensor) -> Holders:
    references = tensor._use_count() if hasattr(tensor, "_use_count") else 0
    return references, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


class _Watch(TorchDispatchMode):
    """Counts the holders of what is added to between two nodes, as a recorder would."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.between = False
        self.found: Holders = (0, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.between and func is torch.ops.aten.add.Tensor:
            self.found = _holders(args[0])
        return func(*args, **(kwargs or {}))


@cache
def holders_of_unshared(fake: bool) -> Holders:
    """Found from a sum that is known to be in place.

    x * 2 + x * 3: the two gradients of x are new tensors that nothing else holds.
    """
    watch = _Watch()
    with torch.enable_grad(), FakeTensorMode() if fake else nullcontext(), watch:
        x = torch.empty(2, requires_grad=True) * 1
        twice, thrice = x * 2, x * 3
        assert twice.grad_fn is not None
        after_node(twice.grad_fn, lambda: setattr(watch, "between", True))
        total = (twice + thrice).sum()
        total.backward()
    return watch.found
