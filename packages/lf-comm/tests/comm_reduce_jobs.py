"""What ranks do in tests of reductions in 16 bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from comm_jobs import batch, bits, made
from torch.nn.parallel import DistributedDataParallel

import lf_comm
from lf_comm._channel import Channel
from lf_comm.reduce import _reduce


def accurate(
    rank: int, dtype: torch.dtype, out_dtype: torch.dtype | None, count: int, op: str
) -> dict[str, Any]:
    """One sum, three times: bits, error against float64, and the error of one rounding."""
    mine = (torch.randn(count, generator=torch.Generator().manual_seed(rank)) + 0.05).to(dtype)
    wire = mine.bfloat16() if dtype is torch.float32 else mine
    parts = [torch.empty_like(wire) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, wire)
    exact = torch.stack([part.double() for part in parts]).sum(0)
    exact = exact / len(parts) if op == "avg" else exact
    results = []
    for _ in range(3):
        given = mine.clone()
        result = lf_comm.accurate_all_reduce(given, op=op, out_dtype=out_dtype)  # type: ignore[arg-type]
        assert (out_dtype in (None, dtype)) == (result.data_ptr() == given.data_ptr() or count == 0)
        results.append(result)
    rounded = exact.float().to(wire.dtype if out_dtype is None else out_dtype)
    return {
        "bits": {bits(result) for result in results},
        "off": float((results[0].double() - rounded.double()).abs().max()) if count else 0.0,
        "dtype": results[0].dtype,
        "step": float(exact.abs().max()) * torch.finfo(rounded.dtype).eps if count else 0.0,
    }


def accurate_ends(rank: int) -> list[float]:
    """1 and 2^-9 in bfloat16 with a float32 result; and a ring's answer."""
    mine = torch.tensor([1.0 if rank == 0 else 2.0**-9], dtype=torch.bfloat16)
    wide = lf_comm.accurate_all_reduce(mine, out_dtype=torch.float32)
    dist.all_reduce(mine)
    return [float(wide), float(mine)]


def accurate_bytes(rank: int, count: int) -> int:
    """Payload bytes of a float32 tensor's sum."""
    channel = Channel()
    _reduce(torch.ones(count), channel, "sum", None, None)
    return channel.sent


def trained_accurately(rank: int) -> tuple[dict[str, bytes], float]:
    """Three steps with the hook: (weights, farthest from DDP's own)."""
    found = []
    for ours in (False, True):
        net = made()
        net.experts[1].requires_grad_(False)
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.05)
        if ours:
            lf_comm.AccurateReducer.attach(ddp)
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.05)
        for step in range(3):
            ddp(batch(rank, step), 0).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(net)
    pairs = zip(found[0].parameters(), found[1].parameters(), strict=True)
    apart = max(float((a - b).abs().max()) for a, b in pairs)
    return {n: bits(p) for n, p in found[1].named_parameters()}, apart


def accurate_refusals(rank: int) -> list[str]:
    """What cannot be summed."""
    said = []
    for tensor, options in (
        (torch.ones(3, dtype=torch.int64), {}),
        (torch.eye(3).to_sparse(), {}),
        (torch.ones(3), {"wire": "int8"}),
        (torch.ones(3), {"op": "max"}),
        (torch.ones(3), {"out_dtype": torch.float64}),
    ):
        try:
            lf_comm.accurate_all_reduce(tensor, **options)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said
