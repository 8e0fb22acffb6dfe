"""Two graphs out of one function: what needs no trainable parameter, and the rest.

The first part (a frozen vision tower, frozen language layers) does not read what the optimizer writes, so its graph
may run beside the optimizer of the step before. The cut is made while the function is captured, at the first call
of the module in which a trainable parameter is used.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lf_graph._backend import Backend, Graph, T


class _FirstUse(TorchDispatchMode):
    """Notices the first operator that reads one of some tensors, and the innermost module entered before it."""

    def __init__(self, tensors: Sequence[Tensor], units: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {t.untyped_storage()._cdata for t in tensors}
        self.units = {id(m) for m in units}
        self.entered: list[nn.Module] = []
        self.found: nn.Module | None = None
        self.operations_before = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.found is None:
            leaves = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
            if any(x.untyped_storage()._cdata in self.storages for x in leaves):
                self.found = self.entered[-1] if self.entered else None
                self.operations_before = -1 if self.found is None else self.operations_before
            elif not func.is_view:
                self.operations_before += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self, root: nn.Module) -> Iterator[None]:
        """Follow which module runs; a unit that will be compiled as a whole hides what is inside it."""
        depth: list[nn.Module] = []
        handles = []

        def enter(module: nn.Module, _: Any) -> None:
            if not any(id(m) in self.units for m in depth) and self.found is None:
                self.entered.append(module)
            depth.append(module)

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            depth.pop()

        for module in root.modules():
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()


def first_trainable(
    root: nn.Module, units: Sequence[nn.Module], call: Callable[[], object]
) -> nn.Module | None:
    """The module at whose call a graph can be cut, or None when there is nothing worth cutting off before it.

    Args:
        root: the model; ``call`` runs it once.
        units: submodules that will be compiled as one, inside of which there is no cutting.
    """
    trainable = [p for p in root.parameters() if p.requires_grad]
    mode = _FirstUse(trainable, units)
    with mode.watching(root):
        call()
    if mode.found is None or mode.found is root or mode.operations_before <= 0:
        return None
    return mode.found


@dataclass
class CutCapture:
    """The graphs of a function cut in two, and what it returned."""

    frozen: Graph | None
    rest: Graph
    result: Any


def capture_cut(
    backend: Backend, fn: Callable[[], T], at: nn.Module, frozen_pool: Any, pool: Any
) -> CutCapture:
    """Capture ``fn`` as two graphs; the second begins at the first call of ``at``.

    The first graph's memory comes from its own pool: it may run while the last step's gradients, which lie in the
    second pool, are still being read.
    """
    backend.synchronize()
    gc.collect()
    frozen: list[Graph] = []
    recording = backend.begin(frozen_pool)

    def cut(_: nn.Module, __: Any) -> None:
        nonlocal recording
        if not frozen:
            frozen.append(recording.end())
            recording = backend.begin(pool)

    handle = at.register_forward_pre_hook(cut, prepend=True)
    try:
        result = fn()
    except BaseException:
        recording.abort()
        raise
    finally:
        handle.remove()
    return CutCapture(frozen[0] if frozen else None, recording.end(), result)
