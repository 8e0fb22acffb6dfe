"""When the gradient of a parameter is given up: the three modes, as data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ._errors import PlanError

Mode = Literal["all-alive", "fused", "bucket"]
MODES: tuple[Mode, ...] = get_args(Mode)
BUCKET_BYTES = 25 << 20  # torch's DistributedDataParallel: bucket_cap_mb=25


@dataclass(frozen=True)
class Policy:
    """What becomes of a parameter's gradient once it is complete.

    Attributes:
        mode: "all-alive" keeps every gradient until the backward pass is over, "fused" gives each up as soon as it
            is complete, "bucket" collects them in the order they come and gives all up together when they
            reach `bucket_bytes`.
        bucket_bytes: size at which a bucket is full.
        accumulation: micro-batches of a step. Beyond 1 every gradient is added to one kept from the micro-batch
            before, so all of them live throughout, whatever the mode.
    """

    mode: Mode = "fused"
    bucket_bytes: int = BUCKET_BYTES
    accumulation: int = 1

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PlanError(f"mode is {self.mode!r}: give one of {', '.join(MODES)}")
        for name, least in (("bucket_bytes", 1), ("accumulation", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise PlanError(f"{name} is {value!r}: give a whole number of at least {least}")

    @property
    def keeps(self) -> bool:
        """Whether gradients outlive the backward pass."""
        return self.mode == "all-alive" or self.accumulation > 1

    def buckets(self, sizes: Sequence[int]) -> list[range]:
        """Which gradients, in order of completion, are given up together; the last bucket may not be full."""
        if self.keeps:
            return [range(len(sizes))] if sizes else []
        if self.mode == "fused":
            return [range(at, at + 1) for at in range(len(sizes))]
        return _full_buckets(sizes, self.bucket_bytes)


def _full_buckets(sizes: Sequence[int], limit: int) -> list[range]:
    found: list[range] = []
    start = filled = 0
    for at, size in enumerate(sizes):
        filled += size
        if filled >= limit:
            found.append(range(start, at + 1))
            start, filled = at + 1, 0
    if start < len(sizes):
        found.append(range(start, len(sizes)))
    return found


def last_steps(policy: Policy, steps: Sequence[int], sizes: Sequence[int], last: int) -> list[int]:
    """The last step at which each gradient lives, given the step that completes it and the last step of all.

    A bucket that is full is given up at the step that filled it; what is not full lives until the end.
    """
    ends = [last] * len(steps)
    if policy.keeps:
        return ends
    for bucket in policy.buckets(sizes):
        if policy.mode == "fused" or sum(sizes[at] for at in bucket) >= policy.bucket_bytes:
            ends[bucket.start : bucket.stop] = [steps[bucket.stop - 1]] * len(bucket)
    return ends
