"""Accumulation of micro-batches in the optimizer's state, without a gradient buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._modes import Fused, Options
from ._modes_ledger import Ledger
from ._modes_slot import Slot
from ._modes_update import Updater
from ._release_errors import ReleaseError

State = MutableMapping[str, Any]
Group = Mapping[str, Any]


class Rule(ABC):
    """One optimizer's mathematics in three parts: before, for each, and after the micro-batches of a step."""

    @abstractmethod
    def refuse(self, group: Group) -> None:
        """Raise ValueError for hyper-parameters whose mathematics need the summed gradient."""

    @abstractmethod
    def begin(self, param: Tensor, state: State, group: Group) -> None:
        """Decay the state once a step, making it if there is none."""

    @abstractmethod
    def add(self, grad: Tensor, state: State, group: Group) -> None:
        """Add one micro-batch's gradient."""

    @abstractmethod
    def finish(self, param: Tensor, state: State, group: Group) -> None:
        """Update the parameter."""


class AdamRule(Rule):
    """Adam and AdamW: the first moment is that of the summed gradient, the second adds squares of its parts.

    v = b2 v + (1 - b2) sum(g_i^2) instead of (sum g_i)^2, as in AdamA (Zhang et al., arXiv 2305.19982): other
    mathematics than the ordinary loop for more than one micro-batch.
    """

    def refuse(self, group: Group) -> None:
        for key in ("amsgrad", "maximize"):
            if group[key]:
                raise ValueError(f"accumulate='state' does not do {key}=True: leave it out or say 'buffer'")
        if group["weight_decay"] and not group.get("decoupled_weight_decay"):
            raise ValueError(
                "accumulate='state' does not do Adam's coupled weight_decay: use AdamW or 'buffer'"
            )

    def begin(self, param: Tensor, state: State, group: Group) -> None:
        if not state:
            on_device = group["capturable"] or group["fused"]
            state["step"] = torch.zeros((), device=param.device if on_device else "cpu", dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        beta1, beta2 = group["betas"]
        state["exp_avg"].mul_(beta1)
        state["exp_avg_sq"].mul_(beta2)

    def add(self, grad: Tensor, state: State, group: Group) -> None:
        beta1, beta2 = group["betas"]
        state["exp_avg"].add_(grad, alpha=1 - beta1)
        state["exp_avg_sq"].addcmul_(grad, grad, value=1 - beta2)

    def finish(self, param: Tensor, state: State, group: Group) -> None:
        state["step"] += 1
        (beta1, beta2), lr = group["betas"], group["lr"]
        # A step counted on the host is read there; one on the device stays there, and the factors with it.
        step = state["step"] if state["step"].device.type != "cpu" else state["step"].item()
        param.mul_(1 - lr * group["weight_decay"])
        root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        param.sub_(state["exp_avg"] / root * (lr / (1 - beta1**step)))


class MomentumRule(Rule):
    """SGD with momentum, which is linear in the gradient: the ordinary loop's mathematics, summed in another order."""

    def refuse(self, group: Group) -> None:
        for key in ("nesterov", "maximize"):
            if group[key]:
                raise ValueError(f"accumulate='state' does not do {key}=True: leave it out or say 'buffer'")
        if not group["momentum"]:
            raise ValueError(
                "accumulate='state' needs momentum to accumulate into: set momentum= or say 'buffer'"
            )

    def begin(self, param: Tensor, state: State, group: Group) -> None:
        buffer = state.get("momentum_buffer")
        if buffer is None:  # torch's first step does not dampen
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state[_FIRST] = True
        else:
            buffer.mul_(group["momentum"])

    def add(self, grad: Tensor, state: State, group: Group) -> None:
        state["momentum_buffer"].add_(grad, alpha=self._weight(state, group))

    def finish(self, param: Tensor, state: State, group: Group) -> None:
        buffer = state["momentum_buffer"]
        buffer.add_(param, alpha=self._weight(state, group) * group["weight_decay"])
        param.sub_(buffer * group["lr"])
        state.pop(_FIRST, None)

    def _weight(self, state: State, group: Group) -> float:
        return 1.0 if _FIRST in state else 1.0 - float(group["dampening"])


_FIRST = "lf_memory_first"  # in a state only between its first micro-batch and its first update
_RULES: dict[type[Optimizer], type[Rule]] = {
    torch.optim.Adam: AdamRule,
    torch.optim.AdamW: AdamRule,
    torch.optim.SGD: MomentumRule,
}


class StateAccumulation(Fused):
    """Adds each micro-batch's gradient to the optimizer's state and frees it at once."""

    def __init__(self, options: Options, slots: Sequence[Slot], updater: Updater, ledger: Ledger) -> None:
        super().__init__(options, slots, updater, ledger)
        self._rule = rule_for(updater.optimizer)

    def gradient(self, slot: Slot) -> None:
        state, group = self._of(slot)
        if slot.updated:
            raise ReleaseError(
                f"{slot.name} got gradient {slot.seen} of {self.options.accumulation} in one step"
            )
        if slot.seen == 1:
            self._rule.begin(slot.param, state, group)
        self._rule.add(slot.grad, state, group)
        slot.free()
        if slot.seen == self.options.accumulation:
            self.apply(slot)

    def stays(self, slot: Slot) -> bool:
        return False

    def apply(self, slot: Slot) -> None:
        self._rule.finish(slot.param, *self._of(slot))
        slot.updated = True

    def left(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.seen and not slot.updated]

    def reset(self) -> None:
        for slot in self.slots:
            self.updater.optimizer.state.get(slot.param, {}).pop(_FIRST, None)

    def planned_bytes(self) -> int:
        return max((slot.nbytes for slot in self.slots), default=0)

    def _of(self, slot: Slot) -> tuple[State, Group]:
        optimizer = self.updater.optimizer
        return optimizer.state[slot.param], optimizer.param_groups[slot.group]


def rule_for(optimizer: Optimizer) -> Rule:
    """The rule of an optimizer; ValueError for classes and hyper-parameters that have none."""
    kind = _RULES.get(type(optimizer))
    if kind is None:
        known = ", ".join(sorted(k.__name__ for k in _RULES))
        raise ValueError(
            f"accumulate='state' knows {known}, not {type(optimizer).__name__}: say accumulate='buffer'"
        )
    rule = kind()
    for group in optimizer.param_groups:
        rule.refuse(group)
    return rule
