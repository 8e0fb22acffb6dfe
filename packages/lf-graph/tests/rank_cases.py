"""What the ranks of test_reduce.py and test_cuda.py run; importable, because a new process finds functions by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import lf_graph
from lf_graph import AllReduce, Chain, GraphError, Piece, ShardedParameterError, TrainStep
from lf_graph._adamw import FusedAdamW
from lf_graph._flat import FlatParameters

WORLD = 2
SMALL_BUCKETS = 512  # bytes; the net below fills several


class Net(nn.Module):
    """Rows to one squared error each; returns (sum of errors, rows that count)."""

    def __init__(self, normalize: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16) if normalize else nn.LayerNorm(16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        error = (self.last(self.norm(self.first(x)).relu()).float() - y).square().sum(1)
        return (error * weight).sum(), weight.sum()


def net(rank: int = 0, normalize: bool = False, device: str = "cpu") -> Net:
    """The same weights wherever ``rank`` is 0; others show that somebody sent rank 0's."""
    torch.manual_seed(rank)
    return Net(normalize).to(device)


def batches(rank: int, count: int, device: str = "cpu") -> list[tuple[Tensor, Tensor, Tensor]]:
    """Ragged micro-batches: each rank and each batch has another number of rows that count."""
    draw = torch.Generator().manual_seed(100 + rank)
    made = []
    for i in range(count):
        x, y = torch.randn(8, 6, generator=draw), torch.randn(8, 3, generator=draw)
        rows = 1 + (3 * i + 5 * rank) % 8
        made.append((x.to(device), y.to(device), (torch.arange(8) < rows).float().to(device)))
    return made


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=2**-6, momentum=0.5)  # numbers that float32 holds exactly


def values(model: nn.Module) -> list[Any]:
    """Parameters and buffers as arrays, which travel between processes without sharing memory."""
    return [t.detach().cpu().numpy().copy() for t in model.state_dict().values()]


Finish = Callable[[Tensor], None]  # the end of an update: gradients times a scale, clipped, to the optimizer


def by_torch(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float = 0.0) -> Finish:
    """As one writes it by hand."""

    def finish(scale: Tensor) -> None:
        for p in model.parameters():
            p.grad.mul_(scale)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return finish


@contextmanager
def by_flat(optimizer: torch.optim.Optimizer, clip: float = 0.0) -> Iterator[Finish]:
    """With TrainStep's own AdamW, which rounds in another order than torch's: what is left is what ranks add up."""
    flat = FlatParameters(optimizer)
    fused = FusedAdamW(flat, clip=clip)

    def finish(scale: Tensor) -> None:
        fused.set_gradients([p.grad for p in flat.parameters])
        fused.step(scale)
        optimizer.zero_grad()

    yield finish
    flat.close()


def eager_ddp(
    model: DDP,
    finish: Finish,
    micros: list[tuple[Tensor, Tensor, Tensor]],
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
) -> None:
    """Sums, one synchronised backward, and an end with what makes DDP's mean a sum over the count of all ranks."""
    for start in range(0, len(micros), accumulate):
        group = micros[start : start + accumulate]
        count = torch.stack([w.sum() for _, _, w in group]).sum()
        dist.all_reduce(count)
        for i, micro in enumerate(group):
            quiet = model.no_sync() if i + 1 < len(group) else nullcontext()
            cast = (
                torch.autocast(micro[0].device.type, autocast, cache_enabled=False)
                if autocast
                else nullcontext()
            )
            with quiet, cast:
                total, _ = model(*micro)
                total.backward()
        finish(WORLD / count)


def run_step(step: TrainStep, micros: list[tuple[Tensor, Tensor, Tensor]], accumulate: int) -> None:
    for start in range(0, len(micros), accumulate):
        for micro in micros[start : start + accumulate]:
            step.micro(*micro)
        step.update()


def twins(
    rank: int,
    *,
    wrapped: bool,
    build: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    accumulate: int = 1,
    clip: float = 0.0,
    autocast: torch.dtype | None = None,
    normalize: bool = False,
    updates: int = 5,
    wire: torch.dtype | None = None,
    device: str = "cpu",
    flat: bool = False,
) -> tuple[list[Any], list[Any], dict[str, str]]:
    """(weights of DDP's eager loop, weights of TrainStep, its info()) after the same batches.

    ``flat`` gives the loop by hand the AdamW of TrainStep.
    """
    micros = batches(rank, updates * accumulate, device)
    plain = DDP(net(rank, normalize, device))
    optimizer = build(plain)
    with by_flat(optimizer, clip) if flat else nullcontext(by_torch(plain, optimizer, clip)) as finish:
        eager_ddp(plain, finish, micros, accumulate, autocast)
    model = DDP(net(rank, normalize, device)) if wrapped else net(0, normalize, device)
    reduce = None if wrapped and wire is None else AllReduce(bucket_bytes=SMALL_BUCKETS, dtype=wire)
    step = TrainStep(model, build(model), accumulate=accumulate, clip=clip, autocast=autocast, reduce=reduce)
    with step:
        run_step(step, micros, accumulate)
        info = step.info()
    return values(plain.module), values(model.module if wrapped else model), info


def even_sgd(rank: int) -> tuple[list[Any], list[Any]]:
    """The same with SGD and 8 rows that count everywhere: every scale is a power of two, so nothing rounds."""
    micros = [(x, y, torch.ones(8)) for x, y, _ in batches(rank, 10)]
    plain, ours = DDP(net()), net()
    eager_ddp(plain, by_torch(plain, sgd(plain)), micros, 2)
    with TrainStep(ours, sgd(ours), accumulate=2, reduce=AllReduce(bucket_bytes=SMALL_BUCKETS)) as step:
        run_step(step, micros, 2)
    return values(plain.module), values(ours)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Sizes in bytes of the all-reduces that torch is asked for."""
    sizes: list[int] = []
    original = dist.all_reduce

    def spy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = spy
    try:
        yield sizes
    finally:
        dist.all_reduce = original


def collectives_of_one_update(rank: int, wire: torch.dtype | None = None) -> tuple[list[int], int]:
    """(bytes of each all-reduce in the second update, bytes of all gradients)."""
    model, reduce = net(), AllReduce(bucket_bytes=SMALL_BUCKETS, dtype=wire)
    micros = batches(rank, 2)
    with TrainStep(model, adamw(model), reduce=reduce) as step:
        step(*micros[0])
        before = reduce.collectives
        with counted() as sizes:
            step(*micros[1])
        assert reduce.collectives - before == len(sizes)
        return sizes, sum(p.numel() * 4 for p in model.parameters())


def reported(rank: int) -> tuple[float, float, float, float]:
    """(loss, count) that the step reports, and what they are over all ranks."""
    model, batch = net(), batches(rank, 1)[0]
    want = torch.stack([v.detach() for v in net()(*batch)])
    dist.all_reduce(want)
    with TrainStep(model, adamw(model), reduce=AllReduce()) as step:
        result = step(*batch)
    return result.loss.item(), result.count.item(), (want[0] / want[1]).item(), want[1].item()


def poisoned_on_one_rank(rank: int) -> tuple[list[Any], list[Any], int, list[Any]]:
    """(weights before, weights after a step with inf on rank 1, steps skipped, weights after a good step)."""
    model, micros = net(), batches(rank, 3)
    with TrainStep(model, adamw(model), clip=1.0, reduce=AllReduce()) as step:
        step(*micros[0])
        before = values(model)
        x, y, weight = micros[1]
        step(x * (float("inf") if rank == 1 else 1.0), y, weight)
        after = values(model)
        step(*micros[2])
        return before, after, int(step.skipped), values(model)


def different_options(rank: int) -> str:
    """The error of ranks that cut other buckets."""
    model = net()
    with TrainStep(model, adamw(model), reduce=AllReduce(bucket_bytes=256 * (1 + rank))) as step:
        try:
            step(*batches(rank, 1)[0])
        except GraphError as e:
            return str(e)
    return ""


def peer_dies(rank: int, flag: Path) -> dict[str, Any]:
    """Rank 1 vanishes between a micro-batch and its update; what rank 0 sees."""
    model, micros = net(), batches(rank, 2)
    step = TrainStep(model, adamw(model), reduce=AllReduce(bucket_bytes=SMALL_BUCKETS))
    step(*micros[0])
    before = values(model)
    step.micro(*micros[1])
    if rank == 1:
        while not flag.exists():  # an earlier end could take the first step's last bytes with it
            time.sleep(0.01)
        os._exit(1)
    flag.touch()
    found: dict[str, Any] = {"before": before}
    for name, act in (
        ("first", step.update),
        ("again", step.update),
        ("micro", lambda: step.micro(*micros[1])),
    ):
        try:
            act()
        except Exception as e:
            found[name] = (isinstance(e, GraphError), str(e))
    step.close()
    found["after"] = values(model)
    model(*micros[1])[0].backward()
    found["usable"] = all(p.grad is not None for p in model.parameters())
    return found


def wrapper_in_the_loss(rank: int) -> tuple[list[Any], list[Any]]:
    """Weights when the loss calls the DDP wrapper, and when TrainStep calls the module."""
    found = []
    for own in (True, False):
        model = DDP(net(rank))
        loss = (lambda *batch, model=model: model(*batch)) if own else None
        with TrainStep(model, adamw(model), loss=loss, autocast=torch.bfloat16) as step:
            run_step(step, batches(rank, 3), 1)
        found.append(values(model.module))
    return found[0], found[1]


def eager_after_close(rank: int) -> tuple[list[Any], list[Any]]:
    """Weights after a step, and after an eager DDP update with its AdamW; then one eager DDP update of both."""
    first, second = batches(rank, 2)
    ours, plain = DDP(net(rank)), DDP(net(rank))
    optimizer, reference = adamw(ours), adamw(plain)
    with TrainStep(ours, optimizer) as step:
        step(*first)
    with by_flat(reference) as finish:
        eager_ddp(plain, finish, [first])
    for model, own in ((ours, optimizer), (plain, reference)):
        eager_ddp(model, by_torch(model, own), [second])
    return values(ours.module), values(plain.module)


def bucket_size_of_wrapper(rank: int) -> tuple[int, bool]:
    model = DDP(net(), bucket_cap_mb=3)
    step = TrainStep(model, adamw(model))
    reduce: Any = step._parallel.reduce
    return reduce.bucket_bytes, reduce.process_group is model.process_group


def refusal(act: Callable[[], object]) -> str:
    """The message of the GraphError that ``act`` raises, else ""."""
    try:
        act()
    except GraphError as e:
        return str(e)
    return ""


def refused_wrappers(rank: int) -> dict[str, str]:
    """What TrainStep says to DDP options that it cannot keep."""
    hooked = DDP(net())
    hooked.register_comm_hook(None, lambda state, bucket: bucket.get_future())
    static = DDP(net(), static_graph=True)
    partial = net()
    DDP._set_params_and_buffers_to_ignore_for_model(partial, ["last.bias"])
    ignoring = DDP(partial)
    models = {"hook": hooked, "static": static, "ignored": ignoring}
    said = {k: refusal(lambda m=m: TrainStep(m, adamw(m))) for k, m in models.items()}
    joined = DDP(net())
    step = TrainStep(joined, adamw(joined))
    with joined.join():
        said["join"] = refusal(lambda: step(*batches(rank, 1)[0]))
        joined._join_config = joined._join_config.construct_disabled_join_config()
    step.close()
    return said


def refused_shards(rank: int) -> dict[str, Any]:
    """What TrainStep, Chain and capture say to models sharded by FSDP2, FSDP1 and tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, inner, split, old = net(), net(), net(), net()
    fully_shard(whole, mesh=mesh)
    fully_shard(inner.last, mesh=mesh)
    parallelize_module(split, mesh, {"first": ColwiseParallel()})
    wrapped = FullyShardedDataParallel(old, use_orig_params=True, device_id=torch.device("cpu"))
    found: dict[str, Any] = {}
    for name, model in {"whole": whole, "inner": inner, "split": split, "old": wrapped}.items():
        for how, build in {
            "step": lambda m=model: TrainStep(m, adamw(m)),
            "chain": lambda m=model: Chain([Piece(m, ("x", "y", "w"))], ("x", "y", "w")),
            "capture": lambda m=model: lf_graph.capture(m, batches(rank, 1)[0]),
        }.items():
            try:
                build()
            except ShardedParameterError as e:
                found[f"{name} {how}"] = (e.parameter, e.kind, str(e))
    optimizer, before = adamw(whole), whole.first.bias.to_local().clone()
    whole(*batches(rank, 1)[0])[0].backward()
    optimizer.step()
    found["still trains"] = bool((whole.first.bias.to_local() != before).any())
    return found


def refused_pipeline(rank: int) -> str:
    from torch.distributed.pipelining import PipelineStage

    model = net()
    stage = PipelineStage(model, rank, WORLD, torch.device("cpu"))
    return refusal(lambda: TrainStep(stage, adamw(model)))
