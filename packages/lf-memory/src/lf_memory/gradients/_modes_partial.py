"""Steps of a torch optimizer that touch a few of its parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_INSEPARABLE = (
    "%s keeps %s, which belongs to no single parameter, so its step cannot be taken one parameter at a time"
)


class PartialOptimizer:
    """Steps some parameters of an optimizer as if it had no others.

    State, hyper-parameters and classes stay the optimizer's own: what `state_dict`, `load_state_dict` and learning
    rate schedulers see and change is what is used. Hooks of the optimizer's `step` are not called.

    Args:
        optimizer: of any class whose state belongs to single parameters.

    Raises ValueError for a class whose step looks at all parameters at once.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        refuse(optimizer)
        self._optimizer = optimizer
        kind = type(optimizer)
        # The wrapper that torch puts around every step runs hooks and opens a profiler range: for each parameter.
        step: Any = kind.step
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._twin: Optimizer = object.__new__(kind)

    def step(self, group: int, params: Sequence[Tensor]) -> None:
        """Update `params`, all of the param group `group`, from their `.grad`.

        Raises ValueError if the optimizer turns out to keep something that belongs to no single parameter.
        """
        shared = self._optimizer.param_groups[group]
        narrow = {**shared, "params": list(params)}
        before = self._attributes()
        self._twin.__dict__ = {**before, "param_groups": [narrow]}
        self._step(self._twin)
        self._require_unchanged(shared, narrow)
        self._carry_back(before)

    def states(self, params: Sequence[Tensor]) -> Iterator[Any]:
        """The optimizer's state of each parameter, empty if it was never stepped."""
        return (self._optimizer.state.get(p, {}) for p in params)

    def _attributes(self) -> dict[str, Any]:
        # A scheduler replaces `step` on the object itself, to count calls.
        kept = {k: v for k, v in self._optimizer.__dict__.items() if k != "step"}
        return {**kept, **{name: OrderedDict() for name in _HOOKS}}

    def _require_unchanged(self, shared: Mapping[str, Any], narrow: Mapping[str, Any]) -> None:
        for key, value in narrow.items():
            if key != "params" and value is not shared.get(key):
                raise ValueError(
                    _INSEPARABLE % (type(self._optimizer).__name__, f"param_groups[...][{key!r}]")
                )

    def _carry_back(self, before: Mapping[str, Any]) -> None:
        for key, value in self._twin.__dict__.items():
            if key == "param_groups" or (key in before and value is before[key]):
                continue
            if not key.startswith("_"):  # torch's own notes, such as "has warned", are private
                raise ValueError(_INSEPARABLE % (type(self._optimizer).__name__, f"the attribute {key!r}"))
            self._optimizer.__dict__[key] = value


def refuse(optimizer: Optimizer) -> None:
    """Raise ValueError for optimizers whose step cannot be split by parameters."""
    name, kind = type(optimizer).__name__, type(optimizer)
    if kind.__module__.startswith("torch.distributed"):
        raise ValueError(
            f"{name} shares one step among ranks; shard with fully_shard and use a plain torch.optim class"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS needs all gradients at once and calls the closure many times; use AdamW or SGD"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("differentiable=True keeps every gradient for a second backward; leave it out")
