"""All trainable parameters of an Adam optimizer in flat buffers: fp32 masters, both moments and a bf16
shadow.

The layout is pure data (:func:`plan_layout`, :func:`cut_chunks`); :class:`FlatParameters` makes it real. The
model keeps its ``Parameter`` objects and the optimizer its state dictionary; both become views of the flat
buffers, so checkpoints written and read by plain PyTorch code stay valid.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lf_graph._errors import AddressError, GraphError

# Bytes. The widest vector load is 16, a DRAM burst 64; cuBLAS is fastest from 256.
ALIGNMENT = 256
CHUNK_COLUMNS = 5  # tensor index, start within the tensor, master offset, shadow offset or -1, length
REFUSED = ("amsgrad", "maximize", "differentiable")
_STATE = ("step", "exp_avg", "exp_avg_sq")
_NOTHING: dict[str, Any] = {}


class OptimizerError(GraphError):
    """An optimizer, parameter or gradient that the flat AdamW cannot take.

    Attributes:
        subject: the parameter or option at fault.
        why: the reason.
        fix: what to do instead.
    """

    def __init__(self, subject: str, why: str, fix: str) -> None:
        self.subject, self.why, self.fix = subject, why, fix
        super().__init__(f"{subject}: {why}; {fix}")


@dataclass(frozen=True)
class Request:
    """One parameter to lay out: its name, parameter group, shape, and whether it gets a bf16 shadow."""

    name: str
    group: int
    shape: tuple[int, ...]
    shadowed: bool


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies. Offsets count elements of the buffer, not bytes.

    Attributes:
        offset: start in the fp32 buffers (master, exp_avg, exp_avg_sq).
        shadow_offset: start in the bf16 buffer, or -1 without a shadow.
    """

    name: str
    group: int
    shape: tuple[int, ...]
    numel: int
    offset: int
    shadow_offset: int

    def view(self, buffer: Tensor) -> Tensor:
        """This parameter's part of an fp32 buffer, in its shape, contiguous."""
        return buffer[self.offset : self.offset + self.numel].view(self.shape)

    def shadow_view(self, shadow: Tensor) -> Tensor:
        """This parameter's part of the bf16 buffer, in its shape, contiguous."""
        return shadow[self.shadow_offset : self.shadow_offset + self.numel].view(self.shape)


@dataclass(frozen=True)
class Layout:
    """Slots in flat order, and how many elements the fp32 buffers and the bf16 buffer have."""

    slots: tuple[Slot, ...]
    elements: int
    shadow_elements: int


def _aligned(elements: int, itemsize: int) -> int:
    unit = ALIGNMENT // itemsize
    return -(-elements // unit) * unit


def plan_layout(requests: Iterable[Request]) -> Layout:
    """Offsets for every parameter, each a multiple of 256 bytes; the order is the order given."""
    slots, offset, shadow_offset = [], 0, 0
    for r in requests:
        numel = int(np.prod(r.shape, dtype=np.int64))
        slots.append(Slot(r.name, r.group, r.shape, numel, offset, shadow_offset if r.shadowed else -1))
        offset += _aligned(numel, 4)
        shadow_offset += _aligned(numel, 2) if r.shadowed else 0
    return Layout(tuple(slots), offset, shadow_offset)


def cut_chunks(layout: Layout, tensors: Sequence[int], length: int) -> npt.NDArray[np.int64]:
    """Cuts the named slots into pieces of at most ``length`` elements.

    Returns an int64 table [chunks, 5]: tensor index, start within the tensor, offset in the fp32 buffers,
    offset in the shadow (-1 without), elements. Every start is a multiple of ``length``, itself a multiple of
    128, so that each piece begins on a 256-byte boundary of every buffer.
    """
    if length < 128 or length % 128:
        raise ValueError(f"chunks of {length} elements: use a multiple of 128, so that pieces stay aligned")
    parts = [_pieces(i, layout.slots[i], length) for i in tensors]
    return np.concatenate([np.empty((0, CHUNK_COLUMNS), np.int64), *parts])


def _pieces(index: int, slot: Slot, length: int) -> npt.NDArray[np.int64]:
    start = np.arange(0, slot.numel, length, dtype=np.int64)
    shadow = start + slot.shadow_offset if slot.shadow_offset >= 0 else np.full_like(start, -1)
    left = np.minimum(length, slot.numel - start)
    return np.stack((np.full_like(start, index), start, start + slot.offset, shadow, left), axis=1)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises :class:`OptimizerError` unless this is a plain ``torch.optim.Adam`` or ``AdamW`` update."""
    adam = torch.optim.Adam, torch.optim.AdamW
    known = {inspect.unwrap(kind.step) for kind in adam}
    if not isinstance(optimizer, adam) or inspect.unwrap(type(optimizer).step) not in known:
        name = type(optimizer).__name__
        raise OptimizerError(
            name, "its update is not that of torch.optim.AdamW or Adam", "use one of these two"
        )
    for group in optimizer.param_groups:
        for option in REFUSED:
            if group.get(option):
                raise OptimizerError(
                    option, "the fused update does not have it", f"build it with {option}=False"
                )


def _check_parameter(name: str, p: Tensor, device: torch.device) -> None:
    if type(p.data) is not Tensor or p.layout is not torch.strided:
        kind = f"{type(p.data).__name__}, {p.layout}"
        raise OptimizerError(name, f"it is no plain dense tensor ({kind})", "keep it with its own optimizer")
    if p.device != device or p.device.type == "meta":
        raise OptimizerError(
            name, f"it lies on {p.device}, the others on {device}", "use one optimizer per device"
        )
    if p.dtype != torch.float32:
        fix = "call model.float() before the optimizer is built; its bf16 copy is the shadow"
        raise OptimizerError(name, f"it is {p.dtype}, and training keeps fp32 masters", fix)


@dataclass(frozen=True)
class _Member:
    name: str
    group: int
    parameter: Tensor


def _members(optimizer: torch.optim.Optimizer, names: Iterable[tuple[str, Tensor]]) -> list[_Member]:
    """Trainable parameters in the optimizer's order, each once; named by ``names``, else by the optimizer."""
    known, members, seen = {id(p): name for name, p in names}, [], set()
    for g, group in enumerate(optimizer.param_groups):
        own = group.get("param_names", [f"group {g} parameter {i}" for i in range(len(group["params"]))])
        for name, p in zip(own, group["params"], strict=True):
            if p.requires_grad and id(p) not in seen:
                seen.add(id(p))
                members.append(_Member(known.get(id(p), name), g, p))
    return members


def _check_members(members: Sequence[_Member], shadowed: set[int]) -> None:
    if not members:
        raise OptimizerError(
            "optimizer", "it has no trainable parameter", "give it parameters that require grad"
        )
    owners: dict[int, str] = {}
    for member in members:
        p = member.parameter
        _check_parameter(member.name, p, members[0].parameter.device)
        other = owners.setdefault(p.data_ptr(), member.name) if p.numel() else member.name
        if other != member.name:
            fix = "tie weights by assigning the same Parameter object to both modules"
            raise OptimizerError(
                member.name, f"it shares its memory with {other} but is another Parameter", fix
            )
    missing = len(shadowed - {id(m.parameter) for m in members})
    if missing:
        fix = "pass trainable parameters of this optimizer only; cast frozen ones once"
        raise OptimizerError("shadowed", f"{missing} of them are not trained by the optimizer", fix)


def _fill(view: Tensor, value: Any, what: str) -> None:
    if not isinstance(value, Tensor):
        view.fill_(value)
    elif value.shape != view.shape:
        why = f"its shape is {list(value.shape)}, the parameter has {list(view.shape)}"
        raise OptimizerError(what, why, "load the state of a model of the same shapes")
    else:
        view.copy_(value)


class FlatParameters:
    """Flat buffers behind a model and its Adam or AdamW optimizer.

    Every trainable parameter of every group is laid out once (tied weights share one place). ``p.data``
    becomes a view of ``master`` with the same values, ``optimizer.state[p]`` holds views of ``exp_avg``,
    ``exp_avg_sq`` and ``steps``, so that ``state_dict()`` and ``load_state_dict()`` of both go on working;
    existing state is kept.

    Args:
        optimizer: ``torch.optim.AdamW`` or ``Adam``; parameters fp32, dense, on one device.
        shadowed: parameters that get a bf16 copy, written by the optimizer and read by the forward.
        names: ``model.named_parameters()``, for messages; without it the optimizer's own names are used.

    Attributes:
        layout: where every parameter lies.
        parameters: the ``Parameter`` objects in flat order.
        master, exp_avg, exp_avg_sq: fp32 [layout.elements]; gaps between parameters are zeros.
        shadow: bf16 [layout.shadow_elements].
        steps: fp32 [parameters], how many updates each parameter has seen.

    Raises:
        OptimizerError: for amsgrad, maximize, differentiable, another update rule, or a parameter that is
            sparse, not fp32, a subclass such as DTensor, or on another device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shadowed: Iterable[Tensor] = (),
        *,
        names: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        check_optimizer(optimizer)
        wanted = {id(p) for p in shadowed}
        members = _members(optimizer, names)
        _check_members(members, wanted)
        self.optimizer = optimizer
        self.parameters = tuple(m.parameter for m in members)
        self.layout = plan_layout(
            Request(m.name, m.group, tuple(m.parameter.shape), id(m.parameter) in wanted) for m in members
        )
        self._allocate(self.parameters[0].device)
        self._attach_parameters()
        self._adopt_state()
        self.refresh_shadow()
        self._hooks = (
            optimizer.register_load_state_dict_post_hook(self._after_load),
            optimizer.register_step_post_hook(self._after_step),
        )

    def _allocate(self, device: torch.device) -> None:
        n = self.layout.elements
        self.master = torch.zeros(n, dtype=torch.float32, device=device)
        self.exp_avg = torch.zeros(n, dtype=torch.float32, device=device)
        self.exp_avg_sq = torch.zeros(n, dtype=torch.float32, device=device)
        self.shadow = torch.zeros(self.layout.shadow_elements, dtype=torch.bfloat16, device=device)
        self.steps = torch.zeros(len(self.parameters), dtype=torch.float32, device=device)
        slots = self.layout.slots
        self._masters = [s.view(self.master) for s in slots]
        self._states: list[dict[str, Tensor]] = [
            {"step": self.steps[i], "exp_avg": s.view(self.exp_avg), "exp_avg_sq": s.view(self.exp_avg_sq)}
            for i, s in enumerate(slots)
        ]
        shadowed = [i for i, s in enumerate(slots) if s.shadow_offset >= 0]
        self._shadows = {id(self.parameters[i]): slots[i].shadow_view(self.shadow) for i in shadowed}
        self._shadow_sources = [self._masters[i] for i in shadowed]

    def _attach_parameters(self) -> None:
        for p, view in zip(self.parameters, self._masters, strict=True):
            view.copy_(p.data)
            p.data = view
        self._addresses = [p.data_ptr() for p in self.parameters]
        self._index = {id(p): i for i, p in enumerate(self.parameters)}

    @torch.no_grad()
    def _adopt_state(self) -> None:
        """Copies the optimizer's state into the flat buffers (zeros where it has none) and puts views there."""
        for p, slot, views in zip(self.parameters, self.layout.slots, self._states, strict=True):
            old: dict[str, Any] = self.optimizer.state.get(p, {})
            for key, view in views.items():
                _fill(view, old.get(key, 0.0), f"{key} of {slot.name}")
            self.optimizer.state[p] = {**old, **views}

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer)
        self._adopt_state()
        self.refresh_shadow()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """torch's own ``optimizer.step()`` still works on the views; it knows nothing of the shadow."""
        self.refresh_shadow()

    def shadow_of(self, parameter: Tensor) -> Tensor:
        """The bf16 copy of a shadowed parameter, in its shape, at a fixed address; else a KeyError."""
        return self._shadows[id(parameter)]

    def has_shadow(self, parameter: Tensor) -> bool:
        """Whether this parameter has a bf16 copy."""
        return id(parameter) in self._shadows

    @torch.no_grad()
    def refresh_shadow(self) -> None:
        """Writes the bf16 copies anew; needed after something else than an optimizer changed the masters.

        Such as ``model.load_state_dict``, which copies into the views. One multi-tensor copy, no wait.
        """
        if self._shadows:
            torch._foreach_copy_(list(self._shadows.values()), self._shadow_sources)

    def verify_addresses(self) -> None:
        """Host-side check that the model and the optimizer still use the flat buffers; no device work.

        Raises:
            AddressError: names the parameter whose ``.data`` or optimizer state was replaced, or which was
            added later.
        """
        if list(map(Tensor.data_ptr, self.parameters)) != self._addresses:
            self._raise_moved()
        states = self.optimizer.state
        for p, views in zip(self.parameters, self._states, strict=True):
            held = states.get(p, _NOTHING)
            for key in _STATE:  # a plain loop: this runs before every step
                if held.get(key) is not views[key]:
                    self._raise_replaced(p, key)
        known = self._index
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad and id(p) not in known:
                    self._raise_added(p)

    def _raise_moved(self) -> None:
        for p, slot, address in zip(self.parameters, self.layout.slots, self._addresses, strict=True):
            if p.data_ptr() != address:
                fix = "change it in place, and move or convert the model before the first step"
                raise AddressError(f"the data of {slot.name} was replaced; {fix}")

    def _raise_replaced(self, p: Tensor, key: str) -> NoReturn:
        name = self.layout.slots[self._index[id(p)]].name
        raise AddressError(f"the optimizer's {key} of {name} was replaced; use optimizer.load_state_dict")

    def _raise_added(self, p: Tensor) -> NoReturn:
        name = next(m.name for m in _members(self.optimizer, ()) if m.parameter is p)
        why = "was added to the optimizer or unfrozen after the flat buffers were laid out"
        raise AddressError(f"{name} {why}; make a new TrainStep after that")

    def close(self) -> None:
        """Takes our hooks off the optimizer; parameters and state stay where they are."""
        for hook in self._hooks:
            hook.remove()
