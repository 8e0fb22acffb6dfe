"""Under bf16 autocast: which parameters the forward reads only through their bf16 cast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lf_graph._backend import Backend
from lf_graph._frugal import forward_only
from lf_graph._members import buffers_as_they_were
from lf_graph._outside import Outside
from lf_graph._recorder import as_if_capturing
from lf_graph._refused_calls import refusing_own_backward
from lf_graph._segment import Autocast
from lf_graph._uses import Owned, parameter_uses


def autocast_of(dtype: torch.dtype | None, backend: Backend) -> Autocast:
    """Context factory of autocast on a backend's device; without its weight cache."""
    if dtype is None:
        return nullcontext
    # the weight cache would keep casts of one capture alive into the next
    return lambda: torch.autocast(backend.device.type, dtype, cache_enabled=False)


def shadowed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Tensor]:
    """Trained parameters, each once, that a bf16 shadow can stand in for; runs ``forward`` once without effect."""
    with ExitStack() as stack:
        stack.enter_context(buffers_as_they_were([model]))
        stack.enter_context(Outside([model]).watching())
        stack.enter_context(refusing_own_backward())
        stack.enter_context(as_if_capturing())  # the branch that will be captured is the one to ask
        uses = forward_only(lambda: parameter_uses(Owned(forward, model), *args, **kwargs))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trained = {id(p) for g in optimizer.param_groups for p in g["params"]}
    eligible = {n for n, u in uses.items() if u.only_cast_to is torch.bfloat16}
    return list({id(p): p for n, p in parameters.items() if n in eligible and id(p) in trained}.values())
