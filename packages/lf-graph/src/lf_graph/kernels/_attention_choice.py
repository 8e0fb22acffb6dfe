"""Which way of attention is the fastest on this card: from the tuner's tables, where it was measured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from lf_graph.kernels import _attention_ways as ways
from lf_graph.kernels._attention_exact import exact
from lf_graph.kernels._attention_layout import Layout
from lf_graph.kernels._inputs import KERNEL_DTYPES
from lf_graph.kernels._tunable import Choice, Key, alternative_of, register_choice

NAMES = ("triton", "varlen_attn", "flash", "cudnn", "flex")
_LARGEST = 16384  # rows of a problem
_TOLERANCES = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 2e-5}
Measured = tuple[Mapping[str, Callable[[], tuple[Tensor, ...]]], tuple[Tensor, ...], tuple[float, ...]]


def is_measured(q: Tensor) -> bool:
    """Whether there is a choice: nowhere but on a GPU."""
    return q.device.type == "cuda" and q.dtype in KERNEL_DTYPES


def key_of(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Key:
    """What a choice depends on.

    Kind of rows, whether gradients are wanted, dtype, head size to a multiple of 8, heads, key-value heads, causal;
    rows of a sequence on average, of queries and of keys, and rows of all sequences. Heads and rows count to powers of
    two. q, k and v are [batch, rows, heads, head_dim].
    """
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    every, every_k, count = q.shape[0] * q.shape[1], k.shape[0] * k.shape[1], max(1, layout.sequences)
    counts = (q.shape[2], k.shape[2]), (every // count, every_k // count, every)
    heads, rows = (tuple(_power_of_two(n) for n in group) for group in counts)
    dtype = str(q.dtype).removeprefix("torch.")
    return (_kind(layout), wanted, dtype, _multiple_of_8(q.shape[3]), *heads, layout.causal, *rows)


def _kind(layout: Layout) -> str:
    if layout.packed:
        return "packed"
    return "whole" if layout.offsets_q is None and layout.offsets_k is None else "padded"


def _power_of_two(n: int) -> int:
    """The smallest one from n on, by comparisons: of a symbol for a size, a compiler then fixes no more than that."""
    found = 1
    while found < n:
        found *= 2
    return found


def _multiple_of_8(n: int) -> int:
    found = 8
    while found < n:
        found += 8
    return found


def fastest(key: Key) -> tuple[str, str]:
    """The way to go for a key, and why."""
    from lf_graph.tune._state import state

    way = alternative_of(CHOICE, key)
    origin = state().origins.get((CHOICE.name, key), ("default",))[0]
    return way, "not measured on this card" if origin == "default" else f"fastest as {origin}"


# All that torch.compiler.assume_constant_result does, but for importing the compiler; see _moe_experts.py.
fastest._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _layout(key: Key, used: list[Tensor], device: torch.device) -> Layout:
    kind, head_dim, causal = str(key[0]), int(key[3]), bool(key[6])
    offsets: list[Tensor | None] = [None, None]
    if kind == "packed":
        offsets = [F.pad(n.cumsum(0), (1, 0)).to(device, torch.int32) for n in used]
    if kind == "padded":
        offsets = [n.to(device, torch.int32) for n in used]
    if used[0] is used[1]:
        offsets[1] = offsets[0]
    return Layout(offsets[0], offsets[1], len(used[0]), kind == "packed", causal, head_dim**-0.5)


def _problem(key: Key, device: torch.device) -> Measured:
    """Random sequences of half the rows to all of them; float64 results, sequence by sequence and head by head."""
    rows, rows_k, every = int(key[7]), int(key[8]), int(key[9])
    generator = torch.Generator().manual_seed(0)
    count = max(1, min(every, _LARGEST) // rows)
    used = [torch.randint(n // 2, n + 1, (count,), generator=generator) for n in (rows, rows_k)]
    if rows == rows_k:
        used[1] = used[0]
    if key[0] == "whole":
        used = [torch.full((count,), n) for n in (rows, rows_k)]
    layout = _layout(key, used, device)
    operands = _operands(key, layout, rows, rows_k, device, generator)
    pairs = list(zip(used[0].tolist(), used[1].tolist(), strict=True))
    expected = exact(layout, pairs, *operands)
    kept = slice(None) if key[1] else slice(1)
    calls = {
        name: functools.partial(_results, name, layout, bool(key[1]), *operands)
        for name in NAMES
        if name == "triton" or ways.obstacle(name, operands[0], operands[1], layout) is None
    }
    allowed = [_TOLERANCES[str(key[2])]] * 4
    return calls, expected[kept], tuple(allowed[kept])


def _operands(
    key: Key, layout: Layout, rows: int, rows_k: int, device: torch.device, generator: torch.Generator
) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    count = layout.sequences
    sizes = ((rows, int(key[4])), (rows_k, int(key[5])), (rows_k, int(key[5])), (rows, int(key[4])))
    shapes = [
        (1, count * n, heads, int(key[3])) if layout.packed else (count, n, heads, int(key[3]))
        for n, heads in sizes
    ]
    dtype = getattr(torch, str(key[2]))
    return [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]


def _results(
    name: str, layout: Layout, wanted: bool, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor
) -> tuple[Tensor, ...]:
    """Output, and gradients if wanted, of one way."""
    leaves = tuple(x.detach().requires_grad_(wanted) for x in (q, k, v))
    out = by_name(name, leaves, layout)
    return (out.detach(), *torch.autograd.grad(out, leaves, gradient)) if wanted else (out,)


def by_name(name: str, operands: tuple[Tensor, ...], layout: Layout) -> Tensor:
    """Attention by one of ``NAMES``, over q, k and v [batch, rows, heads, head_dim]."""
    q, k, v = operands
    if name != "triton":
        return ways.run(name, q, k, v, layout)
    from lf_graph.kernels import _attention_triton as kernels

    return kernels.batched(q, k, v, layout)


CHOICE = register_choice(Choice("attention", NAMES, _problem))
