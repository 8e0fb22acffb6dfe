#!/usr/bin/env python3
"""What fusing saves: blocks of ResNet-50 as one op beside the same block in parts, both ours, one thread.

    bench_fusion.py [--json OUT.json] [--repeat 15] [--only WORD ...]

Convolution, batch norm and relu, and the same with a shortcut before the relu, at the sizes of the four stages. In
parts, the convolution, the multiply-add per channel, the sum and the relu are steps of their own, in the same kernels;
bits are compared. "bare" is the convolution alone: where fused is as fast, fusing has nothing left to save. Times are
milliseconds of the processor, fastest and median of --repeat runs in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import lf_hal
from lf_hal.passes import PassOptions

FUSED = PassOptions(fold_affine=False)  # the affine stays an operation of its own, so bits can be compared
PARTS = PassOptions(fold_affine=False, fuse_conv=False, fuse_residual=False)
SIZES = {"56": (56, 64), "28": (28, 128), "14": (14, 256), "7": (7, 512)}
BLOCKS = {
    f"{kernel}x{kernel} {size}x{size} {inside}-{out}{' shortcut' * shortcut}": (
        side,
        inside,
        out,
        kernel,
        shortcut,
    )
    for size, (side, width) in SIZES.items()
    for kernel, inside, out, shortcut in (
        (3, width, width, False),
        (1, 4 * width, width, False),
        (1, width, 4 * width, False),
        (1, width, 4 * width, True),
    )
}


class Block(nn.Module):
    """relu(norm(conv(x)) + shortcut)."""

    def __init__(self, inside: int, out: int, kernel: int) -> None:
        super().__init__()
        self.conv, self.norm = (
            nn.Conv2d(inside, out, kernel, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(out),
        )
        nn.init.uniform_(self.norm.running_var, 0.5, 1.5)

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        y = self.norm(self.conv(x))
        return torch.relu(y if shortcut is None else y + shortcut)


@dataclass(frozen=True)
class Row:
    """Milliseconds; ratio is parts over fused, of the fastest runs."""

    block: str
    fused_best: float
    fused_median: float
    parts_best: float
    parts_median: float
    bare_best: float
    ratio: float


def measure(name: str, repeat: int) -> Row:
    side, inside, out, kernel, shortcut = BLOCKS[name]
    torch.manual_seed(0)
    block = Block(inside, out, kernel).eval()
    # the layout between convolutions: channels last, so that neither side turns images
    x, add = (torch.randn(1, c, side, side).to(memory_format=torch.channels_last) for c in (inside, out))
    examples = (x, add) if shortcut else (x,)
    graph = lf_hal.trace(Between(block).eval(), tuple(e.permute(0, 2, 3, 1).contiguous() for e in examples))
    weights = lf_hal.weights_of(Between(block).eval(), graph)
    arrays = [e.permute(0, 2, 3, 1).contiguous().numpy() for e in examples]
    made = [lf_hal.compile(graph, weights, passes=passes) for passes in (FUSED, PARTS)]
    bits = [next(iter(m.run(arrays).values())).tobytes() for m in made]
    bare = Between(block.conv).eval()
    bare_graph = lf_hal.trace(bare, (torch.from_numpy(arrays[0]),))
    made.append(lf_hal.compile(bare_graph, lf_hal.weights_of(bare, bare_graph)))
    if bits[0] != bits[1]:
        raise SystemExit(f"{name}: fusing changed bits")
    times: list[list[float]] = [[], [], []]
    loops = max(1, int(2e8 / (2 * side * side * inside * out * kernel * kernel)))
    for _ in range(repeat):
        for artifact, into in zip(made, times, strict=True):
            begin = time.process_time()
            for _ in range(loops):
                artifact.run(arrays[: len(artifact.inputs)])
            into.append((time.process_time() - begin) * 1e3 / loops)
    for m in made:
        m.close()
    fused, parts, alone = times
    medians = statistics.median(fused), statistics.median(parts)
    return Row(name, min(fused), medians[0], min(parts), medians[1], min(alone), min(parts) / min(fused))


class Between(nn.Module):
    """A block whose images come and go channels last."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *images: Tensor) -> Tensor:
        return self.block(*(x.permute(0, 3, 1, 2) for x in images)).permute(0, 2, 3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    rows = []
    for name in BLOCKS:
        if options.only and not any(word in name for word in options.only):
            continue
        rows.append(measure(name, options.repeat))
        r = rows[-1]
        times = f"fused {r.fused_best:7.3f} ms, parts {r.parts_best:7.3f} ms, bare {r.bare_best:7.3f} ms"
        print(f"{r.block:32} {times}, parts/fused {r.ratio:5.2f}", flush=True)
    print(f"geometric mean {np.exp(np.mean([np.log(r.ratio) for r in rows])):.2f}")
    if options.json:
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "target": lf_hal.resolve_target("native").name,
        }
        options.json.write_text(
            json.dumps({"about": about, "rows": [asdict(r) for r in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
