"""What can be said of modules and arguments without running them: hooks, wrappers, devices, Python numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import keystr, tree_flatten_with_path

from lf_graph._findings import Finding
from lf_graph._frames import definition
from lf_graph._names import Names
from lf_graph._rules import Verdict

FORWARD_HOOK = Verdict(
    "hook",
    "Python code of a hook runs at the capture and not at a replay",
    "remove the hook (handle.remove()) and do its work inside forward, or run this module as an eager piece",
)
BACKWARD_HOOK = Verdict(
    "hook",
    "Python code of a hook in the backward runs at the capture and not at a replay",
    "remove the hook (handle.remove()), or run this module as an eager piece",
)
GRADIENT_HOOK = Verdict(
    "hook",
    "gradients are accumulated inside the graph, so the hook of a parameter never runs",
    "remove the hook, and read or change p.grad after the replay",
)
DATA_PARALLEL = Verdict(
    "wrapped",
    "DistributedDataParallel synchronizes gradients in hooks, which a replay does not run",
    "pass ddp.module and reduce the gradients after the replay (TrainStep does)",
)
SHARDED = Verdict(
    "wrapped",
    "fully sharded parameters are gathered and freed by hooks, so their addresses change from step to step",
    "capture before sharding, or use data parallel: a replicated module with gradients reduced after the replay",
)
TENSOR_PARALLEL = Verdict(
    "wrapped",
    "a DTensor is split over devices and communicates through Python in forward and backward",
    "capture the module with plain local parameters, and communicate between pieces",
)
PIPELINE_PARALLEL = Verdict(
    "wrapped",
    "a pipeline schedule sends and receives between devices from Python",
    "capture the module of each stage, and let the schedule call the captured stages",
)
OTHER_DEVICE = Verdict(
    "wrong_device",
    "a graph belongs to one device, and this tensor lies on another of its kind",
    "move it to the device of the others",
)
NOT_CURRENT = Verdict(
    "wrong_device",
    "the current device is another one: temporary memory of the capture would go there (pytorch#87794)",
    "enter `with torch.cuda.device(index)` or call torch.cuda.set_device(index) first",
)

# Hooks that are arithmetic on parameters, without Python state: they are captured as they are.
_PURE_HOOKS = ("torch.nn.utils",)


def structure(names: Names, objects: Sequence[Any]) -> list[Finding]:
    """Findings on parallel wrappers; where there are none (they hook into modules themselves), on hooks."""
    return [*_wrappers(names, objects)] or [*_hooks(names)]


def _wrappers(names: Names, objects: Sequence[Any]) -> Iterator[Finding]:
    for name, module in names.each_module():
        verdict = _wrapper(module)
        if verdict:
            yield verdict.at(type(module).__name__, definition(module), name)
    for name, p in names.parameters:
        if _is_instance(p, "torch.distributed.tensor", "DTensor"):
            yield TENSOR_PARALLEL.at(f"DTensor {name}", "", name.rpartition(".")[0])
    for thing in objects:
        if _is_pipeline(thing):
            yield PIPELINE_PARALLEL.at(type(thing).__name__, definition(thing))


def _wrapper(module: nn.Module) -> Verdict | None:
    if isinstance(module, (DistributedDataParallel, nn.DataParallel)):
        return DATA_PARALLEL
    sharded = ("FSDPModule", "FullyShardedDataParallel")
    return SHARDED if any(_is_instance(module, "torch.distributed.fsdp", name) for name in sharded) else None


def _is_pipeline(thing: Any) -> bool:
    stage = ("torch.distributed.pipelining.stage", "_PipelineStageBase")
    schedule = ("torch.distributed.pipelining.schedules", "_PipelineSchedule")
    return _is_instance(thing, *stage) or _is_instance(thing, *schedule)


def _is_instance(thing: Any, module: str, name: str) -> bool:
    """``isinstance`` without the import: an object of a class exists only when its module is loaded."""
    cls = getattr(sys.modules.get(module), name, None)
    return isinstance(cls, type) and isinstance(thing, cls)


_MODULE_HOOKS = {
    "_forward_pre_hooks": FORWARD_HOOK,
    "_forward_hooks": FORWARD_HOOK,
    "_backward_pre_hooks": BACKWARD_HOOK,
    "_backward_hooks": BACKWARD_HOOK,
}


def _hooks(names: Names) -> Iterator[Finding]:
    for name, module in names.each_module():
        for attribute, verdict in _MODULE_HOOKS.items():
            for hook in getattr(module, attribute).values():
                if not _is_pure(hook):
                    yield verdict.at(attribute.strip("_").replace("hooks", "hook"), definition(hook), name)
    for name, p in {id(p): (name, p) for name, p in reversed(names.parameters)}.values():
        for attribute in ("_post_accumulate_grad_hooks", "_backward_hooks"):
            for hook in (getattr(p, attribute) or {}).values():
                kind = "post_accumulate_grad_hook" if attribute.startswith("_post") else "tensor_hook"
                yield GRADIENT_HOOK.at(f"{kind} of {name}", definition(hook), name.rpartition(".")[0])


def _is_pure(hook: Callable[..., Any]) -> bool:
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).startswith(_PURE_HOOKS)


def target_of(names: Names, tensors: Sequence[Tensor]) -> torch.device:
    """The device the work is for: the first that is not the host, else the host."""
    everything = (*(p for _, p in names.parameters), *(b for _, b in names.each_buffer()), *tensors)
    return next((t.device for t in everything if t.device.type != "cpu"), torch.device("cpu"))


def wrong_devices(devices: Mapping[str, torch.device], current: int | None) -> list[Finding]:
    """Judge on which devices tensors lie.

    Args:
        devices: device of each input, parameter and buffer by name.
        current: index of the current device; None where there is no such thing.

    Returns:
        One finding for each tensor on another device of the first one's kind, and one when the first one's device
        is not the current.
    """
    on_device = {
        name: d for name, d in devices.items() if d.type not in ("cpu", "meta") and d.index is not None
    }
    if not on_device:
        return []
    first = next(iter(on_device.values()))
    found = [OTHER_DEVICE.at(f"{name} on {d}", "") for name, d in on_device.items() if d != first]
    if current is not None and first.index != current:
        name = next(iter(on_device))
        found.append(NOT_CURRENT.at(f"{name} on {first}, current {first.type}:{current}", ""))
    return found


def named_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Each leaf of the arguments, by its place: ``args[0]``, ``args[1]['x']``, ``kwargs['mask']``."""
    positional = {f"args{keystr(path)}": x for path, x in tree_flatten_with_path(tuple(args))[0]}
    named = {f"kwargs{keystr(path)}": x for path, x in tree_flatten_with_path(dict(kwargs))[0]}
    return {**positional, **named}


def frozen_arguments(
    fn: Callable[..., Any], inputs: Mapping[str, Any], again: Mapping[str, Any] | None
) -> list[Finding]:
    """Warn of Python numbers given as arguments, unless a second set of arguments shows that they stay."""
    numbers = {k: v for k, v in inputs.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    where = definition(fn)
    return [
        Verdict(
            "frozen_argument",
            f"the Python number {value} is frozen into the graph",
            "pass it as a tensor on the device if it changes, or bind it with functools.partial if it never does",
            "warning",
        ).at(name, where)
        for name, value in numbers.items()
        if again is None or name not in again
    ]
