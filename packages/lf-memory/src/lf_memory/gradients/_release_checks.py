"""What `release` refuses, and why."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ._modes import Options

MODES = ("fused", "local_clip", "exact", "two_pass")
_DDP = ("torch.nn.parallel.distributed", "DistributedDataParallel")
_FSDP1 = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
_BUCKETS = (
    "DistributedDataParallel reduces gradients in buckets that hold all of them, after the hooks of parameters: mode "
    "{mode!r} would update from gradients of one rank and could free nothing. Say mode='exact' (best with "
    "gradient_as_bucket_view=True), or shard with fully_shard, where every mode works"
)


def check_options(options: Options) -> None:
    """Raise ValueError for arguments that are wrong alone or together."""
    _one_of("mode", options.mode, MODES)
    _one_of("accumulate", options.accumulate, (None, "buffer", "state"))
    _one_of("clip_by", options.clip_by, ("parameter", "running"))
    _check_clip(options)
    _check_accumulation(options)
    _check_keep(options)
    if options.chunk_bytes < 1:
        raise ValueError(f"chunk_bytes={options.chunk_bytes}: at least 1")
    if options.gate and options.accumulate == "state":
        raise ValueError(
            "gate=True cannot take back what accumulate='state' added to the state: say 'buffer'"
        )


def check_model(model: nn.Module, options: Options) -> None:
    """Raise ValueError for wrappers that reduce or flatten gradients in a way the mode does not stand."""
    if _is_a(model, *_FSDP1):
        raise ValueError("FullyShardedDataParallel keeps flat parameters of its own: use fully_shard")
    if not _is_a(model, *_DDP):
        return
    if options.mode != "exact":
        raise ValueError(_BUCKETS.format(mode=options.mode))
    if options.keep is not None or options.accumulate is not None:
        raise ValueError(
            "keep= and accumulate= take gradients before DistributedDataParallel reduces them: leave them out"
        )


def is_ddp(model: nn.Module) -> bool:
    """Whether the model is wrapped in DistributedDataParallel."""
    return _is_a(model, *_DDP)


def refuse_inside_ddp(model: nn.Module, mode: str) -> None:
    """Raise ValueError if a forward of DistributedDataParallel is running that has `model` inside."""
    active: Any = getattr(getattr(sys.modules.get(_DDP[0]), _DDP[1], None), "_active_ddp_module", None)
    if active is not None and any(module is model for module in active.modules()):
        raise ValueError(_BUCKETS.format(mode=mode))


def check_gate(optimizer: Optimizer) -> None:
    """Raise ValueError if steps of parameters on a device would be counted on the host."""
    for group in optimizer.param_groups:
        on_device = any(p.device.type != "cpu" for p in group["params"])
        if on_device and "capturable" in group and not (group["capturable"] or group.get("fused")):
            name = type(optimizer).__name__
            raise ValueError(
                f"gate=True needs steps counted on the device: {name}(..., capturable=True) or fused=True"
            )


def check_parameters(names: Iterable[tuple[str, Tensor]], taken: set[int]) -> None:
    """Raise ValueError if there is nothing to release, a gradient is pending or a parameter is released already."""
    found = [(name, p) for name, p in names if p.requires_grad]
    if not found:
        raise ValueError("no parameter of the optimizer requires a gradient: nothing to release")
    for name, p in found:
        if id(p) in taken:
            raise ValueError(f"{name} is released already: close() the other handle first")
        if p.grad is not None:
            raise ValueError(f"{name} has a gradient already: optimizer.zero_grad() before release")
        if p.layout is not torch.strided:
            raise ValueError(f"{name} is {p.layout}: only strided parameters can be released")


def _check_clip(options: Options) -> None:
    clip, mode = options.clip, options.mode
    if clip is not None and not (math.isfinite(clip) and clip > 0):
        raise ValueError(f"clip={clip}: a finite number above 0, or None")
    if mode == "fused" and clip is not None:
        raise ValueError(
            "mode 'fused' updates before the norm is known: local_clip, exact or two_pass can clip"
        )
    if mode == "local_clip" and clip is None:
        raise ValueError("mode 'local_clip' needs clip=; without it, it is 'fused'")
    if options.clip_by != "parameter" and mode != "local_clip":
        raise ValueError(f"clip_by={options.clip_by!r} belongs to mode 'local_clip', not {mode!r}")


def _check_accumulation(options: Options) -> None:
    mode, n, policy = options.mode, options.accumulation, options.accumulate
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"accumulation={n!r}: a number of micro-batches, at least 1")
    if mode == "two_pass" and (n > 1 or policy is not None):
        raise ValueError(
            "mode 'two_pass' takes one micro-batch: to accumulate, mode 'exact' needs no second backward"
        )
    if mode in ("fused", "local_clip") and n > 1 and policy is None:
        raise ValueError(
            f"mode {mode!r} with accumulation={n} would update at each micro-batch: say accumulate='buffer' (sums "
            "gradients, updates at the last) or 'state' (adds to the optimizer's state), or mode='exact'"
        )
    if policy == "state" and mode != "fused":
        raise ValueError(f"accumulate='state' belongs to mode 'fused', not {mode!r}: say 'buffer'")


def _check_keep(options: Options) -> None:
    if options.keep is None:
        return
    if options.mode != "exact" or options.accumulation > 1 or options.accumulate is not None:
        raise ValueError(
            "keep= belongs to mode 'exact' with one micro-batch: sums in a narrow type lose digits"
        )
    if options.keep not in (torch.bfloat16, torch.float16):
        raise ValueError(f"keep={options.keep}: torch.bfloat16 or torch.float16")


def _one_of(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r}: one of {', '.join(map(repr, known))}")


def _is_a(thing: object, module: str, name: str) -> bool:
    """``isinstance`` without the import: an object of a class exists only when its module is loaded."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(thing, kind)
