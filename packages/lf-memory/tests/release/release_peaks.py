"""Bytes that a function allocates, from the allocator's events."""

from __future__ import annotations

import gc

import torch


def peak_bytes(fn) -> int:
    """Most bytes above the level at the start, as requested of the CPU allocator while `fn` runs."""
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        fn()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak
