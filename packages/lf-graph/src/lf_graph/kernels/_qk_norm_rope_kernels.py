"""RMSNorm and rotation of heads as Triton kernels: q and k are read once and written once, forward and backward.

The backward computes the norm again from q and k, which costs no memory traffic: it reads them anyway.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# Triton has no types, and its kernels take no annotations but constexpr.
# ruff: noqa: N803

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import wrap_triton

from lf_graph.kernels._interpreter import cast, fp32, tl, triton
from lf_graph.kernels._partials import sum_partials
from lf_graph.kernels._rope_triton import Tables, angles_of, dense_heads, outputs_like, rest_of, token_of
from lf_graph.kernels._rows import splits_of
from lf_graph.kernels._tunable import Config


@triton.jit
def _part(x, start, first, real, end, SIZE: tl.constexpr):
    """Columns [first, end) of rows that start at ``start``, fp32 [rows, SIZE], 0 beyond."""
    columns = first + tl.arange(0, SIZE)
    mask = real[:, None] & (columns < end)[None, :]
    return tl.load(x + start[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _put(out, row, first, real, end, value, D: tl.constexpr, SIZE: tl.constexpr):
    """Columns [first, end) of contiguous rows."""
    columns = first + tl.arange(0, SIZE)
    mask = real[:, None] & (columns < end)[None, :]
    places = row.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(out + places, cast(value, out.dtype.element_ty), mask=mask)


@triton.jit
def _weights(w, first, end, SIZE: tl.constexpr):
    columns = first + tl.arange(0, SIZE)
    return tl.load(w + columns, mask=columns < end, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _forward(
    x, x_batch, x_token, x_head, weight, out, cos, sin, t_batch, t_row, positions, p_batch, p_token, length, tokens,
    rows, block, eps, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr, ROWS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """ROWS heads of x, counted over batch, tokens and heads."""
    row = block * ROWS + tl.arange(0, ROWS)
    real = row < rows
    batch, index, head = token_of(row, tokens, HEADS)
    start = batch * x_batch + index * x_token + head * x_head
    a = _part(x, start, 0, real, HALF, BLOCK)
    b = _part(x, start, HALF, real, 2 * HALF, BLOCK)
    square = tl.sum(a * a + b * b, axis=1)
    if REST > 0:
        r = _part(x, start, 2 * HALF, real, D, REST)
        square += tl.sum(r * r, axis=1)
    inverse = (1 / tl.sqrt(square / D + fp32(eps)))[:, None]
    a = a * inverse * _weights(weight, 0, HALF, BLOCK)
    b = b * inverse * _weights(weight, HALF, 2 * HALF, BLOCK)
    c, s = angles_of(
        cos, sin, t_batch, t_row, positions, p_batch, p_token, length, batch, index, real, tl.arange(0, BLOCK), HALF,
        POSITIONS,
    )  # fmt: skip
    _put(out, row, 0, real, HALF, a * c - b * s, D, BLOCK)
    _put(out, row, HALF, real, 2 * HALF, b * c + a * s, D, BLOCK)
    if REST > 0:
        _put(out, row, 2 * HALF, real, D, r * inverse * _weights(weight, 2 * HALF, D, REST), D, REST)


@triton.jit(do_not_specialize=["length", "tokens", "q_rows", "k_rows"])
def norm_and_rotate(
    q, q_batch, q_token, q_head, q_weight, q_out, k, k_batch, k_token, k_head, k_weight, k_out, cos, sin, t_batch,
    t_row, positions, p_batch, p_token, length, tokens, q_rows, k_rows, eps, Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """The first programs take q, the others k."""
    blocks = tl.cdiv(q_rows, ROWS)
    if tl.program_id(0) < blocks:
        _forward(
            q, q_batch, q_token, q_head, q_weight, q_out, cos, sin, t_batch, t_row, positions, p_batch, p_token,
            length, tokens, q_rows, tl.program_id(0), eps, Q_HEADS, D, HALF, BLOCK, REST, ROWS, POSITIONS,
        )  # fmt: skip
    else:
        _forward(
            k, k_batch, k_token, k_head, k_weight, k_out, cos, sin, t_batch, t_row, positions, p_batch, p_token,
            length, tokens, k_rows, tl.program_id(0) - blocks, eps, K_HEADS, D, HALF, BLOCK, REST, ROWS, POSITIONS,
        )  # fmt: skip


@triton.jit
def _backward(
    g, g_batch, g_token, g_head, x, x_batch, x_token, x_head, weight, dx, partials, cos, sin, t_batch, t_row,
    positions, p_batch, p_token, length, tokens, rows, split, splits, eps, HEADS: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """dx of every splits-th tile, and the sum of its part of dweight, fp32 [D] at ``partials``."""
    columns = tl.arange(0, BLOCK)
    wa = _weights(weight, 0, HALF, BLOCK)
    wb = _weights(weight, HALF, 2 * HALF, BLOCK)
    sum_a = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_b = tl.zeros([ROWS, BLOCK], tl.float32)
    if REST > 0:
        wr = _weights(weight, 2 * HALF, D, REST)
        sum_r = tl.zeros([ROWS, REST], tl.float32)
    for first in range(split * ROWS, rows, splits * ROWS):
        row = first + tl.arange(0, ROWS)
        real = row < rows
        batch, index, head = token_of(row, tokens, HEADS)
        start = batch * x_batch + index * x_token + head * x_head
        upstream = batch * g_batch + index * g_token + head * g_head
        a = _part(x, start, 0, real, HALF, BLOCK)
        b = _part(x, start, HALF, real, 2 * HALF, BLOCK)
        up = _part(g, upstream, 0, real, HALF, BLOCK)
        down = _part(g, upstream, HALF, real, 2 * HALF, BLOCK)
        square = tl.sum(a * a + b * b, axis=1)
        if REST > 0:
            r = _part(x, start, 2 * HALF, real, D, REST)
            square += tl.sum(r * r, axis=1)
        # Rows beyond the last are zeros, whose inverse at eps = 0 would be infinite, and NaN in the sums of weights.
        inverse = tl.where(real, 1 / tl.sqrt(square / D + fp32(eps)), 0.0)[:, None]
        c, s = angles_of(
            cos, sin, t_batch, t_row, positions, p_batch, p_token, length, batch, index, real, columns, HALF,
            POSITIONS,
        )  # fmt: skip
        inside = real[:, None] & (columns < HALF)[None, :]
        ga = tl.where(inside, up * c + down * s, 0.0)
        gb = tl.where(inside, down * c - up * s, 0.0)
        a, b = a * inverse, b * inverse
        sum_a += ga * a
        sum_b += gb * b
        ga, gb = ga * wa, gb * wb
        along = tl.sum(ga * a + gb * b, axis=1)
        if REST > 0:
            gr = _part(g, upstream, 2 * HALF, real, D, REST)
            r = r * inverse
            sum_r += gr * r
            gr = gr * wr
            along += tl.sum(gr * r, axis=1)
        along = (along / D)[:, None]
        _put(dx, row, 0, real, HALF, (ga - a * along) * inverse, D, BLOCK)
        _put(dx, row, HALF, real, 2 * HALF, (gb - b * along) * inverse, D, BLOCK)
        if REST > 0:
            _put(dx, row, 2 * HALF, real, D, (gr - r * along) * inverse, D, REST)
    tl.store(partials + columns, tl.sum(sum_a, axis=0), mask=columns < HALF)
    tl.store(partials + HALF + columns, tl.sum(sum_b, axis=0), mask=columns < HALF)
    if REST > 0:
        columns = 2 * HALF + tl.arange(0, REST)
        tl.store(partials + columns, tl.sum(sum_r, axis=0), mask=columns < D)


@triton.jit(do_not_specialize=["length", "tokens", "q_rows", "k_rows", "splits"])
def norm_and_rotate_backward(
    dq, dq_batch, dq_token, dq_head, q, q_batch, q_token, q_head, q_weight, q_out,
    dk, dk_batch, dk_token, dk_head, k, k_batch, k_token, k_head, k_weight, k_out, partials,
    cos, sin, t_batch, t_row, positions, p_batch, p_token, length, tokens, q_rows, k_rows, splits, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr, ROWS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """The first ``splits`` programs take q, the others k; partials fp32 [2, splits, D]."""
    program = tl.program_id(0)
    part = partials + program.to(tl.int64) * D
    if program < splits:
        _backward(
            dq, dq_batch, dq_token, dq_head, q, q_batch, q_token, q_head, q_weight, q_out, part, cos, sin, t_batch,
            t_row, positions, p_batch, p_token, length, tokens, q_rows, program, splits, eps, Q_HEADS, D, HALF, BLOCK,
            REST, ROWS, POSITIONS,
        )  # fmt: skip
    else:
        _backward(
            dk, dk_batch, dk_token, dk_head, k, k_batch, k_token, k_head, k_weight, k_out, part, cos, sin, t_batch,
            t_row, positions, p_batch, p_token, length, tokens, k_rows, program - splits, splits, eps, K_HEADS, D,
            HALF, BLOCK, REST, ROWS, POSITIONS,
        )  # fmt: skip


def _shapes(q: Tensor, k: Tensor, cos: Tensor, positions: Tensor | None) -> dict[str, int]:
    """The constants that shapes decide."""
    heads, kv_heads, width, half = (int(n) for n in (q.shape[2], k.shape[2], q.shape[3], cos.shape[-1]))
    return {
        "Q_HEADS": heads, "K_HEADS": kv_heads, "D": width, "HALF": half, "BLOCK": triton.next_power_of_2(half),
        "REST": rest_of(width, half), "POSITIONS": positions is not None,
    }  # fmt: skip


def launch_forward(
    config: Config, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    cos: Tensor, sin: Tensor, positions: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q and k [B, T, heads, D] normalised and rotated, contiguous."""
    q_out, k_out = outputs_like(q, k)
    q, k, q_weight, k_weight = dense_heads(q), dense_heads(k), q_weight.contiguous(), k_weight.contiguous()
    tables, shapes = Tables.of(cos, sin, positions, q), _shapes(q, k, cos, positions)
    tokens, q_rows, k_rows = q.shape[1], q.numel() // shapes["D"], k.numel() // shapes["D"]
    grid = (triton.cdiv(q_rows, config["ROWS"]) + triton.cdiv(k_rows, config["ROWS"]),)
    if grid[0]:
        with torch.cuda.device_of(q):  # Triton launches on the current device
            wrap_triton(norm_and_rotate)[grid](
                q, *q.stride()[:3], q_weight, q_out, k, *k.stride()[:3], k_weight, k_out, *tables, tokens,
                q_rows, k_rows, eps, **shapes, **config.keywords(),
            )  # fmt: skip
    return q_out, k_out


def launch_backward(
    config: Config, dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    cos: Tensor, sin: Tensor, positions: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q and k, and of both weights, [2, D] in their dtype."""
    q_out, k_out = outputs_like(q, k)
    dq, dk, q, k = (dense_heads(t) for t in (dq, dk, q, k))
    q_weight, k_weight = q_weight.contiguous(), k_weight.contiguous()
    tables, shapes = Tables.of(cos, sin, positions, q), _shapes(q, k, cos, positions)
    tokens, q_rows, k_rows = q.shape[1], q.numel() // shapes["D"], k.numel() // shapes["D"]
    most = max(q_rows, k_rows)
    if not most:
        return q_out, k_out, q_weight.new_zeros(2, shapes["D"])
    splits = splits_of(config["PROGRAMS"], 2, -(-most // config["ROWS"]), q.device)
    partials = q.new_empty(2, splits, shapes["D"], dtype=torch.float32)
    with torch.cuda.device_of(q):
        wrap_triton(norm_and_rotate_backward)[(2 * splits,)](
            dq, *dq.stride()[:3], q, *q.stride()[:3], q_weight, q_out,
            dk, *dk.stride()[:3], k, *k.stride()[:3], k_weight, k_out, partials, *tables, tokens, q_rows, k_rows,
            splits, eps, **shapes, ROWS=config["ROWS"], num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        return q_out, k_out, sum_partials(partials, q_weight.dtype)
