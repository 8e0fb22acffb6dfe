"""Tiles of packed or padded rows for attention kernels: which sequence they belong to, loads, stores, products.

Rows in a kernel count from the start of their sequence.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803
# Triton has no types; its compile-time arguments are in capitals.

from __future__ import annotations

from lf_graph.kernels._interpreter import cast, dot, tl, triton

PACKED, PADDED, FULL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def span(sequence, offsets, pitch, capacity, LAYOUT: tl.constexpr):
    """First row and length of a sequence; never beyond the capacity, whatever the offsets are.

    PACKED: offsets are cu_seqlens. PADDED: they are lengths, and a sequence starts every ``pitch`` rows. FULL: the same
    with all lengths ``pitch``, and offsets are not read.
    """
    if LAYOUT == PACKED:
        start = tl.minimum(tl.maximum(tl.load(offsets + sequence), 0), capacity)
        stop = tl.minimum(tl.load(offsets + sequence + 1), capacity)
        return start, tl.maximum(stop - start, 0)
    elif LAYOUT == PADDED:  # noqa: RET505, Triton compiles one branch of a constexpr if/else
        return sequence * pitch, tl.minimum(tl.maximum(tl.load(offsets + sequence), 0), pitch)
    else:
        return sequence * pitch, sequence * 0 + pitch


@triton.jit
def _packed_sequence(tile, offsets, sequences, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """The last sequence whose tiles begin at ``tile`` or before."""
    begun = 0
    for at in range(0, sequences, LANES):
        index = at + tl.arange(0, LANES)
        first_tiles = tl.load(offsets + index, mask=index < sequences, other=0) // BLOCK + index
        begun += tl.sum(((first_tiles <= tile) & (index < sequences)).to(tl.int32), 0)
    return tl.maximum(begun - 1, 0)


@triton.jit
def find(
    tile, offsets, sequences, pitch, capacity, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr
):
    """Sequence of a tile, its first row and length, the tile's first row, and the row where the next sequence begins.

    The tile is none if its first row is negative, or not before that last row.
    """
    if LAYOUT == PACKED:
        sequence = _packed_sequence(tile, offsets, sequences, BLOCK, LANES)
        start, length = span(sequence, offsets, pitch, capacity, LAYOUT)
        last = sequence + 1 == sequences
        stop = tl.load(offsets + tl.where(last, sequence, sequence + 1))
        stop = tl.where(last, capacity, tl.minimum(stop, capacity)) - start
        first = (tile - start // BLOCK - sequence) * BLOCK
    else:
        tiles = (pitch + BLOCK - 1) // BLOCK
        sequence = tile // tiles
        start, length = span(sequence, offsets, pitch, capacity, LAYOUT)
        stop = pitch
        first = tile % tiles * BLOCK
    return sequence, start, length, first, stop


@triton.jit
def place(
    base, sequence, start, first, head, batch, row, step, LAYOUT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Pointer to row ``first`` of a sequence in a head; strides of batch, row and head count ALIGN elements.

    64-bit: a tensor may have more than 2^31 elements.
    """
    base += (head.to(tl.int64) * step) * ALIGN
    base += (tl.cast(first, tl.int64) * row) * ALIGN
    if LAYOUT == PACKED:
        return base + (start.to(tl.int64) * row) * ALIGN
    else:  # noqa: RET505
        return base + (sequence.to(tl.int64) * batch) * ALIGN


@triton.jit
def _columns(base, rows, stride, limit, FIRST: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    """[rows, WIDTH] from column FIRST on; zero past the head, and from row ``limit`` on unless that is None."""
    columns = FIRST + tl.arange(0, WIDTH)
    pointers = base + rows[:, None] * stride + columns[None, :]
    if limit is None:
        if FIRST + WIDTH <= HEAD_DIM:
            return tl.load(pointers)
        else:  # noqa: RET505, Triton compiles one branch of a constexpr if/else
            return tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    elif FIRST + WIDTH <= HEAD_DIM:
        return tl.load(pointers, mask=(rows < limit)[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=(rows < limit)[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load(base, rows, stride, limit, HEAD_DIM: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Both parts of the head; the second is the first again where there is none."""
    low = _columns(base, rows, stride, limit, 0, LOW, HEAD_DIM)
    if HIGH > 0:
        return low, _columns(base, rows, stride, limit, LOW, HIGH, HEAD_DIM)
    else:  # noqa: RET505
        return low, low


@triton.jit
def _store_columns(
    base, rows, stride, length, stop, x, FIRST: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr
):
    columns = FIRST + tl.arange(0, WIDTH)
    pointers = base + rows[:, None] * stride + columns[None, :]
    x = tl.where((rows < length)[:, None], x, 0.0)
    mask = (rows < stop)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(pointers, cast(x, base.dtype.element_ty), mask=mask)


@triton.jit
def store(
    base, rows, stride, length, stop, low, high,
    HEAD_DIM: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Rows of the sequence, and zeros for unused rows up to ``stop``."""
    _store_columns(base, rows, stride, length, stop, low, 0, LOW, HEAD_DIM)
    if HIGH > 0:
        _store_columns(base, rows, stride, length, stop, high, LOW, HIGH, HEAD_DIM)


@triton.jit
def head_product(a_low, a_high, b_low, b_high, HIGH: tl.constexpr):
    """a @ b^T: sums over the head, fp32."""
    product = dot(a_low, tl.trans(b_low), None, "tf32x3")
    if HIGH > 0:
        product = dot(a_high, tl.trans(b_high), product, "tf32x3")
    return product


@triton.jit
def add_product(low, high, weights, b_low, b_high, HIGH: tl.constexpr):
    """(low, high) + weights @ b, with the weights rounded to the type of b."""
    weights = cast(weights, b_low.dtype)
    low = dot(weights, b_low, low, "tf32x3")
    if HIGH > 0:
        high = dot(weights, b_high, high, "tf32x3")
    return low, high
