"""What ranks do in the tests of topologies; in a module of its own, as other processes import it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from topo_hosts import a100, two_sockets

from lf_comm.topo import TopologyAwareRingBuilder, parse_nvidia_smi


def ordered(rank: int, hosts: int, gpus: bool) -> dict[str, Any]:
    """Each rank says it is on host rank % hosts, and all build one ring; then sum in it."""
    import os

    os.environ["LOCAL_RANK"] = str(rank // hosts)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    seen = parse_nvidia_smi(a100(0) if hosts > 1 else two_sockets([0, 1, 0, 1])) if gpus else None
    builder = TopologyAwareRingBuilder.from_group(seen=seen, host=f"machine{rank % hosts}", nbytes=8 << 20)
    group = builder.new_group()
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=group)
    gathered = [torch.zeros(1) for _ in builder.ranks]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=group)
    try:
        launch: Any = builder.launch()
    except RuntimeError as error:
        launch = str(error)
    return {
        "ranks": builder.ranks,
        "place": dist.get_rank(group),
        "sum": tensor.tolist(),
        "gathered": [int(each) for each in gathered],
        "gain": builder.order.gain,
        "text": builder.explain(),
        "launch": launch,
        "hosts": builder.topology.hosts,
        "kind": builder.topology.device(0).kind,
        "via": [each.via for each in builder.transports(rank)],
    }
