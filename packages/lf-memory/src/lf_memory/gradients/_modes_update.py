"""Updates of a few parameters, with gradients freed after, and left out on the device if they are not finite."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._modes_partial import PartialOptimizer
from ._modes_slot import Slot
from ._modes_tensors import local
from ._release_errors import ReleaseError

_HOST_STATE = (
    "the gate works on the device, but {name} keeps state[{key!r}] {where}: say capturable=True or fused=True"
)


class Updater:
    """Takes an optimizer's step for some parameters and frees their gradients.

    Args:
        optimizer: see PartialOptimizer.
        gate: leave an update out if `finite` is false, without asking the device. The first update of a parameter
            asks it, because there is no state to go back to.

    Args:
        together: bytes of gradients that `soon` gathers before it updates; 1 updates at once.

    Attributes:
        skipped: int64 scalar on the device of the first gated update, updates left out; None before.
    """

    def __init__(self, optimizer: Optimizer, gate: bool, together: int = 1) -> None:
        self.optimizer = optimizer
        self.gate = gate
        self.together = together
        self.skipped: Tensor | None = None
        self._partial = PartialOptimizer(optimizer)
        self._waiting: dict[int, list[Slot]] = {}

    def soon(self, slot: Slot, finite: Tensor | None = None) -> None:
        """Update a parameter together with others of its group, as soon as their gradients are worth a launch.

        Args:
            slot: its gradient is complete.
            finite: the same for all parameters until the next `flush`.
        """
        waiting = self._waiting.setdefault(slot.group, [])
        waiting.append(slot)
        if sum(_held_bytes(s.grad) for s in waiting) >= self.together:
            del self._waiting[slot.group]
            self.update(waiting, finite)

    @torch.no_grad()
    def flush(self, finite: Tensor | None = None) -> None:
        """Update what `soon` still holds."""
        while self._waiting:
            self.update(self._waiting.popitem()[1], finite)

    def forget(self) -> None:
        """Leave out what `soon` still holds."""
        self._waiting.clear()

    def update(self, slots: Sequence[Slot], finite: Tensor | None = None) -> None:
        """Step the parameters of `slots`, all of one param group, from `.grad`; free the gradients.

        Args:
            slots: at least one.
            finite: bool scalar; None updates whatever the gradients are.
        """
        group, params = slots[0].group, [slot.param for slot in slots]
        if finite is None:
            self._partial.step(group, params)
        else:
            self._gated(slots, params, finite)
        for slot in slots:
            slot.updated = True
            slot.free()

    def count(self, finite: Tensor) -> None:
        """Add one to `skipped` unless `finite`."""
        if self.skipped is None:
            self.skipped = torch.zeros((), dtype=torch.int64, device=finite.device)
        self.skipped += (~finite).to(self.skipped.device)

    def _gated(self, slots: Sequence[Slot], params: Sequence[Tensor], finite: Tensor) -> None:
        if not all(
            slot.started or state for slot, state in zip(slots, self._partial.states(params), strict=True)
        ):
            if bool(finite):
                self._partial.step(slots[0].group, params)
                for slot in slots:
                    slot.started = True
            return
        before = [local(p).clone() for p in params]
        states = [dict(self._saved(state)) for state in self._partial.states(params)]
        self._partial.step(slots[0].group, params)
        for param, old in zip(params, before, strict=True):
            _choose(finite, param, old)
        for state, saved in zip(self._partial.states(params), states, strict=True):
            self._choose_state(finite, state, saved)

    def _saved(self, state: MutableMapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in state.items():
            yield key, local(value).clone() if isinstance(value, Tensor) else value

    def _choose_state(
        self, finite: Tensor, state: MutableMapping[str, Any], saved: MutableMapping[str, Any]
    ) -> None:
        name = type(self.optimizer).__name__
        for key, value in state.items():
            if not isinstance(value, Tensor):
                if value != saved.get(key):
                    raise ReleaseError(
                        _HOST_STATE.format(name=name, key=key, where="as a number on the host")
                    )
            elif value.device.type != finite.device.type:
                raise ReleaseError(_HOST_STATE.format(name=name, key=key, where=f"on {value.device}"))
            elif key in saved:
                _choose(finite, value, saved[key])


def _held_bytes(grad: Tensor) -> int:
    """What waiting keeps alive: of a sharded gradient, the buffer of its whole group."""
    return local(grad).untyped_storage().nbytes()


def _choose(finite: Tensor, new: Tensor, old: Tensor) -> None:
    part = local(new)
    part.copy_(torch.where(finite.to(part.device), part, old))
