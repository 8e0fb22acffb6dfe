"""A model trained here, run as a LoongArch program, with the same bits.

    pip install 'lf-hal[torch,zig]'      # and qemu-user 8.2 or newer, where this machine is no LoongArch
    python hello_loongarch.py

Fits a small network to a curve with torch, compiles it for this machine and as a program for a LoongArch CPU with
LASX, and compares every bit of what both compute. On a board the program needs nothing but its folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import lf_hal
from lf_hal import Run, check_consistency


def trained() -> nn.Module:
    """A network that knows a sine."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    x = torch.linspace(-3, 3, 256)[:, None]
    for _ in range(300):
        optimizer.zero_grad()
        loss = (net(x) - x.sin()).square().mean()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.5f}")
    return net.eval()


def main() -> None:
    """Train, compile twice, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="loongarch64-lasx", help="another row of `lf-hal compile --help`")
    parser.add_argument("--out", type=Path, help="keep the LoongArch artefact in this folder")
    args = parser.parse_args()

    net, x = trained(), torch.linspace(-3, 3, 33)[:, None]
    graph = lf_hal.trace(net, (x,))
    weights = lf_hal.weights_of(net, graph)
    here = lf_hal.compile(graph, weights)
    there = lf_hal.compile(graph, weights, target=args.target, folder=args.out)
    report = check_consistency(Run.of(here), Run.of(there), {graph.inputs[0].name: x.numpy()})

    print(f"{here.target.name} against {there.target.name} ({there.target.evidence}): ", end="")
    print("0 differing bits" if report.ok else f"differs: {report.problems or report.differences}")
    if args.out:
        print(f"on the board: {args.out}/model {args.out}/weights.lfw input.raw output.raw")
    if not report.ok:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
