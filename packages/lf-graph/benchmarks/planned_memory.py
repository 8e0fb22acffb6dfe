"""What a compiled step of the language model will hold and move, from Inductor's own schedule: no GPU, no memory.

    python planned_memory.py                              # the 1.65 B model, 8 x 2048, every way of recomputing
    python planned_memory.py --layers 2,4 --recompute cheap,0.5 --json planned.json

The model is made of fake tensors and compiled up to Inductor's schedule of forward and backward (partition, fusion,
order); then the buffers of the schedule are followed from kernel to kernel. That is done at two depths, and a line
through them gives the depth of the workload. Predicted, not measured: Inductor schedules for a CPU here, which leaves
reductions and some products of SwiGLU's backward unfused; what operators need inside is not counted (workspaces, one
chunk of logits). Attention is an opaque operator that keeps what FlashAttention-2 keeps.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import models
import torch
import torch._functorch.config
from fused import fused_loss
from torch import Tensor, fx, nn
from torch._inductor import memory, scheduler
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._ordered_set import OrderedSet
from workloads import LM_DIMS

from lf_graph._compile import Recompute, partitioner_settings

GIB, MIB = 2**30, 2**20
BATCH, LENGTH = 8, 2048
VIEWS = ("view", "permute", "transpose", "t", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze")
BYTES_PER_S = 4e12  # what elementwise kernels of an H200 reach: for the time that more bytes take


# -- one compiled graph ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """Bytes of one graph's schedule.

    Attributes:
        start: that it is given and frees, parameters left out.
        peak: alive at its highest, outputs included.
        moved: that its kernels and products read and write.
    """

    start: int
    peak: int
    moved: int


class _Scheduled(BaseException):
    """Ends a compilation where code would be written."""


def _follow(nodes: Sequence[Any], by_name: Any, by_fused: Any, given: Collection[str]) -> Schedule:
    inputs, outputs = OrderedSet(V.graph.graph_inputs.keys()), OrderedSet(V.graph.get_output_names())
    _, freeable = memory.prepare_planning_info(nodes, by_name, by_fused, inputs, outputs)
    freed = {name: one for name, one in freeable.items() if name in given}
    lives, *_ = memory.compute_memory_timeline(list(nodes), freed, outputs)
    made: list[list[int]] = [[] for _ in nodes]
    ended: list[list[int]] = [[] for _ in nodes]
    for life in lives:
        if life.buffer.get_name() not in freed:
            made[life.start_step].append(life.size_alloc)
        if life.end_step != -1:
            ended[life.end_step].append(life.size_free)
    start = sum(one.mpi_buffer.size_free for one in freed.values())
    in_place = [
        not isinstance(node, (scheduler.ExternKernelSchedulerNode, scheduler.NopKernelSchedulerNode))
        for node in nodes
    ]
    moved = sum(node.get_read_write_buffers_sizes() for node in nodes)
    return Schedule(start, highest(start, made, ended, in_place), moved)


def highest(
    start: int, made: Sequence[Sequence[int]], ended: Sequence[Sequence[int]], in_place: Sequence[bool]
) -> int:
    """Most bytes alive over a schedule.

    Args:
        start: bytes alive before it.
        made, ended: for each kernel the sizes of what it makes, and of what nobody reads after it.
        in_place: for each kernel whether a result may take the memory of an input of its size that ends there, as
            Inductor's own kernels do and matrix products do not.
    """
    alive = most = start
    for new, old, reuses in zip(made, ended, in_place, strict=True):
        shared = sum((Counter(new) & Counter(old)).elements()) if reuses else 0
        most = max(most, alive + sum(new) - shared)
        alive += sum(new) - sum(old)
    return most


def schedule_of(
    graph: fx.GraphModule, inputs: Sequence[Any], given: Collection[str] = (), **options: Any
) -> Schedule:
    """Compile a graph up to its schedule; ``given`` are the inputs that it frees, the others belong to somebody."""
    found: list[Schedule] = []

    def stop(self: scheduler.Scheduler) -> None:
        found.append(_follow(self.nodes, self.name_to_buf, self.name_to_fused_node, given))
        raise _Scheduled

    with mock.patch.object(scheduler.Scheduler, "codegen", stop):
        try:
            compile_fx_inner(graph, inputs, **options)
        except _Scheduled:
            return found[0]
    raise RuntimeError("Inductor wrote code without scheduling it")


# -- forward and backward -------------------------------------------------------------------------------------------

Kind = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class Planned:
    """A compiled forward and backward.

    Attributes:
        kept: (operator, dtype, shape) to (how many, bytes of all) of what the backward is given by the forward.
        forward, backward: their schedules.
    """

    kept: dict[Kind, tuple[int, int]]
    forward: Schedule
    backward: Schedule

    @property
    def peak(self) -> int:
        """Bytes at the highest of both."""
        return max(self.forward.peak, self.backward.peak)

    @property
    def moved(self) -> int:
        """Bytes that both move."""
        return self.forward.moved + self.backward.moved


def _behind_views(node: fx.Node) -> fx.Node:
    while (
        node.op == "call_function"
        and str(node.target).split(".")[1:2]
        and (str(node.target).split(".")[1] in VIEWS)
    ):
        node = node.args[0]  # type: ignore[assignment]
    return node


def handed_over(graph: fx.Graph, results: int = 1) -> list[tuple[fx.Node, fx.Node]]:
    """What a forward graph made for its backward, behind its ``results``: (as it is handed over, what made it)."""
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, (tuple, list))
    pairs = [(o, _behind_views(o)) for o in outputs[results:] if isinstance(o, fx.Node)]
    return [
        (o, root)
        for o, root in pairs
        if root.op != "placeholder" and isinstance(root.meta.get("val"), Tensor)
    ]


def sizes_of(nodes: Iterable[fx.Node]) -> dict[Kind, tuple[int, int]]:
    """How many nodes there are of a kind, each once, and their bytes."""
    sizes: dict[Kind, list[int]] = defaultdict(list)
    for node in dict.fromkeys(nodes):
        value = node.meta["val"]
        sizes[str(node.target), str(value.dtype), tuple(value.shape)].append(value.untyped_storage().nbytes())
    return {kind: (len(each), sum(each)) for kind, each in sizes.items()}


def planned(
    loss: Callable[[], Tensor], parameters: Sequence[Tensor], recompute: Recompute = "default"
) -> Planned:
    """Compile a loss and its backward under the fake mode of their tensors, and follow both schedules.

    Args:
        loss: without arguments; its tensors are fake.
        parameters: whose gradients are taken.
        recompute: as for ``lf_graph.TrainStep``.
    """
    schedules: list[Schedule] = []
    kept: list[tuple[fx.Node, fx.Node]] = []

    def inner(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[[list[Any]], Any]:
        given = {
            node.name for node in graph.graph.find_nodes(op="placeholder") if node.name.startswith("tangents")
        }
        given |= {node.name for node, _ in kept}  # by the forward, where this is the backward
        copy = deepcopy(graph)  # Inductor changes its own
        if not options.get("is_backward"):
            kept.extend(handed_over(copy.graph))
        schedules.append(schedule_of(graph, inputs, given, **options))

        def call(values: list[Any]) -> Any:
            given = list(values)
            values.clear()
            return copy(*given)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    torch._dynamo.reset()
    with torch._functorch.config.patch(partitioner_settings(recompute)):
        compiled = torch.compile(
            loss, dynamic=False, backend=lambda graph, given: compile_fx(graph, given, inner_compile=inner)
        )
        value = compiled()
        torch.autograd.grad(value, parameters, torch.ones_like(value))
    forward, backward = schedules
    return Planned(sizes_of(root for _, root in kept), forward, backward)


# -- the language model ---------------------------------------------------------------------------------------------


@torch.library.custom_op("planned::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(output as FlashAttention-2 lays it out, log of sums [B, H, T]); for fake tensors only."""
    raise NotImplementedError("planned::attention computes nothing")


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = q.shape
    out = q.new_empty(batch, length, heads, width).transpose(1, 2)
    return out, q.new_empty(batch, heads, length, dtype=torch.float32)


@torch.library.custom_op("planned::attention_backward", mutates_args=())
def attention_backward(
    up: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; for fake tensors only."""
    raise NotImplementedError("planned::attention_backward computes nothing")


@attention_backward.register_fake
def _(
    up: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length, width = q.shape
    made = [q.new_empty(batch, length, heads, width).transpose(1, 2) for _ in range(3)]
    return made[0], made[1], made[2]


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, up: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    given: tuple[Tensor, ...] = torch.ops.planned.attention_backward(up, *ctx.saved_tensors)
    return given


attention.register_autograd(_gradients, setup_context=_keep)


def _attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    out: Tensor = torch.ops.planned.attention(q, k, v)[0]
    return out


def hidden_sum(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The part of the loss that is compiled where the loss is not: its gradient is given from outside."""
    found: Tensor = model.hidden(batch[0])
    return found


LOSSES: dict[str, Callable[[nn.Module, list[Tensor]], Tensor]] = {
    "plain": lambda model, batch: model(*batch),
    "fused": fused_loss,
    "outside": hidden_sum,
}


def shadowed(model: models.LM, loss: str) -> list[nn.Linear]:
    """The layers whose weight TrainStep gives a bf16 shadow; the head outside of plain losses is read in fp32."""
    linear = (m for m in model.modules() if isinstance(m, nn.Linear))
    return [m for m in linear if loss == "plain" or m is not model.head]


def language_model(
    layers: int, loss: str, recompute: Recompute, shadows: bool = True, dims: models.LMDims = LM_DIMS
) -> Planned:
    """The benchmark's language model as TrainStep compiles it."""
    with FakeTensorMode(), mock.patch.object(nn.functional, "scaled_dot_product_attention", _attend):
        model = models.LM(replace(dims, layers=layers))
        for module in shadowed(model, loss) if shadows else []:
            module.weight.data = module.weight.data.bfloat16()
        batch = [torch.zeros(BATCH, LENGTH, dtype=torch.int64) for _ in range(2)]

        def compute() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                return LOSSES[loss](model, batch)

        trained = [p for p in model.parameters() if loss != "outside" or p is not model.head.weight]
        return planned(compute, trained, recompute)


def optimizer_bytes(loss: str, shadows: bool = True, dims: models.LMDims = LM_DIMS) -> int:
    """Masters and two moments in fp32, and bf16 shadows."""
    with torch.device("meta"):
        model = models.LM(dims)
    halves = [m.weight.numel() for m in shadowed(model, loss)] if shadows else []
    return 12 * sum(p.numel() for p in model.parameters()) + 2 * sum(halves)


def at_depth(depths: Sequence[int], values: Sequence[int], layers: int) -> int:
    """The value at ``layers`` of the line through the first and the last of ``depths``."""
    slope = (values[-1] - values[0]) / (depths[-1] - depths[0])
    return round(values[-1] + slope * (layers - depths[-1]))


def row_of(loss: str, recompute: Recompute, depths: Sequence[int], shadows: bool = True) -> dict[str, Any]:
    """One way of compiling: bytes at the depth of the workload, and what a layer keeps."""
    found = [language_model(layers, loss, recompute, shadows) for layers in depths]
    line = lambda values: at_depth(depths, values, LM_DIMS.layers)  # noqa: E731
    first, last = (sum(size for _, size in plan.kept.values()) for plan in (found[0], found[-1]))
    step = optimizer_bytes(loss, shadows)
    return {
        "loss": loss,
        "recompute": recompute,
        "kept_of_a_layer": (last - first) // (depths[-1] - depths[0]),
        "optimizer": step,
        "forward": line([p.forward.peak for p in found]),
        "backward": line([p.backward.peak for p in found]),
        "peak": step + line([p.peak for p in found]),
        "moved": line([p.moved for p in found]),
        "kept": [
            {"operator": o, "dtype": d, "shape": list(s), "count": n, "bytes": b}
            for (o, d, s), (n, b) in sorted(found[-1].kept.items(), key=lambda item: -item[1][1])
        ],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as markdown; more bytes moved, and the time they take, are against the first row of the same loss."""
    lines = [
        "| loss | recompute | kept of a layer, MiB | peak, GiB | moved, GiB | more, GiB | ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        base = next(r for r in rows if r["loss"] == row["loss"])
        more = row["moved"] - base["moved"]
        lines.append(
            f"| {row['loss']} | {row['recompute']} | {row['kept_of_a_layer'] / MIB:.0f} | {row['peak'] / GIB:.1f} "
            f"| {row['moved'] / GIB:.0f} | {more / GIB:+.1f} | {more / BYTES_PER_S * 1e3:+.1f} |"
        )
    return "\n".join(lines)


def _recompute(text: str) -> Recompute:
    return text if text in ("default", "cheap") else float(text)  # type: ignore[return-value]


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--layers", default="4,8", help="depths that are compiled")
    p.add_argument(
        "--loss", default="fused", help="plain, fused, outside (the compiled part ends at hidden states)"
    )
    p.add_argument("--recompute", default="default,cheap,0.99", help="default, cheap, or shares of memory")
    p.add_argument("--no-shadows", action="store_true", help="weights are fp32, and cast where they are read")
    p.add_argument("--kept", action="store_true", help="list what the deeper one keeps")
    p.add_argument("--json", type=Path)
    args = p.parse_args(argv)
    depths = [int(d) for d in args.layers.split(",")]
    rows = [
        row_of(loss, _recompute(how), depths, not args.no_shadows)
        for loss in args.loss.split(",")
        for how in args.recompute.split(",")
    ]
    print(table(rows))
    for row in rows if args.kept else []:
        print(f"\n{row['loss']}, {row['recompute']}, {depths[-1]} layers")
        for one in row["kept"][:12]:
            print(
                f"{one['bytes'] / MIB:8.0f} MiB {one['count']:4d} x {one['shape']} {one['dtype']} {one['operator']}"
            )
    if args.json:
        args.json.write_text(json.dumps({"version": 1, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
