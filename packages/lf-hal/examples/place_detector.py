"""A small detector placed over torch on the CPU, C of this machine and a simulated accelerator, by measured costs.

    pip install 'lf-hal[torch]'      # and gcc
    python place_detector.py

Backbone, neck and head of YOLO's kind; the head is marked for an MLU, which is simulated on the CPU here and labelled
so in the plan and in the report. On a machine that has one, drop ``on="cpu"``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lf_hal import (
    CostTable,
    Executor,
    Pool,
    c_target,
    hardware,
    optimize,
    plan,
    torch_device,
    trace,
    weights_of,
)


def conv(i: int, o: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.SiLU())


@hardware("mlu290")
class Head(nn.Module):
    """Boxes and scores of each place: [B, 6, H, W]."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.stem, self.box, self.score = conv(c, c), nn.Conv2d(c, 4, 1), nn.Conv2d(c, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return torch.cat((self.box(y), self.score(y).sigmoid()), 1)


class Detector(nn.Module):
    def __init__(self, c: int = 16) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Sequential(conv(3, c, 2), conv(c, c, 2)), conv(c, 2 * c, 2)
        self.pool, self.up = nn.MaxPool2d(5, 1, 2), nn.Upsample(scale_factor=2)
        self.neck, self.head = conv(5 * c, c), Head(c)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        coarse = self.coarse(fine)
        wide = torch.cat((coarse, self.pool(coarse)), 1)
        out: Tensor = self.head(self.neck(torch.cat((self.up(wide), fine), 1)))
        return out


def main() -> None:
    """Measure, plan, run, compare."""
    torch.manual_seed(0)
    net, x = Detector().eval(), torch.randn(1, 3, 128, 128)
    graph = optimize(trace(net, (x,)))
    pool = Pool([torch_device("cpu:0"), c_target(), torch_device("mlu:0", on="cpu", spec="mlu290")])
    costs = CostTable().measure_links(pool)
    for device in pool.devices:
        costs.measure(graph, device)
    best = plan(graph, pool, costs)
    print(best)
    with Executor(best, graph, weights_of(net, graph)) as ready:
        ready.run([x.numpy()])
        done = ready.run([x.numpy()])
    print(done.report)
    (found,) = done.outputs.values()
    with torch.no_grad():
        print(f"largest distance from torch: {abs(found - net(x).numpy()).max():.2g}")


if __name__ == "__main__":
    main()
