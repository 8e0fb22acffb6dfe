"""Optimizer state by parameter name: collected, matched, and put back. The names are listed in state.py."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .errors import CkptError, UnsupportedError
from .jsonio import Json
from .typed import State, pack, references, unpack

_log = logging.getLogger("lf_ckpt")
_OF_SCHEDULERS = frozenset(
    {"params", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
)
# These say how a machine computes the update, not what it is; a step saved on a GPU must load on a CPU box.
_HOW_NOT_WHAT = frozenset({"foreach", "fused", "capturable", "differentiable"})


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Name of every optimizer parameter; a tied one goes by its first name. UnsupportedError for one without."""
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


def collect_optimizer(
    names: Mapping[Tensor, str],
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    items: dict[str, Json],
) -> None:
    """Add moments, scalars and groups to `tensors` and `items`."""
    scalars: dict[str, dict[str, Json]] = {}
    for parameter, state in optimizer.state.items():
        name = names[parameter]
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optim.{name}.{key}"] = value.detach()
            else:  # a number, or (L-BFGS, Shampoo) lists of tensors
                scalars.setdefault(name, {})[key], nested = pack(value, f"optim_nested.{name}.{key}")
                tensors |= nested
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


def require_forms(items: Mapping[str, Json]) -> None:
    """CkptError for an item of model or optimizer that `collect` cannot have made."""
    groups, scalars = items.get("optim.groups", []), items.get("optim.scalars", {})
    if not isinstance(items.get("model.extra", {}), Mapping):
        raise CkptError("item model.extra is no mapping of names")
    if not (isinstance(scalars, Mapping) and all(isinstance(found, Mapping) for found in scalars.values())):
        raise CkptError("item optim.scalars is no mapping of parameters to numbers")
    if not (isinstance(groups, list) and all(map(_is_group, groups))):
        raise CkptError("item optim.groups is no list of groups with the names of their parameters")


def _is_group(group: Json) -> bool:
    names = group.get("params") if isinstance(group, Mapping) else None
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


class Moments(NamedTuple):
    """Saved optimizer state by present parameter name, and the saved names that no live parameter has."""

    by_name: dict[str, dict[str, Any]]
    unexpected: list[str]


def saved_parameters(state: State) -> set[str]:
    """Saved names of the parameters that have optimizer state or are members of a group."""
    groups = state.items.get("optim.groups", [])
    return {
        *(full[6:].rpartition(".")[0] for full in state.tensors if full.startswith("optim.")),
        *state.items.get("optim.scalars", {}),
        *(name for group in groups for name in group["params"]),
    }


def moments(state: State, live: Iterable[str], renamed: Mapping[str, str]) -> Moments:
    """Match saved optimizer state with the names of live parameters. `renamed`: saved -> present name."""
    by_name: dict[str, dict[str, Any]] = {}
    known, unexpected = set(live), []
    for full, tensor in state.tensors.items():
        if not full.startswith("optim."):
            continue
        name, _, key = full[6:].rpartition(".")
        if (now := renamed.get(name, name)) in known:
            by_name.setdefault(now, {})[key] = tensor
        else:
            unexpected.append(full)
    for name, values in state.items.get("optim.scalars", {}).items():
        if (now := renamed.get(name, name)) not in known:
            unexpected.append(f"optim.{name}")
            continue
        lost = [ref for ref in references(list(values.values())) if ref not in state.tensors]
        if lost:
            raise UnsupportedError(f"optimizer state of {name} refers to {lost[0]}, which was not loaded")
        by_name.setdefault(now, {}).update({k: unpack(value, state.tensors) for k, value in values.items()})
    return Moments(by_name, unexpected)


def restore_moments(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], saved: Mapping[str, dict[str, Any]]
) -> None:
    """Put moments back where the optimizer wants them; parameters without saved state lose theirs."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = saved.get(names[parameter])
            live = optimizer.state.get(parameter, {})
            if not values:
                optimizer.state.pop(parameter, None)
                continue
            # Not load_state_dict: it would cast float32 moments of a bfloat16 parameter to bfloat16.
            optimizer.state[parameter] = {
                key: _settle(key, value, live.get(key), parameter, group) for key, value in values.items()
            }


def _settle(key: str, value: Any, live: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """The saved tensor where the optimizer wants it, filled into the live one when that has the same kind."""
    if isinstance(value, list | tuple):
        return type(value)(_settle("", element, None, parameter, group) for element in value)
    if not isinstance(value, Tensor):
        return value
    if isinstance(live, Tensor) and (live.shape, live.dtype) == (value.shape, value.dtype):
        with torch.no_grad():
            return live.copy_(value)
    # Step counters stay on the host unless the optimizer's kernels read them.
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return value.detach().cpu().clone() if on_host else value.detach().to(parameter.device, copy=True)


def restore_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], state: State, renamed: Mapping[str, str]
) -> list[int]:
    """Hyper-parameters by equal membership; returns the numbers of live groups that have no equal."""
    saved = {
        frozenset(renamed.get(name, name) for name in group["params"]): (number, group)
        for number, group in enumerate(state.items.get("optim.groups", []))
    }
    kept = []
    for index, group in enumerate(optimizer.param_groups):
        found = saved.get(frozenset(names[p] for p in group["params"]))
        if found is None:
            kept.append(index)
            continue
        _warn_of_another_kind(optimizer, index, found[1])
        _fill_group(group, *found, state)
    if kept:
        _log.warning("optimizer groups %s have other members than any saved group; their settings stay", kept)
    return kept


def _warn_of_another_kind(optimizer: torch.optim.Optimizer, index: int, saved: Mapping[str, Json]) -> None:
    """Log settings that say that a group was saved by another kind of optimizer: each has some that the other lacks.

    Not one-sided ones: versions of torch add settings, and schedulers theirs.
    """
    live = optimizer.defaults.keys() - _HOW_NOT_WHAT
    strange = saved.keys() - optimizer.param_groups[index].keys() - _HOW_NOT_WHAT - _OF_SCHEDULERS
    lacking = live - saved.keys() - {k for k, v in optimizer.defaults.items() if isinstance(v, Tensor)}
    if strange and lacking:
        _log.warning(
            "optimizer group %d was saved by another kind of optimizer, with %s; %s has %s and no use for its "
            "moments",
            index, ", ".join(sorted(strange)), type(optimizer).__name__, ", ".join(sorted(lacking)),
        )  # fmt: skip


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
