"""The real model for the time of one step that leaves it as it was."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ._errors import PlanError
from ._losses import named_parameters

T = TypeVar("T")


class RealWorld:
    """Real parameters, whose gradients, like buffers and random state, are afterwards what they were before.

    Args:
        models: on one device, with memory.
        args: what the function will get.
    """

    def __init__(self, models: Sequence[nn.Module], args: Any) -> None:
        self._models = models
        self.args = args
        self.parameters = dict(named_parameters(models))
        refuse_hooks(self.parameters)

    def run(self, work: Callable[[], T]) -> T:
        """Do something that may run forward and backward passes."""
        buffers = [buffer for model in self._models for buffer in model.buffers()]
        leaves = [x for x in tree_leaves(self.args) if isinstance(x, torch.Tensor) and x.is_leaf]
        with ExitStack() as stack:
            stack.enter_context(set_aside([*self.parameters.values(), *leaves]))
            stack.enter_context(_unchanged(buffers))
            for kind, devices in _accelerators(self.parameters.values()).items():
                stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
            return work()


def refuse_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Hooks on complete gradients would act on those of a step that is none."""
    for name, parameter in parameters.items():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise PlanError(
                f"{name} has a hook that acts on its complete gradient: remove it (close `release`) first"
            )


@contextmanager
def set_aside(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Leaves have no gradients within, and their own again after."""
    gradients = [leaf.grad for leaf in leaves]
    clear(leaves)
    try:
        yield
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient


def clear(leaves: Iterable[torch.Tensor]) -> None:
    """Drop all gradients."""
    for leaf in leaves:
        leaf.grad = None


@contextmanager
def _unchanged(buffers: Iterable[torch.Tensor]) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _accelerators(parameters: Iterable[torch.Tensor]) -> dict[str, list[torch.device]]:
    """Devices with generators of their own by their type; "cuda" without any is the host's generator alone."""
    found: dict[str, list[torch.device]] = {}
    for device in {parameter.device for parameter in parameters} - {
        torch.device("cpu"),
        torch.device("meta"),
    }:
        found.setdefault(device.type, []).append(device)
    return found or {"cuda": []}
