"""Micro-batches of one step whose sums start as early as they can.

    for part in lf_comm.accumulate(ddp, samples=len(batch), most=8):
        loss = mean_loss(ddp(batch[part.begin : part.end]))
        (loss * part.share).backward()
    optimizer.step()

A gradient is sent once, when the last micro-batch has added to it, so sums hide behind the backward pass of that one
only: it is as large as memory holds, and what does not fill a micro-batch comes first. To send earlier what the others
have added up costs all bytes twice, and the second sending ends no earlier; a last micro-batch cut smaller starts its
sums later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

from torch.nn.parallel import DistributedDataParallel

from lf_comm._buckets import Profile, Wire, exposed
from lf_comm._timer import ScheduleError


@dataclass(frozen=True)
class MicroBatch:
    """Samples begin to end (not in it) of a step; share: of the step's samples, the weight of a mean loss."""

    begin: int
    end: int
    share: float
    last: bool


def micro_batches(samples: int, most: int) -> tuple[MicroBatch, ...]:
    """The fewest of at most `most` samples, the last as large as that allows. ValueError without any."""
    if samples < 1 or most < 1:
        raise ValueError(f"samples={samples}, most={most}: at least 1 of each is wanted")
    first = samples % most or min(most, samples)
    ends = range(first, samples + 1, most)
    begins = [0, *ends[:-1]]
    return tuple(MicroBatch(b, e, (e - b) / samples, e == samples) for b, e in zip(begins, ends, strict=True))


def accumulate(ddp: DistributedDataParallel, samples: int, most: int) -> Iterator[MicroBatch]:
    """Micro-batches of one step; forward and backward of each belong into the loop. DDP sums in the last one only.

    All ranks have the same number of samples. Raises ScheduleError with static_graph, which torch cannot accumulate.
    """
    parts = micro_batches(samples, most)
    if ddp.static_graph and len(parts) > 1:
        raise ScheduleError("DDP with static_graph cannot accumulate (no_sync): make it without static_graph")
    for part in parts:
        with nullcontext() if part.last else ddp.no_sync():
            yield part


def accumulated_step_s(
    sizes: list[int],
    profile: Profile,
    profiled: int,
    buckets: list[list[int]],
    wire: Wire,
    overhead_s: float = 0.0,
) -> float:
    """Predicted seconds of a step of micro-batches of these sizes, for a profile of `profiled` samples.

    Times are taken to grow with the samples, and overhead_s is what each micro-batch takes beside.
    """
    scale = sizes[-1] / profiled
    last = replace(
        profile,
        gradients=tuple(replace(g, ready_s=g.ready_s * scale) for g in profile.gradients),
        backward_s=profile.backward_s * scale,
    )
    compute = (profile.forward_s + profile.backward_s) * sum(sizes) / profiled + overhead_s * len(sizes)
    return compute + exposed(last, buckets, wire)
