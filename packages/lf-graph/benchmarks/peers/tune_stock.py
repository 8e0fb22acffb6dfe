"""The hour of making stock PyTorch faster: configurations beyond those of stock.py, as rows of the same frame.

    python bench_step.py --workloads vla --rows stock,peers.tune_stock --match "vla|16" --budget-s 520 --json tune.json
    python bench_step.py --workloads moe --rows peers.tune_stock --match cast,combo

They count as stock: the best stock row of a run is the fastest of all. README.md beside this says what each gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import stock
import torch
from measure import Case, Prepared, Row, count_trained, forget_moments, reload_weights
from models import GroupedMoE
from stock import BLOCKS_GRAPH, EAGER_FUSED, GRAPH, WHOLE_GRAPH, Variant, pinned
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from workloads import Workload

# --- casts of all weights in one kernel


class KeptCasts:
    """bfloat16 copies of the weights that autocast would cast at every use, refreshed by one multi-tensor copy a step.

    The module's weight is the copy; the optimizer trains the float32 master. Gradients arrive in bfloat16, as they do
    from autocast's own cast, and are widened by one more multi-tensor copy.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model  # a graph reads its frozen weights for as long as it is replayed
        self.masters: dict[str, nn.Parameter] = {}
        self.copies: list[nn.Parameter] = []
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear | GroupedMoE):
                self._take_over(path, module)
        taken = set(self.copies)
        self.others = {n: p for n, p in model.named_parameters() if p.requires_grad and p not in taken}

    def _take_over(self, path: str, module: nn.Module) -> None:
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.requires_grad and weight.dim() > 1:
                self.masters[f"{path}.{name}"] = weight
                copy = nn.Parameter(weight.detach().bfloat16())
                self.copies.append(copy)
                setattr(module, name, copy)

    def trained(self) -> list[nn.Parameter]:
        """What the optimizer gets; all float32."""
        return [*self.masters.values(), *self.others.values()]

    def drop_gradients(self) -> None:
        """Forget the gradients of the copies."""
        for copy in self.copies:
            copy.grad = None

    def widen_gradients(self) -> None:
        """Give the masters the gradients of their copies."""
        masters = list(self.masters.values())
        for master in masters:
            master.grad = torch.empty_like(master)
        torch._foreach_copy_([m.grad for m in masters], [c.grad for c in self.copies])

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the masters into the copies."""
        torch._foreach_copy_(self.copies, list(self.masters.values()))

    @torch.no_grad()
    def reload(self, fresh: nn.Module) -> None:
        """Take the values of a model whose weights were not taken over."""
        source = dict(fresh.named_parameters())
        for name, parameter in (self.masters | self.others).items():
            parameter.copy_(source[name])
        self.refresh()


def prepare_kept_casts(case: Case, variant: Variant) -> Prepared:
    """A variant whose weights are cast once a step."""
    model = stock.build(case, variant)
    kept = KeptCasts(model)
    count = count_trained(model)
    capturable = variant.graph and case.device.type == "cuda"
    optimizer = torch.optim.AdamW(kept.trained(), lr=stock.LEARNING_RATE, fused=True, capturable=capturable)
    called, batch = stock.compiled(model, case.workload, variant), case.inputs()

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        kept.drop_gradients()
        with torch.autocast(case.device.type, torch.bfloat16, cache_enabled=not variant.graph):
            loss = case.workload.loss(called, batch)
        loss.backward()
        kept.widen_gradients()
        optimizer.step()
        kept.refresh()
        return loss.detach()

    def restart() -> None:
        kept.reload(stock.build(case, variant))
        forget_moments(optimizer)

    run = stock.captured(step) if variant.graph else step
    return Prepared(run, restart, trainable=count, feeds=batch)


# --- torch.cuda.make_graphed_callables on every block


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def detached(value: Any) -> Any:
    """A tensor of the same values outside of any autograd graph, still asking for a gradient if it did."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def block_calls(model: nn.Module, workload: Workload, batch: Any, kind: str) -> dict[nn.Module, Call]:
    """With which arguments the model calls each of its blocks, from one forward pass under autocast."""
    found: dict[nn.Module, Call] = {}

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[module] = Call(*pytree.tree_map(detached, (args, kwargs)))

    hooks = [b.register_forward_pre_hook(remember, with_kwargs=True) for b in workload.blocks(model)]
    with torch.autocast(kind, torch.bfloat16, cache_enabled=False):
        workload.loss(model, batch)
    for hook in hooks:
        hook.remove()
    return found


class TensorsOnly(nn.Module):
    """A block as make_graphed_callables wants it: positional tensors; everything else stays as in the sample call."""

    def __init__(self, block: nn.Module, sample: Call) -> None:
        super().__init__()
        self.block, self.plain = block, block.forward
        self.leaves, self.structure = pytree.tree_flatten((sample.args, sample.kwargs))

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[Tensor, ...]:
        """The tensors among the arguments of a call."""
        return tuple(x for x in pytree.tree_leaves((args, kwargs or {})) if isinstance(x, Tensor))

    def forward(self, *tensors: Tensor) -> Any:
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, Tensor) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return self.plain(*args, **kwargs)


def graph_blocks(model: nn.Module, workload: Workload, batch: Any) -> None:
    """Replace the forward of every block by its pair of graphs."""
    calls = block_calls(model, workload, batch, "cuda")
    bound = [TensorsOnly(block, call) for block, call in calls.items()]
    samples = [b.tensors(c.args, c.kwargs) for b, c in zip(bound, calls.values(), strict=True)]
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        torch.cuda.make_graphed_callables(tuple(bound), tuple(samples), allow_unused_input=True)
    for graphed in bound:
        graphed.block.forward = caller_of(graphed)


def caller_of(graphed: TensorsOnly) -> Callable[..., Any]:
    """A block's new forward."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return graphed(*graphed.tensors(args, kwargs))

    return forward


def prepare_graphed_blocks(case: Case, variant: Variant) -> Prepared:
    """Blocks as graphs, the rest and the optimizer as plain launches."""
    model, batch = stock.build(case, variant), case.inputs()
    optimizer = stock.optimizer_of(model, variant, case.device)
    # the weight casts of a graphed block lie in its graph, so autocast must not keep any
    step = stock.whole_step(model, optimizer, case, replace(variant, graph=True), batch)
    graph_blocks(model, case.workload, batch)

    def restart() -> None:
        reload_weights(model, stock.build(case, variant))
        forget_moments(optimizer)

    return Prepared(step, restart, trainable=count_trained(model), feeds=batch)


# --- inductor's own graphs


def prepare_reduce_overhead(case: Case, variant: Variant) -> Prepared:
    """``mode="reduce-overhead"``: inductor captures forward and backward itself."""
    prepared = stock.prepare(case, variant)
    inner = prepared.step

    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return inner()

    prepared.step = step
    return prepared


# --- the other matrix library


@contextmanager
def cublaslt() -> Iterator[None]:
    """Let plain matrix products prefer cuBLASLt."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def prepare_cublaslt(case: Case, variant: Variant) -> Prepared:
    """Products through cuBLASLt, whose choice of kernels differs from cuBLAS's, for as long as the row lives."""
    with ExitStack() as undo:
        undo.enter_context(cublaslt())
        prepared = stock.prepare(case, variant)
        undo.callback(prepared.close)
        return replace(prepared, close=undo.pop_all().close)


# --- the rows


def with_options(variant: Variant, name: str, expect_s: float, **options: Any) -> Variant:
    """``variant`` with inductor options."""
    pairs = tuple(options.items())
    return replace(variant, name=f"{variant.name}, {name}", options=pairs, expect_s=expect_s, urgent=False)


def compiler_variants(base: Variant) -> list[Variant]:
    """One compiled and captured variant, with what inductor and the optimizer can be told."""
    again = replace(base, urgent=False)
    slow = replace(again, fused=False, compile_optimizer=True, expect_s=base.expect_s + 60)
    best = "max-autotune-no-cudagraphs"
    return [
        with_options(base, "coordinate descent", base.expect_s + 60, coordinate_descent_tuning=True),
        with_options(base, "combo kernels", base.expect_s + 20, combo_kernels=True),
        with_options(base, "dependent launches", base.expect_s + 20, **{"triton.enable_pdl": True}),
        pinned(base, "cudnn"),
        pinned(base, "flash"),
        replace(slow, name=f"{base.name}, compiled AdamW"),
        replace(again, name=f"{base.name}, max-autotune", mode=best, expect_s=base.expect_s + 150),
    ]


def special_rows(workload: Workload, batch: int) -> list[Row]:
    """Rows that are set up in their own way."""

    def row(prepare: Callable[[Case, Variant], Prepared], variant: Variant) -> Row:
        plain = stock.row_of(workload, batch, variant)
        return replace(
            plain, setup=lambda case: prepare(case, variant), urgent=False, plain=False, needs_gpu=True
        )

    accelerated = replace(EAGER_FUSED, accelerated=True)
    own: dict[str, Any] = {"compile": "whole", "mode": "reduce-overhead", "expect_s": WHOLE_GRAPH.expect_s}
    return [
        row(prepare_kept_casts, replace(GRAPH, name="graph, kept casts")),
        row(prepare_kept_casts, replace(BLOCKS_GRAPH, name="blocks+graph, kept casts")),
        row(prepare_kept_casts, replace(WHOLE_GRAPH, name="whole+graph, kept casts")),
        row(prepare_cublaslt, replace(BLOCKS_GRAPH, name="blocks+graph, cuBLASLt")),
        row(prepare_graphed_blocks, replace(accelerated, name="graphed callables", expect_s=20)),
        row(prepare_reduce_overhead, replace(accelerated, name="whole, reduce-overhead", **own)),
    ]


def rows(workload: Workload) -> list[Row]:
    """All further configurations of a workload; the largest batch first."""
    compiled = [v for base in (BLOCKS_GRAPH, WHOLE_GRAPH) for v in compiler_variants(base)]
    bfloat16 = [replace(WHOLE_GRAPH, name="whole+graph, bf16 weights", weights_bf16=True, urgent=False)]
    found = []
    for batch in workload.batches:
        found += special_rows(workload, batch)
        found += [stock.row_of(workload, batch, v) for v in (*compiled, *bfloat16)]
    return found
