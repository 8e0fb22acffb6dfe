"""Parameter gradients at planned offsets of one storage."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import nn

from ._errors import PlanError
from ._losses import Models, models_of, named_parameters
from ._offsets import aligned
from ._plan import Placement, Plan


@dataclass(frozen=True, eq=False)
class Bucket:
    """Complete gradients that lie side by side and are given up together.

    Attributes:
        parameters: by name, in the order their gradients were planned to be complete; each has its `.grad`.
        missing: names of those that got no gradient in this pass; theirs is zero.
        flat: all of them as one tensor of one dimension, zeros between them where they do not fill 128 bytes; None
            if their dtypes differ.
    """

    parameters: Mapping[str, nn.Parameter]
    missing: frozenset[str]
    flat: torch.Tensor | None


@dataclass(frozen=True)
class ArenaStats:
    """What an arena has done.

    Attributes:
        bytes: size of the storage.
        bound_bytes: no storage that holds what lives at one time could be smaller.
        gradient_bytes: bytes of all gradients, as if each had its own.
        live_bytes: of gradients in the arena now.
        peak_bytes: highest number of those.
        copies: gradients copied in; those of later micro-batches are added in place and not counted.
        buckets: buckets given up.
    """

    bytes: int
    bound_bytes: int
    gradient_bytes: int
    live_bytes: int
    peak_bytes: int
    copies: int
    buckets: int


@dataclass(eq=False)
class _Place:
    """One parameter's part of the arena."""

    name: str
    parameter: nn.Parameter
    view: torch.Tensor
    start: int
    end: int
    bucket: int
    live: bool = False


@dataclass(eq=False)
class _Group:
    """A bucket and the bytes from its first gradient to its last."""

    places: list[_Place] = field(default_factory=list)
    gaps: list[torch.Tensor] = field(default_factory=list)
    start: int = 0
    end: int = 0


class GradientArena:
    """Puts parameter gradients where a plan says, so that those that never live together share memory.

    In mode "fused" or "bucket" each bucket is handed to `consume` when its gradients are complete and then given up;
    `consume` may step an optimizer, or reduce `bucket.flat`. In mode "all-alive", and with accumulation, they stay, and
    `arena.flat` is all of them, for one reduction or one norm. Addresses never change, as graph capture needs.

    A gradient is copied in when it is complete and its own memory freed, so that one at a time exists twice. The arena
    saves no peak over giving gradients up without one; it makes buckets contiguous and ends fragmentation.

    All gradients must be made on one stream. A context manager; hooks are removed at its end.

    Args:
        plan: of `predict` for this very model.
        model: the module or modules whose parameters the plan names.
        consume: gets each bucket, while `.grad` of its parameters is set; required unless gradients are kept.

    Raises:
        PlanError: plan and model do not fit, or, from within a backward pass, gradients come in an order in which two
            would share memory. Call `reset()` after an error in a backward pass.
    """

    def __init__(self, plan: Plan, model: Models, consume: Callable[[Bucket], object] | None = None) -> None:
        self._keeps = plan.policy.keeps
        if consume is None and not self._keeps:
            raise PlanError(
                f"mode {plan.policy.mode!r} gives gradients up: say with consume= what becomes of them"
            )
        self._plan, self._consume = plan, consume
        parameters = dict(named_parameters(models_of(lambda: None, model)))
        _check_fit(plan, parameters)
        device = parameters[plan.placements[0].name].device if plan.placements else torch.device("cpu")
        self._storage = torch.zeros(plan.arena_bytes, dtype=torch.uint8, device=device)
        self._groups = self._make_groups(parameters)
        self._places = {place.name: place for group in self._groups for place in group.places}
        self._live_bytes = self._peak_bytes = self._copies = self._given_up = 0
        self._held: set[int] = set()  # buckets with a live gradient
        self._stream: object = None
        self._handles = [
            place.parameter.register_post_accumulate_grad_hook(self._hook(place))
            for place in self._places.values()
        ]

    @property
    def flat(self) -> torch.Tensor:
        """All gradients as one tensor of one dimension, zeros between them and where a parameter has none."""
        dtypes = {place.view.dtype for place in self._places.values()}
        if not self._keeps or len(dtypes) != 1:
            raise PlanError(
                "gradients that are given up, or differ in dtype, are never one tensor: use the buckets"
            )
        for place in self._places.values():
            if place.parameter.grad is not place.view:
                place.view.zero_()
        return self._storage.view(dtypes.pop())

    def flush(self) -> None:
        """To be called after each backward pass: buckets that are not complete are given up, zeros for what is missing.

        Only parameters without a gradient leave one incomplete. Nothing is left live unless gradients are kept.
        """
        self._stream = None
        for number in sorted(self._held) if not self._keeps else ():
            self._give_up(self._groups[number])

    def reset(self) -> None:
        """Drop every gradient in the arena, as after an exception in a backward pass."""
        for place in self._places.values():
            self._forget(place)
        self._held.clear()
        self._stream = None

    def stats(self) -> ArenaStats:
        """Sizes and counts."""
        return ArenaStats(
            bytes=self._storage.numel(),
            bound_bytes=self._plan.arena_bound_bytes,
            gradient_bytes=sum(one.nbytes for one in self._plan.placements),
            live_bytes=sum(p.end - p.start for p in self._places.values() if p.parameter.grad is p.view),
            peak_bytes=self._peak_bytes,
            copies=self._copies,
            buckets=self._given_up,
        )

    def close(self) -> None:
        """Remove the hooks and drop gradients in the arena; its memory is freed when no tensor refers to it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_groups(self, parameters: Mapping[str, nn.Parameter]) -> list[_Group]:
        placements = self._plan.placements
        groups = []
        for number, members in enumerate(self._plan.policy.buckets([one.nbytes for one in placements])):
            group = _Group()
            for one in placements[members.start : members.stop]:
                _check_offset(one, group.places[-1].end if group.places else None)
                view = self._view(one, parameters[one.name])
                end = one.offset + one.nbytes
                group.places.append(_Place(one.name, parameters[one.name], view, one.offset, end, number))
                group.gaps += [self._storage[end : aligned(end)]] * (aligned(end) > end)
            group.start, group.end = group.places[0].start, aligned(group.places[-1].end)
            groups.append(group)
        return groups

    def _view(self, one: Placement, parameter: nn.Parameter) -> torch.Tensor:
        """A view with the parameter's own strides, as AccumulateGrad wants it."""
        raw = self._storage[one.offset : one.offset + one.nbytes].view(parameter.dtype)
        return raw.as_strided(parameter.shape, parameter.stride(), raw.storage_offset())

    def _hook(self, place: _Place) -> Callable[[torch.Tensor], None]:
        return lambda _: self._complete(place)

    def _complete(self, place: _Place) -> None:
        gradient = place.parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise PlanError(f"the gradient of {place.name} is sparse: an arena holds dense ones")
        self._check_stream()
        if place.live and not self._keeps:
            raise PlanError(
                f"{place.name} has a gradient in the arena, and now another: call flush() after each backward pass, "
                "and reset() after one that failed"
            )
        if gradient is not place.view:
            self._check_free(place)
            place.view.copy_(gradient)
            place.parameter.grad = place.view
            self._copies += 1
        self._note_live(place)
        group = self._groups[place.bucket]
        if not self._keeps and all(one.live for one in group.places):
            self._give_up(group)

    def _note_live(self, place: _Place) -> None:
        self._held.add(place.bucket)
        if not place.live:
            place.live = True
            self._live_bytes += place.end - place.start
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)

    def _check_free(self, place: _Place) -> None:
        """The plan keeps buckets apart only if gradients come in the order it was made for."""
        mine = self._groups[place.bucket]
        for number in self._held - {place.bucket}:
            group = self._groups[number]
            if group.start < mine.end and mine.start < group.end:
                held = next(one.name for one in group.places if one.live)
                raise PlanError(
                    f"the gradient of {place.name} comes while that of {held}, planned at the same place, is needed: "
                    "the graph is not the planned one; make the plan anew and call reset()"
                )

    def _check_stream(self) -> None:
        """What one stream frees another may not reuse without waiting."""
        device = self._storage.device
        if device.type != "cpu":
            now = torch.get_device_module(device).current_stream(device)
            if self._stream is not None and self._stream != now:
                raise PlanError("gradients come on several streams: an arena needs a backward pass on one")
            self._stream = now

    def _give_up(self, group: _Group) -> None:
        assert self._consume is not None
        missing = [place for place in group.places if not place.live]
        for place in missing:
            self._check_free(place)
            place.view.zero_()
            place.parameter.grad = place.view
            self._note_live(place)
        for gap in group.gaps:
            gap.zero_()
        self._consume(self._bucket(group, frozenset(place.name for place in missing)))
        for place in group.places:
            self._forget(place)
        self._held.discard(group.places[0].bucket)
        self._given_up += 1

    def _bucket(self, group: _Group, missing: frozenset[str]) -> Bucket:
        dtypes = {place.view.dtype for place in group.places}
        flat = self._storage[group.start : group.end].view(dtypes.pop()) if len(dtypes) == 1 else None
        return Bucket({place.name: place.parameter for place in group.places}, missing, flat)

    def _forget(self, place: _Place) -> None:
        if place.live:
            place.live = False
            self._live_bytes -= place.end - place.start
        if place.parameter.grad is place.view:
            place.parameter.grad = None


def _check_fit(plan: Plan, parameters: Mapping[str, nn.Parameter]) -> None:
    devices = set()
    for one, parameter in _planned(plan, parameters):
        dense = torch.ops.aten.is_non_overlapping_and_dense.default(parameter)
        if parameter.nbytes != one.nbytes or not dense:
            raise PlanError(
                f"{one.name} takes {parameter.nbytes} bytes and its planned gradient {one.nbytes}: the plan is of "
                "another model, or the gradient is sparse"
            )
        devices.add(parameter.device)
    if len(devices) > 1:
        raise PlanError(f"the parameters are on {sorted(map(str, devices))}: an arena is on one device")


def _check_offset(one: Placement, before: int | None) -> None:
    """A bucket lies side by side, as `predict` lays it out; a file may say otherwise."""
    expected = one.offset if before is None else aligned(before)
    if one.offset != expected or one.offset != aligned(one.offset):
        raise PlanError(
            f"{one.name} is not at a multiple of 128 bytes next to its bucket: make the plan anew"
        )


def _planned(plan: Plan, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[Placement, nn.Parameter]]:
    for one in plan.placements:
        if one.name not in parameters:
            raise PlanError(f"the model has no parameter {one.name}: the plan is of another model")
        yield one, parameters[one.name]
