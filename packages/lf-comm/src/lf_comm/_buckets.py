"""Which gradients DDP puts into which bucket, when their sums end, and the cuts that end first; pure functions.

A backward pass makes gradients one after another. Buckets are summed in order on one stream: a sum begins when its last
gradient is there and the sum before it has ended, and is never interrupted. What of the sums lies behind the end of the
backward pass is exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lf_comm.cost import Rates

FIRST_BYTES, DEFAULT_BYTES = 1 << 20, 25 << 20  # of DDP's own: the first bucket, and the others
_ATOMS = 384  # neighbours are put together above this, so that cutting takes a moment for any model
_SLACK = 0.001  # fewer buckets are taken when sums end at most so much later; real streams gain from several


@dataclass(frozen=True)
class Gradient:
    """One parameter's. ready_s: since the backward pass began; use_s: of the parameter, since a forward began."""

    name: str
    nbytes: int
    ready_s: float
    use_s: float = 0.0
    kind: str = "float32 cpu"  # gradients of one dtype and device share buckets
    sparse: bool = False  # has a bucket of its own


@dataclass(frozen=True)
class Profile:
    """What was measured of a module. gradients: as the module defines its parameters; arrival: their indices in the
    order in which gradients came; unused ones last."""

    gradients: tuple[Gradient, ...]
    arrival: tuple[int, ...]
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        if sorted(self.arrival) != list(range(len(self.gradients))):
            raise ValueError("arrival: each gradient's index once is wanted")


@dataclass(frozen=True)
class Wire:
    """Seconds of a bucket's sum: latency_s + bytes * second_per_byte."""

    latency_s: float
    second_per_byte: float

    @classmethod
    def of(cls, rates: Rates, ranks: int) -> Wire:
        """Of a group whose rates were measured. One rank sends nothing."""
        if ranks == 1:
            return cls(0.0, 0.0)
        return cls(rates.latency, rates.all_reduce * 2 * (ranks - 1) / ranks)

    def seconds(self, nbytes: int) -> float:
        """Of one sum."""
        return self.latency_s + nbytes * self.second_per_byte


@dataclass(frozen=True)
class Slot:
    """One bucket on the stream; seconds since the backward pass began."""

    begin_s: float
    end_s: float


def run_stream(buckets: Sequence[tuple[int, float]], wire: Wire) -> list[Slot]:
    """Sums of (bytes, ready_s), one after another as given."""
    slots, free = [], 0.0
    for nbytes, ready in buckets:
        begin = max(free, ready)
        free = begin + wire.seconds(nbytes)
        slots.append(Slot(begin, free))
    return slots


def assign(gradients: Sequence[Gradient], limits: Sequence[int]) -> list[list[int]]:
    """Indices by bucket, as torch's ``compute_bucket_assignment_by_size`` makes them of tensors in this order.

    A bucket is closed by the gradient that reaches its limit; the last limit holds for all further buckets, and each
    kind counts through the limits on its own. Kinds that are left open at the end come in the order of their begin.
    """
    closed: list[list[int]] = []
    open_: dict[str, list[int]] = {}
    size: dict[str, int] = {}
    at: dict[str, int] = {}
    for index, one in enumerate(gradients):
        if one.sparse:
            closed.append([index])
            continue
        open_.setdefault(one.kind, []).append(index)
        size[one.kind] = size.get(one.kind, 0) + one.nbytes
        if size[one.kind] >= limits[at.setdefault(one.kind, 0)]:
            closed.append(open_.pop(one.kind))
            size[one.kind] = 0
            at[one.kind] = min(at[one.kind] + 1, len(limits) - 1)
    return closed + list(open_.values())


def ddp_buckets(profile: Profile, limits: Sequence[int], *, rebuilt: bool) -> list[list[int]]:
    """Indices of gradients by bucket, in the order in which DDP sums them.

    rebuilt: DDP makes its buckets anew by arrival, after the first step; with find_unused_parameters it never does, and
    cuts the parameters as they are defined, first to last, then sums the last bucket first.
    """
    if rebuilt:
        arrived = [profile.gradients[i] for i in profile.arrival]
        return [[profile.arrival[i] for i in bucket] for bucket in assign(arrived, limits)]
    return sorted(assign(profile.gradients, limits), key=min)[::-1]


def stream_of(profile: Profile, buckets: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
    """(bytes, ready_s) of buckets, for :func:`run_stream`."""
    of = profile.gradients
    return [(sum(of[i].nbytes for i in bucket), max(of[i].ready_s for i in bucket)) for bucket in buckets]


def exposed(profile: Profile, buckets: Sequence[Sequence[int]], wire: Wire) -> float:
    """Seconds that the sums of these buckets go on after the backward pass."""
    slots = run_stream(stream_of(profile, buckets), wire)
    return max(0.0, slots[-1].end_s - profile.backward_s) if slots else 0.0


def cut(gradients: Sequence[tuple[int, float]], wire: Wire) -> list[int]:
    """Bytes of each bucket such that the last sum ends first: gradients are (bytes, ready_s) in the order of sums.

    Exact, by dynamic programming over (buckets, gradients): the sums of a beginning end no later when the sums before
    do, so the best end of each beginning is all that counts. Of cuts that end within 0.1 % of the best, one with fewest
    buckets. Above 384 gradients neighbours are put together first.
    """
    atoms = _together(gradients)
    if not atoms:
        return []
    size = torch.tensor([0] + [nbytes for nbytes, _ in atoms], dtype=torch.float64).cumsum(0)
    # a bucket waits for the latest of its gradients, and for those of buckets before
    ready = torch.tensor([0.0] + [at for _, at in atoms], dtype=torch.float64).cummax(0).values
    span = size[None, :] - size[:, None]
    cost = torch.where(span.triu(1) > 0, wire.latency_s + span * wire.second_per_byte, torch.inf)
    best = torch.zeros_like(size)  # the end of each beginning's sums, with any number of buckets
    for i in range(1, len(size)):
        best[i] = (torch.clamp(best[:i], min=float(ready[i])) + cost[:i, i]).min()
    enough = float(best[-1]) * (1 + _SLACK)
    end, froms = torch.full_like(size, torch.inf), []
    end[0] = 0.0
    while end[-1] > enough:  # one bucket more
        end, chosen = (torch.maximum(end[:, None], ready[None, :]) + cost).min(0)
        froms.append(chosen.tolist())
    cuts, at = [], len(atoms)
    for chosen_from in reversed(froms):
        before = chosen_from[at]
        cuts.append(int(size[at] - size[before]))
        at = before
    return cuts[::-1]


def _together(gradients: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Gradients without empty ones; neighbours as one when there are many."""
    some = [one for one in gradients if one[0] > 0]
    least = sum(nbytes for nbytes, _ in some) / _ATOMS if len(some) > _ATOMS else 0
    atoms: list[tuple[int, float]] = []
    held, late = 0, 0.0
    for nbytes, ready in some:
        held, late = held + nbytes, max(late, ready)
        if held >= least:
            atoms.append((held, late))
            held = 0
    return atoms + ([(held, late)] if held else [])
