"""Python calls that a dry run refuses because no operator gives them away.

Each is exchanged by name for the duration of the run, for the thread of the run alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lf_graph._errors import GraphCaptureError
from lf_graph._frames import user_line
from lf_graph._replaced import Below, replaced

_OWN_BACKWARD = (
    "a training step makes the backward and the update itself, from what the loss returns",
    "return the loss, and leave backward(), zero_grad() and optimizer.step() to the step",
)
_SCALED = (
    "nothing in the step divides the gradients by the scale again",
    "return the loss unscaled; autocast=torch.bfloat16 needs no scaler",
)
_PRINTED = (
    "it needs the values on the host, and a graph cannot wait for the device",
    "return the tensor, or the loss, and print it after the replay",
)
REENTRANT_CHECKPOINT = (
    "use_reentrant=True starts a backward of its own inside the backward, which reaches every parameter at once",
    "pass use_reentrant=False, and preserve_rng_state=False where the region has no dropout (transformers: both in "
    "gradient_checkpointing_kwargs)",
)
_GENERATOR_STATE = (
    "the state of the generator is read, set or seeded during the capture, as activation checkpointing does with "
    "preserve_rng_state=True",
    "checkpoint with preserve_rng_state=False where the region has no dropout (transformers: in "
    "gradient_checkpointing_kwargs), in a Piece(checkpoint=True), or by compile= with recompute=; seed and restore "
    "generators outside of the graph",
)

Judge = Callable[..., tuple[str, str] | None]


@contextmanager
def refusing_own_backward() -> Iterator[None]:
    """A loss returns what is to be differentiated, as it is.

    Raises:
        GraphCaptureError: inside the block, at ``backward()`` or a gradient scaler's ``scale()``.
    """
    with ExitStack() as stack:
        stack.enter_context(_refusing(torch.autograd, "backward", lambda *a, **k: _OWN_BACKWARD))
        stack.enter_context(_refusing(torch.amp.GradScaler, "scale", _scales))
        yield


@contextmanager
def refusing_calls() -> Iterator[None]:
    """What no graph can hold.

    Raises:
        GraphCaptureError: inside the block, where a tensor is printed, or at a reentrant checkpoint.
    """
    checkpoint = torch.utils.checkpoint.CheckpointFunction
    with ExitStack() as stack:
        stack.enter_context(_refusing(torch._tensor_str, "_str", _prints, "Tensor.__repr__"))
        stack.enter_context(_refusing(checkpoint, "forward", reenters, "torch.utils.checkpoint.checkpoint"))
        yield


@contextmanager
def refusing_generator_states() -> Iterator[None]:
    """The host's generator stands for a device's, whose state cannot be read or set during a capture.

    Raises:
        GraphCaptureError: inside the block, where torch's default generator is read, set or seeded.
    """
    with ExitStack() as stack:
        for name in ("get_rng_state", "set_rng_state", "manual_seed", "seed"):
            stack.enter_context(_refusing(torch, name, lambda *_: _GENERATOR_STATE))
        yield


def _scales(scaler: torch.amp.GradScaler, *_: Any) -> tuple[str, str] | None:
    return _SCALED if scaler.is_enabled() else None


def _prints(tensor: Tensor, **_: Any) -> tuple[str, str] | None:
    """Tensors without values, such as a compiler's, are printed without reading any."""
    return _PRINTED if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type != "meta" else None


def reenters(ctx: Any, *_: Any) -> tuple[str, str] | None:
    """Why and what to do, when a reentrant checkpoint is part of what is differentiated."""
    return REENTRANT_CHECKPOINT if any(ctx.needs_input_grad) else None


@contextmanager
def _refusing(owner: Any, name: str, judge: Judge, op: str = "") -> Iterator[None]:
    thread = threading.get_ident()
    op = op or f"{owner.__name__}.{name}"

    def judged_over(below: Below) -> Any:
        def judged(*args: Any, **kwargs: Any) -> Any:
            problem = judge(*args, **kwargs) if threading.get_ident() == thread else None
            if problem is not None:
                raise GraphCaptureError(op, user_line(), *problem)
            held = below.held
            real = held.__func__ if isinstance(held, staticmethod) else held
            return real(*args, **kwargs)

        return staticmethod(judged) if isinstance(below.held, staticmethod) else judged

    with replaced(owner, name, judged_over):
        yield
