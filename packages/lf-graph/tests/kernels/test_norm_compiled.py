"""Norms compiled for an H200, which needs no GPU: wide accesses, and a tile that stays in registers."""

from __future__ import annotations

import pytest
import sm90

from lf_graph.kernels._norm_triton import NORM_BACKWARD
from lf_graph.kernels._rows import MAX_WIDTH

TILES = ("x", "dy", "dsummed", "dx", "dbranch", "weight")


@pytest.mark.parametrize(("width", "rows", "warps"), [(1536, 1, 4), (128, 16, 4)])
def test_compiled_for_a_gpu_a_backward_moves_16_bytes_at_once(width: int, rows: int, warps: int) -> None:
    text = sm90.ptx(
        "lf_graph.kernels._norm_kernels", "norm_rows_backward", default="i32", options={"num_warps": warps},
        types={**dict.fromkeys(TILES, "*bf16"), "statistics": "*fp32", "partials": "*fp32"},
        aligned=["x_outer_stride", "dy_outer_stride", "ds_outer_stride", "weight_stride"],
        constants={
            "D": width, "BLOCK": 1 << (width - 1).bit_length(), "ROWS": rows,
            "x_inner": 1, "dy_inner": 1, "ds_inner": 1,
            "CENTRED": True, "DSUMMED": True, "WEIGHT": True, "PER_SAMPLE": True, "BRANCH": True, "DWEIGHT": True,
            "DBIAS": True, "STAGES": 1,
        },
    )  # fmt: skip
    found = sm90.accesses(text)
    # 2048 elements over 128 threads: two accesses of 16 bytes for each of dy, x, dsummed, and of dx, dbranch
    assert found["ld 16"] >= 6
    assert found["st 16"] >= 4
    rest = sum(n for size, n in found.items() if size not in ("ld 16", "st 16"))
    assert rest <= 7  # two statistics of two rows, weight, two sums


def test_the_widest_default_launch_keeps_its_tile_in_registers() -> None:
    assert NORM_BACKWARD.default((MAX_WIDTH, "bfloat16", True, True, True, True)).num_warps == 32
