"""A plan in words and numbers."""

from dataclasses import asdict
from typing import get_args

from ._plan import GRADIENTS, LASTING, MIB, Count, Kind, Plan

ROWS: tuple[tuple[str, tuple[Kind, ...]], ...] = (
    ("parameter gradients", ("parameter",)),
    ("activation gradients", ("activation",)),
    ("gradients and temporaries", GRADIENTS),
    ("saved by the forward pass", ("saved",)),
    ("backward pass in all", ("saved", *GRADIENTS)),
)


def describe(plan: Plan) -> str:
    """A table of buffers, bytes and lifetimes, and what the arena takes."""
    policy = plan.policy
    bucket = f" of {policy.bucket_bytes / MIB:.0f} MiB" if policy.mode == "bucket" else ""
    accumulation = f", {policy.accumulation} micro-batches" if policy.accumulation > 1 else ""
    lines = [
        f"Backward pass of {plan.steps} steps on {plan.device}, {policy.mode}{bucket}{accumulation}, by {plan.method}",
        f"{'':28s}{'buffers':>8s}{'sum MiB':>12s}{'peak MiB':>12s}",
    ]
    for label, kinds in ROWS:
        buffers = sum(one.kind in kinds for one in plan.lifetimes)
        if buffers:
            lines.append(
                f"{label:28s}{buffers:8d}{plan.total(*kinds) / MIB:12.1f}{plan.peak(*kinds) / MIB:12.1f}"
            )
    lines += [_shares(plan, kinds) for kinds in (("parameter",), ("activation",))]
    lines.append(
        f"arena of parameter gradients: {plan.arena_bytes / MIB:.1f} MiB (at least "
        f"{plan.arena_bound_bytes / MIB:.1f}), {plan.reuse:.0%} of their bytes reused"
    )
    return "\n".join(lines)


def _shares(plan: Plan, kinds: tuple[Kind, ...]) -> str:
    by_buffer = [f"{plan.share_below(steps, 'buffer', kinds):.1%}" for steps in (3, 5)]
    by_slot = [f"{plan.share_below(steps, 'slot', kinds):.1%}" for steps in (3, 5)]
    return (
        f"{kinds[0]} gradients that live < 3 and < 5 steps: {by_buffer[0]} and {by_buffer[1]} of buffers, "
        f"{by_slot[0]} and {by_slot[1]} of node inputs"
    )


def summary(plan: Plan) -> dict[str, object]:
    """The numbers of a plan for other programs; bytes, and shares from 0 to 1 with what they count."""
    shares = {
        f"{kind} gradients below {steps} steps, share of {count}s": plan.share_below(steps, count, [kind])
        for kind in LASTING
        for steps in (3, 5)
        for count in get_args(Count)
    }
    return {
        "key": plan.key,
        "method": plan.method,
        "policy": asdict(plan.policy),
        "torch": plan.torch_version,
        "device": plan.device,
        "steps": plan.steps,
        "parameter_bytes": plan.total("parameter"),
        "parameter_peak_bytes": plan.parameter_peak_bytes,
        "activation_peak_bytes": plan.peak("activation"),
        "gradient_peak_bytes": plan.gradient_peak_bytes,
        "saved_bytes": plan.saved_bytes,
        "backward_peak_bytes": plan.backward_peak_bytes,
        "forward_peak_bytes": plan.forward_peak_bytes,
        "arena_bytes": plan.arena_bytes,
        "arena_bound_bytes": plan.arena_bound_bytes,
        "reuse": plan.reuse,
        "shares": shares,
    }
