"""Rotary positions as a Triton kernel: one launch for q and k; the backward is the inverse rotation."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# Triton has no types, and its kernels take no annotations but constexpr.
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import wrap_triton

from lf_graph.kernels._interpreter import cast, operator, tl, triton
from lf_graph.kernels._tunable import Config, Key, Problem, Tunable, config_of, register


@triton.jit
def token_of(row, tokens, HEADS: tl.constexpr):
    """Batch, index of the token and head of a row of heads, 64-bit."""
    token = row // HEADS
    return (token // tokens).to(tl.int64), (token % tokens).to(tl.int64), (row % HEADS).to(tl.int64)


@triton.jit
def angles_of(
    cos, sin, t_batch, t_row, positions, p_batch, p_token, length, batch, index, real, columns, HALF: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """cos and sin [rows, columns] of tokens, fp32; cos is NaN at positions outside of the table."""
    position = index
    if POSITIONS:
        position = tl.load(positions + batch * p_batch + index * p_token, mask=real, other=0).to(tl.int64)
    inside = (real & (position >= 0) & (position < length))[:, None] & (columns < HALF)[None, :]
    places = (batch * t_batch + position * t_row)[:, None] + columns[None, :]
    c = tl.load(cos + places, mask=inside, other=float("nan")).to(tl.float32)
    return c, tl.load(sin + places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _rotate(
    x, x_batch, x_token, x_head, out, cos, sin, t_batch, t_row, positions, p_batch, p_token, length, tokens, rows,
    block, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr, POSITIONS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """ROWS heads of x, counted over batch, tokens and heads; REST is a power of two over what passes through."""
    row = block * ROWS + tl.arange(0, ROWS)
    real = row < rows
    batch, index, head = token_of(row, tokens, HEADS)
    columns = tl.arange(0, BLOCK)
    mask = real[:, None] & (columns < HALF)[None, :]
    c, s = angles_of(
        cos, sin, t_batch, t_row, positions, p_batch, p_token, length, batch, index, real, columns, HALF, POSITIONS
    )  # fmt: skip
    if INVERSE:
        s = -s
    source = x + (batch * x_batch + index * x_token + head * x_head)[:, None] + columns[None, :]
    target = out + row.to(tl.int64)[:, None] * D + columns[None, :]
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, cast(a * c - b * s, out.dtype.element_ty), mask=mask)
    tl.store(target + HALF, cast(b * c + a * s, out.dtype.element_ty), mask=mask)
    if REST > 0:
        columns = 2 * HALF + tl.arange(0, REST)
        mask = real[:, None] & (columns < D)[None, :]
        source = x + (batch * x_batch + index * x_token + head * x_head)[:, None] + columns[None, :]
        target = out + row.to(tl.int64)[:, None] * D + columns[None, :]
        tl.store(target, tl.load(source, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["length", "tokens", "q_rows", "k_rows"])
def rotate_heads(
    q, q_batch, q_token, q_head, q_out, k, k_batch, k_token, k_head, k_out, cos, sin, t_batch, t_row,
    positions, p_batch, p_token, length, tokens, q_rows, k_rows, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
    POSITIONS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """The first programs rotate q, the others k; tables are indexed by batch and position."""
    blocks = tl.cdiv(q_rows, ROWS)
    if tl.program_id(0) < blocks:
        _rotate(
            q, q_batch, q_token, q_head, q_out, cos, sin, t_batch, t_row, positions, p_batch, p_token, length,
            tokens, q_rows, tl.program_id(0), Q_HEADS, D, HALF, BLOCK, REST, ROWS, POSITIONS, INVERSE,
        )  # fmt: skip
    else:
        _rotate(
            k, k_batch, k_token, k_head, k_out, cos, sin, t_batch, t_row, positions, p_batch, p_token, length,
            tokens, k_rows, tl.program_id(0) - blocks, K_HEADS, D, HALF, BLOCK, REST, ROWS, POSITIONS, INVERSE,
        )  # fmt: skip


def launch(
    config: Config,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """q and k [B, T, heads, D] rotated, contiguous; tables [L, R/2] or [B, T, R/2]."""
    q_out, k_out = outputs_like(q, k)
    q, k, tables = dense_heads(q), dense_heads(k), Tables.of(cos, sin, positions, q)
    batch, tokens = q.shape[:2]
    heads, kv_heads, width, half = (int(n) for n in (q.shape[2], k.shape[2], q.shape[3], cos.shape[-1]))
    q_rows, k_rows = batch * tokens * heads, batch * tokens * kv_heads
    grid = (triton.cdiv(q_rows, config["ROWS"]) + triton.cdiv(k_rows, config["ROWS"]),)
    if not grid[0]:
        return q_out, k_out
    with torch.cuda.device_of(q):  # Triton launches on the current device
        wrap_triton(rotate_heads)[grid](
            q, *q.stride()[:3], q_out, k, *k.stride()[:3], k_out, *tables, tokens, q_rows, k_rows,
            Q_HEADS=heads, K_HEADS=kv_heads, D=width, HALF=half, BLOCK=triton.next_power_of_2(half),
            REST=rest_of(width, half), POSITIONS=positions is not None, INVERSE=inverse, **config.keywords(),
        )  # fmt: skip
    return q_out, k_out


class Tables(NamedTuple):
    """Arguments by which a kernel finds the angles of a token: tables, positions, and their strides."""

    cos: Tensor
    sin: Tensor
    batch_stride: int
    row_stride: int
    positions: Tensor
    positions_batch_stride: int
    positions_stride: int
    length: int

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor, positions: Tensor | None, stand_in: Tensor) -> Tables:
        """Of tables [L, R/2] or [B, T, R/2] and positions [B, T], [T] or None (then ``stand_in`` is not read)."""
        if cos.stride(-1) != 1 or sin.stride() != cos.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
        batch_stride = cos.stride(0) if cos.dim() == 3 else 0
        where, steps = stand_in, (0, 0)
        if positions is not None:
            where, steps = (
                positions,
                (positions.stride(0) if positions.dim() == 2 else 0, positions.stride(-1)),
            )
        return cls(cos, sin, batch_stride, cos.stride(-2), where, *steps, cos.shape[-2])


def dense_heads(x: Tensor) -> Tensor:
    """Heads whose elements are neighbours."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rest_of(width: int, half: int) -> int:
    """A power of two over the dimensions that pass through; 0 for none."""
    return int(triton.next_power_of_2(width - 2 * half)) if width > 2 * half else 0


def outputs_like(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(
        k.shape, dtype=k.dtype, device=k.device
    )


def _key(q: Tensor, cos: Tensor) -> Key:
    return int(q.shape[-1]), int(cos.shape[-1]), str(q.dtype).removeprefix("torch.")


def _block(key: Key) -> int:
    return 1 << max(0, int(key[1]) - 1).bit_length()


def _default(key: Key) -> Config:
    """About 1024 pairs a program, 8 a thread."""
    rows = max(1, 1024 // _block(key))
    return Config((("ROWS", rows),), num_warps=max(1, min(4, rows * _block(key) // 256)), num_stages=1)


def _candidates(key: Key) -> Sequence[Config]:
    tiles = [(r, w) for r in (1, 2, 4, 8, 16, 32, 64, 128) for w in (1, 2, 4, 8)]
    fits = [(r, w) for r, w in tiles if 2 <= r * _block(key) // (32 * w) <= 32]
    tried = [Config((("ROWS", r),), num_warps=w, num_stages=1) for r, w in fits]
    return list(dict.fromkeys([_default(key), *tried]))


_ROUNDING = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def _problem(key: Key, device: torch.device) -> Problem:
    """16 and 8 heads at random positions; seeded, so that every process tries the same problem."""
    width, half, dtype = int(key[0]), int(key[1]), getattr(torch, str(key[2]))
    generator = torch.Generator(device).manual_seed(0)
    tokens = max(1, (1 << 24 if device.type == "cuda" else 1 << 11) // width // 24)
    q, k = (torch.randn(1, tokens, h, width, generator=generator, device=device).to(dtype) for h in (16, 8))
    angle = torch.randn(4096, half, generator=generator, device=device)
    positions = torch.randint(4096, (1, tokens), generator=generator, device=device, dtype=torch.int32)
    cos, sin = angle.cos(), angle.sin()
    c, s = (t[positions].double()[:, :, None] for t in (cos, sin))

    def exact(x: Tensor) -> Tensor:
        a, b, rest = x.double().tensor_split((half, 2 * half), -1)
        return torch.cat((a * c - b * s, b * c + a * s, rest), -1)

    return Problem(
        lambda config: launch(config, q, k, cos, sin, positions, False),
        (exact(q), exact(k)),
        (_ROUNDING[str(key[2])],) * 2,
    )


ROPE = register(Tunable("rope", (rotate_heads,), _default, _candidates, _problem))


@operator("lf_graph::rope")
def rope_op(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, inverse: bool
) -> tuple[Tensor, Tensor]:
    """See ``launch``."""
    return launch(config_of(ROPE, _key(q, cos)), q, k, cos, sin, positions, inverse)


@rope_op.register_fake
def _(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, inverse: bool
) -> tuple[Tensor, Tensor]:
    return outputs_like(q, k)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[2:5])
    ctx.inverse = inputs[5]


def _gradients(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    return *rope_op(dq, dk, *ctx.saved_tensors, not ctx.inverse), None, None, None, None


rope_op.register_autograd(_gradients, setup_context=_remember)
