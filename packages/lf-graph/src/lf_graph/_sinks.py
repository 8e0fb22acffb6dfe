"""Where the micro-batch graphs of a training step leave gradients for its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lf_graph._errors import GraphError


class Direct:
    """Keeps the tensors that the backward made: nothing is copied. For one micro-batch per update."""

    def __init__(self, index: dict[int, int], count: int) -> None:
        self._index = index
        self.gradients: list[Tensor | None] = [None] * count

    def take(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Keep, or add to what an earlier piece gave for a tied weight."""
        # an addition of two parameters hands one tensor to both; optimizers scale gradients in place
        taken = {g.data_ptr() for g in self.gradients if g is not None}
        for parameter, grad in zip(parameters, gradients, strict=True):
            i = self._index[id(parameter)]
            known = self.gradients[i]
            if known is not None:
                known.add_(grad)
                continue
            self.gradients[i] = grad.clone() if grad.data_ptr() in taken else grad
            taken.add(grad.data_ptr())


class Into:
    """Writes gradients over, or adds them into, buffers at fixed addresses, inside the graph."""

    def __init__(
        self, index: dict[int, int], buffers: Sequence[Tensor], mode: Literal["write", "add"]
    ) -> None:
        self._index, self._buffers, self._mode = index, buffers, mode
        self._written: set[int] = set()

    @property
    def adds(self) -> bool:
        """Whether the buffers must be zero before the first micro-batch."""
        return self._mode == "add"

    @property
    def gradients(self) -> list[Tensor | None]:
        """The buffers."""
        return list(self._buffers)

    def take(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Copy what comes first for a parameter in "write" mode; add everything else."""
        first: list[tuple[Tensor, Tensor]] = []
        again: list[tuple[Tensor, Tensor]] = []
        for parameter, grad in zip(parameters, gradients, strict=True):
            i = self._index[id(parameter)]
            fresh = self._mode == "write" and i not in self._written
            (first if fresh else again).append((self._buffers[i], grad))
            self._written.add(i)
        with torch.no_grad():
            if first:
                torch._foreach_copy_([b for b, _ in first], [g for _, g in first])
            if again:
                torch._foreach_add_([b for b, _ in again], [g for _, g in again])


def require_all_used(used: Sequence[Tensor], index: dict[int, int], names: Sequence[str]) -> None:
    """Every parameter of the optimizer must get a gradient: a graph would leave the others stale for ever.

    Raises:
        GraphError: naming the parameters that the loss does not depend on, or that no optimizer updates.
    """
    found = {index[id(p)] for p in used if id(p) in index}
    unused = [name for i, name in enumerate(names) if i not in found]
    strangers = sum(id(p) not in index for p in used)
    if not found and not strangers:
        raise GraphError(
            "the loss has no gradient: it was detached, is made of whole numbers, or does not call the model (loss= "
            "gets the batch, not the model's output)"
        )
    if unused:
        raise GraphError(
            f"the loss does not depend on {', '.join(unused[:8])}{' ...' if len(unused) > 8 else ''}: use them, or "
            "freeze them with requires_grad_(False) and leave them out of the optimizer"
        )
    if strangers:
        raise GraphError(
            f"{strangers} tensors that want a gradient are not in the optimizer: add them to it, or freeze them"
        )
