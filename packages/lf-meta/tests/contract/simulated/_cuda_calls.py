"""Which calls of torch.cuda our packages make while they work on another device."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch

from ._log import CallLog

# Questions that every machine answers, and that change nothing.
HARMLESS = ("is_available", "is_initialized")


def watch_cuda(log: CallLog) -> None:
    """Log each call of a public function or class of torch.cuda that comes from a package of LoongForge or a test."""
    for name, value in list(vars(torch.cuda).items()):
        if name.startswith("_") or name in HARMLESS:
            continue
        if inspect.isfunction(value):
            setattr(torch.cuda, name, _watched(log, name, value))
        elif inspect.isclass(value) and name in ("Stream", "Event", "CUDAGraph"):
            value.__new__ = _watched(log, name, value.__new__)
    torch.cuda.device.__init__ = _watched(log, "device", torch.cuda.device.__init__)  # type: ignore[method-assign]


def _watched(log: CallLog, name: str, real: Any) -> Any:
    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        module = str(caller.f_globals.get("__name__", ""))
        if module.startswith("lf_") or ".suite_" in f".{module}":
            log.add("cuda", f"torch.cuda.{name} from {module.rpartition('.suite_')[2]}:{caller.f_lineno}")
        return real(*args, **kwargs)

    return call
