"""See Triton kernels that are launched without the dispatcher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Launched = Callable[[str, Sequence[Tensor]], None]

# Every launch, ``kernel[grid](...)`` or autotuned, ends in ``run`` of one of these.
_LAUNCHERS = (("triton.runtime.jit", "JITFunction"), ("triton.runtime.interpreter", "InterpretedFunction"))


@contextmanager
def triton_launches(launched: Launched) -> Iterator[None]:
    """Call ``launched(kernel, tensors)`` before each launch in the block; nothing happens without triton.

    What the interpreter does with torch operators of its own is hidden from the modes that are active.
    """
    classes = [getattr(sys.modules.get(module), name, None) for module, name in _LAUNCHERS]
    originals = [(cls, cls.run) for cls in classes if cls is not None]
    for cls, run in originals:
        cls.run = _observed(run, launched)
    try:
        yield
    finally:
        for cls, run in originals:
            cls.run = run


def _observed(run: Callable[..., Any], launched: Launched) -> Callable[..., Any]:
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        launched(getattr(self, "__name__", "kernel"), tensors)
        with _disable_current_modes():
            return run(self, *args, **kwargs)

    return observed
