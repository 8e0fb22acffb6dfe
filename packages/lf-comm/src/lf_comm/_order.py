"""In which order sums should go when the next forward pass waits for each of them by itself; pure functions.

DDP has no such lever: its reducer sums buckets as it has made them and waits for all before ``backward`` returns.
Then every order without pauses ends at the same time. An order pays where a forward pass begins while sums go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lf_comm._buckets import Wire, run_stream

_EXACT = 7  # buckets of which all orders are tried


@dataclass(frozen=True)
class Job:
    """One bucket. ready_s: since the backward pass began; due_s: of its first use, since the next forward began."""

    nbytes: int
    ready_s: float
    due_s: float


def stall(jobs: Sequence[Job], order: Sequence[int], wire: Wire, backward_s: float) -> float:
    """Seconds that a forward pass waits, which begins at the end of the backward pass and waits for each bucket at
    its first use. Waiting for one bucket also moves all later uses, so it is the longest wait that counts."""
    slots = run_stream([(jobs[i].nbytes, jobs[i].ready_s) for i in order], wire)
    late = (slot.end_s - backward_s - jobs[i].due_s for i, slot in zip(order, slots, strict=True))
    return max(0.0, *late) if jobs else 0.0


def order_by_deadline(jobs: Sequence[Job], wire: Wire, backward_s: float) -> tuple[int, ...]:
    """The order of sums with the shortest stall; the earlier of two that are equal.

    Exact for up to 7 buckets. Beyond, the better of arrival and of Schrage's rule (whenever the stream is free, of the
    buckets that are there the one that is due first), whose end of the forward pass is within twice the best.
    """
    arrival = tuple(sorted(range(len(jobs)), key=lambda i: (jobs[i].ready_s, i)))
    tried: Iterable[tuple[int, ...]] = (arrival, _schrage(jobs, wire))
    if len(jobs) <= _EXACT:
        tried = itertools.permutations(arrival)
    return min(tried, key=lambda order: stall(jobs, order, wire, backward_s), default=())


def _schrage(jobs: Sequence[Job], wire: Wire) -> tuple[int, ...]:
    left, order, now = set(range(len(jobs))), [], 0.0
    while left:
        there = [i for i in left if jobs[i].ready_s <= now]
        if not there:
            now = min(jobs[i].ready_s for i in left)
            continue
        chosen = min(there, key=lambda i: (jobs[i].due_s, i))
        left.remove(chosen)
        order.append(chosen)
        now += wire.seconds(jobs[chosen].nbytes)
    return tuple(order)
