"""Model, optimizer and generator state as named tensors and JSON items, and back.

Optimizer state goes by parameter name, never by position, so groups may be reordered or split between save and load.

    model.<name>                  parameters and persistent buffers (tied names share one tensor)
    optim.<parameter>.<key>       e.g. optim.head.weight.exp_avg
    optim_group.<i>.<key>         hyper-parameters that are tensors (a learning rate on the device)
    items["optim.groups"]         [{"params": [names], "lr": ...}]
    items["optim.scalars"]        {parameter: {key: number}}, state that is no tensor
    items["model.extra"]          extra state of modules (JSON data)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .errors import CkptError, MismatchError, UnsupportedError
from .jsonio import Json

_log = logging.getLogger("lf_ckpt")
_EXTRA = "_extra_state"
# These say how a machine computes the update, not what it is; a step saved on a GPU must load on a CPU box.
_HOW_NOT_WHAT = frozenset({"foreach", "fused", "capturable", "differentiable"})


class Collected(NamedTuple):
    """Named tensors (the live ones, not copies) and JSON items; unpack it into `store.save(step, *collected)`."""

    tensors: dict[str, Tensor]
    items: dict[str, Json]


class State(Protocol):
    """What `restore` reads: a `Loaded`, a `Collected`, or anything with these two mappings."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def items(self) -> Mapping[str, Json]: ...


@dataclass(frozen=True)
class RestoreReport:
    """What `restore` did not find or use. groups_kept: live groups whose members differ from every saved one."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    groups_kept: tuple[int, ...] = ()


def collect(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Collected:
    """State of a model and its optimizer by name; wrappers (DDP, torch.compile) are looked through.

    Raises UnsupportedError for state that is neither tensor nor JSON data, and for optimizer parameters that the model
    does not name.
    """
    model = unwrap(model)
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Json] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            tensors[f"model.{name}"] = value.detach()
        else:
            extra[name] = value
    items: dict[str, Json] = {"model.extra": extra} if extra else {}
    if optimizer is not None:
        _collect_optimizer(_names(model, optimizer), optimizer, tensors, items)
    return Collected(tensors, items)


def restore(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, state: State, strict: bool = True
) -> RestoreReport:
    """Put collected state back in place; a fresh optimizer gets its state filled in.

    strict: MismatchError unless model tensors agree exactly and every saved moment has its parameter; nothing has been
    changed then. Moments keep their saved dtype. Hyper-parameters of a group are restored when a saved group has the
    same members; otherwise the live ones stay, which is logged and reported.
    """
    model = unwrap(model)
    saved = {name[6:]: tensor for name, tensor in state.tensors.items() if name.startswith("model.")}
    live = {n: v for n, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
    missing = [f"model.{name}" for name in live if name not in saved]
    unexpected = [f"model.{name}" for name in saved if name not in live]
    mismatched = [
        f"model.{n}: {_kind(saved[n])} -> {_kind(live[n])}"
        for n in live
        if n in saved and not _fits(saved[n], live[n])
    ]
    names = _names(model, optimizer) if optimizer is not None else {}
    moments = _moments(state, names.values()) if optimizer is not None else _Moments({}, [])
    unexpected += moments.unexpected
    if strict and (missing or unexpected or mismatched):
        raise MismatchError(missing, unexpected, mismatched)
    with torch.no_grad():
        for name, tensor in live.items():
            if name in saved and _fits(saved[name], tensor):
                tensor.copy_(saved[name])
    _restore_extra(model, state.items.get("model.extra", {}))
    kept: list[int] = []
    if optimizer is not None:
        _restore_moments(optimizer, names, moments.by_name)
        kept = _restore_groups(optimizer, names, state)
    return RestoreReport(tuple(missing), tuple(unexpected), tuple(mismatched), tuple(kept))


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel and torch.compile wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Name of every optimizer parameter; a tied one goes by its first name."""
    named: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        named.setdefault(parameter, name)
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in named:
                shape = list(parameter.shape)
                raise UnsupportedError(
                    f"optimizer group {index}: a parameter of shape {shape} is not in the model"
                )
    return named


def _collect_optimizer(
    names: Mapping[Tensor, str],
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    items: dict[str, Json],
) -> None:
    scalars: dict[str, dict[str, Json]] = {}
    for parameter, state in optimizer.state.items():
        name = names[parameter]
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optim.{name}.{key}"] = value.detach()
            elif value is None or isinstance(value, bool | int | float | str):
                scalars.setdefault(name, {})[key] = value
            else:
                raise UnsupportedError(
                    f"optimizer state {name}.{key}: {type(value).__name__} cannot be stored"
                )
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        plain: dict[str, Json] = {"params": [names[p] for p in group["params"]]}
        for key, value in group.items():
            if isinstance(value, Tensor):
                tensors[f"optim_group.{index}.{key}"] = value.detach()
            elif key not in ("params", "param_names"):
                plain[key] = value
        groups.append(plain)
    items["optim.groups"] = groups
    if scalars:
        items["optim.scalars"] = scalars


class _Moments(NamedTuple):
    by_name: dict[str, dict[str, Any]]
    unexpected: list[str]


def _moments(state: State, names: Iterable[str]) -> _Moments:
    """Saved optimizer state by parameter name, and the saved names that no live parameter has."""
    by_name: dict[str, dict[str, Any]] = {}
    known, unexpected = set(names), []
    for full, tensor in state.tensors.items():
        if not full.startswith("optim."):
            continue
        name, _, key = full[6:].rpartition(".")
        if name in known:
            by_name.setdefault(name, {})[key] = tensor
        else:
            unexpected.append(full)
    for name, values in state.items.get("optim.scalars", {}).items():
        if name in known:
            by_name.setdefault(name, {}).update(values)
        else:
            unexpected.append(f"optim.{name}")
    return _Moments(by_name, unexpected)


def _restore_moments(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], saved: Mapping[str, dict[str, Any]]
) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = saved.get(names[parameter])
            live = optimizer.state.get(parameter, {})
            if not values:
                optimizer.state.pop(parameter, None)
                continue
            # Not load_state_dict: it would cast float32 moments of a bfloat16 parameter to bfloat16.
            optimizer.state[parameter] = {
                key: _settle(key, value, live.get(key), parameter, group)
                if isinstance(value, Tensor)
                else value
                for key, value in values.items()
            }


def _settle(key: str, value: Tensor, live: Any, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The saved tensor where the optimizer wants it, filled into the live one when that has the same kind."""
    if isinstance(live, Tensor) and _fits(value, live):
        with torch.no_grad():
            return live.copy_(value)
    # Step counters stay on the host unless the optimizer's kernels read them.
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return value.detach().clone() if on_host else value.detach().to(parameter.device, copy=True)


def _restore_groups(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], state: State) -> list[int]:
    """Hyper-parameters by equal membership; returns the numbers of live groups that have no equal."""
    saved = {frozenset(g["params"]): (i, g) for i, g in enumerate(state.items.get("optim.groups", []))}
    kept = []
    for index, group in enumerate(optimizer.param_groups):
        found = saved.get(frozenset(names[p] for p in group["params"]))
        if found is None:
            kept.append(index)
            continue
        _fill_group(group, *found, state)
    if kept:
        _log.warning("optimizer groups %s have other members than any saved group; their settings stay", kept)
    return kept


def _fill_group(group: dict[str, Any], number: int, values: Mapping[str, Json], state: State) -> None:
    """Saved hyper-parameters into a live group; whether a value is a tensor or a number is the live group's choice."""
    prefix = f"optim_group.{number}."
    tensors = {name.removeprefix(prefix): t for name, t in state.tensors.items() if name.startswith(prefix)}
    for key, value in {**values, **tensors}.items():
        live = group.get(key)
        if key == "params" or key in _HOW_NOT_WHAT:
            continue
        if isinstance(live, Tensor):
            live.copy_(value) if isinstance(value, Tensor) else live.fill_(value)
        elif isinstance(value, Tensor):
            group[key] = value.item() if live is not None and value.numel() == 1 else value.detach().clone()
        else:
            group[key] = tuple(value) if isinstance(live, tuple) else value


def _restore_extra(model: nn.Module, extra: Mapping[str, Json]) -> None:
    modules = dict(model.named_modules())
    for name, value in extra.items():
        module = modules.get(name.removesuffix(_EXTRA).removesuffix("."))
        if module is None:
            raise CkptError(f"model.{name}: no module takes this extra state")
        module.set_extra_state(value)


def _fits(saved: Tensor, live: Tensor) -> bool:
    return saved.shape == live.shape and saved.dtype == live.dtype


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
