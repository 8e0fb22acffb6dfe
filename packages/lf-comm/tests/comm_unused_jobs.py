"""What ranks do in tests of embeddings and experts that a rank does not use."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from comm_jobs import batch, bits, made, own_expert
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lf_comm

PADDING = 0


def embeddings(rank: int, sparse: bool) -> list[str]:
    """Steps in which ranks hit {} and {1, 2, 3}, all {}, and all 16 rows: what differs from the dense sum."""
    wrong = []
    for step, ids in enumerate(([[], [1, 2, 3]], [[], []], [list(range(1, 16)), [5]])):
        table = nn.Embedding(16, 4, padding_idx=PADDING, sparse=sparse)
        torch.manual_seed(rank)
        mine = torch.tensor([[PADDING, *ids[rank % 2]]])
        (
            table(mine) * torch.randint(-8, 8, (4,))
        ).sum().backward()  # whole numbers: any order gives the same sum
        assert table.weight.grad is not None
        dense = table.weight.grad.to_dense().clone()
        dist.all_reduce(dense)
        for plan in ("auto",) if sparse else ("auto", "dense", "gather", "union", "split"):
            given = table.weight.grad.clone()
            reducer = lf_comm.RowReducer(rates=lf_comm.Rates(*[1e-9] * 7), min_bytes=0)
            found = reducer.all_reduce(given, "table", plan=plan).result  # type: ignore[arg-type]
            if bits(found.to_dense()) != bits(dense):
                wrong.append(f"step {step}, {plan}")
    return wrong


def left_out(rank: int, hook: str) -> dict[str, Any]:
    """A model of which each rank uses another expert, without find_unused_parameters."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(made())
    attach: Any = {"rows": lf_comm.SparseGradReducer, "accurate": lf_comm.AccurateReducer}[hook]
    attach.attach(ddp)
    # Nothing below waits for a peer: a rank that is done would close what another one, still making the hook's group,
    # is connecting to (torch makes groups without a barrier unless TORCH_DIST_INIT_BARRIER=1).
    dist.barrier()
    ddp(batch(rank, 0), own_expert(rank)).square().sum().backward()
    try:
        ddp(batch(rank, 1), own_expert(rank))
    except lf_comm.UnusedParametersError as error:
        return {"names": error.names, "text": str(error)}
    return {}


def all_used(rank: int) -> int:
    """Passes that leave nothing out, or are not summed, are nobody's business: steps that went well."""
    net = made()
    net.experts[1].requires_grad_(False)
    ddp = DistributedDataParallel(net)
    lf_comm.SparseGradReducer.attach(ddp)
    for step in range(3):
        with ddp.no_sync():
            ddp(batch(rank, step), 0)[:, :4].square().sum().backward()
        ddp(batch(rank, step), 0).square().sum().backward()
        with torch.no_grad():
            ddp(batch(rank, step), 0)
    return step + 1
