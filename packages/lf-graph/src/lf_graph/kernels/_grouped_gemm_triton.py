"""Grouped products as Triton kernels: tiles of experts laid out from offsets on the device, and sums of rows.

A program takes tiles round by round. It reads all offsets, so that it knows where each expert's tiles begin, and finds
its tile's expert by counting those that end before it. The rows that belong to no expert are one more group, whose
tiles are zero. Within an expert, ``GROUP`` tiles below each other share a column of the weight before the next column
begins: programs that run together read the same weights from L2.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
# Triton has no types, and its kernels take no annotations but constexpr.
# ruff: noqa: N803

from __future__ import annotations

from lf_graph.kernels._interpreter import cast, dot, tl, triton


@triton.jit
def _bounds(group, start, end, rows, experts):
    """First and end row of each group: experts, the rows of none, and none; wrong offsets stay within the rows."""
    start = tl.where(group <= experts, start, rows)
    start = tl.minimum(tl.maximum(start, 0), rows)
    end = tl.where(group < experts, end, rows)
    return start, tl.minimum(tl.maximum(end, start), rows)


@triton.jit
def _chosen(values, group, number):
    """values[number] of a block."""
    return tl.sum(tl.where(group == number, values, 0), axis=0)


@triton.jit
def _tile_of(local, below, beside, GROUP: tl.constexpr):
    """Which tile down and across is number ``local`` of a matrix with ``below`` x ``beside`` tiles."""
    band = local // (GROUP * beside)
    height = tl.minimum(below - band * GROUP, GROUP)
    inside = local - band * GROUP * beside
    return band * GROUP + inside % height, inside // height


@triton.jit
def _multiplied(
    a, b, inside, fits, depth, w_depth, up_shift, SWIGLU: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum over depth of the tiles that start at the pointers a [M, K] and b [K, N]; of two tiles b with SWIGLU."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    k = tl.arange(0, BLOCK_K)
    for start in range(0, depth, BLOCK_K):
        left = k < depth - start
        if WHOLE:
            left_tile = tl.load(a, mask=inside[:, None], other=0.0)
            right_tile = tl.load(b)
        else:
            left_tile = tl.load(a, mask=inside[:, None] & left[None, :], other=0.0)
            right_tile = tl.load(b, mask=left[:, None] & fits[None, :], other=0.0)
        acc = dot(left_tile, right_tile, acc, PRECISION)
        if SWIGLU:
            if WHOLE:
                up_tile = tl.load(b + up_shift)
            else:
                up_tile = tl.load(b + up_shift, mask=left[:, None] & fits[None, :], other=0.0)
            up = dot(left_tile, up_tile, up, PRECISION)
        a += BLOCK_K
        b += BLOCK_K * w_depth
    return acc, up


@triton.jit
def _store_swiglu(acc, up, out, hidden, factor, row, column, columns, stored):
    """Gate and up, rounded, and what the backward will compute from them."""
    gate, up = cast(acc, out.dtype.element_ty), cast(up, out.dtype.element_ty)
    place = row[:, None].to(tl.int64) * (2 * columns) + column[None, :]
    tl.store(out + place, gate, mask=stored)
    tl.store(out + place + columns, up, mask=stored)
    g = gate.to(tl.float32)
    value = g * tl.sigmoid(g) * up.to(tl.float32) * factor[:, None]
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(hidden + place, cast(value, hidden.dtype.element_ty), mask=stored)


@triton.jit
def grouped_product(
    x, w, out, hidden, row_weight, offsets, tokens, rows, experts, depth, columns, x_stride, w_expert, w_depth,
    w_column, INDEXED: tl.constexpr, SWIGLU: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """out[r] = x[r] @ w[expert of r]; with SWIGLU also hidden[r] = silu(gate) * up * row_weight[r].

    ``columns`` are those of one half with SWIGLU, whose tiles have two accumulators. WHOLE: tiles fill depth and
    columns, so that weights need no masks. GROUPS is a power of two above the number of experts.
    """
    group = tl.arange(0, GROUPS)
    # loaded here: a compiler takes what a function reaches by pointer, and returns for a store's place, as written to
    starts = tl.load(offsets + group - 1, mask=(group > 0) & (group <= experts), other=0)
    ends = tl.load(offsets + group, mask=group < experts, other=0)
    starts, ends = _bounds(group, starts, ends, rows, experts)
    below_all = (ends - starts + BLOCK_M - 1) // BLOCK_M
    beside = tl.cdiv(columns, BLOCK_N)
    last = tl.cumsum(below_all, axis=0) * beside
    total = tl.sum(below_all, axis=0) * beside
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        number = tl.sum((last <= tile).to(tl.int32), axis=0)
        below = _chosen(below_all, group, number)
        local = tile - _chosen(last, group, number) + below * beside
        down, across = _tile_of(local, below, beside, GROUP)
        row = _chosen(starts, group, number) + down * BLOCK_M + tl.arange(0, BLOCK_M)
        column = across * BLOCK_N + tl.arange(0, BLOCK_N)
        inside, fits = row < _chosen(ends, group, number), column < columns
        of_expert = inside & (row * 0 + number < experts)
        source = row.to(tl.int64)
        if INDEXED:
            source = tl.load(tokens + row, mask=of_expert, other=0).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        expert = tl.minimum(number, experts - 1).to(tl.int64)
        acc, up = _multiplied(
            x + source[:, None] * x_stride + k[None, :],
            w + expert * w_expert + k[:, None] * w_depth + column[None, :].to(tl.int64) * w_column,
            inside, fits, tl.where(number < experts, depth, 0), w_depth, tl.cast(columns, tl.int64) * w_column,
            SWIGLU, WHOLE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        stored = inside[:, None] & fits[None, :]
        if SWIGLU:
            factor = tl.load(row_weight + row, mask=of_expert, other=0.0)
            _store_swiglu(acc, up, out, hidden, factor, row, column, columns, stored)
        else:
            place = row[:, None].to(tl.int64) * columns + column[None, :]
            tl.store(out + place, cast(acc, out.dtype.element_ty), mask=stored)


@triton.jit
def grouped_weight_gradient(
    x, grad, out, offsets, x_tokens, grad_tokens, rows, depth, columns, x_stride, grad_stride, out_expert,
    out_depth, out_column, X_INDEXED: tl.constexpr, GRAD_INDEXED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[e] = x[rows of e].T @ grad[rows of e]: one program for each tile, which sums over the rows in order."""
    below, beside = tl.cdiv(depth, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    expert = tl.program_id(0) // (below * beside)
    down, across = _tile_of(tl.program_id(0) % (below * beside), below, beside, GROUP)
    start = tl.minimum(tl.maximum(tl.load(offsets + expert - 1, mask=expert > 0, other=0), 0), rows)
    end = tl.minimum(tl.load(offsets + expert), rows)
    d, column = down * BLOCK_M + tl.arange(0, BLOCK_M), across * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(start, end, BLOCK_K):
        row = first + tl.arange(0, BLOCK_K)
        inside = row < end
        x_row, grad_row = row.to(tl.int64), row.to(tl.int64)
        if X_INDEXED:
            x_row = tl.load(x_tokens + row, mask=inside, other=0).to(tl.int64)
        if GRAD_INDEXED:
            grad_row = tl.load(grad_tokens + row, mask=inside, other=0).to(tl.int64)
        a_mask, b_mask = inside[:, None] & (d < depth)[None, :], inside[:, None] & (column < columns)[None, :]
        a = tl.load(x + x_row[:, None] * x_stride + d[None, :], mask=a_mask, other=0.0)
        b = tl.load(grad + grad_row[:, None] * grad_stride + column[None, :], mask=b_mask, other=0.0)
        acc = dot(tl.trans(a), b, acc, PRECISION)
    place = d[:, None].to(tl.int64) * out_depth + column[None, :].to(tl.int64) * out_column
    stored = (d < depth)[:, None] & (column < columns)[None, :]
    tl.store(out + expert.to(tl.int64) * out_expert + place, cast(acc, out.dtype.element_ty), mask=stored)


@triton.jit
def token_sums(y, out, rows, columns, y_stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = sum of y[rows[t, k]] over k, in fp32 and in order; grid (tokens, blocks of columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(rows + token * TOP_K + k)
        total += tl.load(y + row * y_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * columns + column, cast(total, out.dtype.element_ty), mask=mask)
