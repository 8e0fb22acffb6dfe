"""Where parameter gradients lie in an arena: side by side within a bucket, buckets where the lifetimes allow."""

from collections.abc import Mapping

from ._offsets import Span, aligned, place
from ._plan import Placement
from ._policy import Policy, last_steps

Completed = Mapping[str, tuple[int, int]]  # name -> (step that completes its gradient, bytes)


def lay_out(completed: Completed, policy: Policy, steps: int) -> tuple[Placement, ...]:
    """Placements in the order of completion, for a backward pass of so many steps."""
    order = sorted(completed, key=lambda name: completed[name][0])
    starts, sizes = [completed[name][0] for name in order], [completed[name][1] for name in order]
    last = max(0, steps - 1)
    ends = last_steps(policy, starts, sizes, last)
    if policy.accumulation > 1:
        starts = [0] * len(order)
    buckets = policy.buckets(sizes)
    spans = [_bucket_span(starts, sizes, ends, bucket) for bucket in buckets]
    placed: list[Placement] = []
    for bucket, offset in zip(buckets, place(spans)[0], strict=True):
        for at in bucket:
            placed.append(Placement(order[at], offset, sizes[at], starts[at], ends[at]))
            offset += aligned(sizes[at])
    return tuple(placed)


def _bucket_span(starts: list[int], sizes: list[int], ends: list[int], bucket: range) -> Span:
    nbytes = sum(aligned(sizes[at]) for at in bucket)
    return Span(nbytes, min(starts[at] for at in bucket), max(ends[at] for at in bucket) + 1)
