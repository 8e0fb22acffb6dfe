"""The state of a training run as named tensors and JSON items, and back.

Optimizer state goes by parameter name, never by position, so groups may be reordered or split between save and load.

    model.<name>                  parameters and persistent buffers (tied names share one tensor)
    optim.<parameter>.<key>       e.g. optim.head.weight.exp_avg
    optim_nested.<parameter>...   tensors inside lists of optimizer state (L-BFGS)
    optim_group.<i>.<key>         hyper-parameters that are tensors (a learning rate on the device)
    rng.*                         generator states, see rng.py
    items["optim.groups"]         [{"params": [names], "lr": ...}]
    items["optim.scalars"]        {parameter: {key: number}}, state that is no tensor
    items["model.extra"]          extra state of modules (JSON data; one that is a tensor is with the others in model.)
    items["scheduler"], ["scaler"], ["loader"]    their state_dict(), packed by typed.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .errors import CkptError, MismatchError, UnsupportedError
from .jsonio import Json
from .local import require_memory
from .naming import Fitting, Kind, MapNames, Match, match, rename
from .optim_state import (
    Moments,
    collect_optimizer,
    moments,
    parameter_names,
    require_forms,
    restore_groups,
    restore_moments,
    saved_parameters,
)
from .rng import require_rng_state, rng_state, set_rng_state
from .typed import Collected, State, Stateful, pack, unpack

_EXTRA = "_extra_state"
_STATEFUL = ("scheduler", "scaler", "loader")


@dataclass(frozen=True)
class RestoreReport:
    """What `restore` did not find or use, and what it changed.

    groups_kept: live groups whose members differ from every saved one. renamed: (saved, present) name of a parameter or
    buffer. reshaped, cast: "name: saved -> live". unused: saved state of a scheduler, scaler or loader that was not
    asked for; "optimizer" likewise.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    groups_kept: tuple[int, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    reshaped: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    loader: Stateful | None = None,
    rng: bool = False,
) -> Collected:
    """State of a run by name; wrappers (DDP, torch.compile) are looked through.

    scheduler, scaler, loader: anything with `state_dict` and `load_state_dict` whose state is made of numbers, text,
    bytes, lists, tuples, sets, mappings, tensors and numpy arrays. rng: generators of torch, CUDA, random and numpy.
    Raises UnsupportedError, naming the key, for other state, and for optimizer parameters outside the model.
    """
    model = unwrap(model)
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Json] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            if is_lazy(value):
                raise UnsupportedError(f"model.{name} has no shape yet: run a batch through the model first")
            tensors[f"model.{name}"] = value.detach()
        else:
            extra[name] = value
    items: dict[str, Json] = {"model.extra": extra} if extra else {}
    if optimizer is not None:
        collect_optimizer(parameter_names(model, optimizer), optimizer, tensors, items)
    for name, source in zip(_STATEFUL, (scheduler, scaler, loader), strict=True):
        if source is not None:
            items[name], packed = pack(source.state_dict(), name)
            tensors |= packed
    if rng:
        generators = rng_state()
        tensors |= generators.tensors
        items |= generators.items
    return Collected(tensors, items)


def restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: State,
    strict: bool = True,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    loader: Stateful | None = None,
    rng: bool = False,
    map_names: MapNames | None = None,
    reshape: bool = False,
    cast: bool = False,
) -> RestoreReport:
    """Put collected state back in place; a fresh optimizer gets its state filled in.

    strict: MismatchError unless model tensors agree exactly, every saved moment has its parameter and everything asked
    for is there; nothing has been changed then. Moments keep their saved dtype. Hyper-parameters of a group are
    restored when a saved group has the same members; otherwise the live ones stay, which is logged and reported.
    map_names: saved -> present name of parameters and buffers (as the module names them, without "model."); their
    moments and groups follow. reshape: a tensor of as many elements may have another shape. cast: dtypes may differ
    where a conversion only rounds.
    """
    model = unwrap(model)
    require_forms(state.items)
    if rng and "rng.torch" in state.tensors:
        require_rng_state(state)
    asked = {n: s for n, s in zip(_STATEFUL, (scheduler, scaler, loader), strict=True) if s is not None}
    plan = _plan(model, optimizer, state, map_names, Fitting(reshape, cast))
    for name in plan.match.source:
        require_memory(f"model.{name}", plan.live[name])
    plan.missing += [name for name in asked if name not in state.items]
    if rng and "rng.torch" not in state.tensors:
        plan.missing.append("rng")
    if strict and (plan.missing or plan.unexpected or plan.mismatched):
        raise MismatchError(plan.missing, plan.unexpected, plan.mismatched)
    packed = {name: unpack(state.items[name], state.tensors) for name in asked if name in state.items}
    with torch.no_grad():
        for name, source in plan.match.source.items():
            live = plan.live[name]
            live.copy_(state.tensors[f"model.{source}"].reshape(live.shape))
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, value in plan.extra.items():
        modules[name.removesuffix(_EXTRA).removesuffix(".")].set_extra_state(value)
    kept: list[int] = []
    if optimizer is not None:
        restore_moments(optimizer, plan.names, plan.moments.by_name)
        kept = restore_groups(optimizer, plan.names, state, plan.renamed)
    for name, value in packed.items():
        _load_into(asked[name], name, value)
    if rng and "rng" not in plan.missing:
        set_rng_state(state)
    return RestoreReport(
        tuple(plan.missing),
        tuple(plan.unexpected),
        tuple(plan.mismatched),
        tuple(kept),
        plan.match.renamed,
        plan.match.reshaped,
        plan.match.cast,
        (
            *(n for n in _STATEFUL if n in state.items and n not in asked),
            *(["optimizer"] if optimizer is None and "optim.groups" in state.items else []),
        ),
    )


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel and torch.compile wrappers."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"model: {type(model).__name__} is no torch.nn.Module")
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


@dataclass
class _RestorePlan:
    """What a restore will do, before anything is touched."""

    live: dict[str, Tensor]
    match: Match
    renamed: dict[str, str]
    names: dict[Tensor, str]
    moments: Moments
    extra: dict[str, Json | Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)


def _plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: State,
    map_names: MapNames | None,
    how: Fitting,
) -> _RestorePlan:
    values = {name[6:]: tensor for name, tensor in state.tensors.items() if name.startswith("model.")}
    saved = {name: tensor for name, tensor in values.items() if not _is_extra(name)}
    extra = {**state.items.get("model.extra", {}), **{n: v for n, v in values.items() if _is_extra(n)}}
    whole = model.state_dict(keep_vars=True)
    live = {n: v for n, v in whole.items() if isinstance(v, Tensor) and not _is_extra(n)}
    takers = {name for name in whole if _is_extra(name)}
    with_moments = saved_parameters(state) if optimizer is not None else set()
    renamed = rename(dict.fromkeys([*saved, *extra, *sorted(with_moments)]), map_names)
    found = match(_kinds(saved), _kinds(live), {name: renamed[name] for name in saved}, how)
    names = parameter_names(model, optimizer) if optimizer is not None else {}
    held = moments(state, names.values(), renamed) if optimizer is not None else Moments({}, [])
    now = {renamed[name]: value for name, value in extra.items()}
    plan = _RestorePlan(live, found, renamed, names, held)
    plan.extra = {name: value for name, value in now.items() if name in takers}
    plan.missing = [f"model.{name}" for name in (*found.missing, *sorted(takers - now.keys()))]
    plan.unexpected = [f"model.{name}" for name in (*found.unexpected, *sorted(now.keys() - takers))]
    plan.unexpected += held.unexpected
    plan.mismatched = [f"model.{text}" for text in found.mismatched]
    for parameter, name in names.items():
        _fit_moments(plan, parameter, name, saved)
    return plan


def _fit_moments(plan: _RestorePlan, parameter: Tensor, name: str, saved: Mapping[str, Tensor]) -> None:
    """Moments take the new shape of their parameter; those of a parameter that does not fit are left out."""
    values = plan.moments.by_name.get(name)
    if values is None:
        return
    source = plan.match.source.get(name)
    if source is None:
        if name not in plan.match.missing:  # it is there, and does not fit
            del plan.moments.by_name[name]
        return
    before = saved[source].shape
    if before != parameter.shape:
        for key, value in values.items():
            if isinstance(value, Tensor) and value.shape == before:
                values[key] = value.reshape(parameter.shape)


def _is_extra(name: str) -> bool:
    """Whether a name of a state dict is what `get_extra_state` of a module gives, a tensor perhaps."""
    return name.rpartition(".")[2] == _EXTRA


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, Kind]:
    return {name: Kind(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _load_into(target: Stateful, name: str, value: Any) -> None:
    try:
        target.load_state_dict(value)
    except Exception as error:
        raise CkptError(f"{name}: {type(target).__name__}.load_state_dict failed: {error}") from error
