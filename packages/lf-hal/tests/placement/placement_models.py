"""A detector and a text reader of the usual structure, small: what plans of several devices are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lf_hal
from lf_hal import hardware
from lf_hal.lir import Graph

Array = np.ndarray[Any, Any]


class Conv(nn.Module):
    def __init__(self, i: int, o: int, k: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(i, o, k, stride, k // 2, bias=False), nn.BatchNorm2d(o)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.bn(self.conv(x)))


class Split(nn.Module):
    """Half of the channels go through two convolutions with a shortcut, and all stages are joined (C2f of YOLOv8)."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.into, self.a, self.b = Conv(c, c, 1), Conv(c // 2, c // 2), Conv(c // 2, c // 2)
        self.out = Conv(c + c // 2, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.into(x).chunk(2, 1)
        return self.out(torch.cat((left, right, right + self.b(self.a(right))), 1))


class Backbone(nn.Module):
    """Three scales; the last one pooled at growing windows (SPPF)."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.stem, self.two, self.three = Conv(3, c, 3, 2), Conv(c, 2 * c, 3, 2), Conv(2 * c, 4 * c, 3, 2)
        self.split2, self.split3 = Split(2 * c), Split(4 * c)
        self.four, self.narrow = Conv(4 * c, 4 * c, 3, 2), Conv(4 * c, 2 * c, 1)
        self.pool, self.join = nn.MaxPool2d(5, 1, 2), Conv(8 * c, 4 * c, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p2 = self.split2(self.two(self.stem(x)))
        p3 = self.split3(self.three(p2))
        pools = [self.narrow(self.four(p3))]
        for _ in range(3):
            pools.append(self.pool(pools[-1]))
        return p2, p3, self.join(torch.cat(pools, 1))


class Neck(nn.Module):
    """From coarse to fine by upsampling and concatenation, and back by strided convolutions."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.merge3, self.merge2 = Conv(8 * c, 2 * c), Conv(4 * c, 2 * c)
        self.down, self.merge4 = Conv(2 * c, 2 * c, 3, 2), Conv(4 * c, 2 * c)

    def forward(self, p2: Tensor, p3: Tensor, p4: Tensor) -> tuple[Tensor, Tensor]:
        n3 = self.merge3(torch.cat((self.up(p4), p3), 1))
        n2 = self.merge2(torch.cat((self.up(n3), p2), 1))
        return n2, self.merge4(torch.cat((self.down(n2), n3), 1))


class Head(nn.Module):
    """Boxes and classes apart, for each scale; rows of all places."""

    def __init__(self, c: int, classes: int) -> None:
        super().__init__()
        self.box = nn.ModuleList(nn.Sequential(Conv(2 * c, c), nn.Conv2d(c, 4, 1)) for _ in range(2))
        self.label = nn.ModuleList(nn.Sequential(Conv(2 * c, c), nn.Conv2d(c, classes, 1)) for _ in range(2))

    def forward(self, n2: Tensor, n3: Tensor) -> tuple[Tensor, Tensor]:
        scales = list(zip((n2, n3), self.box, self.label, strict=True))
        boxes = torch.cat([box(x).flatten(2) for x, box, _ in scales], 2)
        labels = torch.cat([label(x).flatten(2) for x, _, label in scales], 2)
        return boxes.transpose(1, 2), labels.transpose(1, 2).sigmoid()


class Detector(nn.Module):
    """Backbone, neck and head of YOLO's kind: [B, 3, S, S] to boxes [B, P, 4] and scores [B, P, classes]."""

    def __init__(self, c: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.backbone, self.neck, self.head = Backbone(c), Neck(c), Head(c, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(*self.neck(*self.backbone(x)))  # type: ignore[no-any-return]


class Reader(nn.Module):
    """Convolutions over a line of text, an LSTM over its columns in both directions, log probabilities for CTC."""

    def __init__(self, width: int = 12, letters: int = 6) -> None:
        super().__init__()
        self.features = nn.Sequential(
            Conv(1, 8), nn.MaxPool2d(2), Conv(8, 16), nn.MaxPool2d((2, 1)), Conv(16, 16)
        )
        self.lstm = nn.LSTM(32, width, bidirectional=True, batch_first=True)
        self.letters = nn.Linear(2 * width, letters + 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x).permute(0, 3, 1, 2).flatten(2)
        y, _ = self.lstm(y)
        return F.log_softmax(self.letters(y), -1)


def decode(log_probabilities: Array, blank: int = 0) -> list[list[int]]:
    """Greedy CTC: the likeliest letter of each column, repeats and blanks dropped."""
    found = []
    for row in log_probabilities.argmax(-1):
        kept = [int(n) for i, n in enumerate(row) if n != blank and (i == 0 or n != row[i - 1])]
        found.append(kept)
    return found


@dataclass(frozen=True)
class Model:
    """A module, its graph as traced and after all passes, and what a run needs."""

    module: nn.Module
    traced: Graph
    graph: Graph
    weights: dict[str, Array]
    inputs: dict[str, Array]


def settled(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_mean, -0.2, 0.2)  # type: ignore[arg-type]
            nn.init.uniform_(part.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    return module.eval()


def of(module: nn.Module, x: Tensor) -> Model:
    traced = lf_hal.trace(settled(module), (x,))
    graph = lf_hal.optimize(traced)
    return Model(module, traced, graph, lf_hal.weights_of(module, graph), {graph.inputs[0].name: x.numpy()})


def detector(mark: str | None = None) -> Model:
    """``mark`` is the hardware of its neck."""
    torch.manual_seed(3)
    module = Detector()
    if mark is not None:
        hardware(mark)(module.neck)
    return of(module, torch.randn(1, 3, 64, 64))


def reader() -> Model:
    torch.manual_seed(4)
    return of(Reader(), torch.randn(2, 1, 8, 12))
