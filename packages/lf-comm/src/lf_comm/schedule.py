"""Buckets of DistributedDataParallel from measured times: a few steps are timed, planned for, tried, and agreed.

    def run(model):                              # forward and backward of one batch, as in training
        loss(model(batch)).backward()

    plan = lf_comm.plan_buckets(module, run)     # every rank, before DDP
    ddp = DistributedDataParallel(module, **plan.ddp_options())
    print(plan)                                  # buckets, when their sums go, what is exposed, and why

All ranks adopt the plan of rank 0. It is left for DDP's defaults when a trial on the same ranks shows no gain.
"""

from __future__ import annotations

import gc
import inspect
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lf_comm._buckets import Profile, Wire
from lf_comm._channel import Channel
from lf_comm._plan import BucketPlan, Measured, decide, default_plan, make_plan
from lf_comm._text import text_of
from lf_comm._timer import BackwardTimer, OrderChangedError, ScheduleError
from lf_comm.cost import Rates, measure_rates

_LEVERS = ("bucket_cap_mb_list", "bucket_cap_mb")
_TRIALS = 2  # times two rounds with the defaults and two as planned
_WARM = 2  # steps of a new DDP that are not timed: it makes its buckets anew after the first

Run = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Exposed:
    """Median seconds of a step of the slowest rank, with sums and without."""

    step_s: float
    compute_s: float

    @property
    def exposed_s(self) -> float:
        """Communication that no computation hides."""
        return max(0.0, self.step_s - self.compute_s)


def supported_levers() -> tuple[str, ...]:
    """Which arguments for bucket sizes this torch's DistributedDataParallel takes, best first."""
    taken = inspect.signature(DistributedDataParallel.__init__).parameters
    return tuple(lever for lever in _LEVERS if lever in taken)


def plan_buckets(
    module: nn.Module,
    run: Run,
    group: dist.ProcessGroup | None = None,
    *,
    ddp_options: Mapping[str, Any] | None = None,
    rates: Rates | None = None,
    steps: int = 5,
    trial_steps: int = 3,
) -> BucketPlan:
    """Time `run` on the plain module, plan its buckets, and try them beside DDP's defaults. All ranks call it.

    module: as DDP will get it, not wrapped yet. run: forward and backward of one batch through the module it is given;
    no optimizer. ddp_options: of the DDP to come (find_unused_parameters, static_graph...), which trials use too.
    rates: of the group; None: measured, about a second. steps: that are timed, behind one that is not.
    trial_steps: timed in each of four rounds as planned and four with the defaults, in turns, each behind two that are
        not; 0: no trial, the prediction decides.

    Gradients, buffers and torch's random state are afterwards what they were; with a trial, parameters are those of
    rank 0, as DDP makes them anyway. Raises OrderChangedError, on all ranks, when gradients do not come in one order on
    all ranks and in all steps; ScheduleError when no parameter needs a gradient or another rank failed before.
    """
    options = dict(ddp_options or {})
    if given := sorted(set(options) & {*_LEVERS, "process_group", "module"}):
        raise ValueError(f"ddp_options: {given[0]} is what is planned, or has an argument of its own here")
    if steps < 1 or trial_steps < 0:
        raise ValueError(f"steps={steps}, trial_steps={trial_steps}: at least 1 and 0 are wanted")
    if isinstance(module, DistributedDataParallel):
        raise TypeError(
            "a module that DDP has not wrapped yet is wanted: its buckets are made when it is wrapped"
        )
    channel = Channel(group)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    unused, static = bool(options.get("find_unused_parameters")), bool(options.get("static_graph"))
    with _untouched(module):
        mine, problem = _measured(module, run, steps, unused)
        profile = _merged(mine, problem, channel, device, find_unused=unused)
        wire = Wire(0.0, 0.0)
        if channel.size > 1:
            wire = Wire.of(rates or measure_rates(group, device), channel.size)
        plan = make_plan(profile, wire, rebuilt=static or not unused, levers=supported_levers())
        plan = _adopted(plan, channel, device)
        if plan.lever == "default" or not trial_steps:
            return plan
        default = default_plan(profile, wire, rebuilt=static or not unused)
        tried = _trial(module, run, plan, options, channel, device, trial_steps)
        chosen = decide(plan, default, tried)
        return _adopted(chosen, channel, device)


def measure_exposed(
    ddp: DistributedDataParallel, run: Run, steps: int = 10, group: dist.ProcessGroup | None = None
) -> Exposed:
    """Time steps with and without sums, in turns; all ranks. run: as for :func:`plan_buckets`, given `ddp`.

    Gradients are afterwards what they were; buffers and random state are not. Raises ScheduleError with static_graph,
    which knows no step without sums.
    """
    if ddp.static_graph:
        raise ScheduleError("with static_graph DDP has no step without sums (no_sync): measure it without")
    channel = Channel(group or ddp.process_group)
    device = next(ddp.parameters()).device
    held = _gradients(ddp)
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(_WARM + steps):
        for seconds, without in zip(found, (False, True), strict=True):
            _clear(ddp)
            took = _step(run, ddp, channel, device, ddp.no_sync() if without else nullcontext())
            if number >= _WARM:
                seconds.append(took)
    _restore(held)
    step_s, compute_s = (statistics.median(_slowest(s, channel, device)) for s in found)
    return Exposed(step_s, compute_s)


def _measured(
    module: nn.Module, run: Run, steps: int, unused: bool
) -> tuple[Profile | None, Exception | None]:
    """This rank's profile, or why it has none. Nothing is sent."""
    try:
        timer = BackwardTimer(module)
        for _ in range(steps + 1):
            _clear(module)
            with timer.step():
                run(module)
        return timer.profile(find_unused=unused), None
    except Exception as error:  # told to all ranks before it is raised, as they would wait
        return None, error


def _merged(
    mine: Profile | None,
    problem: Exception | None,
    channel: Channel,
    device: torch.device,
    *,
    find_unused: bool,
) -> Profile:
    """The slowest rank's times, on all ranks, after all have told whether they failed and in which order they go."""
    failed = channel.all_gather(torch.tensor([problem is not None], device=device)).flatten().tolist()
    if problem is not None:
        raise problem
    if any(failed):
        raise ScheduleError(f"rank {failed.index(True)} failed before its plan; its own error says why")
    assert mine is not None
    names = [mine.gradients[i].name for i in mine.arrival]
    # with find_unused_parameters buckets are cut as parameters are defined, and ranks may use different ones
    told = sorted(names) if find_unused else names
    theirs: list[str] = json.loads(text_of(0, json.dumps(told), channel, device))
    pairs = zip(told, theirs, strict=False)
    apart = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(told), len(theirs)))
    place = apart if told != theirs else -1
    places = channel.all_gather(torch.tensor([place], device=device)).flatten().tolist()
    if odd := [rank for rank, at in enumerate(places) if at >= 0]:
        first = places[odd[0]]
        name = theirs[first] if first < len(theirs) else f"parameter {first}"
        raise OrderChangedError(name, f"rank {odd[0]}", "its gradient comes at another place than on rank 0")
    times = [(g.ready_s, g.use_s, float(g.nbytes)) for g in mine.gradients]
    held = torch.tensor([*times, (mine.forward_s, mine.backward_s, 0.0)], dtype=torch.float64, device=device)
    if channel.size > 1:
        channel.all_reduce(held, dist.ReduceOp.MAX)
    *of, (forward, backward, _) = held.tolist()
    gradients = tuple(
        replace(g, ready_s=ready, use_s=use, nbytes=int(nbytes))
        for g, (ready, use, nbytes) in zip(mine.gradients, of, strict=True)
    )
    return Profile(gradients, mine.arrival, forward, backward)


def _adopted(plan: BucketPlan, channel: Channel, device: torch.device) -> BucketPlan:
    """Rank 0's."""
    return BucketPlan.from_json(text_of(0, plan.to_json(), channel, device))


def _trial(
    module: nn.Module,
    run: Run,
    plan: BucketPlan,
    options: Mapping[str, Any],
    channel: Channel,
    device: torch.device,
    steps: int,
) -> Measured:
    """Steps without sums, with defaults and as planned, in rounds whose order a drift does not favour."""
    compute: list[float] = []
    seconds: dict[str, list[list[float]]] = {"default": [], "planned": []}
    for kind in ("default", "planned", "planned", "default") * _TRIALS:
        _clear(module)
        compute.append(_step(run, module, channel, device, nullcontext()))
        caps = plan.ddp_options() if kind == "planned" else {}
        ddp = DistributedDataParallel(module, process_group=channel.group, **options, **caps)
        took = []
        for _ in range(_WARM + steps):
            _clear(module)
            took.append(_step(run, ddp, channel, device, nullcontext()))
        seconds[kind].append(_slowest(took[_WARM:], channel, device))
        del ddp
        gc.collect()  # its reducer takes its hooks off the parameters when it goes
    return Measured.of(_slowest(compute, channel, device), seconds["default"], seconds["planned"])


def _step(
    run: Run,
    model: nn.Module,
    channel: Channel,
    device: torch.device,
    context: AbstractContextManager[None],
) -> float:
    """Seconds of one step on this rank; all ranks begin together."""
    token = torch.zeros(1, device=device)
    channel.all_reduce(token)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    with context:
        run(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _slowest(seconds: list[float], channel: Channel, device: torch.device) -> list[float]:
    held = torch.tensor(seconds, dtype=torch.float64, device=device)
    if channel.size > 1:
        channel.all_reduce(held, dist.ReduceOp.MAX)
    found: list[float] = held.tolist()
    return found


def _gradients(module: nn.Module) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
    return [(p, p.grad) for p in module.parameters()]


def _restore(held: list[tuple[nn.Parameter, torch.Tensor | None]]) -> None:
    for parameter, gradient in held:
        parameter.grad = gradient


def _clear(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Afterwards gradients, buffers and torch's random state are as before."""
    gradients = _gradients(module)
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        _restore(gradients)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
