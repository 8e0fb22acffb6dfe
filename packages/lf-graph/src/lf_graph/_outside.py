"""Modules that a loss calls besides the model that is trained: teachers, discriminators, frozen encoders.

A graph holds their forward like any other: it reads their memory and their mode of the capture. They are seen when
they are called, since a loss may reach them in any way; what is called inside of the model is the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lf_graph._members import AssignedBuffers
from lf_graph._sandbox import buffers_of


class Outside:
    """The outermost modules called that are not part of ``roots``, and hold none of them (a wrapper does).

    Attributes:
        modules: in the order of their first call.
        assigned: see :class:`AssignedBuffers`; one for each module, from before its first call.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self.modules: list[nn.Module] = []
        self.assigned: list[AssignedBuffers] = []
        self._roots = set(roots)
        self._known = {m for root in self._roots for m in root.modules()}
        self._kept: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notice calls inside the block, and put back the values of the buffers that they write."""
        handle = register_module_forward_pre_hook(self._called)
        try:
            yield
        finally:
            handle.remove()
            with torch.no_grad():
                for buffer, value in self._kept:
                    buffer.copy_(value)
            self._kept.clear()

    def _called(self, module: nn.Module, args: Any) -> None:
        if module in self._known:
            return
        parts = set(module.modules())
        if parts & self._roots:  # what else it holds is noticed when it is called
            self._known.add(module)
            return
        self._known |= parts
        self.modules.append(module)
        self.assigned.append(AssignedBuffers([module]))
        self._kept += [(b, b.detach().clone()) for b in buffers_of([module])]
