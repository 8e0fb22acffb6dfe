"""When a gradient is used and freed: the modes that work within the backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._modes_ledger import Ledger
from ._modes_slot import Slot
from ._modes_tensors import coefficient, norm_of, scale, total_norm
from ._modes_update import Updater
from ._release_errors import ReleaseError

Closure = Callable[[], Any]


@dataclass(frozen=True)
class Options:
    """What `release` was asked for; see there."""

    mode: str
    clip: float | None = None
    clip_by: str = "parameter"
    accumulation: int = 1
    accumulate: str | None = None
    gate: bool = False
    keep: torch.dtype | None = None
    chunk_bytes: int = 1
    reduced_later: bool = False  # by DistributedDataParallel, after the hooks of parameters


class Mode(ABC):
    """What happens to a gradient when it comes, and what is left for the end of the step.

    Args:
        options: what was asked for.
        slots: the parameters, in the order of the optimizer.
        updater: takes the optimizer's step for some of them.
        ledger: is told of gradients that are kept in other tensors than `param.grad`.

    Attributes:
        norm: 2-norm of the last step's gradients before clipping, a scalar on the device; None if not computed.
        in_place: whether a failed backward leaves parameters or state half updated.
    """

    in_place = True

    def __init__(self, options: Options, slots: Sequence[Slot], updater: Updater, ledger: Ledger) -> None:
        self.options = options
        self.slots = slots
        self.updater = updater
        self.ledger = ledger
        self.norm: Tensor | None = None

    @abstractmethod
    def gradient(self, slot: Slot) -> None:
        """Take the gradient of a micro-batch, which `slot.param.grad` has just received."""

    def stays(self, slot: Slot) -> bool:
        """Whether `slot.param.grad` outlives the backward that made it."""
        return False

    @abstractmethod
    def finish(self) -> None:
        """Update what has a gradient left, and free it."""

    def reset(self) -> None:  # noqa: B027 (most modes keep it all in slots)
        """Forget what was gathered for a step that is given up."""

    def planned_bytes(self) -> int:
        """Most bytes of complete gradients that should ever be alive at one time."""
        largest = max((slot.nbytes for slot in self.slots), default=0)
        waiting = (self.updater.together - 1) * len({slot.group for slot in self.slots})
        return min(largest + waiting, sum(slot.nbytes for slot in self.slots))

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs to know of this one."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (most modes have nothing to take)
        """Take what `state_dict` gave."""

    def left(self) -> list[Slot]:
        """Slots with a gradient that no update has used."""
        return [slot for slot in self.slots if slot.pending]


class Fused(Mode):
    """Updates a parameter as soon as its gradient is complete.

    With several micro-batches the gradients add up, in float32 for narrower parameters, and the last micro-batch
    of a parameter updates it.
    """

    def gradient(self, slot: Slot) -> None:
        if slot.seen > self.options.accumulation:
            raise ReleaseError(_AGAIN.format(name=slot.name, n=slot.seen, told=self.options.accumulation))
        if self._in_buffer(slot):
            slot.keep(torch.float32)
            assert slot.buffer is not None
            self.ledger.add(slot.name, slot.buffer, stays=True)
        if slot.seen == self.options.accumulation:
            self.apply(slot)

    def stays(self, slot: Slot) -> bool:
        return slot.seen < self.options.accumulation and not self._in_buffer(slot)

    def finish(self) -> None:
        self.updater.flush()
        for slot in self.left():  # seen in fewer micro-batches than there were
            self.apply(slot)
        self.updater.flush()

    def apply(self, slot: Slot) -> None:
        """Update one parameter from its complete gradient, or have it updated with the next."""
        slot.restore()
        if self.updater.gate:
            self._gated(slot, total_norm([(slot.param, norm_of(slot.grad))]))
        else:
            self.updater.soon(slot)

    def reset(self) -> None:
        self.updater.forget()

    def _gated(self, slot: Slot, norm: Tensor) -> None:
        finite = torch.isfinite(norm)  # its own: it cannot wait for others
        self.updater.count(finite)
        self.updater.update([slot], finite)

    def _in_buffer(self, slot: Slot) -> bool:
        return self.options.accumulate == "buffer" and slot.param.dtype.itemsize < torch.float32.itemsize

    def planned_bytes(self) -> int:
        if self.options.accumulation == 1:
            return super().planned_bytes()
        # A narrower parameter's sum is widened, and narrowed beside it just before the update.
        return sum(_summed(slot) for slot in self.slots) + max(
            (slot.nbytes for slot in self.slots if _summed(slot) > slot.nbytes), default=0
        )


class LocalClip(Fused):
    """Like Fused, but scales each gradient by what is known of the norm when it comes.

    By "parameter": by the parameter's own norm. By "running": by the larger of the norm of all gradients of this
    backward so far, this one included, and the norm of the whole previous step. Neither is the global clipping of
    `torch.nn.utils.clip_grad_norm_`.
    """

    def __init__(self, options: Options, slots: Sequence[Slot], updater: Updater, ledger: Ledger) -> None:
        super().__init__(options, slots, updater, ledger)
        self._squares: Tensor | None = None

    def apply(self, slot: Slot) -> None:
        slot.restore()
        own = total_norm([(slot.param, norm_of(slot.grad))])
        square = torch.where(
            torch.isfinite(own), own, 0.0
        ).square()  # or one bad gradient would spoil all later norms
        self._squares = square if self._squares is None else self._squares + square.to(self._squares.device)
        assert self.options.clip is not None
        scale([slot.grad], coefficient(self.options.clip, self._bound(own)))
        if self.updater.gate:
            self._gated(slot, own)
        else:
            self.updater.soon(slot)

    def finish(self) -> None:
        super().finish()
        if self._squares is not None:
            self.norm, self._squares = self._squares.sqrt(), None

    def reset(self) -> None:
        super().reset()
        self._squares = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self.norm is None else {"norm": self.norm.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norm = state["norm"].clone() if "norm" in state else None

    def _bound(self, own: Tensor) -> Tensor:
        if self.options.clip_by == "parameter":
            return own
        assert self._squares is not None
        so_far = self._squares.sqrt()
        return so_far if self.norm is None else torch.maximum(so_far, self.norm.to(so_far.device))


def call(closure: Closure) -> Any:
    """Run a closure as torch's optimizers do: with gradients enabled."""
    with torch.enable_grad():
        return closure()


def _summed(slot: Slot) -> int:
    return slot.nbytes * max(1, torch.float32.itemsize // slot.param.dtype.itemsize)


_AGAIN = (
    "{name} got gradient {n} after its update: more backward passes than accumulation={told} before handle.step(). "
    "Say accumulation= and accumulate=, or call handle.step() after each backward; reentrant checkpointing of a "
    "parameter used twice does the same: use_reentrant=False"
)
