"""Give gradients up as a policy says, during a backward pass."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from ._policy import Policy

Complete = Callable[[str, nn.Parameter], None]


def gradient_bytes(gradient: torch.Tensor) -> int:
    """Bytes of a gradient; of a sparse one, those of its indices and values."""
    if gradient.layout is torch.sparse_coo:
        return gradient._indices().nbytes + gradient._values().nbytes
    return gradient.nbytes


class _Pending:
    """The gradients of a bucket that is not full."""

    def __init__(self, policy: Policy) -> None:
        self._limit = 0 if policy.mode == "fused" else policy.bucket_bytes
        self._parameters: list[nn.Parameter] = []
        self._nbytes = 0

    def add(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._parameters.append(parameter)
        self._nbytes += gradient_bytes(parameter.grad)
        if self._nbytes >= self._limit:
            for one in self._parameters:
                one.grad = None
            self._parameters, self._nbytes = [], 0


@contextmanager
def following(parameters: Mapping[str, nn.Parameter], policy: Policy, complete: Complete) -> Iterator[None]:
    """Backward passes in this context treat gradients as the policy says; `.grad` must be None before.

    Args:
        parameters: by name; those that require no gradient are left alone.
        policy: with accumulation, gradients of zeros stand for those of earlier micro-batches.
        complete: called with the name of each parameter when its gradient is complete, before it is given up.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    pending = _Pending(policy)

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        def completed(parameter: torch.Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            complete(name, parameter)
            if not policy.keeps:
                pending.add(parameter)

        return completed

    if policy.accumulation > 1:
        for parameter in trained.values():
            parameter.grad = torch.zeros_like(parameter)
    handles = [one.register_post_accumulate_grad_hook(hook(name)) for name, one in trained.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
