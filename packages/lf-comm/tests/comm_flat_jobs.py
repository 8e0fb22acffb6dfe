"""What ranks do in the tests of flat buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lf_comm import BufferReducer, DisagreementError, Rates

RATES = Rates(1e-5, 8e-7, 8e-7, 8e-7, 4e-10, 4e-10, 4e-10)
SHAPES = {"table": (512, 64), "body": (100, 7), "bias": (33,), "experts": (8, 16, 96)}


def flat(dtypes: dict[str, torch.dtype] | None = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Buffers by dtype, and views of them by name."""
    dtypes = dtypes or {}
    buffers, views = [], {}
    for dtype in dict.fromkeys(dtypes.get(n, torch.float32) for n in SHAPES):
        mine = [n for n in SHAPES if dtypes.get(n, torch.float32) == dtype]
        buffer = torch.zeros(sum(torch.Size(SHAPES[n]).numel() for n in mine), dtype=dtype)
        parts = buffer.split([torch.Size(SHAPES[n]).numel() for n in mine])
        views |= {n: p.view(SHAPES[n]) for n, p in zip(mine, parts, strict=True)}
        buffers.append(buffer)
    return buffers, {n: views[n] for n in SHAPES}


def fill(views: dict[str, Tensor], rank: int, step: int) -> None:
    """Gradients of which a few rows of the table and one expert are set."""
    torch.manual_seed(100 * step + rank)
    for view in views.values():
        view.zero_()
    views["table"][torch.randint(0, 512, (9,))] = torch.randn(64).to(views["table"].dtype)
    views["experts"][rank] = torch.randn(16, 96).to(views["experts"].dtype)
    views["body"].normal_()
    views["bias"].normal_()


def summed(
    rank: int, how: str, dtypes: dict[str, torch.dtype] | None = None, **options: Any
) -> tuple[list[list[float]], float, dict[str, str], int]:
    """Buffers behind three sums, the totals, how each gradient was summed, and bytes sent."""
    import torch.distributed as dist

    buffers, views = flat(dtypes)
    totals = torch.zeros(2)
    reducer = BufferReducer(rates=RATES, min_bytes=1 << 10, **options)
    reducer.bind(views)
    for step in range(3):
        fill(views, rank, step)
        totals.fill_(rank + 1.0)
        if how == "stock":
            for tensor in (*buffers, totals):
                dist.all_reduce(tensor)
        else:
            reducer(buffers, totals)
    return (
        [b.double().tolist() for b in buffers],
        float(totals.sum()),
        {n: d.path for n, d in reducer.report().items()},
        reducer.bytes_sent,
    )


def disagreement(rank: int) -> str:
    """What is said where one rank has another order of gradients."""
    buffers, views = flat()
    reducer = BufferReducer(rates=RATES)
    reducer.bind(views if rank == 0 else dict(reversed(views.items())))
    fill(views, rank, 0)
    before = [b.clone() for b in buffers]
    try:
        reducer(buffers)
    except DisagreementError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, buffers, strict=True))
        return str(error)
    return ""
