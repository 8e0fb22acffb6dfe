"""Rounding to 8-bit floats as Triton kernels; the products are ``torch._scaled_mm``.

One scale a tensor: partial maxima, then one pass that writes values and their transpose, as 8-bit products want both
operands with neighbours along the sum. One scale a row: a program reads its rows twice, the second time from cache.

The operators are opaque to compilers, which could fuse nothing with them. Matrices are bf16: of fp32 ones Triton 3.6
puts a quarter of the rows of ``turned`` wrong, on an H200.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
# Triton has no types, and its kernels take no annotations but constexpr.
# ruff: noqa: N803

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from lf_graph.kernels._float8 import MULTIPLE, VALUES, Float8Parts, Rounded
from lf_graph.kernels._interpreter import INTERPRETED, tl, triton

_TINY = tl.constexpr(float(torch.finfo(torch.float32).tiny))
PARTIALS = 1024  # at most: every program of the second pass reads them all, 4 KiB from L2


@triton.jit
def _float8(x, DTYPE: tl.constexpr):
    """fp32 within the format's range to 8 bits, to nearest even; the interpreter cuts small values and loses NaN."""
    if INTERPRETED:
        fraction: tl.constexpr = 3 if DTYPE == tl.float8e4nv else 2  # noqa: SIM300, a constexpr is no constant
        lowest: tl.constexpr = -6 if DTYPE == tl.float8e4nv else -14  # noqa: SIM300
        source = x.to(tl.int32, bitcast=True)
        exponent = ((source >> 23) & 0xFF) - 127
        step = tl.exp2((tl.maximum(exponent, lowest) - fraction).to(tl.float32))
        near = (x / step + 12582912.0 - 12582912.0) * step  # 1.5 * 2^23: its last bit is 1
        bits = near.to(DTYPE).to(tl.uint8, bitcast=True)
        bits = tl.where(x == x, bits & 0x7F, 0x7F) | ((source >> 24) & 0x80)
        return bits.to(tl.uint8).to(DTYPE, bitcast=True)
    else:  # noqa: RET505, Triton compiles one branch of a constexpr if/else
        return x.to(DTYPE)


@triton.jit
def _scale_of(largest, LIMIT: tl.constexpr):
    """As ``float8_linear.scale_of``."""
    scale = tl.div_rn(largest, LIMIT + largest * 0)  # as the twin divides, to the last bit
    return tl.where(scale > 0, tl.maximum(scale, _TINY), 1.0)


@triton.jit
def _small(x, inverse, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    """x * inverse in 8 bits, at most LIMIT; what is not a number stays so."""
    value = x.to(tl.float32) * inverse
    value = tl.where(value > LIMIT, LIMIT, tl.where(value < -LIMIT, -LIMIT, value))
    return _float8(value, DTYPE)


@triton.jit
def largest_magnitudes(
    x, partials, rows, columns, x_row, x_column, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """partials[program] = largest |x| of its tiles, of numbers only."""
    beside = tl.cdiv(columns, BLOCK_C)
    tiles = tl.cdiv(rows, BLOCK_R) * beside
    found = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        r = (tile // beside) * BLOCK_R + tl.arange(0, BLOCK_R)
        c = (tile % beside) * BLOCK_C + tl.arange(0, BLOCK_C)
        mask = (r < rows)[:, None] & (c < columns)[None, :]
        place = r[:, None].to(tl.int64) * x_row + c[None, :].to(tl.int64) * x_column
        value = tl.abs(tl.load(x + place, mask=mask, other=0.0).to(tl.float32))
        found = tl.where(value > found, value, found)
    tl.store(partials + tl.program_id(0), tl.max(tl.max(found, axis=1), axis=0))


@triton.jit
def round_by_tensor(
    x, partials, count, values, turned, scale, rows, columns, turned_rows, x_row, x_column,
    LIMIT: tl.constexpr, PARTIALS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """values = x / scale and turned = its transpose, zero from column ``rows`` to ``turned_rows``."""
    one = tl.arange(0, PARTIALS)
    factor = _scale_of(tl.max(tl.load(partials + one, mask=one < count, other=0.0), axis=0), LIMIT)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scale, factor)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (r < rows)[:, None] & (c < columns)[None, :]
    place = r[:, None].to(tl.int64) * x_row + c[None, :].to(tl.int64) * x_column
    inverse = tl.div_rn(1.0 + factor * 0, factor)
    tile = tl.load(x + place, mask=mask, other=0.0)
    small = _small(tile, inverse, LIMIT, values.dtype.element_ty)
    tl.store(values + r[:, None].to(tl.int64) * columns + c[None, :], small, mask=mask)
    mask = (c < columns)[:, None] & (r < turned_rows)[None, :]
    tl.store(turned + c[:, None].to(tl.int64) * turned_rows + r[None, :], tl.trans(small), mask=mask)


@triton.jit
def round_by_row(
    x, values, scale, rows, columns, x_row, x_column,
    LIMIT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """values[r] = x[r] / scale[r]."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    start = x + r[:, None].to(tl.int64) * x_row
    found = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for first in range(0, columns, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        mask = (r < rows)[:, None] & (c < columns)[None, :]
        value = tl.abs(
            tl.load(start + c[None, :].to(tl.int64) * x_column, mask=mask, other=0.0).to(tl.float32)
        )
        found = tl.where(value > found, value, found)
    factor = _scale_of(tl.max(found, axis=1), LIMIT)
    tl.store(scale + r, factor, mask=r < rows)
    inverse = tl.div_rn(1.0 + factor * 0, factor)[:, None]
    for first in range(0, columns, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        mask = (r < rows)[:, None] & (c < columns)[None, :]
        value = tl.load(start + c[None, :].to(tl.int64) * x_column, mask=mask, other=0.0)
        place = r[:, None].to(tl.int64) * columns + c[None, :]
        tl.store(values + place, _small(value, inverse, LIMIT, values.dtype.element_ty), mask=mask)


def _limit(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max)


def _programs(x: Tensor, tiles: int) -> int:
    """Four a multiprocessor; three in the interpreter, so that its programs take several tiles as well."""
    if x.device.type != "cuda":
        return min(tiles, 3)
    count = int(torch.cuda.get_device_properties(x.device).multi_processor_count)
    return min(tiles, 4 * count, PARTIALS)


@custom_op("lf_graph::float8_by_tensor", mutates_args=())
def by_tensor(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """values [R, C], turned [C, R up to a multiple of 16] and scale []."""
    if x.dtype == torch.float32 and not INTERPRETED.value:
        raise ValueError("float8_by_tensor: Triton 3.6 turns float32 matrices wrongly; give bfloat16")
    rows, columns = x.shape
    behind = triton.cdiv(rows, MULTIPLE) * MULTIPLE
    values, turned = x.new_empty(rows, columns, dtype=dtype), x.new_empty(columns, behind, dtype=dtype)
    scale = x.new_ones((), dtype=torch.float32)
    if not x.numel():
        return values, turned, scale
    count = _programs(x, triton.cdiv(rows, 16) * triton.cdiv(columns, 256))
    partials = x.new_empty(count, dtype=torch.float32)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        largest_magnitudes[(count,)](
            x, partials, rows, columns, *x.stride(), BLOCK_R=16, BLOCK_C=256, num_warps=4
        )
        round_by_tensor[(triton.cdiv(rows, 64), triton.cdiv(columns, 64))](
            x, partials, count, values, turned, scale, rows, columns, behind, *x.stride(), LIMIT=_limit(dtype),
            PARTIALS=triton.next_power_of_2(count), BLOCK_R=64, BLOCK_C=64, num_warps=4,
        )  # fmt: skip
    return values, turned, scale


@custom_op("lf_graph::float8_by_row", mutates_args=())
def by_row(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """values [R, C] and scale [R, 1]."""
    rows, columns = x.shape
    values, scale = x.new_empty(rows, columns, dtype=dtype), x.new_empty(rows, 1, dtype=torch.float32)
    if not rows:
        return values, scale
    # neighbours in memory side by side in a tile, whichever dimension they are of
    block = (4, 512) if x.stride(1) == 1 else (64, 32)
    with torch.cuda.device_of(x):
        round_by_row[(triton.cdiv(rows, block[0]),)](
            x, values, scale, rows, columns, *x.stride(), LIMIT=_limit(dtype), BLOCK_R=block[0],
            BLOCK_C=block[1], num_warps=4,
        )  # fmt: skip
    return values, scale


@custom_op("lf_graph::float8_product", mutates_args=())
def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b.T [M, N] of a [M, K] and b [N, K]."""
    other = b_scale.reshape(1, -1) if b_scale.ndim else b_scale
    fast = a.dtype == VALUES
    found: Tensor = torch._scaled_mm(a, b.t(), a_scale, other, out_dtype=dtype, use_fast_accum=fast)
    return found


@product.register_fake
def _(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


@by_tensor.register_fake
def _(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    turned = x.new_empty(columns, -(-rows // MULTIPLE) * MULTIPLE, dtype=dtype)
    return x.new_empty(rows, columns, dtype=dtype), turned, x.new_empty((), dtype=torch.float32)


@by_row.register_fake
def _(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[0], 1, dtype=torch.float32)


def _by_tensor(x: Tensor, dtype: torch.dtype) -> Rounded:
    values, turned, scale = by_tensor(x, dtype)
    return Rounded(values, scale, turned)


def _by_row(x: Tensor, dtype: torch.dtype) -> Rounded:
    return Rounded(*by_row(x, dtype))


def _product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The forward in fast accumulation, whose partial sums stay in the tensor cores' shorter registers."""
    if not a.numel() or not b.numel():
        return a.new_zeros(a.shape[0], b.shape[0], dtype=dtype)
    # one scale a row is for bfloat16 results only
    found: Tensor = product(a, b, a_scale, b_scale, torch.bfloat16 if a_scale.ndim else dtype)
    return found.to(dtype)


PARTS = Float8Parts(_by_tensor, _by_row, _product)
