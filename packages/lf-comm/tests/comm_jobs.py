"""What ranks do in tests; every function gets its rank first and returns what can be pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lf_comm
from lf_comm import Item, Rates, RowReducer, SparseGradReducer

PLANS = ("dense", "gather", "union", "split")
FREE = Rates(1e-5, 1e-9, 1e-9, 1e-9, 1e-10, 1e-10, 1e-10)
SLOW_LINK = Rates(1e-4, 1e-7, 1e-7, 1e-7, 1e-10, 1e-10, 1e-10)


def bits(tensor: Tensor) -> bytes:
    """Its bytes in row-major order."""
    plain = tensor.detach().contiguous()
    flat = torch.view_as_real(plain) if plain.is_complex() else plain
    return flat.reshape(-1).view(torch.uint8).numpy().tobytes()


def own_rows(kind: str, rank: int, rows: int, seed: int) -> Tensor:
    """The rows that a rank sets."""
    same, mine = (torch.Generator().manual_seed(seed + 97 * r) for r in (0, rank + 1))
    size = dist.get_world_size()
    return {
        "none": lambda: torch.empty(0, dtype=torch.int64),
        "all": lambda: torch.arange(rows),
        "same": lambda: torch.randperm(rows, generator=same)[: max(rows // 4, 1)],
        "random": lambda: torch.randperm(rows, generator=mine)[: max(rows // 4, 1)],
        "disjoint": lambda: torch.arange(rows)[rank::size],
        "first rank only": lambda: torch.arange(rows) if rank == 0 else torch.empty(0, dtype=torch.int64),
        "all but the first": lambda: (
            torch.empty(0, dtype=torch.int64) if rank == 0 else torch.arange(rows)[1:4]
        ),
        "neighbours": lambda: torch.arange(min(rank + 2, rows)),
    }[kind]()


KINDS = ("none", "all", "same", "random", "disjoint", "first rank only", "all but the first", "neighbours")


def gradient(kind: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Small whole numbers in the rows of this rank: any order of summation gives the same."""
    out = torch.zeros(shape, dtype=dtype)
    if out.numel() == 0:
        return out
    flat = out.view(1, -1) if out.dim() == 0 else out
    ids = own_rows(kind, rank, flat.shape[0], seed)
    values = torch.randint(
        -9, 10, (len(ids), *flat.shape[1:]), generator=torch.Generator().manual_seed(seed + rank)
    )
    flat[ids] = values.to(dtype)
    return out


def sums(rank: int, cases: list[tuple[str, tuple[int, ...], torch.dtype]], seed: int) -> list[str]:
    """Each case by each path; what differs from the dense sum."""
    wrong = []
    for kind, shape, dtype in cases:
        mine = gradient(kind, rank, shape, dtype, seed)
        wanted = mine.clone()
        dist.all_reduce(wanted)
        for plan in PLANS:
            found = mine.clone()
            work = RowReducer().all_reduce(found, plan=plan)
            if bits(found) != bits(wanted) or work.result is not found:
                wrong.append(f"rank {rank}: {plan} of {kind} {shape} {dtype}")
    return wrong


def strided(rank: int) -> list[str]:
    """Layouts whose first dimension is not the outermost in memory."""
    wrong = []
    makers: dict[str, Callable[[], Tensor]] = {
        "channels_last": lambda: torch.zeros(8, 3, 4, 4).to(memory_format=torch.channels_last),
        "transposed": lambda: torch.zeros(5, 12).t(),
        "every second column": lambda: torch.zeros(12, 10)[:, ::2],
        "inside of another": lambda: torch.zeros(13, 5)[1:],
        "at an odd byte": lambda: torch.zeros(12 * 5 + 1, dtype=torch.int8)[1:].view(12, 5),
    }
    for name, make in makers.items():
        for plan in PLANS:
            tensor = make()
            tensor[rank::3] = rank + 1
            wanted = tensor.contiguous().clone()
            dist.all_reduce(wanted)
            RowReducer().all_reduce(tensor, plan=plan)
            if not torch.equal(tensor, wanted):
                wrong.append(f"{plan} of {name}")
    return wrong


def in_rank_order(rank: int, op: str, dtype: torch.dtype) -> list[tuple[str, bool, bytes]]:
    """Random floats: (plan, equal to the sum in rank order, bits) for the paths that promise it, twice."""
    generator = torch.Generator().manual_seed(rank)
    mine = torch.zeros(64, 33, dtype=dtype)
    mine[rank::2] = torch.randn(len(mine[rank::2]), 33, generator=generator).to(dtype)
    mine[7] = torch.randn(33, generator=generator).to(dtype)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    scaled = [part / len(parts) if op == "avg" else part for part in parts]
    wanted = scaled[0].clone()
    for part in scaled[1:]:
        wanted += part
    found = []
    for plan in ("gather", "split") * 2:
        tensor = mine.clone()
        RowReducer().all_reduce(tensor, plan=plan, op=op)  # type: ignore[arg-type]
        found.append((plan, bits(tensor) == bits(wanted), bits(tensor)))
    return found


def odd_bits(rank: int, plan: str) -> Tensor:
    """Row 0: -0.0 on all ranks; 1: -0.0 on rank 0 only; 2: NaN on the last rank; 3: inf on all; 4: never set."""
    tensor = torch.zeros(5, 4)
    tensor[0] = -0.0
    if rank == 0:
        tensor[1] = -0.0
    if rank == dist.get_world_size() - 1:
        tensor[2] = float("nan")
    tensor[3] = float("inf")
    RowReducer().all_reduce(tensor, plan=plan)  # type: ignore[arg-type]
    return tensor


def known_rows(rank: int, plan: str) -> tuple[bool, str]:
    """Ids in any order and more than once."""
    mine = torch.zeros(20, 3)
    ids = torch.tensor([5, 2, 5, 19 - rank])
    mine[ids] = 1.0 + rank
    wanted = mine.clone()
    dist.all_reduce(wanted)
    work = lf_comm.all_reduce_rows(mine, rows=ids, plan=plan)  # type: ignore[arg-type]
    return torch.equal(mine, wanted), work.decision.path


def auto(rank: int, kind: str, rates: Rates, times: int = 1) -> list[tuple[str, int, int, bool]]:
    """(path, bytes, predicted bytes, right) of sums of 2 MiB."""
    reducer = RowReducer(rates=rates)
    found = []
    for seed in range(times):
        mine = gradient(kind, rank, (2048, 256), torch.float32, seed)
        wanted = mine.clone()
        dist.all_reduce(wanted)
        decision = reducer.all_reduce(mine, "w").decision
        found.append((decision.path, decision.bytes, decision.predicted_bytes, torch.equal(mine, wanted)))
    return found


def collectives(rank: int, shapes: list[tuple[int, ...]]) -> list[int]:
    """How many collectives sums of these shapes make, one reducer each."""
    found = []
    for shape in shapes:
        reducer = RowReducer(rates=FREE)
        reducer.all_reduce(torch.ones(shape), "w")
        found.append(reducer.channel.calls)
    return found


def many(rank: int) -> tuple[list[bool], int]:
    """Several tensors ask in one collective; (right, collectives)."""
    reducer = RowReducer(rates=SLOW_LINK)
    shapes = [(4096, 128), (700, 1000), (3, 5)]
    mine = [gradient("same", rank, shape, torch.float32, 3) for shape in shapes]
    wanted = [tensor.clone() for tensor in mine]
    for tensor in wanted:
        dist.all_reduce(tensor)
    reducer.all_reduce_many([Item(tensor, str(i)) for i, tensor in enumerate(mine)])
    return [torch.equal(a, b) for a, b in zip(mine, wanted, strict=True)], reducer.channel.calls


def coo(rank: int) -> list[bool]:
    """Sparse embedding gradients: nobody but one, nobody, one all rows, ids twice."""
    found = []
    per_rank = [
        [[], [1, 2, 3]],
        [[], []],
        [list(range(16)), []],
        [[4, 4, 9], [9, 4, 0]],
    ]
    for rows in per_rank:
        mine = rows[rank] if rank < 2 else []
        embedding = nn.Embedding(16, 4, sparse=True)
        if mine:
            (embedding(torch.tensor(mine)) * (rank + 1)).sum().backward()
            assert embedding.weight.grad is not None
            gradient = embedding.weight.grad
        else:
            gradient = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 4), (16, 4)
            )
        wanted = gradient.to_dense()
        dist.all_reduce(wanted)
        result = lf_comm.all_reduce_rows(gradient).result
        found.append(result.is_sparse and torch.equal(result.to_dense(), wanted))
    return found


def layout_errors(rank: int) -> list[str]:
    """What is said of layouts that cannot be summed."""
    said = []
    for tensor in (torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse(2)):
        try:
            lf_comm.all_reduce_rows(tensor, key="table.weight")
        except lf_comm.LayoutError as error:
            said.append(str(error))
    return said


def measured(rank: int) -> Rates:
    """Rates of the group."""
    return lf_comm.measure_rates(nbytes=1 << 18)


class Net(nn.Module):
    """A table of 1 MiB of which few rows are used, experts, and a layer that is dense."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(4096, 64, sparse=sparse)
        self.experts = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])
        self.head = nn.Linear(64, 8)

    def forward(self, ids: Tensor, expert: int) -> Tensor:
        out: Tensor = self.head(self.experts[expert](self.table(ids)))
        return out


def batch(rank: int, step: int) -> Tensor:
    return torch.randint(0, 4096, (32,), generator=torch.Generator().manual_seed(100 * rank + step))


def made(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def trained(rank: int, how: str, **options: Any) -> tuple[dict[str, bytes], dict[str, str]]:
    """Three steps with DDP's own hook or ours: (weights, path of each gradient)."""
    ddp_options = {"find_unused_parameters": True, **options.pop("ddp", {})}
    expert = options.pop("expert", lambda rank: 0)
    accumulate = options.pop("accumulate", 1)
    net = made(**options)
    ddp = DistributedDataParallel(net, **ddp_options)
    reducer = SparseGradReducer.attach(ddp, rates=SLOW_LINK, min_bytes=1 << 16) if how == "ours" else None
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for step in range(3):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with torch.enable_grad() if last else ddp.no_sync():
                ddp(batch(rank, 10 * step + micro), expert(rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    paths = {} if reducer is None else {n: d.path for n, d in reducer.report().items()}
    return {n: bits(p) for n, p in net.named_parameters()}, paths


def own_expert(rank: int) -> int:
    return rank % 2


def joined(rank: int) -> dict[str, bytes]:
    """Rank 0 has two batches, the others three."""
    net = made()
    net.experts[1].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.5)
    ddp = DistributedDataParallel(net)
    SparseGradReducer.attach(ddp, rates=SLOW_LINK, min_bytes=1 << 16)
    with ddp.join():
        for step in range(2 if rank == 0 else 3):
            ddp(batch(rank, step), 0).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {n: bits(p) for n, p in net.named_parameters()}


def hook_errors(rank: int) -> list[str]:
    """An error inside the hook, and a second hook."""
    said = []
    net = made()
    net.experts[1].requires_grad_(False)
    ddp = DistributedDataParallel(net)
    reducer = SparseGradReducer.attach(ddp, rates=SLOW_LINK)
    try:
        SparseGradReducer.attach(ddp, rates=SLOW_LINK)
    except RuntimeError as error:
        said.append(str(error))

    def broken(*_: Any, **__: Any) -> None:
        raise ArithmeticError("broken on purpose")

    reducer._rows.prepare = broken  # type: ignore[method-assign]
    try:
        ddp(batch(rank, 0), 0).sum().backward()
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    return said


def own_error(rank: int) -> tuple[str, int, dict[int, float]]:
    """A wrong shape within a step: (kind of error, gradients left, ages)."""
    watch = lf_comm.PeerWatch(interval_s=0.05)
    layer = nn.Linear(3, 3)
    layer(torch.ones(1, 3)).sum().backward()
    said = ""
    try:
        with watch.step(layer, 0):
            layer(torch.ones(1, 4))
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:3]}"
    ages = watch.ages()
    dist.barrier()
    watch.close()
    return said, sum(p.grad is not None for p in layer.parameters()), ages


def misuse(rank: int) -> list[str]:
    """What is said of calls that cannot be meant."""
    ones, said = torch.ones(600, 600), []
    reducer = RowReducer(rates=FREE)
    for call in (
        lambda: reducer.all_reduce_many([Item(ones)], plan="ring"),  # type: ignore[arg-type]
        lambda: reducer.all_reduce_many([Item(ones)], op="max"),  # type: ignore[arg-type]
        lambda: reducer.all_reduce_many([Item(torch.eye(3).to_sparse(1), "t")]),
        lambda: reducer.all_reduce_many([Item(ones, "a"), Item(ones, "a")]),
        lambda: reducer.all_reduce(ones.long(), "steps", op="avg"),
        lambda: reducer.all_reduce(ones, "w", rows=torch.tensor([-1])),
        lambda: lf_comm.PeerWatch(patience_s=float("nan")),
        lambda: lf_comm.PeerWatch(interval_s=0),
    ):
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    assert bool((ones == 1).all())
    return said


def groups_that_end(rank: int) -> int:
    """Default reducers left after sums over groups that were destroyed."""
    from lf_comm.rows import _defaults

    for _ in range(3):
        group = dist.new_group([0, 1])
        lf_comm.all_reduce_rows(torch.ones(3), group)
        dist.destroy_process_group(group)
    lf_comm.all_reduce_rows(torch.ones(3))
    return len(_defaults)


def disagreements(rank: int) -> list[str]:
    """What each rank hears when one is different."""
    said = []

    def attempt(work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    tensor = torch.zeros(2048, 256)
    odd = rank == 1
    attempt(lambda: RowReducer(rates=FREE if odd else SLOW_LINK).all_reduce(tensor, "w"))
    ids = torch.tensor([5000 if odd else 5])
    attempt(lambda: RowReducer(rates=FREE).all_reduce(tensor, "w", rows=ids))
    attempt(lambda: RowReducer(rates=FREE).all_reduce(tensor, "w", rows=torch.ones(1) if odd else ids))
    attempt(lambda: RowReducer(rates=FREE).all_reduce(tensor, "a" if odd else "b"))
    assert not tensor.any()
    # one that searches and one that knows agree
    tensor[3] = 1.0
    found = RowReducer(rates=SLOW_LINK).all_reduce(tensor, "w", rows=torch.tensor([3]) if odd else None)
    said.append(found.decision.path)
    return said
