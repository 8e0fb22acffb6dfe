"""What ranks do in tests of group stores; a module of its own, for the processes import it by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ckpt_states import bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import lf_ckpt
from lf_ckpt.errors import CkptError
from lf_ckpt.files import FileLayer

Bits = dict[str, bytes]


def world() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def full_bits(tensors: dict[str, torch.Tensor]) -> Bits:
    """Bytes of every tensor as a whole, on every rank."""
    return {n: bits(t.full_tensor() if isinstance(t, DTensor) else t) for n, t in tensors.items()}


class Tiny(nn.Module):
    """7 rows on 3 ranks are 3, 3 and 1; 2 rows leave one rank with nothing, also in its moments."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(7, 2)
        self.tied = nn.Linear(6, 7, bias=False)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)) + self.tied(x))


def trained(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model under FSDP2 with AdamW after `steps` steps, its weights a function of the seed alone."""
    torch.manual_seed(seed)
    model = Tiny()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model.steps += 1
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_trained(rank: int, path: str, step: int) -> Bits:
    """Save a trained model; what it was, gathered."""
    state = lf_ckpt.collect(*trained(seed=1, steps=2))
    with lf_ckpt.open(path, group=world()) as store:
        report = store.save(step, *state).wait()
        assert report.folder == str(step)
        assert store.steps() == (step,)
    return full_bits(state.tensors)


def load_trained(rank: int, path: str) -> tuple[Bits, int]:
    """Load into a model of other values; what it is now, gathered, and the bytes that this rank has read."""
    model, optimizer = trained(seed=2, steps=1)
    state = lf_ckpt.collect(model, optimizer)
    with lf_ckpt.open(path, group=world(), read_only=True) as store:
        loaded = store.load(into=state.tensors)
    lf_ckpt.restore(model, optimizer, loaded)
    return full_bits(lf_ckpt.collect(model, optimizer).tensors), loaded.report.bytes_read


def save_steps(rank: int, path: str, compress: str = "auto") -> dict[str, Any]:
    """Three steps: full, delta (one shard changed), full again; with items."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.rand(900, 1000, generator=torch.Generator().manual_seed(0))
    tensors: dict[str, torch.Tensor] = {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "shared": torch.arange(300_000),
        "rng.torch": torch.tensor([rank]),
        "only": torch.tensor(5),
    }
    if rank == 1:
        tensors["of rank 1"] = torch.ones(3)
    items = {"epoch": rank, "loader": {"rank": rank}, "rng": bytes([rank]), "note": b"rank 0"}
    reports = []
    with lf_ckpt.open(path, group=world(), compress=compress) as store:
        for step in (1, 2):
            handle = store.save(step, tensors, items, per_rank=["rng", "loader"], overlap=step == 2)
            reports.append(handle.wait())
        if rank == 1:
            tensors["rows"].to_local()[5] = -1
        reports.append(store.save(3, tensors, items, per_rank=["rng", "loader"]).wait())
        loaded = store.load(2)
        assert bits(loaded.tensors["rows"])[: 4 * 300_000] == bits(rows[:300])
    return {
        "kinds": [report.kind for report in reports],
        "written": [report.bytes_written for report in reports],
        "rows": bits(tensors["rows"].full_tensor()),
        "own": (loaded.items, loaded.tensors["rng.torch"].tolist(), sorted(loaded.tensors)),
    }


def load_items(rank: int, path: str) -> tuple[Any, ...]:
    """Items and tensors kept per rank as this rank and as rank 0 sees them."""
    with lf_ckpt.open(path, group=world(), read_only=True) as store:
        own, first = store.load(1), store.load(1, rank=0)
    return own.items.get("rng"), own.items["epoch"], "rng.torch" in own.tensors, first.items["rng"]


def save_hsdp(rank: int, path: str) -> list[int]:
    """A 2 x 2 mesh: replicated over one dimension, sharded over the other, and one tensor sharded over both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    tensor = torch.arange(5 * 7.0).view(5, 7)
    tensors = {
        "hsdp": distribute_tensor(tensor, mesh, [Replicate(), Shard(0)]),
        "both": distribute_tensor(tensor, mesh, [Shard(0), Shard(1)]),
        "all": distribute_tensor(tensor, mesh, [Replicate(), Replicate()]),
        "scalar": distribute_tensor(torch.tensor(3.0), mesh, [Replicate(), Replicate()]),
        "none": distribute_tensor(torch.empty(0, 3), mesh, [Shard(0), Replicate()]),
    }
    with lf_ckpt.open(path, group=world()) as store:
        report = store.save(1, tensors).wait()
        for name, tensor in tensors.items():
            into = {name: torch.zeros_like(tensor)}
            store.load(1, into=into, strict=False)
            assert bits(into[name].to_local()) == bits(tensor.to_local()), name
    return [report.bytes_raw]


def save_what_cannot_be(rank: int, path: str, case: str) -> str:
    """A save that one rank cannot do; the error of this rank, after which a good one works."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    good = {"x": torch.zeros(3)}
    with lf_ckpt.open(path, group=world()) as store:
        store.save(1, good).wait()
        bad: dict[str, Any] = dict(good)
        step = 2
        if case == "partial":
            bad["sum"] = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        elif case == "unsupported" and rank == 1:
            bad["x"] = torch.empty(3, device="meta")
        elif case == "shapes":
            bad["x"] = torch.zeros(3 + rank)
        elif case == "steps":
            step = 2 + rank
        elif case == "no step" and rank == 1:
            step = torch.tensor(2)  # type: ignore[assignment]
        own: Any = "rng" if case == "no list" and rank == 1 else ["rng"]
        try:
            store.save(step, bad, per_rank=own).wait()
        except (CkptError, ValueError) as error:
            message = f"{type(error).__name__}: {error}"
        store.save(9, good).wait()
        assert store.steps() == (1, 9)
    return message


def load_what_cannot_be(rank: int, path: str, case: str, broken: int) -> tuple[str, int]:
    """A load that one rank cannot begin; the error of this rank, and the step that the next load finds."""
    wrong: dict[str, dict[str, Any]] = {
        "device": {"device": "warp:3"},
        "options": {"into": {}, "strict": False, "precheck": False},
        "step": {"step": 2},
        "rank": {"rank": -1},
    }
    with lf_ckpt.open(path, group=world(), group_timeout=600.0) as store:
        store.save(1, {"x": torch.zeros(3)})
        try:
            store.load(**{"step": 1, **(wrong[case] if rank == broken else {})})
        except (CkptError, ValueError) as error:
            message = f"{type(error).__name__}: {error}"
        return message, store.load().step


class FullOnRank(FileLayer):
    """A disk that is full while one rank writes its data file."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.full = rank == 1

    def write(self, fd: int, buffers: Any, offset: int) -> None:
        if self.full and offset > 4096:
            raise OSError(28, os.strerror(28))
        super().write(fd, buffers, offset)


def save_on_a_full_disk(rank: int, path: str, on_error: str) -> tuple[str, tuple[int, ...]]:
    """Rank 1 has no space in the second save and has it again in the third."""
    tensors = {"x": distribute_tensor(torch.randn(300_000), init_device_mesh("cpu", (3,)), [Shard(0)])}
    files = FullOnRank(rank)
    with lf_ckpt.open(path, group=world(), files=files, on_error=on_error, io="buffered") as store:
        files.full, again = False, files.full
        store.save(1, tensors).wait()
        files.full = again
        tensors["x"].to_local().add_(1)
        text = wait_for_error(lambda: store.save(2, tensors).wait().error)
        files.full = False
        store.save(3, tensors).wait()
        return text, store.steps()


def wait_for_error(save: Callable[[], str | None]) -> str:
    try:
        return f"warned: {save()}"
    except CkptError as error:
        return f"{type(error).__name__}: {error}"


class DieOnRank(FileLayer):
    """Kills its process at the first data write of the save after `armed`."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False

    def write(self, fd: int, buffers: Any, offset: int) -> None:
        if self.armed:
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(fd, buffers, offset)


def die_in_a_save(rank: int, path: str, victim: int) -> tuple[str, str]:
    """One rank is killed while it writes step 2."""
    tensors = {"x": distribute_tensor(torch.arange(300_000), init_device_mesh("cpu", (3,)), [Shard(0)])}
    files = DieOnRank()
    store = lf_ckpt.open(path, group=world(), files=files, io="buffered")
    store.save(1, tensors).wait()
    files.armed = rank == victim
    first = wait_for_error(lambda: store.save(2, tensors).wait().error)
    second = wait_for_error(lambda: store.save(3, tensors).wait().error)
    store.close()
    return first, second


def load_with_a_bad_file(rank: int, path: str) -> tuple[int, str, list[int]]:
    """The newest step is damaged where only one rank reads; all fall back together."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    into = {"x": distribute_tensor(torch.zeros(300_000, dtype=torch.int64), mesh, [Shard(0)])}
    with lf_ckpt.open(path, group=world(), read_only=True) as store:
        loaded = store.load(into=into)
        exact = wait_for_error(lambda: str(store.load(2, into=into).step))
    ((step, reason),) = loaded.report.fallbacks
    assert step == 2
    return loaded.step, f"{reason} | {exact}", into["x"].to_local()[:3].tolist()


def save_two(rank: int, path: str) -> None:
    """Steps 1 and 2 of one sharded tensor, each full."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with lf_ckpt.open(path, group=world(), full_every=0, compress="raw") as store:
        for step in (1, 2):
            x = distribute_tensor(torch.arange(300_000) + step, mesh, [Shard(0)])
            store.save(step, {"x": x}).wait()


def open_locked(rank: int, path: str) -> str:
    """Open a store that another process holds."""
    return wait_for_error(lambda: lf_ckpt.open(path, group=world()).path)


def save_alone(rank: int, path: str) -> str:
    """A shard saved by a store that knows no other ranks."""
    tensors = {"x": distribute_tensor(torch.arange(10), init_device_mesh("cpu", (2,)), [Shard(0)])}
    with lf_ckpt.open(f"{path}/{rank}") as store:
        return wait_for_error(lambda: store.save(1, tensors).wait().error)


def save_uploaded(rank: int, path: str, copy: str) -> Bits:
    """A sharded tensor on a shared file system, uploaded by rank 0."""
    whole = torch.arange(35.0).reshape(7, 5)
    shard = distribute_tensor(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    with lf_ckpt.open(path, group=world(), mode="shared", upload=copy) as store:
        for step in (1, 2):
            store.save(step, {"x": shard, "y": torch.ones(3) * step}).wait()
        store.wait_uploaded()
        assert store.info()["commit"] == "marker last"
        assert (store.info()["lock"] == "OFD") == (rank == 0)
    return {"x": bits(whole), "y": bits(torch.ones(3) * 2)}


def reopen(rank: int, path: str) -> list[tuple[int, ...]]:
    """Stores of the same ranks one after another and side by side."""
    tensors = {"x": torch.arange(3)}
    steps = []
    for step in (1, 2):
        with lf_ckpt.open(path, group=world()) as store:
            store.save(step, tensors).wait()
            steps.append(store.steps())
    with lf_ckpt.open(path, group=world()) as one, lf_ckpt.open(f"{path}2", group=world()) as other:
        handles = [one.save(3, tensors), other.save(4, tensors)]
        for handle in reversed(handles) if rank else handles:
            handle.wait()
        steps += [one.steps(), other.steps()]
    return steps
