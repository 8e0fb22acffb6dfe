"""Our rows: the same models through :class:`lf_graph.TrainStep`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from measure import Case, Prepared, Row, forget_moments, reload_weights
from stock import LEARNING_RATE, sgd
from torch import nn
from workloads import Workload

from lf_graph import Launch, TrainStep
from lf_graph._compile import Recompute
from lf_graph._step_options import Release


@dataclass(frozen=True)
class Ours:
    """One configuration of TrainStep.

    ``change`` puts fused modules into the accelerated model, ``loss`` takes the place of the workload's, and ``around``
    is entered for as long as the row lives, on a GPU.
    """

    name: str = "lf-graph"
    compile: str = "blocks"
    shadows: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    recompute: Recompute = "default"
    release: Release = "exact"
    clip: float = 0.0
    sgd: bool = False
    launch: Launch | None = None
    expect_s: float = 55.0
    change: Callable[[nn.Module], nn.Module] = lambda model: model
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def prepare(case: Case, ours: Ours) -> Prepared:
    """Set one configuration up."""
    undo = ExitStack()
    compiles = case.device.type == "cuda"
    if compiles:
        undo.enter_context(ours.around())
    model = ours.change(case.workload.accelerate(case.model()))
    loss = ours.loss or case.workload.loss
    case.workload.freeze(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    if ours.sgd:
        optimizer = sgd(trained, case.device)
    step = TrainStep(
        model,
        optimizer,
        loss=lambda *batch: loss(model, list(batch)),
        autocast=torch.bfloat16,
        compile=ours.compile if compiles else "off",
        compile_options=ours.options,
        recompute=ours.recompute if compiles else "default",
        release=ours.release,
        clip=ours.clip,
        shadows=ours.shadows,
        launch=ours.launch,
    )
    batch = case.inputs()

    def run() -> torch.Tensor:
        return step(*batch).loss

    def restart() -> None:
        fresh = ours.change(case.workload.accelerate(case.model()))
        reload_weights(model, fresh)
        forget_moments(optimizer)

    undo.callback(step.close)
    return Prepared(
        run,
        restart,
        close=undo.close,
        trainable=sum(p.numel() for p in trained),
        facts=step.info,
        feeds=batch,
    )


def row_of(workload: Workload, batch: int, ours: Ours) -> Row:
    """The measurable row of a configuration."""
    setup: Callable[[Case], Prepared] = lambda case: prepare(case, ours)  # noqa: E731
    return Row(
        workload, batch, ours.name, "ours", setup, expect_s=ours.expect_s, urgent=True, needs_gpu=False
    )


def configurations(workload: Workload) -> list[Ours]:
    """What is measured of a workload: repeated blocks compiled, or the whole where one block is most of the model.

    Uncompiled graphs run the kernels of eager PyTorch: their curves must be its curves.
    """
    plain = Ours("lf-graph, not compiled", compile="off", expect_s=15)
    if workload.name.startswith(("vla", "n16")):
        return [Ours(), plain]
    return [Ours(compile="model", expect_s=60), plain]


def rows(workload: Workload) -> list[Row]:
    """All our rows of a workload."""
    return [row_of(workload, batch, ours) for batch in workload.batches for ours in configurations(workload)]
