"""release: gradients used and freed within the backward, in four modes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ._modes import Closure, Fused, LocalClip, Mode, Options, call
from ._modes_exact import Exact, TwoPass
from ._modes_ledger import Ledger
from ._modes_passes import Passes
from ._modes_slot import Slot
from ._modes_state import StateAccumulation
from ._modes_update import Updater
from ._release_checks import (
    check_gate,
    check_model,
    check_options,
    check_parameters,
    is_ddp,
    refuse_inside_ddp,
)
from ._release_errors import ReleaseError
from ._release_stats import ReleaseStats
from ._release_watch import BackwardWatch

_MODES: dict[str, type[Mode]] = {"fused": Fused, "local_clip": LocalClip, "exact": Exact}
_MIB = 1 << 20
_CHUNK = {"exact": 64 << 20}
_handles: weakref.WeakSet[ReleaseHandle] = weakref.WeakSet()


def release(
    model: nn.Module, optimizer: Optimizer, mode: str = "exact", *, clip: float | None = None, accumulation: int = 1,
    accumulate: str | None = None, gate: bool = False, clip_by: str = "parameter", keep: torch.dtype | None = None,
    chunk_bytes: int | None = None,
) -> ReleaseHandle:  # fmt: skip
    """Free each gradient as early as a mode allows; `handle.step()` then takes the place of `optimizer.step()`.

    Optimizer, state, schedulers and `state_dict` stay the caller's own. Gradients are None after a step.

    Args:
        model: whose forward is run; wrapped already, if it is to be wrapped.
        optimizer: a torch optimizer whose state belongs to single parameters.
        mode: what is given for memory.

            - "fused": updates a parameter as soon as its gradient is there. No clipping. Bits of the ordinary loop.
            - "local_clip": the same after scaling by a norm known by then; other mathematics than global clipping.
            - "exact": keeps gradients to the end, clips by the global norm; saves what clipping and a foreach step
              allocate, and with `keep` half of float32 gradients. The ordinary loop.
            - "two_pass": forward and backward twice, by `handle.step(closure)`: the global norm, then clipped
              updates. Memory of "fused", result of "exact" if the forward is repeatable.
        clip: largest 2-norm, as in `torch.nn.utils.clip_grad_norm_`; None does not clip.
        accumulation: micro-batches (backward passes) a step.
        accumulate: how "fused" and "local_clip" take several of them: "buffer" sums gradients (float32 for narrower
            parameters) and updates within the last backward; "state" (fused; Adam, AdamW, SGD with momentum) adds
            each to the optimizer's state, which for Adam is other mathematics (AdamRule). With "exact", "buffer"
            sums those of narrower parameters in float32.
        gate: leave an update out if its gradients are not finite, decided on the device: all parameters in "exact"
            and "two_pass", each parameter for itself in the others. `handle.skipped` counts.
        clip_by: norm for "local_clip": "parameter" or "running" (see LocalClip).
        keep: "exact" keeps gradients of wider parameters in this type: torch.bfloat16 loses nothing of gradients
            that come from one use under bfloat16 autocast, and rounds others.
        chunk_bytes: so many bytes of gradients are updated at a time: by default 64 MiB in "exact", and 1 MiB in the
            other modes, where small gradients wait for each other; 1 updates each parameter alone.

    Returns:
        The handle, to be closed or kept: when it is garbage, training is ordinary again.

    Raises ValueError for combinations that cannot do what they say; the message names what can.
    """
    chunk = _CHUNK.get(mode, 1 << 20) if chunk_bytes is None else chunk_bytes
    options = Options(
        mode, clip, clip_by, accumulation, accumulate, gate, keep, chunk, reduced_later=is_ddp(model)
    )
    check_options(options)
    check_model(model, options)
    if gate:
        check_gate(optimizer)
    return ReleaseHandle(model, optimizer, options)


class ReleaseHandle:
    """Takes the steps of a released optimizer; made by `release`. Also a context manager that closes.

    Args:
        model, optimizer: as for `release`.
        options: checked already.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, options: Options) -> None:
        named = list(_named(model, optimizer))
        check_parameters(((name, p) for name, _, p in named), {i for h in _handles for i in h._members})
        self._optimizer = optimizer
        self._options = options
        self._members: list[int] = [id(p) for _, _, p in named]
        self._slots = [Slot(name, p, group) for name, group, p in named if p.requires_grad]
        self._ledger = Ledger()
        self._updater = Updater(optimizer, options.gate, options.chunk_bytes)
        self._mode = _mode(model, options, self._slots, self._updater, self._ledger)
        self._watch = BackwardWatch()
        self._steps = self._in_backward = self._at_step = 0
        self._stepping = self._failed = self._closed = False
        self._remove = weakref.finalize(self, _remove, self._hooks(model))
        self._remove.atexit = False
        _handles.add(self)

    @property
    def norm(self) -> Tensor | None:
        """2-norm of the last step's gradients before clipping, a scalar on the device; None if not computed."""
        return self._mode.norm

    @property
    def skipped(self) -> Tensor | None:
        """Updates that the gate left out, an int64 scalar on the device; None before the first gated one."""
        return self._updater.skipped

    @property
    def drift(self) -> Tensor | None:
        """Relative difference of the two norms of "two_pass", a scalar on the device; None in other modes."""
        return self._mode.drift if isinstance(self._mode, TwoPass) else None

    @property
    def broken(self) -> bool:
        """Whether a backward or a step stopped in the middle; `reset` ends that."""
        return bool(self._failed or self._watch.open)

    def step(self, closure: Closure | None = None) -> Any:
        """End the step: update what is left, free every gradient.

        Args:
            closure: runs forward and backward and returns the loss; only "two_pass" needs it, and calls it twice.
                It reads the same batch both times and does not call `zero_grad`.

        Returns:
            What `closure` returned, or None.

        Raises ReleaseError if a backward did not end, if a gradient did not come through autograd, or, after the
        step is complete, if something still holds a gradient.
        """
        self._require_usable()
        self._stepping = True
        try:
            loss = self._step(closure)
        except BaseException:
            self._failed = True
            raise
        finally:
            self._stepping = False
        self._require_freed()
        return loss

    def reset(self) -> None:
        """Give up the step that has begun: drop its gradients; what was updated already stays so."""
        for slot in self._slots:
            slot.reset()
        self._mode.reset()
        self._watch.open.clear()
        self._ledger.forget()
        self._failed = False

    def close(self) -> None:
        """Remove the hooks; training is ordinary again. Gradients kept in other types are dropped."""
        self._closed = True
        self._remove()
        _handles.discard(self)
        for slot in self._slots:
            slot.buffer = None

    def stats(self) -> ReleaseStats:
        """A snapshot; see ReleaseStats."""
        self._ledger.live()
        return ReleaseStats(
            mode=self._options.mode,
            parameters=len(self._slots),
            steps=self._steps,
            in_backward=self._in_backward,
            at_step=self._at_step,
            planned_bytes=self._mode.planned_bytes(),
            peak_bytes=self._ledger.peak,
            live_bytes=self._ledger.nbytes,
        )

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs besides the optimizer's own state: the norm for clip_by="running"."""
        return self._mode.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave."""
        self._mode.load_state_dict(state)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hooks(self, model: nn.Module) -> list[Any]:
        this = weakref.ref(self)
        hooks: list[Any] = [
            slot.param.register_post_accumulate_grad_hook(functools.partial(_on_gradient, this, slot))
            for slot in self._slots
        ]
        hooks.append(self._optimizer.register_step_pre_hook(functools.partial(_on_step, this)))
        if self._options.mode != "exact" and dist.is_available() and dist.is_initialized():
            hooks.append(model.register_forward_pre_hook(functools.partial(_on_forward, self._options.mode)))
        return hooks

    def _gradient(self, slot: Slot) -> None:
        self._watch.enter()
        _require_plain(slot)
        slot.seen += 1
        with torch.no_grad():
            self._ledger.add(slot.name, slot.grad, stays=self._mode.stays(slot))
            self._mode.gradient(slot)

    def _step(self, closure: Closure | None) -> Any:
        if isinstance(self._mode, TwoPass):
            loss = self._mode.run(closure)
        else:
            loss = call(closure) if closure is not None else None
            self._require_whole()
        self._in_backward = sum(slot.updated for slot in self._slots)
        with torch.no_grad():
            self._mode.finish()
        self._at_step = sum(slot.updated for slot in self._slots) - self._in_backward
        self._optimizer.step()  # finds no gradient: for the caller's hooks, and the count of schedulers
        for slot in self._slots:
            slot.seen, slot.updated, slot.norm = 0, False, None
        self._steps += 1
        return loss

    def _require_usable(self) -> None:
        if self._closed:
            raise ReleaseError("this handle is closed: optimizer.step() works as before, or release() again")
        if self.broken:
            raise ReleaseError(self._what_broke())
        now = [id(p) for group in self._optimizer.param_groups for p in group["params"]]
        if now != self._members:
            raise ReleaseError(
                "the optimizer's parameters are others than at release(): close() and release() again"
            )

    def _require_whole(self) -> None:
        """All gradients came by the hooks, of backward passes that ended."""
        if self._watch.open:
            raise ReleaseError(self._what_broke())
        known = {id(slot.param) for slot in self._slots if slot.seen}
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        strange = [p for p in params if p.grad is not None and id(p) not in known]
        if strange and not self._options.reduced_later:
            names = {id(slot.param): slot.name for slot in self._slots}
            name = names.get(id(strange[0]), "a parameter that was frozen at release()")
            raise ReleaseError(
                f"{name} has a gradient that no backward announced: a CUDA graph that accumulates by itself, or an "
                "assignment to .grad. Take ordinary optimizer steps there, or release() after parameters are thawed"
            )

    def _require_freed(self) -> None:
        live = [] if self._options.reduced_later else self._ledger.live()
        self._ledger.forget()
        if live:
            names = ", ".join(f"{e.name} ({e.nbytes / _MIB:.1f} MiB)" for e in live[:4])
            more = f" and {len(live) - 4} more" if len(live) > 4 else ""
            raise ReleaseError(
                f"the step is done, but something still holds the gradients of {names}{more}: keep p.grad.clone(), "
                "not p.grad or views of it"
            )

    def _what_broke(self) -> str:
        updated = sum(slot.updated for slot in self._slots)
        if self._mode.in_place and (updated or self._options.accumulate == "state"):
            state = (
                f"{updated} of {len(self._slots)} parameters were updated: load a checkpoint, or accept that"
            )
        else:
            state = "no parameter was updated: repeat the step"
        return f"a backward or a step stopped in the middle; {state}, after handle.reset()"


def _mode(model: nn.Module, options: Options, slots: list[Slot], updater: Updater, ledger: Ledger) -> Mode:
    if options.mode == "two_pass":
        passes = Passes(model, (slot.param.device for slot in slots))
        return TwoPass(passes, options, slots, updater, ledger)
    kind = StateAccumulation if options.accumulate == "state" else _MODES[options.mode]
    return kind(options, slots, updater, ledger)


def _on_gradient(this: weakref.ref[ReleaseHandle], slot: Slot, param: Tensor) -> None:
    handle = this()
    if handle is not None:
        handle._gradient(slot)


def _on_step(this: weakref.ref[ReleaseHandle], *_: Any) -> None:
    handle = this()
    if handle is not None and not handle._stepping:
        raise ReleaseError(
            "optimizer.step() (or GradScaler.step) on a released optimizer: call handle.step(). With a GradScaler, "
            "mode 'exact': scaler.unscale_(optimizer), handle.step() with gate=True, scaler.update()"
        )


def _on_forward(mode: str, model: nn.Module, _: Any) -> None:
    if not torch.compiler.is_compiling():  # a compiled forward has no room for a look at other modules
        refuse_inside_ddp(model, mode)


def _require_plain(slot: Slot) -> None:
    if slot.param.grad is None:
        raise ReleaseError(f"the gradient of {slot.name} was freed by another hook")
    if slot.param.grad.layout is not torch.strided:
        raise ReleaseError(
            f"the gradient of {slot.name} is {slot.param.grad.layout}: construct Embedding with sparse=False"
        )
    if slot.param.grad.requires_grad:
        raise ReleaseError(
            f"the gradient of {slot.name} has a graph: create_graph=True keeps what release would free"
        )


def _named(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, int, Tensor]]:
    """(name, number of the param group, parameter) in the order of the optimizer."""
    names = {id(p): name for name, p in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            yield names.get(id(p), f"param_groups[{number}]['params'][{i}]"), number, p


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
