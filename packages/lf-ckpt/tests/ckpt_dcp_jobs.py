"""What ranks do in tests of the DCP plug-in; a module of its own, for the processes import it by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ckpt_group_jobs import Bits, full_bits, trained
from ckpt_states import bits
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import lf_ckpt
from lf_ckpt.dcp import LfLoadPlanner, LfSavePlanner, LfStorageReader, LfStorageWriter


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors of a nested state dict by dotted name."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            found[prefix + key] = value
    return found


def state_of(seed: int, steps: int) -> tuple[Any, Any, dict[str, Any]]:
    """A trained FSDP2 model, its optimizer, and both in the form that DCP wants."""
    model, optimizer = trained(seed, steps)
    weights, moments = get_state_dict(model, optimizer)
    return model, optimizer, {"model": weights, "optim": moments}


def save_with_dcp(rank: int, path: str, in_background: bool) -> tuple[Bits, list[str]]:
    """Two checkpoints through one writer; what was saved, gathered, and the kinds of the steps."""
    _, _, state = state_of(seed=1, steps=2)
    state["extra"] = {"epoch": 3, "betas": (0.9, 0.95), "note": "ä", "raw": b"\0\1", "list": [1, {"a": None}]}
    kinds = []
    writer = LfStorageWriter(path)
    for step in (10, 20):
        options = {"checkpoint_id": f"step-{step}", "storage_writer": writer, "planner": LfSavePlanner()}
        if in_background:
            dcp.async_save(state, **options).result()
        else:
            dcp.save(state, **options)
        assert writer.report is not None
        kinds.append(writer.report.kind)
    writer.close()
    return full_bits(flat(state)), kinds


def load_with_dcp(rank: int, path: str) -> tuple[Bits, Any]:
    """Load into a model of other values; what it is now, gathered, and the values that are no tensors."""
    model, optimizer, state = state_of(seed=2, steps=1)
    state["extra"] = {"epoch": 0, "betas": (0.0, 0.0), "note": "", "raw": b"", "list": [0, {"a": 1}]}
    dcp.load(state, checkpoint_id="10", storage_reader=LfStorageReader(path), planner=LfLoadPlanner())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    _, _, extra = None, None, state.pop("extra")
    weights, moments = get_state_dict(model, optimizer)
    return full_bits(flat({"model": weights, "optim": moments})), extra


def refuse_pickle(rank: int, path: str) -> list[str]:
    """A stock planner: refused, allowed, refused at reading, allowed at reading."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"x": distribute_tensor(torch.arange(5), mesh, [Shard(0)]), "value": {1, 2}}
    said = []
    for allow in (False, True):
        writer = LfStorageWriter(f"{path}/{allow}", allow_pickle=allow)
        said.append(outcome(lambda w=writer: dcp.save(state, checkpoint_id="1", storage_writer=w)))
        writer.close()
    for allow in (False, True):
        into = {"x": state["x"].clone(), "value": None}
        reader = LfStorageReader(f"{path}/True", allow_pickle=allow)
        said.append(outcome(lambda r=reader, i=into: dcp.load(i, storage_reader=r)))
        said.append(repr(into["value"]))
    return said


def outcome(action: Any) -> str:
    try:
        action()
    except BaseException as error:  # DCP wraps what its ranks raise in a BaseException
        return str(error)
    return "done"


def read_a_store_save(rank: int, path: str) -> tuple[list[int], str]:
    """DCP reads what `Store.save` has written, here with the stock load planner, and in another dtype."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.arange(7)
    with lf_ckpt.open(path, group=dist.group.WORLD) as store:
        store.save(4, {"x": distribute_tensor(x, mesh, [Shard(0)]), "scalar": torch.tensor(2.5)}).wait()
    into = {"x": distribute_tensor(torch.zeros(7), mesh, [Shard(0)]), "scalar": torch.tensor(0.0)}
    dcp.load(into, storage_reader=LfStorageReader(path))
    missing = outcome(lambda: dcp.load({"y": torch.zeros(1)}, storage_reader=LfStorageReader(path)))
    return [int(v) for v in into["x"].full_tensor()] + [int(into["scalar"] * 2)], missing


def save_tied(rank: int, path: str) -> tuple[int, list[bool]]:
    """A tied pair that every rank has whole, another that is sharded, and a look-alike; bytes written by this rank
    before padding, and whether the values came back."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(1000.0)
    shard = distribute_tensor(torch.arange(2000.0), mesh, [Shard(0)])
    state = {"a": whole, "s": shard, "b": whole, "t": shard, "c": whole.clone()}
    writer = LfStorageWriter(path)
    dcp.save(state, checkpoint_id="1", storage_writer=writer, planner=LfSavePlanner())
    writer.close()
    assert writer.report is not None
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(into, storage_reader=LfStorageReader(path), planner=LfLoadPlanner())
    return writer.report.bytes_raw, [
        bits(full) == bits(other) for full, other in zip(_whole(into), _whole(state), strict=True)
    ]


def _whole(tensors: dict[str, Any]) -> list[torch.Tensor]:
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors.values()]
