"""Where kernels find the rows of ``_rows.Rows``, and one row of weights for a sample."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# Triton has no types, and its kernels take no annotations but constexpr.
# ruff: noqa: N803

from __future__ import annotations

from lf_graph.kernels._interpreter import tl, triton


@triton.jit
def places(row, inner, outer_stride, inner_stride, columns):
    """Element offsets [rows, columns], 64-bit; see ``Rows``."""
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    return start[:, None] + columns[None, :]


@triton.jit
def row_of_sample(w, sample, stride, columns, D: tl.constexpr):
    """A row of weights [1, columns], fp32, 0 beyond D."""
    row = tl.load(w + sample.to(tl.int64) * stride + columns, mask=columns < D, other=0.0)
    return row.to(tl.float32)[None, :]
