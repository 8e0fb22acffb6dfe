"""What ptxas makes of the kernels in their default configurations for an H200; no GPU is needed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import sm90

PRODUCTS = "attention,grouped_experts"
PRODUCT_KERNELS = {
    "forward", "backward_queries", "backward_keys", "grouped_product", "grouped_weight_gradient"
}  # fmt: skip
STREAMS = "norm,gated_residual,rope,swiglu,gelu_tanh,float8,linear_cross_entropy"


def can_target_cuda() -> bool:
    """Whether Triton brings a compiler for NVIDIA cards."""
    found = importlib.util.find_spec("triton.backends.nvidia")
    return found is not None


pytestmark = pytest.mark.skipif(not can_target_cuda(), reason="this triton cannot compile for CUDA")


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{row['case']} | {row['kernel']} | {row['config']}" for row in rows]


def test_products_run_on_the_matrix_units_of_hopper_one_behind_the_other() -> None:
    rows = sm90.rows(PRODUCTS)
    products = [row for row in rows if row["kernel"] in PRODUCT_KERNELS]
    assert {row["kernel"] for row in products} == PRODUCT_KERNELS
    assert names([row for row in products if row["mma"] or not row["wgmma"]]) == []
    assert names([row for row in products if row["serialized"]]) == []
    assert names([row for row in rows if not row["fits"]]) == []
    # A few addresses may be spilled in a loop, sums must not be: those are many more than matrix instructions.
    assert names([row for row in rows if row["loop_spills"] > row["wgmma"]]) == []


def test_kernels_bound_by_memory_move_16_bytes_at_once_without_spills() -> None:
    rows = sm90.rows(STREAMS)
    assert {row["case"].split()[0] for row in rows} >= {name for name in STREAMS.split(",") if name != "norm"}
    assert names([row for row in rows if "ld 16" not in row["accesses"] or row["wide"] < 0.5]) == []
    assert names([row for row in rows if row["spills"] or not row["fits"]]) == []
    # 2048 threads of a multiprocessor; below a quarter too few loads are under way to hide the latency of memory
    assert names([row for row in rows if row["resident"] * row["warps"] < 16]) == []


def test_the_optimizer_keeps_everything_in_registers() -> None:
    rows = sm90.rows("adamw")
    assert {row["kernel"] for row in rows} == {"update", "square_sums"}
    assert names([row for row in rows if row["spills"] or "ld 16" not in row["accesses"]]) == []


@pytest.fixture(scope="module")
def reader() -> Iterator[ModuleType]:
    sys.path.insert(0, str(sm90.BENCHMARKS))
    try:
        yield importlib.import_module("offline.compiled")
    finally:
        sys.path.remove(str(sm90.BENCHMARKS))
        for name in [m for m in sys.modules if m.split(".")[0] == "offline"]:
            sys.modules.pop(name)


PTX = """
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	ld.global.L1::evict_first.L2::cache_hint.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ], %rd9;
	ld.global.b16 { %rs1 }, [ %rd2 + 0 ];
	ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];
	st.global.cs.v2.b32 [ %rd3 + 0 ], { %r1, %r2 };
	cp.async.cg.shared.global [ %r7 + 0 ], [ %rd4 + 0 ], 0x10, %r8;
	cp.async.ca.shared.global [ %r7 + 0 ], [ %rd4 + 0 ], 0x8, %r8;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, 0, 1, 1, 0, 0;
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}, {%r2}, {%r3}, {%r4};
"""
LOG = """ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""


def test_accesses_are_counted_by_their_bytes(reader: ModuleType) -> None:
    assert reader.accesses(PTX) == {"ld 16": 2, "ld 2": 1, "st 8": 1, "cp 16": 1, "cp 8": 1}


def test_what_ptxas_says_is_read(reader: ModuleType) -> None:
    made = reader.read("k", 8, 100 * 1024, PTX, LOG)
    assert (made.registers, made.spills, made.serialized) == (168, 56, True)
    assert (made.wgmma, made.mma) == (1, 1)
    assert made.wide("ld") == 32 / 34
    assert made.wide("ld", "cp", "st") == 48 / 66
    calm = reader.read("k", 8, 0, PTX, "0 bytes spill stores, 0 bytes spill loads\nUsed 32 registers")
    assert (calm.spills, calm.serialized) == (0, False)


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "resident"),
    [
        (255, 8, 0, 1),
        (128, 4, 0, 4),
        (32, 4, 0, 16),
        (32, 4, 113 * 1024, 2),
        (32, 4, 114 * 1024, 1),
        (16, 1, 0, 32),
    ],
)
def test_programs_share_a_multiprocessor_as_registers_and_shared_memory_allow(
    reader: ModuleType, registers: int, warps: int, shared: int, resident: int
) -> None:
    assert reader.Compiled("k", warps, registers, shared=shared).resident == resident


def test_more_shared_memory_than_a_program_may_have_does_not_fit(reader: ModuleType) -> None:
    assert reader.Compiled("k", shared=227 * 1024).fits
    assert not reader.Compiled("k", shared=227 * 1024 + 1).fits


SASS = """
        /*0000*/                   STL [R1+0x4], R5 ;              /* 0x000 */
        /*0010*/                   LDL R4, [R1] ;
        /*0020*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0030*/              @!P0 BRA 0x20 ;
        /*0040*/                   LDL.LU.64 R4, [R1] ;
        /*0050*/               @P1 BRA 0x10 ;
        /*0060*/                   BRA 0x60;
"""


def test_spills_count_in_innermost_loops_only(reader: ModuleType) -> None:
    assert reader.loop_spills(SASS) == 0
    assert reader.loop_spills(SASS.replace("@!P0 BRA 0x20", "@!P0 BRA 0x10")) == 1
    assert reader.loop_spills(SASS.replace("IADD3 R1, R1, 0x1, RZ", "STL.64 [R1+0x8], R4")) == 1
