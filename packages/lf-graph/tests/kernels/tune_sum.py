"""A sum as a Triton kernel with right, racy, lazy and broken configurations; also imported by the tuner's workers."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lf_graph.kernels._tunable import TUNABLES, Config, Key, Problem, Tunable, register

KEY: Key = ("float32", 1 << 16)


@triton.jit
def total_kernel(x, out, n, WAY: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """The sum of x: 0 in one program, 1 by atomics in any order, 2 not at all, 3 to where nothing is."""
    lanes = tl.arange(0, BLOCK)
    if WAY == 0:
        last = n * (tl.program_id(0) == 0)  # the first program does it all
        acc = tl.zeros([BLOCK], tl.float32)
        for start in range(0, last, BLOCK):
            acc += tl.load(x + start + lanes, mask=start + lanes < n, other=0.0)
        tl.store(out + lanes, tl.sum(acc), mask=lanes < tl.minimum(last, 1))
    if WAY == 1:
        at = tl.program_id(0) * BLOCK + lanes
        tl.atomic_add(out, tl.sum(tl.load(x + at, mask=at < n, other=0.0)))
    if WAY == 3:
        tl.store(out + (1 << 40) + lanes, lanes.to(tl.float32))


def config(way: int, block: int = 128, warps: int = 4) -> Config:
    return Config((("WAY", way), ("BLOCK", block)), num_warps=warps)


RIGHT, RACY, LAZY, BREAKS = map(config, range(4))
TOO_BIG = config(0, warps=64)  # 2048 threads, and a multiprocessor runs 1024 of one program


def total(x: Tensor, chosen: Config) -> tuple[Tensor, ...]:
    out = torch.zeros(1, device=x.device) if chosen["WAY"] == 1 else torch.empty(1, device=x.device)
    grid = (triton.cdiv(x.numel(), chosen["BLOCK"]),)
    total_kernel[grid](x, out, x.numel(), **chosen.keywords())
    return (out,)


def problem(key: Key, device: torch.device) -> Problem:
    x = torch.randn(int(key[1]), device=device)
    return Problem(lambda c: total(x, c), (x.double().sum().view(1),), (1e-2,))


def tunable(name: str, *candidates: Config) -> Tunable:
    if name not in TUNABLES:
        register(Tunable(name, (total_kernel,), lambda key: RIGHT, lambda key: candidates, problem))
    return TUNABLES[name]


TOTAL = tunable("tests.total", RACY, LAZY, TOO_BIG)
BREAKING = tunable("tests.breaking", BREAKS)
