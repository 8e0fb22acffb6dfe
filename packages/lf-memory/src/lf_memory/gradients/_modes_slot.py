"""One parameter of a released optimizer, and where its gradient is between backward and update."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ._modes_tensors import is_sharded, local


@dataclass(eq=False, slots=True)
class Slot:
    """A parameter and the state of its gradient within one step.

    Attributes:
        name: of the parameter, for messages.
        param: the parameter.
        group: index of its param group.
        seen: gradients of micro-batches that came since the last step.
        updated: whether the parameter was updated since then.
        started: whether a gated update was taken, so that there is a state to go back to.
        buffer: gradient kept apart from `param.grad`, in another dtype; None if there is none.
        norm: 2-norm of this pass's gradient on this rank, where a mode needs it later.
    """

    name: str
    param: Tensor
    group: int
    seen: int = 0
    updated: bool = False
    started: bool = False
    buffer: Tensor | None = None
    norm: Tensor | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient on this rank, in the parameter's dtype."""
        return local(self.param.detach()).nbytes

    @property
    def grad(self) -> Tensor:
        """`param.grad`, which must be there."""
        assert self.param.grad is not None
        return self.param.grad

    @property
    def pending(self) -> bool:
        """Whether there is a gradient to update from."""
        return self.buffer is not None or self.param.grad is not None

    def keep(self, dtype: torch.dtype) -> None:
        """Add `param.grad` to the buffer, which is of `dtype`, and free it."""
        if self.buffer is None:
            self.buffer = self.grad.to(dtype)  # itself if nothing changes: autograd has let go of it
        else:
            self.buffer.add_(self.grad)
        self.free()

    def restore(self) -> None:
        """Turn the buffer, if there is one, into `param.grad`."""
        if self.buffer is not None:
            self.param.grad = self.buffer.to(self.param.dtype)
            self.buffer = None

    def free(self) -> None:
        """Drop `param.grad`."""
        grad = self.param.grad
        if grad is not None and is_sharded(grad) and grad.device.type != "cpu":
            # fully_shard allocates it on a stream of its own: the block waits for what this stream still does.
            module = torch.get_device_module(grad.device)
            local(grad).record_stream(module.current_stream(grad.device))
        self.param.grad = None

    def reset(self) -> None:
        """Forget the step: gradient, buffer and counts."""
        self.free()
        self.buffer = self.norm = None
        self.seen, self.updated = 0, False
