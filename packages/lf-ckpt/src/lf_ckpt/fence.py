"""Saving behind the next forward and backward: what must be copied at once, and an optimizer that waits for the rest.

Between `save` and `optimizer.step()` a training loop changes gradients, which are not saved, and whatever the forward
pass keeps in place (running statistics, counters, generators), but not what only the optimizer writes. So a save with
fences copies everything that no fenced optimizer owns before it returns, and each optimizer's parameters and state
before that optimizer's next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from .errors import CkptError
from .plan import Plan, Stream
from .progress import Progress

_gates: weakref.WeakKeyDictionary[torch.optim.Optimizer, Gate] = weakref.WeakKeyDictionary()


class Gate:
    """The pre-step hook of one optimizer; passing it costs one comparison when no save is in flight."""

    def __init__(self) -> None:
        self._pending: list[tuple[Progress, int]] = []

    def arm(self, progress: Progress, streams: int) -> None:
        """The next step waits until the first `streams` streams of a save are copied."""
        # An optimizer that does not step for long must not collect what has ended meanwhile.
        self._pending[:] = [*(entry for entry in self._pending if not entry[0].arrived), (progress, streams)]

    def __call__(self, *_: Any) -> None:
        """Called by torch before each step, with the optimizer and its arguments."""
        while self._pending:
            progress, streams = self._pending[0]
            progress.fence(streams)
            del self._pending[0]  # not before: after a Ctrl-C in there the next step has to wait as well


def gate_of(optimizer: torch.optim.Optimizer) -> Gate:
    """The gate of an optimizer, registered at the first call; CkptError for what takes no hook."""
    gate = _gates.get(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
    if gate is not None:
        return gate
    register = getattr(optimizer, "register_step_pre_hook", None)
    if register is None:
        raise CkptError(
            f"fence={type(optimizer).__name__}: it has no register_step_pre_hook; save with overlap=True alone and "
            "call handle.fence() before the tensors change"
        )
    gate = Gate()
    register(gate)
    _gates[optimizer] = gate
    return gate


def in_order_of_change(plan: Plan, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Plan, list[int]]:
    """The plan in the order in which its tensors may change, and where it may be cut.

    Returns (plan, ends): the first ends[0] streams belong to no optimizer; up to ends[1] to the first one or to none,
    and so on. Bytes items are private copies and come last.
    """
    groups: list[list[Stream]] = [[] for _ in range(len(optimizers) + 1)]
    for stream, group in zip(plan.streams, _groups(plan, optimizers), strict=True):
        if not stream.is_item:
            groups[group].append(stream)
    items = [stream for stream in plan.streams if stream.is_item]
    ordered = replace(plan, streams=(*(stream for group in groups for stream in group), *items))
    return ordered, ends_in(ordered, optimizers)


def ends_in(plan: Plan, optimizers: Sequence[torch.optim.Optimizer]) -> list[int]:
    """Where a plan in any order may be cut: the first ends[0] streams hold all that belongs to no optimizer, the first
    ends[1] also what belongs to the first one, and so on.
    """
    ends = [0] * (len(optimizers) + 1)
    for number, (stream, group) in enumerate(zip(plan.streams, _groups(plan, optimizers), strict=True)):
        if not stream.is_item:
            ends[group] = number + 1
    return list(accumulate(ends, max))


def _groups(plan: Plan, optimizers: Sequence[torch.optim.Optimizer]) -> list[int]:
    """For each stream: 0 when it belongs to no optimizer, else the number of the first that has it, from 1."""
    owners = {
        key: number for number in reversed(range(len(optimizers))) for key in _owned(optimizers[number])
    }
    return [
        owners.get(_key(stream.source), -1) + 1 if isinstance(stream.source, torch.Tensor) else 0
        for stream in plan.streams
    ]


def _owned(optimizer: torch.optim.Optimizer) -> Iterable[object]:
    """Keys of what only `step` changes. Hyper-parameters that are tensors are not among it: schedulers write them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield _key(parameter)
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    yield _key(value)


def _key(tensor: torch.Tensor) -> object:
    """Equal for two handles of the same elements; a DTensor is its local part."""
    local = getattr(tensor, "_local_tensor", tensor)
    if local.numel() == 0:
        return object()  # nothing to protect
    return (local.device, local.data_ptr(), local.dtype, local.numel())
