"""Stock rows: what PyTorch's own pieces reach, each in the best configuration known.

A variant is data: which optimizer, which dtypes, what is compiled, whether the whole step is one CUDA graph. The best
row of a (workload, batch) is whichever is fastest in the run, not one chosen here. Configurations that lost are in
``peers/tune_stock.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._functorch.config
from measure import Case, Prepared, Row, count_trained, forget_moments, reload_weights
from torch import Tensor, nn
from workloads import Workload

GRAPH_WARM_UP = 3  # steps on a side stream before capture, as torch's documentation asks
LEARNING_RATE = 1e-4
SGD_RATE = 1e-2
ATTENTION = {"flash": "flash", "cudnn": "cudnn", "efficient": "mem_efficient"}


@dataclass(frozen=True)
class Variant:
    """One stock configuration.

    compile: "" (eager), "blocks" (each block alone) or "whole" (the model); ``options`` go to inductor, and ``mode``
    replaces them; ``partition`` are settings of torch._functorch.config, by which forward and backward are cut apart.
    attention: "" lets torch choose the kernel. ``compile_optimizer`` compiles ``optimizer.step``. ``sgd`` takes
    that rule instead of AdamW's.
    """

    name: str
    fused: bool = True
    frozen_bf16: bool = True
    weights_bf16: bool = False
    accelerated: bool = True
    compile: str = ""
    compile_optimizer: bool = False
    sgd: bool = False
    graph: bool = False
    attention: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    mode: str | None = None
    partition: tuple[tuple[str, Any], ...] = ()
    expect_s: float = 12.0
    urgent: bool = False
    plain: bool = False


EAGER = Variant("eager", fused=False, frozen_bf16=False, accelerated=False, plain=True)
EAGER_FUSED = Variant("eager fused", accelerated=False, plain=True)
GROUPED = Variant("grouped eager")
GRAPH = Variant("graph", graph=True)
BLOCKS = Variant("blocks", compile="blocks", expect_s=45)
BLOCKS_GRAPH = Variant("blocks+graph", compile="blocks", graph=True, expect_s=50, urgent=True)
WHOLE = Variant("whole", compile="whole", expect_s=100)
WHOLE_GRAPH = Variant("whole+graph", compile="whole", graph=True, expect_s=130, urgent=True)


def pinned(variant: Variant, attention: str) -> Variant:
    """``variant`` with one attention kernel for the whole row."""
    return replace(variant, name=f"{variant.name}, {attention}", attention=attention, urgent=False)


def variants(workload: Workload) -> list[Variant]:
    """The rows of one workload: the needed ones first."""
    common = [BLOCKS_GRAPH, WHOLE_GRAPH, GRAPH, EAGER_FUSED, EAGER]
    kind = workload.name.split("-")[0]
    if kind == "moe":
        quick = [replace(BLOCKS_GRAPH, expect_s=30), replace(WHOLE_GRAPH, expect_s=80)]
        slow = [replace(EAGER_FUSED, expect_s=40), replace(EAGER, expect_s=40)]
        return [*quick, GRAPH, GROUPED, *slow]
    if kind == "lm":
        whole = replace(WHOLE, expect_s=60, urgent=True)
        return [replace(WHOLE_GRAPH, expect_s=100), whole, pinned(whole, "cudnn"), *common[2:]]
    return [*common, pinned(GRAPH, "flash"), pinned(GRAPH, "cudnn")]


@contextmanager
def only_attention(kind: str) -> Iterator[None]:
    """Let ``scaled_dot_product_attention`` use one kernel, and the plain one where that refuses; "" changes nothing."""
    if not kind:
        yield
        return
    cuda = torch.backends.cuda
    names = list(ATTENTION.values())
    before = {name: getattr(cuda, f"{name}_sdp_enabled")() for name in names}
    try:
        for name in names:
            getattr(cuda, f"enable_{name}_sdp")(name == ATTENTION[kind])
        yield
    finally:
        for name, on in before.items():
            getattr(cuda, f"enable_{name}_sdp")(on)


def build(case: Case, variant: Variant) -> nn.Module:
    """The model as the variant stores it."""
    model = case.model()
    if variant.accelerated:
        model = case.workload.accelerate(model)
    if variant.weights_bf16:
        model.bfloat16()
    if variant.frozen_bf16:
        case.workload.freeze(model)
    return model


def compiler_arguments(variant: Variant) -> dict[str, Any]:
    """Keyword arguments of ``torch.compile``; shapes are static, and graphs are made by hand."""
    if variant.mode:
        return {"dynamic": False, "mode": variant.mode}
    return {"dynamic": False, "options": {"triton.cudagraphs": False, **dict(variant.options)}}


def allow_many_recompiles() -> None:
    """A block is compiled once per kind of instance; the default limit is far below one model's number of kinds."""
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 4096


def compiled(model: nn.Module, workload: Workload, variant: Variant) -> nn.Module:
    """The model to call."""
    allow_many_recompiles()
    if variant.compile == "blocks":
        for block in workload.blocks(model):
            block.compile(**compiler_arguments(variant))
    if variant.compile == "whole":
        return torch.compile(model, **compiler_arguments(variant))  # type: ignore[return-value]
    return model


def optimizer_of(model: nn.Module, variant: Variant, device: torch.device) -> torch.optim.Optimizer:
    """AdamW with its defaults, or SGD; ``capturable`` keeps the step count on the device."""
    trained = [p for p in model.parameters() if p.requires_grad]
    capturable = variant.graph and device.type == "cuda"
    if variant.sgd:
        return sgd(trained, device)
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=variant.fused, capturable=capturable)


def sgd(parameters: Iterable[nn.Parameter], device: torch.device) -> torch.optim.SGD:
    """The optimizer that :class:`lf_graph.TrainStep` captures as torch has it; its rate lies on the device there."""
    return torch.optim.SGD(parameters, lr=torch.tensor(SGD_RATE, device=device), momentum=0.9, fused=True)


def whole_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, variant: Variant, batch: Any
) -> Callable[[], Tensor]:
    """zero_grad, forward under autocast, backward and update as one function."""
    loss_of, kind = case.workload.loss, case.device.type
    update = torch.compile(optimizer.step, dynamic=False) if variant.compile_optimizer else optimizer.step

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        # a weight cast that is kept across capture would be one that replays do not redo
        with torch.autocast(
            kind, torch.bfloat16, enabled=not variant.weights_bf16, cache_enabled=not variant.graph
        ):
            loss = loss_of(model, batch)
        loss.backward()
        update()
        return loss.detach()

    return step


def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """``step`` as one CUDA graph; its loss lies at a fixed address."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(GRAPH_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def prepare(case: Case, variant: Variant) -> Prepared:
    """Set one variant up."""
    with ExitStack() as undo:
        undo.enter_context(only_attention(variant.attention))
        undo.enter_context(torch._functorch.config.patch(dict(variant.partition)))
        model = build(case, variant)
        optimizer = optimizer_of(model, variant, case.device)
        called = compiled(model, case.workload, variant)
        batch = case.inputs()
        step = whole_step(called, optimizer, case, variant, batch)
        if variant.graph:
            optimizer.zero_grad(set_to_none=True)
            step = captured(step)

        def restart() -> None:
            reload_weights(model, build(case, variant))
            forget_moments(optimizer)

        close = undo.pop_all().close
        return Prepared(step, restart, close=close, trainable=count_trained(model), feeds=batch)


def row_of(workload: Workload, batch: int, variant: Variant) -> Row:
    """The measurable row of a variant."""
    return Row(
        workload,
        batch,
        variant.name,
        "stock",
        lambda case: prepare(case, variant),
        expect_s=variant.expect_s,
        urgent=variant.urgent,
        plain=variant.plain,
        needs_gpu=variant.graph or bool(variant.compile),
        masters=not variant.weights_bf16,
        launches_matter=not (variant.graph or variant.compile == "whole"),
    )


def rows(workload: Workload) -> list[Row]:
    """All stock rows of a workload."""
    return [row_of(workload, batch, variant) for batch in workload.batches for variant in variants(workload)]
