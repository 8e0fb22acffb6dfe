"""Which launches of the attention kernels to try, and the problems to try them on."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lf_graph.kernels import _attention_kernels as kernels
from lf_graph.kernels._attention_exact import exact
from lf_graph.kernels._attention_layout import Layout
from lf_graph.kernels._tunable import Config, Key, Problem, Tunable, register

_SHORTEST, _LONGEST = 64, 8192  # bounds of the length bucket
_TOKENS, _HEADS = 8192, 8  # of a tuning problem: enough tiles for every multiprocessor
_SHARED = 227 * 1024  # bytes a program may have on sm_90, the most of all cards
_TOLERANCES = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 2e-5}


def power_of_two(n: int) -> int:
    """The smallest power of two from n on."""
    return 1 << (n - 1).bit_length()


def key_of(q: Tensor, layout: Layout) -> Key:
    """(dtype, head_dim, causal, rows a sequence can have on average, to a power of two); q [batch, rows, heads, D]."""
    rows = power_of_two(max(1, q.shape[0] * q.shape[1] // max(1, layout.sequences)))
    return str(q.dtype).removeprefix("torch."), q.shape[3], layout.causal, min(max(rows, _SHORTEST), _LONGEST)


def head_parts(head_dim: int, split: bool) -> tuple[int, int]:
    """Widths of the one or two blocks that hold a head: powers of two from 16 on, the second 0 if there is none."""
    whole = max(16, power_of_two(head_dim))
    low = whole // 2
    if not split or low < 16 or head_dim == whole:
        return whole, 0
    high = max(16, power_of_two(head_dim - low))
    return (low, high) if high < low else (whole, 0)


def _compact(head_dim: int) -> bool:
    """Whether two blocks save a third or more of the columns: 72 as 64 + 16 instead of 128."""
    return sum(head_parts(head_dim, True)) * 3 <= 2 * sum(head_parts(head_dim, False))


@dataclass(frozen=True)
class _Needs:
    """What a program of one kernel holds: rows of heads that stay, rows loaded ahead, sums of the rows that stay."""

    outer: str  # the block that stays: BLOCK_M or BLOCK_N
    inner: str  # the block that goes by
    kept: int  # rows of the outer block in shared memory, such as keys and values
    sums: int  # fp32 accumulators of the outer block


_FORWARD = _Needs("BLOCK_M", "BLOCK_N", kept=1, sums=1)
_DQ = _Needs("BLOCK_M", "BLOCK_N", kept=2, sums=1)
_DKV = _Needs("BLOCK_N", "BLOCK_M", kept=2, sums=2)


def _fits(needs: _Needs, config: Config, key: Key, shared: int) -> bool:
    """Whether shared memory holds the tiles and 255 registers a thread hold the sums and two blocks of scores.

    An operand of fp32 lies there as two of tf32, in part: half as much again, as compiled for sm_90.
    """
    outer, inner = config[needs.outer], config[needs.inner]
    width = sum(head_parts(int(key[1]), bool(config["SPLIT"])))
    size = 6 if key[0] == "float32" else 2
    used = (needs.kept * outer + 2 * config.num_stages * inner) * width * size
    registers = needs.sums * outer * width + 2 * outer * inner
    return used <= shared and registers <= 32 * config.num_warps * 220


def _config(needs: _Needs, outer: int, inner: int, split: bool, warps: int, stages: int) -> Config:
    blocks = {needs.outer: outer, needs.inner: inner}
    constants = (*((name, blocks[name]) for name in ("BLOCK_M", "BLOCK_N")), ("SPLIT", int(split)))
    return Config(constants, num_warps=warps, num_stages=stages)


_SAFE = _config(_FORWARD, 16, 16, False, 4, 1)


def _outer_blocks(key: Key) -> tuple[int, ...]:
    """64 rows are what one group of four warps multiplies on sm_90; more than a sequence has are of no use."""
    if int(key[3]) <= _SHORTEST or int(key[1]) > 128 or key[0] == "float32":
        return 32, 64
    return 64, 128


def _candidates(needs: _Needs, key: Key) -> list[Config]:
    splits = {head_parts(int(key[1]), s): s for s in (False, True)}.values()
    grid = itertools.product(_outer_blocks(key), (16, 32, 64, 128), splits, (4, 8), (1, 2, 3, 4))
    configs = [_config(needs, *c) for c in grid if c[3] == 4 or c[0] == 128]
    return [c for c in configs if _fits(needs, c, key, _SHARED) and _worth_a_try(needs, c)]


def _worth_a_try(needs: _Needs, config: Config) -> bool:
    """Two to four stages for blocks of 32 to 128; fewer only where those do not fit."""
    return (config.num_stages > 1) == (config[needs.inner] > 16)


@functools.cache
def _shared_memory() -> int:
    """Bytes of shared memory that a program may have on the current device."""
    if not torch.cuda.is_available():
        return _SHARED
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(getattr(properties, "shared_memory_per_block_optin", 99 * 1024))


def _default(needs: _Needs, key: Key) -> Config:
    """The first of the preferred launches that fits this card."""
    blocks = [b for b in _preferred(needs, key) if b[0] <= max(_SHORTEST, int(key[3]))]
    configs = [_config(needs, m, n, _compact(int(key[1])), warps, stages) for m, n, warps, stages in blocks]
    return next((c for c in configs if _fits(needs, c, key, _shared_memory() - 2048)), configs[-1])


def _preferred(needs: _Needs, key: Key) -> list[tuple[int, int, int, int]]:
    """Outer block, inner block, warps, stages; from the greatest, down to what fits everywhere."""
    large = [(128, 128, 8, 2), (128, 64, 8, 2)] if needs is _FORWARD else [(128, 64, 8, 2)]
    small = [(64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)]
    return small[2:] if key[0] == "float32" else large + small


@dataclass(frozen=True)
class _Example:
    """Random packed sequences of one key, and the float64 results of attention over them."""

    q: Tensor
    k: Tensor
    v: Tensor
    gradient: Tensor
    out: Tensor
    lse: Tensor
    terms: Tensor
    layout: Layout
    expected: tuple[Tensor, ...]  # out, dq, dk, dv


def _example(key: Key, device: torch.device) -> _Example:
    from lf_graph.kernels._attention_triton import launch_dq, launch_forward

    dtype, head_dim, causal, rows = str(key[0]), int(key[1]), bool(key[2]), int(key[3])
    heads, tokens = (_HEADS, _TOKENS) if device.type == "cuda" else (1, rows)
    sequences = max(1, tokens // rows)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(rows // 2, rows + 1, (sequences,), generator=generator)
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
    numbers = torch.randn((4, 1, sequences * rows, heads, head_dim), generator=generator)
    q, k, v, gradient = numbers.to(device, getattr(torch, dtype)).unbind()
    layout = Layout(cu, cu, sequences, True, causal, head_dim**-0.5)
    out, lse = launch_forward(q, k, v, layout, _SAFE)
    _, terms = launch_dq(gradient, q, k, v, out, lse, layout, _SAFE)
    expected = exact(layout, [(n, n) for n in lengths.tolist()], q, k, v, gradient)
    return _Example(q, k, v, gradient, out, lse, terms, layout, expected)


def _problem_forward(key: Key, device: torch.device) -> Problem:
    from lf_graph.kernels._attention_triton import launch_forward

    e = _example(key, device)
    return Problem(
        lambda config: launch_forward(e.q, e.k, e.v, e.layout, config)[:1],
        e.expected[:1],
        (_TOLERANCES[str(key[0])],),
    )


def _problem_dq(key: Key, device: torch.device) -> Problem:
    from lf_graph.kernels._attention_triton import launch_dq

    e = _example(key, device)
    return Problem(
        lambda config: launch_dq(e.gradient, e.q, e.k, e.v, e.out, e.lse, e.layout, config)[:1],
        e.expected[1:2],
        (_TOLERANCES[str(key[0])],),
    )


def _problem_dkv(key: Key, device: torch.device) -> Problem:
    from lf_graph.kernels._attention_triton import launch_dkv

    e = _example(key, device)
    return Problem(
        lambda config: launch_dkv(e.gradient, e.q, e.k, e.v, e.terms, e.layout, config),
        e.expected[2:],
        (_TOLERANCES[str(key[0])],) * 2,
    )


def _tunable(
    name: str, kernel: Any, needs: _Needs, problem: Callable[[Key, torch.device], Problem]
) -> Tunable:
    return register(
        Tunable(
            name,
            (kernel,),
            default=lambda key: _default(needs, key),
            candidates=lambda key: _candidates(needs, key),
            problem=problem,
        )
    )


FORWARD = _tunable("attention_forward", kernels.forward, _FORWARD, _problem_forward)
DQ = _tunable("attention_dq", kernels.backward_queries, _DQ, _problem_dq)
DKV = _tunable("attention_dkv", kernels.backward_keys, _DKV, _problem_dkv)
