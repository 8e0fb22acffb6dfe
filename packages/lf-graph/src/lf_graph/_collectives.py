"""Collectives inside a graph: allowed, but for one setting of the allocator in which a replay corrupts memory."""

from __future__ import annotations

import os
from typing import Any

_NAMESPACES = ("c10d", "_c10d_functional")
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def refused_collective(func: Any) -> tuple[str, str] | None:
    """(why, fix) when ``func`` is a collective whose memory NCCL would register at addresses that move.

    NCCL registers the buffers of a captured collective with the network, and expandable segments are mapped anew
    under it: an illegal access at a replay, or a hang at exit (pytorch#158029).
    """
    if func.namespace not in _NAMESPACES or not _segments_expand():
        return None
    if os.environ.get("NCCL_GRAPH_REGISTER") == "0":
        return None
    return (
        "NCCL registers the memory of a captured collective, and expandable segments move under it",
        "set NCCL_GRAPH_REGISTER=0, or expandable_segments:False in PYTORCH_CUDA_ALLOC_CONF, or keep the collective "
        "in an Eager element",
    )


def _segments_expand() -> bool:
    settings = ",".join(os.environ.get(name, "") for name in _SETTINGS)
    return "expandable_segments:true" in settings.replace(" ", "").lower()
