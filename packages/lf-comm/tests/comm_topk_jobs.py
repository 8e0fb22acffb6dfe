"""What ranks do in tests of block top-k."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from comm_jobs import bits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lf_comm import SparseGradientReducer

BLOCK = 256


class Named(nn.Module):
    """Parameters of given lengths, for gradients that a test makes up."""

    def __init__(self, **counts: int) -> None:
        super().__init__()
        for name, count in counts.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(count)))


def whole_numbers(rank: int, step: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Multiples of 16, so that any order of sums and a division by 2 or 4 are exact; blocks of very different size."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    size = (
        torch.randint(1, 9, (-(-count // BLOCK), 1), generator=generator).expand(-1, BLOCK).flatten()[:count]
    )
    return (16 * size * torch.randint(-3, 4, (count,), generator=generator)).to(dtype)


def reference(steps: int, world: int, count: int, ratio: int) -> tuple[list[Tensor], list[Tensor]]:
    """Block by block in plain Python: (averages by step, residuals by rank) of one parameter."""
    left = [torch.zeros(count) for _ in range(world)]
    averages, blocks = [], count // BLOCK
    for step in range(steps):
        given = [left[r] + whole_numbers(r, step, count) / world for r in range(world)]
        energy = [
            sum(float(g[b * BLOCK : (b + 1) * BLOCK].square().sum()) for g in given) for b in range(blocks)
        ]
        best = sorted(range(blocks), key=lambda b: (-energy[b], b))[: blocks // ratio]
        sent = torch.zeros(count, dtype=torch.bool)
        sent[blocks * BLOCK :] = True
        for block in best:
            sent[block * BLOCK : (block + 1) * BLOCK] = True
        averages.append(torch.stack(given).sum(0) * sent)
        left = [g * ~sent for g in given]
    return averages, left


def reducer_of(counts: dict[str, int], **options: Any) -> SparseGradientReducer:
    return SparseGradientReducer(Named(**counts), **{"sparsity_threshold": 0.0, **options})


def averaged(reducer: SparseGradientReducer, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """One bucket of these gradients."""
    flat = torch.cat([g.flatten() for g in gradients.values()])
    counts = [g.numel() for g in gradients.values()]
    reducer._average(flat, list(gradients), counts)
    return dict(zip(gradients, flat.split(counts), strict=True))


def by_reference(rank: int, count: int, ratio: int, steps: int) -> tuple[bool, bool]:
    """Whether (averages, residual) are those of `reference`."""
    world = dist.get_world_size()
    averages, left = reference(steps, world, count, ratio)
    reducer = reducer_of({"w": count}, compression_ratio=ratio)
    same = [
        torch.equal(averaged(reducer, {"w": whole_numbers(rank, step, count)})["w"], averages[step])
        for step in range(steps)
    ]
    kept = reducer.state_dict()["residuals"].get("w", torch.zeros(count))
    return all(same), torch.equal(kept, left[rank])


def conserved(rank: int, threshold: float, dtype: torch.dtype, together: bool) -> tuple[float, float, str]:
    """(largest difference of what was sent and is left from what was given, largest given, last path)."""
    counts = {"a": 8 * BLOCK + 3, "b": 5, "c": 40 * BLOCK}
    reducer = reducer_of(counts, sparsity_threshold=threshold)
    sent, given = ({n: torch.zeros(c) for n, c in counts.items()} for _ in range(2))
    for step in range(4):
        mine = {n: whole_numbers(rank, step, c, dtype) for n, c in counts.items()}
        for name, gradient in mine.items():
            mean = gradient.to(torch.float32, copy=True)
            dist.all_reduce(mean)
            given[name] += mean / dist.get_world_size()
        results = averaged(reducer, mine) if together else {}
        for name in () if together else counts:
            results |= averaged(reducer, {name: mine[name]})
        for name, result in results.items():
            sent[name] += result.float()
    for name, residual in reducer.state_dict()["residuals"].items():
        total = residual.clone()
        dist.all_reduce(total)
        sent[name] += total
    off = max(float((sent[n] - given[n]).abs().max()) for n in counts)
    return off, max(float(g.abs().max()) for g in given.values()), reducer.report()["c"].path


def ties(rank: int) -> list[int]:
    """Blocks that are sent of ten with the same energy, and of two that differ by a bit."""
    reducer = reducer_of({"w": 10 * BLOCK}, compression_ratio=3)
    result = averaged(reducer, {"w": torch.ones(10 * BLOCK)})["w"]
    return result.view(10, BLOCK).any(1).nonzero().flatten().tolist()


def not_finite(rank: int, value: float, dtype: torch.dtype) -> dict[str, Any]:
    """One element of the last rank is not finite, in a block that would not be sent and in every third of others."""
    counts = {"w": 40 * BLOCK, "calm": 8 * BLOCK}
    reducer = reducer_of(counts)
    averaged(reducer, {n: whole_numbers(rank, 0, c, dtype) for n, c in counts.items()})
    before = reducer.state_dict()["residuals"]["w"]
    bad = whole_numbers(rank, 1, counts["w"], dtype)
    places = torch.arange(7, counts["w"], 3 * BLOCK)
    if rank == dist.get_world_size() - 1:
        bad[places] = value
    result = averaged(reducer, {"w": bad, "calm": whole_numbers(rank, 1, counts["calm"], dtype)})
    residuals = reducer.state_dict()["residuals"]
    return {
        "arrived": not bool(torch.isfinite(result["w"][places]).any()),
        "elsewhere": int((~torch.isfinite(result["w"])).sum()) - len(places),
        "left": float((residuals["w"] - before).abs().max()),
        "calm": bool(torch.isfinite(result["calm"]).all()),
        "path": reducer.report()["w"].path,
    }


def huge_and_tiny(rank: int) -> tuple[bool, bool]:
    """(squares that overflow are summed whole, squares that vanish are not lost)."""
    reducer = reducer_of({"w": 8 * BLOCK})
    large = averaged(reducer, {"w": torch.full((8 * BLOCK,), 1e30)})["w"]
    small = torch.zeros(8 * BLOCK)
    small[-1] = 1e-30
    sent = averaged(reducer, {"w": small.clone()})["w"]
    left = reducer.state_dict()["residuals"].get("w", torch.zeros(8 * BLOCK))
    dist.all_reduce(left)
    return bool((large == 1e30).all()), torch.equal(sent + left, small)


def bytes_of(rank: int, dtype: torch.dtype, blocks: int) -> tuple[float, int]:
    """(bytes of a dense sum's, collectives) for one large gradient."""
    reducer = reducer_of({"w": blocks * BLOCK})
    averaged(reducer, {"w": whole_numbers(rank, 0, blocks * BLOCK, dtype)})
    world = dist.get_world_size()
    dense = 2 * (world - 1) * blocks * BLOCK * dtype.itemsize / world
    return reducer.bytes_sent / dense if dense else 0.0, reducer._channel.calls


def threshold(rank: int) -> dict[str, str]:
    """Paths of gradients whose best quarter has all, most and little of the energy."""
    counts = {"sparse": 40 * BLOCK, "leaning": 40 * BLOCK, "flat": 40 * BLOCK}
    scale = torch.full((40, 1), 1.0)
    leaning, sparse = scale.clone(), scale.clone()
    leaning[10:], sparse[10:] = 0.2, 0.0
    noise = torch.randn(3, 40, BLOCK, generator=torch.Generator().manual_seed(rank))
    reducer = reducer_of(counts, sparsity_threshold=0.85)
    averaged(reducer, dict(zip(counts, (noise[0] * sparse, noise[1] * leaning, noise[2]), strict=True)))
    return {name: decision.path for name, decision in reducer.report().items()}


def without_feedback(rank: int) -> tuple[dict[str, Tensor], bool]:
    """(residuals, whether the second sum is that of the second gradient alone)."""
    count = 8 * BLOCK
    fresh, used = (reducer_of({"w": count}, error_feedback=False) for _ in range(2))
    averaged(used, {"w": whole_numbers(rank, 0, count)})
    results = [averaged(r, {"w": whole_numbers(rank, 1, count)})["w"] for r in (fresh, used)]
    return used.state_dict()["residuals"], torch.equal(*results)


class Odd(nn.Module):
    """Every kind of parameter that a bucket may hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.pairs = nn.Parameter(torch.randn(64, 40, dtype=torch.complex64))
        self.image = nn.Parameter(torch.randn(32, 8, 4, 4).to(memory_format=torch.channels_last))
        self.transposed = nn.Parameter(torch.randn(60, 50).t())
        self.narrow = nn.Parameter(torch.randn(50, 80, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(64, 64, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        product = self.pairs @ x[:40].to(torch.complex64)
        image = (self.image * x[40:168].view(8, 4, 4)).sum((1, 2, 3))
        parts = [
            torch.view_as_real(product).square().mean(),
            image.square().mean() * self.scalar,
            (self.transposed @ x[:60]).square().mean(),
            (self.narrow @ x[:80].bfloat16()).float().square().mean(),
            (self.wide @ x[:64].double()).square().mean().float(),
            self.empty.sum(),
        ]
        return torch.stack(parts).sum()


def data(rank: int, step: int) -> Tensor:
    return torch.randn(168, generator=torch.Generator().manual_seed(100 * rank + step))


def trained_odd(
    rank: int, how: str, threshold: float = 0.0, steps: int = 3, accumulate: int = 1, **ddp_options: Any
) -> tuple[dict[str, bytes], dict[str, str], int]:
    """(weights, paths, bytes) after steps with DDP's own averaging, this hook, or no DDP."""
    net = Odd()
    ddp = DistributedDataParallel(net, **ddp_options) if how != "plain" else net
    reducer = SparseGradientReducer.attach(ddp, threshold) if how == "ours" else None  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for step in range(steps):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with torch.enable_grad() if last else ddp.no_sync():
                ddp(data(rank, 10 * step + micro)).backward()
        optimizer.step()
        optimizer.zero_grad()
    paths = {n: d.path for n, d in reducer.report().items()} if reducer else {}
    return {n: bits(p) for n, p in net.named_parameters()}, paths, reducer.bytes_sent if reducer else 0


def resumed(rank: int, stop: int, cap: float | None) -> tuple[bool, dict[str, Any]]:
    """Whether five steps, and five with a new process's objects after `stop` steps, end in the same bits."""

    def begin(net: Odd, cap: float | None, state: dict[str, Any] | None) -> Any:
        ddp = DistributedDataParallel(net, **({} if cap is None else {"bucket_cap_mb": cap}))
        reducer = SparseGradientReducer.attach(ddp, 0.0)
        if state is not None:
            reducer.load_state_dict(state)
        return ddp, reducer, torch.optim.SGD(net.parameters(), 0.01)

    def go_on(run: Any, steps: range) -> None:
        ddp, _, optimizer = run
        for step in steps:
            ddp(data(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    whole = Odd()
    run = begin(whole, None, None)
    go_on(run, range(stop))
    weights = {n: p.detach().clone() for n, p in whole.named_parameters()}
    state = run[1].state_dict()
    go_on(run, range(stop, 5))
    net = Odd()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(weights[name])
    go_on(begin(net, cap, state), range(stop, 5))
    same = all(bits(a) == bits(b) for a, b in zip(whole.parameters(), net.parameters(), strict=True))
    return same, state


def reloaded(rank: int, states: Any) -> tuple[dict[str, Tensor], list[str]]:
    """(residuals by name after loading, warnings)."""
    reducer = SparseGradientReducer(Odd(), 0.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        reducer.load_state_dict(states)
    return reducer.state_dict()["residuals"], [str(w.message) for w in said if w.category is UserWarning]


def flushed(rank: int, states: Any) -> tuple[bool, int, dict[str, Tensor]]:
    """On one rank, what was left of more is added to the gradient: (right, collectives, residuals after)."""
    reducer = SparseGradientReducer(Odd(), 0.0)
    reducer.load_state_dict(states)
    left = reducer.state_dict()["residuals"]["pairs"]
    gradient = torch.ones(left.numel())
    reducer._average(gradient, ["pairs"], [left.numel()])
    return (
        torch.equal(gradient, 1 + left.flatten()),
        reducer._channel.calls,
        reducer.state_dict()["residuals"],
    )


def refused_states(rank: int) -> list[str]:
    """What is said of states that do not fit."""
    reducer, said = reducer_of({"w": 1024}), []
    good = {"version": 1, "rank": rank, "ranks": 1, "residuals": {"w": torch.zeros(1024)}}
    for state in (
        {},
        {**good, "version": 2},
        {**good, "residuals": {"v": torch.zeros(1024)}},
        {**good, "residuals": {"w": torch.zeros(512)}},
        {**good, "residuals": {"w": torch.full((1024,), float("nan"))}},
        [{**good, "ranks": 3}, {**good, "rank": 2, "ranks": 3}],
    ):
        try:
            reducer.load_state_dict(state)  # type: ignore[arg-type]
        except ValueError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def joined(rank: int) -> tuple[dict[str, bytes], float, float]:
    """Rank 0 has two batches, the others three: (weights, change of its residual by the third, its size)."""
    net = Odd()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    ddp = DistributedDataParallel(net)
    reducer = SparseGradientReducer.attach(ddp, 0.0)
    kept: dict[str, Tensor] = {}
    with ddp.join():
        for step in range(2 if rank == 0 else 3):
            ddp(data(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            kept = reducer.state_dict()["residuals"]
    after = reducer.state_dict()["residuals"]
    change = max(float((after[n] - kept[n]).abs().max()) for n in kept)
    return {n: bits(p) for n, p in net.named_parameters()}, change, float(kept["image"].abs().max())


def refused(rank: int) -> list[str]:
    """A second hook, options out of range, and a sparse gradient."""
    said = []
    ddp = DistributedDataParallel(nn.Embedding(2000, 8, sparse=True))
    SparseGradientReducer.attach(ddp)
    for call in (
        lambda: SparseGradientReducer.attach(ddp),
        lambda: reducer_of({}, sparsity_threshold=1.5),
        lambda: reducer_of({}, compression_ratio=1),
        lambda: ddp(torch.arange(5)).sum().backward(),
    ):
        try:
            call()
        except Exception as error:
            said.append(str(error))
    return said
