"""A backward pass that left parameters out, named: DDP speaks of indices, and hooks of its buckets never hear of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lf_comm._errors import CommError


class UnusedParametersError(CommError, RuntimeError):
    """Trained parameters got no gradient in a backward pass whose gradients were to be summed. names: of them."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        super().__init__(
            f"no gradient for {shown} in the last backward pass, so buckets of this rank were never summed, and other "
            "ranks wait: build DistributedDataParallel with find_unused_parameters=True, or use all parameters on "
            "every rank in every step"
        )

    def __reduce__(self) -> tuple[type[UnusedParametersError], tuple[list[str]]]:
        return UnusedParametersError, (self.names,)


class _Watch:
    """Which parameters have had a gradient since the last forward pass."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._names = {id(p): name for name, p in ddp.module.named_parameters() if p.requires_grad}
        self._names = {i: n for i, n in self._names.items() if n not in ddp.parameters_to_ignore}
        self._got: set[int] = set()
        self._summed = False  # whether the backward of the last forward is summed
        for parameter in ddp.module.parameters():
            if id(parameter) in self._names:
                parameter.register_post_accumulate_grad_hook(self._seen)
        ddp.register_forward_pre_hook(self._before_forward)

    def _seen(self, parameter: Tensor) -> None:
        self._got.add(id(parameter))

    def _before_forward(self, ddp: Any, _: object) -> None:
        got, summed = self._got, self._summed
        self._got, self._summed = set(), ddp.require_backward_grad_sync and torch.is_grad_enabled()
        if summed and got and len(got) < len(self._names):
            raise UnusedParametersError(sorted(n for i, n in self._names.items() if i not in got))


def require_gradients(ddp: DistributedDataParallel) -> None:
    """Have `ddp` raise UnusedParametersError, at its next forward pass, where DDP itself could only fail or hang."""
    if not ddp.find_unused_parameters and not ddp.static_graph:
        _Watch(ddp)
