"""From a profile and rates to the options of DistributedDataParallel; pure functions over plain data."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from lf_comm._buckets import (
    DEFAULT_BYTES,
    FIRST_BYTES,
    Profile,
    Wire,
    cut,
    ddp_buckets,
    exposed,
    run_stream,
    stream_of,
)
from lf_comm._order import Job, order_by_deadline, stall

Lever: TypeAlias = Literal["bucket_cap_mb_list", "bucket_cap_mb", "default"]
_MIB = 1 << 20
_SWEEP = (1, 2, 4, 8, 16, 50, 100, 200)  # MiB of bucket_cap_mb, where DDP takes no list
# Neighbours make measured steps slower than they will be: a plan must also serve a quicker backward pass.
_SPEEDS = (1.0, 1.4, 2.0)
_GAIN = 0.01  # of the backward pass and its sums; less is no reason to leave DDP's defaults


@dataclass(frozen=True)
class PlannedBucket:
    """Seconds since the backward pass began, as predicted; due_s: of the first use, since a forward pass began."""

    names: tuple[str, ...]
    nbytes: int
    ready_s: float
    begin_s: float
    end_s: float
    due_s: float


@dataclass(frozen=True)
class Measured:
    """Seconds of steps on the slowest rank, medians: without sums, with DDP's defaults, and those less the gain of the
    planned buckets. noise_s: what gains differ by without a reason."""

    compute_s: float
    default_s: float
    planned_s: float
    noise_s: float

    @classmethod
    def of(
        cls, compute: Sequence[float], default: Sequence[Sequence[float]], planned: Sequence[Sequence[float]]
    ) -> Measured:
        """From seconds of steps; default and planned by round, rounds of one number measured next to each other.

        What neighbours do changes from round to round, so it is rounds that are compared: the noise is how far gains
        of rounds lie from their median, as a median, and at least 1 % of a step.
        """
        gains = [statistics.median(d) - statistics.median(p) for d, p in zip(default, planned, strict=True)]
        before = statistics.median(second for one in default for second in one)
        gain = statistics.median(gains)
        spread = statistics.median(
            abs(one - gain) for one in gains
        )  # one disturbed round of four does not count
        return cls(statistics.median(compute), before, before - gain, max(spread, _GAIN * before))


@dataclass(frozen=True)
class BucketPlan:
    """Buckets of one module; the same on all ranks. ``DistributedDataParallel(module, **plan.ddp_options())``.

    caps_mb: MiB, for the lever. exposed_s, default_exposed_s: of sums behind the backward pass, as predicted.
    order: of buckets when a forward pass waits for each by itself, which DDP cannot; order_stall_s and
    arrival_stall_s: seconds such a forward pass waits in that order, and in DDP's. measured: if it was tried.
    """

    lever: Lever
    caps_mb: tuple[float, ...]
    buckets: tuple[PlannedBucket, ...]
    backward_s: float
    exposed_s: float
    default_exposed_s: float
    order: tuple[int, ...]
    order_stall_s: float
    arrival_stall_s: float
    reason: str
    measured: Measured | None = None

    def ddp_options(self) -> dict[str, Any]:
        """Keyword arguments of DistributedDataParallel; empty for its defaults."""
        if self.lever == "bucket_cap_mb_list":
            return {self.lever: list(self.caps_mb)}
        return {self.lever: self.caps_mb[0]} if self.lever == "bucket_cap_mb" else {}

    def to_json(self) -> str:
        """With a version."""
        return json.dumps({"version": 1, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """What :meth:`to_json` wrote. ValueError for anything else."""
        try:
            found = json.loads(text)
            if found.pop("version") != 1 or found["lever"] not in get_args(Lever):
                raise ValueError("another version or lever")
            found["caps_mb"], found["order"] = (
                tuple(map(float, found["caps_mb"])),
                tuple(map(int, found["order"])),
            )
            found["buckets"] = tuple(
                PlannedBucket(**{**bucket, "names": tuple(bucket["names"])}) for bucket in found["buckets"]
            )
            found["measured"] = Measured(**found["measured"]) if found["measured"] else None
            return cls(**found)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"no plan of lf-comm: {error}") from error

    def __str__(self) -> str:
        lines = [
            f"{self.lever}: {self.reason}",
            "| bucket | MB | gradients | ready ms | sum ms | due ms |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {number} | {one.nbytes / 1e6:.2f} | {len(one.names)} | {1e3 * one.ready_s:.1f} | "
            f"{1e3 * one.begin_s:.1f} - {1e3 * one.end_s:.1f} | {1e3 * one.due_s:.1f} |"
            for number, one in enumerate(self.buckets)
        ]
        lines.append(
            f"backward {1e3 * self.backward_s:.1f} ms; exposed {1e3 * self.exposed_s:.1f} ms predicted, "
            f"{1e3 * self.default_exposed_s:.1f} ms with DDP's defaults"
        )
        lines.append(
            f"order by next use: a forward pass that waited by bucket would stall {1e3 * self.order_stall_s:.1f} ms "
            f"({1e3 * self.arrival_stall_s:.1f} ms in DDP's order); DDP waits for all buckets, so it is not applied"
        )
        if (m := self.measured) is not None:
            lines.append(
                f"measured step {1e3 * m.planned_s:.1f} ms planned, {1e3 * m.default_s:.1f} ms with DDP's defaults, "
                f"{1e3 * m.compute_s:.1f} ms without sums: exposed {1e3 * max(0.0, m.planned_s - m.compute_s):.1f} "
                f"and {1e3 * max(0.0, m.default_s - m.compute_s):.1f} ms"
            )
        return "\n".join(lines)


def make_plan(
    profile: Profile,
    wire: Wire,
    *,
    rebuilt: bool = True,
    levers: Sequence[str] = ("bucket_cap_mb_list", "bucket_cap_mb"),
) -> BucketPlan:
    """Buckets whose sums end first, of those that DDP can be told to make; its defaults unless 1 % is gained.

    Of the best cuts for the backward pass as measured, 1.4 and 2 times as quick, it is the one that exposes least more
    than the best of each, so that a measurement beside busy neighbours does no harm.

    rebuilt: whether DDP makes its buckets anew by arrival (not with find_unused_parameters). levers: which arguments
    this DDP takes. With gradients of several dtypes or devices the list is cut for the kind that has most bytes.
    """
    default = ddp_buckets(profile, (FIRST_BYTES, DEFAULT_BYTES), rebuilt=rebuilt)
    plain = exposed(profile, default, wire)
    profiles = [_at_speed(profile, speed) for speed in _SPEEDS]
    tried: list[tuple[Lever, list[int]]] = []
    if "bucket_cap_mb_list" in levers:
        cuts = [
            limits if rebuilt else limits[::-1] for p in profiles if (limits := cut(_sums(p, rebuilt), wire))
        ]
        tried = [("bucket_cap_mb_list", limits) for limits in cuts]
    elif "bucket_cap_mb" in levers:
        tried = [("bucket_cap_mb", [mib * _MIB]) for mib in _SWEEP]
    least = plain
    found: tuple[Lever, tuple[float, ...], list[list[int]]] = ("default", (), default)
    if tried:
        made = [ddp_buckets(profile, limits, rebuilt=rebuilt) for _, limits in tried]
        best = _least_regret([[exposed(p, buckets, wire) for p in profiles] for buckets in made])
        lever, limits = tried[best]
        least = exposed(profile, made[best], wire)
        found = (lever, tuple(limit / _MIB for limit in limits), made[best])  # exact: a power of two
    if plain - least <= _GAIN * (profile.backward_s + plain):
        return _planned(profile, wire, ("default", (), default), plain, _no_gain(tried, plain, least))
    reason = f"{1e3 * (plain - least):.1f} ms less are exposed than with DDP's defaults, as predicted"
    return _planned(profile, wire, found, plain, reason)


def decide(plan: BucketPlan, default: BucketPlan, measured: Measured) -> BucketPlan:
    """`plan` if its steps were faster than those with DDP's defaults by more than noise, else `default`."""
    gain = measured.default_s - measured.planned_s
    said = f"steps of {1e3 * measured.planned_s:.1f} ms measured, {1e3 * measured.default_s:.1f} ms with DDP's defaults"
    if gain > measured.noise_s:
        return replace(plan, measured=measured, reason=f"{plan.reason}; {said}")
    reason = f"planned buckets gained no more than noise ({1e3 * measured.noise_s:.1f} ms): {said}"
    return replace(default, measured=measured, reason=reason)


def _no_gain(tried: Sequence[object], plain: float, least: float) -> str:
    if plain == 0.0:
        return "DDP's defaults leave nothing exposed"
    if not tried:
        return "this DDP takes neither bucket_cap_mb_list nor bucket_cap_mb, or there is nothing to sum"
    return f"{1e3 * plain:.1f} ms are exposed with DDP's defaults, {1e3 * least:.1f} ms at best: less than 1 % to gain"


def _at_speed(profile: Profile, speed: float) -> Profile:
    gradients = tuple(replace(g, ready_s=g.ready_s / speed) for g in profile.gradients)
    return replace(profile, gradients=gradients, backward_s=profile.backward_s / speed)


def _least_regret(costs: Sequence[Sequence[float]]) -> int:
    """The row that lies least above the best of any column, in its worst column."""
    best = [min(column) for column in zip(*costs, strict=True)]
    worst = [max(cost - least for cost, least in zip(row, best, strict=True)) for row in costs]
    return worst.index(min(worst))


def _sums(profile: Profile, rebuilt: bool) -> list[tuple[int, float]]:
    """(bytes, ready_s) of the kind with most bytes, in the order of sums."""
    order = profile.arrival if rebuilt else range(len(profile.gradients) - 1, -1, -1)
    dense = [profile.gradients[i] for i in order if not profile.gradients[i].sparse]
    of: dict[str, int] = {}
    for one in dense:
        of[one.kind] = of.get(one.kind, 0) + one.nbytes
    most = max(of, key=of.__getitem__, default="")
    return [(one.nbytes, one.ready_s) for one in dense if one.kind == most]


def _planned(
    profile: Profile,
    wire: Wire,
    found: tuple[Lever, tuple[float, ...], list[list[int]]],
    plain: float,
    reason: str,
) -> BucketPlan:
    lever, caps, indices = found
    stream = stream_of(profile, indices)
    slots = run_stream(stream, wire)
    due = [min(profile.gradients[i].use_s for i in bucket) for bucket in indices]
    jobs = [Job(nbytes, ready, at) for (nbytes, ready), at in zip(stream, due, strict=True)]
    order = order_by_deadline(jobs, wire, profile.backward_s)
    buckets = tuple(
        PlannedBucket(
            tuple(profile.gradients[i].name for i in bucket),
            job.nbytes,
            job.ready_s,
            slot.begin_s,
            slot.end_s,
            job.due_s,
        )
        for bucket, job, slot in zip(indices, jobs, slots, strict=True)
    )
    return BucketPlan(
        lever,
        caps,
        buckets,
        profile.backward_s,
        exposed(profile, indices, wire),
        plain,
        order,
        stall(jobs, order, wire, profile.backward_s),
        stall(jobs, range(len(jobs)), wire, profile.backward_s),
        reason,
    )


def default_plan(profile: Profile, wire: Wire, *, rebuilt: bool, reason: str = "") -> BucketPlan:
    """DDP's own buckets, as a plan."""
    return replace(make_plan(profile, wire, rebuilt=rebuilt, levers=()), reason=reason)
