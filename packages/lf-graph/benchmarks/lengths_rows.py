"""Ways to train the language model on documents of real lengths: stock, ours, and the ladder from one to the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from lengths_data import Batch, Corpus, Shape, loong_feed, packed, padded, torch_feed
from lengths_models import (
    as_gr00t,
    attend_flex,
    attend_ours,
    document_mask,
    packed_loss,
    take_packed,
    torch_varlen,
)
from models import LM
from stock import LEARNING_RATE
from torch import Tensor, nn
from workloads import Workload

from lf_graph import TrainStep

WHOLE: dict[str, Any] = {"dynamic": False, "options": {"triton.cudagraphs": False}}
Layout = Literal["padded", "packed"]


@dataclass(frozen=True)
class Setting:
    """What all rows share: the model, the documents and the device."""

    workload: Workload
    shape: Shape
    corpus: Corpus
    device: torch.device

    def model(self) -> Any:
        """The plain model with its initial weights."""
        return self.workload.model(self.device)

    def feed(self, loader: str, layout: Layout) -> Iterator[Batch]:
        """Endless batches on the device."""
        if loader == "lf-iouring":
            return loong_feed(self.corpus, self.device)
        return torch_feed(self.corpus, layout, self.device)

    def parity_batch(self, way: Way) -> tuple[Tensor, ...]:
        """The first documents as the loader of ``way`` lays them, on the device."""
        documents = [self.corpus[i] for i in range(self.shape.rows)]
        if way.layout == "padded":
            tensors, _ = padded(documents, self.shape)
        else:
            tensors, _ = packed(documents, self.shape, fill_end=way.loader == "torch")
        return tuple(t.to(self.device) for t in tensors)


@dataclass(frozen=True)
class Trained:
    """A way that is set up: ``step`` trains on one batch and returns its loss on the device."""

    step: Callable[..., Tensor]
    close: Callable[[], None] = lambda: None
    facts: Callable[[], dict[str, Any]] = dict


@dataclass(frozen=True)
class Way:
    """One row. ``expect_s`` is how long it takes in all on an H200, compilation included."""

    name: str
    source: str
    setup: Callable[[Setting], Trained]
    layout: Layout = "packed"
    loader: str = "torch"
    expect_s: float = 15.0
    needs_gpu: bool = False


@dataclass(frozen=True)
class Eager:
    """A loop of plain PyTorch.

    attention: "" for padded rows, else what packed ones use. ``compile`` compiles model and loss as a whole,
    ``kernels`` takes lf-graph's in eager code, ``release`` frees each gradient within the backward, and ``read_back``
    has the host wait for the loss of every step.
    """

    attention: Literal["", "varlen_attn", "flex", "lf-graph"] = ""
    fused_adamw: bool = True
    compile: bool = False
    kernels: bool = False
    release: bool = False
    read_back: bool = False


def loss_of(setting: Setting, model: LM, way: Eager) -> Callable[..., Tensor]:
    """The loss as a function of a batch on the device."""
    shape = setting.shape
    if not way.attention:
        found: Callable[..., Tensor] = model
    else:
        attend = {
            "varlen_attn": lambda: torch_varlen(shape.length),
            "flex": lambda: attend_flex,
            "lf-graph": lambda: attend_ours,
        }[way.attention]()
        found = functools.partial(packed_loss, take_packed(model, attend, way.kernels), way.kernels)
    if way.compile:
        found = torch.compile(found, **WHOLE)
    if way.attention != "flex":
        return found
    mask = document_mask(shape.capacity, setting.device)
    return lambda ids, labels, cu: found(ids, labels, cu, mask(cu))


def eager(setting: Setting, way: Eager) -> Trained:
    """Forward under bf16 autocast, backward, AdamW on float32 weights."""
    model = setting.model()
    loss = loss_of(setting, model, way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=way.fused_adamw)
    update, close = optimizer.step, lambda: None
    if way.release:
        from lf_memory.gradients import release

        handle = release(model, optimizer, mode="fused")
        update, close = handle.step, handle.close

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(setting.device.type, torch.bfloat16):
            value = loss(*batch)
        value.backward()
        update()
        if way.read_back:
            value.item()
        return value.detach()

    return Trained(step, close)


def graphed(setting: Setting, compile: str, kernels: bool = False) -> Trained:
    """TrainStep on ``models.LM`` with packed rows and the fused loss."""
    model = take_packed(setting.model(), attend_ours, kernels)
    return in_train_step(setting, model, functools.partial(packed_loss, model, True), compile)


def gr00t(setting: Setting, compile: str) -> Trained:
    """TrainStep on ``gr00t_n16_lm`` of lf-meta, same weights."""
    model = as_gr00t(setting.model(), fused_loss=True)
    return in_train_step(setting, model, lambda ids, labels, cu: model(ids, cu_seqlens=cu), compile)


def in_train_step(setting: Setting, model: nn.Module, loss: Callable[..., Any], compile: str) -> Trained:
    """One graph for every batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    compile = compile if setting.device.type == "cuda" else "off"
    step: Any = TrainStep(
        model,
        optimizer,
        loss=loss,
        autocast=torch.bfloat16,
        compile=compile,  # type: ignore[arg-type]
    )
    return Trained(lambda *batch: step(*batch).loss, step.close, step.info)


def of(name: str, way: Eager, source: str = "stock", loader: str = "torch", expect_s: float = 15.0) -> Way:
    """The row of an eager loop."""
    return Way(
        name,
        source,
        lambda setting: eager(setting, way),
        layout="packed" if way.attention else "padded",
        loader=loader,
        expect_s=expect_s,
        needs_gpu=way.compile or way.attention in ("varlen_attn", "flex"),
    )


def ours(name: str, setup: Callable[[Setting], Trained], expect_s: float) -> Way:
    """A row of TrainStep, fed by lf-iouring."""
    return Way(name, "ours", setup, loader="lf-iouring", expect_s=expect_s)


EAGER = of("eager", Eager(fused_adamw=False))
OURS = ours("lf-graph", lambda s: graphed(s, "model"), 60)


def stock_rows() -> list[Way]:
    """The padded loop, and the best that torch's own pieces make of packed rows; needed ones first."""
    return [
        EAGER,
        of("packed varlen_attn, whole", Eager("varlen_attn", compile=True), expect_s=58),
        of("packed FlexAttention, whole", Eager("flex", compile=True), expect_s=65),
        of("padded, whole", Eager(compile=True), expect_s=58),
        of("padded, fused AdamW", Eager()),
        of("packed varlen_attn", Eager("varlen_attn")),
    ]


def our_rows() -> list[Way]:
    """TrainStep, compiled as a whole, on the model of the baselines and on lf-meta's."""
    return [
        OURS,
        ours("lf-graph, gr00t_n16_lm", lambda s: gr00t(s, "model"), 60),
        ours("lf-graph, not compiled", lambda s: graphed(s, "off"), 18),
    ]


def ladder_rows() -> list[Way]:
    """Each row adds one thing to the one above: the first, no read-back (eager), packing, and so on.

    Graphs take the place of early release, which they refuse; compiled code takes the place of the elementwise kernels.
    """
    base = Eager(fused_adamw=False)
    packing = replace(base, attention="lf-graph")
    kernels = replace(packing, fused_adamw=True, kernels=True)
    loong: dict[str, Any] = {"source": "ours", "loader": "lf-iouring"}
    return [
        of("padded, reads back", replace(base, read_back=True)),
        EAGER,
        of("+ packing", packing, **loong),
        of("+ fused kernels", kernels, **loong),
        of("+ early release", replace(kernels, release=True), **loong),
        ours("+ graphs", lambda s: graphed(s, "off", True), 18),
        replace(OURS, name="+ compiled"),
    ]


KINDS: dict[str, Callable[[], list[Way]]] = {"stock": stock_rows, "ours": our_rows, "ladder": ladder_rows}
