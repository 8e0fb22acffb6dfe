"""When each gradient of a backward pass is there, and each parameter of a forward pass is used.

    timer = BackwardTimer(module)               # the plain module, before DDP
    for batch in few:
        with timer.step():
            loss(module(batch)).backward()
    profile = timer.profile()

Times are of the host, or with parameters on CUDA of events in the current stream.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lf_comm._buckets import Gradient, Profile
from lf_comm._errors import CommError

Mark: TypeAlias = "float | torch.cuda.Event"


class ScheduleError(CommError, RuntimeError):
    """Base of what planning of buckets raises."""


class OrderChangedError(ScheduleError):
    """Gradients do not come in one order: no buckets fit. parameter: the first that is elsewhere; where: which step or
    rank has another order."""

    def __init__(self, parameter: str, where: str, why: str) -> None:
        self.parameter, self.where, self.why = parameter, where, why
        super().__init__(
            f"{parameter}: {why} in {where}; buckets are planned for one order only. Plan with DDP's defaults, or give "
            "`run` batches that take the same way through the model on every rank"
        )

    def __reduce__(self) -> tuple[type[OrderChangedError], tuple[str, str, str]]:
        return OrderChangedError, (self.parameter, self.where, self.why)


@dataclass
class _Step:
    """Marks of one step. ready is ordered by arrival."""

    began: Mark
    forward_end: Mark | None = None
    ended: Mark | None = None
    used: dict[str, Mark] = field(default_factory=dict)
    about: dict[str, Mark] = field(
        default_factory=dict
    )  # of what is used without its own module's being called
    ready: dict[str, Mark] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)

    def use_s(self, name: str) -> float:
        """Of a parameter; 0.0, the earliest there is, when no module that holds it began."""
        return _seconds(self.began, self.used.get(name, self.about.get(name, self.began)))


class BackwardTimer:
    """Of one module's parameters that need gradients, without those DDP is told to ignore."""

    def __init__(self, module: nn.Module) -> None:
        """Raises ScheduleError when no parameter needs a gradient."""
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._module = module
        self._named = {n: p for n, p in module.named_parameters() if p.requires_grad and n not in ignored}
        if not self._named:
            raise ScheduleError("no parameter needs a gradient, so there is nothing to sum")
        self._cuda = any(p.is_cuda for p in self._named.values())
        self._sparse = {
            id(m.weight)
            for m in module.modules()
            if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
        }
        self._steps: list[_Step] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """One forward and backward pass of the module. Hooks are there only within; not counted when it raises."""
        found = _Step(self._mark())
        names = {id(p): n for n, p in self._named.items()}
        with ExitStack() as hooks:
            for module in self._module.modules():
                own = {names[id(p)] for p in module.parameters(recurse=False) if id(p) in names}
                within = [names[id(p)] for p in module.parameters() if id(p) in names]
                if within:
                    begin = partial(self._use, found, own, within)
                    hooks.callback(module.register_forward_pre_hook(begin).remove)
            hooks.callback(self._module.register_forward_hook(lambda m, a, o: self._forward(found)).remove)
            for name, parameter in self._named.items():
                arrived = parameter.register_post_accumulate_grad_hook(
                    lambda p, n=name: self._arrive(found, n, p)
                )
                hooks.callback(arrived.remove)
            yield
        found.ended = self._mark()
        if found.forward_end is None:
            raise ScheduleError("the step did not call the module that is timed: call what `run` is given")
        self._steps.append(found)

    def profile(self, *, find_unused: bool = False) -> Profile:
        """Medians over all steps but the first.

        find_unused: as DDP's find_unused_parameters; steps may leave out parameters then, and the latest time counts.
        Raises OrderChangedError when steps have another order, ScheduleError without steps.
        """
        if not self._steps:
            raise ScheduleError("no step was timed")
        if self._cuda:
            torch.cuda.synchronize()
        where = [f"step {i}" for i in range(len(self._steps))]
        same_order([list(step.ready) for step in self._steps], where, find_unused)
        steps = self._steps[1:] or self._steps
        backward = statistics.median(_seconds(s.forward_end, s.ended) for s in steps)
        forward = statistics.median(_seconds(s.began, s.forward_end) for s in steps)
        arrived = sorted(self._named, key=lambda name: self._place(name))
        late, times = 0.0, {}
        for name in arrived:
            had = [_seconds(s.forward_end, s.ready[name]) for s in steps if name in s.ready]
            # DDP counts unused ones as there when the backward pass begins, if it looks for them
            at = (
                (max(had) if find_unused else statistics.median(had))
                if had
                else (0.0 if find_unused else backward)
            )
            times[name] = at if find_unused else (late := max(late, at))
        index = {name: i for i, name in enumerate(self._named)}
        gradients = tuple(
            Gradient(
                name,
                next((s.nbytes[name] for s in steps if name in s.nbytes), parameter.nbytes),
                times[name],
                min(step.use_s(name) for step in steps),
                f"{parameter.dtype} {parameter.device}",
                id(parameter) in self._sparse,
            )
            for name, parameter in self._named.items()
        )
        return Profile(gradients, tuple(index[name] for name in arrived), forward, max(backward, late))

    def _place(self, name: str) -> tuple[int, int]:
        """Where a gradient comes, by the step that has most gradients; unused ones last."""
        order = list(max(self._steps, key=lambda s: len(s.ready)).ready)
        return (0, order.index(name)) if name in order else (1, list(self._named).index(name))

    def _mark(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _use(self, found: _Step, own: set[str], within: Sequence[str], *_: object) -> None:
        """A module begins: its own parameters are used; those within may be, and a later, inner module knows better."""
        mark = self._mark()
        for name in within:
            if name not in found.used:
                (found.used if name in own else found.about)[name] = mark

    def _forward(self, found: _Step) -> None:
        found.forward_end = self._mark()

    def _arrive(self, found: _Step, name: str, parameter: Tensor) -> None:
        found.ready.pop(name, None)  # the last time counts, where a checkpoint adds up in several passes
        found.ready[name] = self._mark()
        gradient: Any = parameter.grad
        if gradient is not None and gradient.is_sparse:
            found.nbytes[name] = gradient._values().nbytes


def same_order(orders: Sequence[Sequence[str]], where: Sequence[str], find_unused: bool) -> None:
    """Raise OrderChangedError unless all orders are the same, or with find_unused agree about what they share."""
    seen = [set(order) for order in orders]
    for i in range(1, len(orders)):
        if not find_unused and (odd := sorted(seen[0] ^ seen[i])):
            missing = where[i] if odd[0] in seen[0] else where[0]
            raise OrderChangedError(
                odd[0], missing, "has no gradient (find_unused_parameters=True allows it)"
            )
        for j in range(i):
            shared = seen[i] & seen[j]
            pairs = zip(*([n for n in orders[k] if n in shared] for k in (j, i)), strict=True)
            if different := next((a for a, b in pairs if a != b), None):
                raise OrderChangedError(
                    different, where[i], f"its gradient comes at another place than in {where[j]}"
                )


def _seconds(begin: Mark | None, end: Mark | None) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return max(0.0, float(begin.elapsed_time(end)) / 1e3)
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return max(0.0, end - begin)
