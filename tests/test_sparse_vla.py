"""lf-comm beside the robot model: one robot's gradients for 31 of 32 embodiments are zero, and need not travel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import lf_comm
from lf_meta.models import gr00t_vla
from lf_meta.models.gr00t_vla_batch import random_batch

RATES = lf_comm.Rates(1e-5, 8e-7, 8e-7, 8e-7, 4e-10, 4e-10, 4e-10)


def rank_of(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    for ours in (False, True):
        torch.save(train(rank, ours), f"{folder}/{ours}-{rank}.pt")
    dist.destroy_process_group()


def train(rank: int, ours: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = gr00t_vla.build("tiny", embodiments=32)
    ddp = DistributedDataParallel(model)
    reducer = lf_comm.SparseGradReducer.attach(ddp, rates=RATES, min_bytes=1 << 14) if ours else None
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    for step in range(3):
        batch = random_batch(model.config, 2, 12, seed=10 * step + rank)
        batch["embodiment_id"].fill_(7)
        torch.manual_seed(100 * step + rank)
        total, count = ddp(batch)[:2]
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "weights": model.state_dict(),
        "dense bytes": 3 * sum(p.nbytes for p in trained),
        "sent": reducer.bytes_sent if reducer is not None else 0,
        "sparse": {n: d.path for n, d in reducer.report().items() if d.path != "dense"}
        if reducer is not None
        else {},
    }


def test_one_robot_sends_a_fifth_less_and_gets_the_same_weights(tmp_path: Path) -> None:
    mp.start_processes(rank_of, (str(tmp_path),), nprocs=2, start_method="forkserver")
    stock, other, first, second = (
        torch.load(tmp_path / f"{name}.pt") for name in ("False-0", "False-1", "True-0", "True-1")
    )
    for name, weight in stock["weights"].items():
        assert torch.equal(weight, other["weights"][name]), name
        assert torch.equal(weight, first["weights"][name]), name
        assert torch.equal(weight, second["weights"][name]), name
    tables = [n for n in first["sparse"] if "encoder" in n or "decoder" in n or "embed" in n]
    assert len(tables) >= 4
    assert first["sent"] < 0.82 * first["dense bytes"]
