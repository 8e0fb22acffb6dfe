"""Step hooks of an optimizer, around the replay that stands for its ``step()``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import optimizer as _torch

from lf_graph._flat import FlatParameters, OptimizerError

_PRE, _POST = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
Hook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Any]


def _own(hook: Hook) -> bool:
    return isinstance(getattr(hook, "__self__", None), FlatParameters)


def _before(optimizer: torch.optim.Optimizer) -> list[Hook]:
    return [*_torch._global_optimizer_pre_hooks.values(), *getattr(optimizer, _PRE).values()]


def _after(optimizer: torch.optim.Optimizer) -> list[Hook]:
    found = [*getattr(optimizer, _POST).values(), *_torch._global_optimizer_post_hooks.values()]
    return [hook for hook in found if not _own(hook)]


def call_before(optimizer: torch.optim.Optimizer) -> None:
    """What torch calls before a step, with no arguments to exchange."""
    for hook in _before(optimizer):
        hook(optimizer, (), {})


def call_after(optimizer: torch.optim.Optimizer) -> None:
    """What torch calls behind a step."""
    for hook in _after(optimizer):
        hook(optimizer, (), {})


def require_none(optimizer: torch.optim.Optimizer) -> None:
    """Refuse hooks where there is no moment between gradients and update.

    Raises:
        OptimizerError: there are some.
    """
    if _before(optimizer) or _after(optimizer):
        why = "release='fused' updates within the backward, where no hook can run"
        raise OptimizerError("step hooks", why, "use release='exact', or remove them")


@contextmanager
def without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """No hook of this optimizer runs in the block: rehearsals and captures are no steps."""
    held = {name: getattr(optimizer, name) for name in (_PRE, _POST)}
    for name in held:
        setattr(optimizer, name, OrderedDict())
    try:
        yield
    finally:
        for name, hooks in held.items():
            setattr(optimizer, name, hooks)
