"""``@hardware("mlu290")``: a hint on which device a module's or a function's ops should run.

The hint reaches each op traced from it as ``hardware_affinity``, and ``lf_hal.place`` obeys it in training; it never
changes what is computed. The innermost
hint counts, and a function's counts within the modules around it. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from lf_hal.lir.errors import LirError

__all__ = ["HardwareNameError", "hardware", "hardware_of"]

T = TypeVar("T", bound=Callable[..., Any])
ATTRIBUTE = "__lf_hardware__"
KEY = "lf_hardware"
PLACED: ContextVar[Callable[..., Any] | None] = ContextVar("placed", default=None)
"""What runs a marked function while a placed module's forward does: see :mod:`lf_hal.placement.training`."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


class HardwareNameError(LirError):
    """A name of hardware of other characters than letters, digits, ``_``, ``.`` and ``-``. Attribute ``name``."""

    def __init__(self, name: object) -> None:
        self.name = name
        super().__init__(f"{name!r} is no name of hardware: use letters, digits, _ . and -, like mlu290")


def hardware(name: str) -> Callable[[T], T]:
    """Mark a module class, a module, or a function of tensors.

    A class or module is marked and returned; a function is wrapped, and costs one look-up more at every call.

    Args:
        name: a device kind, as placement knows it ("mlu290", "cpu", "npu").

    Raises:
        HardwareNameError: not such a name.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise HardwareNameError(name)

    def mark(target: T) -> T:
        if isinstance(target, type) or hasattr(target, "forward"):
            setattr(target, ATTRIBUTE, name)
            return target
        return _wrapped(target, name)

    return mark


def hardware_of(target: object) -> str | None:
    """The hint on this very module, its class or function; None if there is none."""
    return getattr(target, ATTRIBUTE, None)


def _wrapped(function: T, name: str) -> T:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not torch.compiler.is_exporting():
            placed = PLACED.get()
            return function(*args, **kwargs) if placed is None else placed(function, name, args, kwargs)
        with torch.fx.traceback.annotate({KEY: name}):
            return function(*args, **kwargs)

    setattr(call, ATTRIBUTE, name)
    return call  # type: ignore[return-value]
