"""Our rows with what Inductor, cuBLAS and the optimizer's kernels can be told: which of it should become the default.

python bench_step.py --workloads vla --rows ours,tuned --match "vla|16"
"""

from __future__ import annotations

from dataclasses import replace

from measure import Row
from ours import Ours, configurations, row_of
from rewrites import GeluInProduct, OneProductForOneInput
from workloads import Workload

from lf_graph import Launch
from peers.tune_stock import cublaslt


def variants(base: Ours) -> list[Ours]:
    """One configuration, with one thing changed in each."""

    def told(name: str, more_s: float, **options: object) -> Ours:
        mine = {**base.options, **options}
        return replace(base, name=f"{base.name}, {name}", options=mine, expect_s=base.expect_s + more_s)

    # ours compiles as Inductor, which names max-autotune-no-cudagraphs by its options
    products = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
    return [
        replace(base, name=f"{base.name}, cuBLASLt", around=cublaslt),
        told("coordinate descent", 40, coordinate_descent_tuning=True),
        told("combo kernels", 10, combo_kernels=True),
        told("max-autotune products", 150, **products),
        told("dependent launches", 20, **{"triton.enable_pdl": True}),
        told("GELU in the product", 20, pre_grad_custom_pass=GeluInProduct()),
        told("one product for one input", 20, pre_grad_custom_pass=OneProductForOneInput()),
        replace(base, name=f"{base.name}, 8-wide AdamW", launch=Launch(vector=8)),
        replace(base, name=f"{base.name}, AdamW blocks of 2048", launch=Launch(block=2048, warps=8)),
        replace(
            base,
            name=f"{base.name}, whole model" if base.compile == "blocks" else f"{base.name}, blocks",
            compile="model" if base.compile == "blocks" else "blocks",
            expect_s=base.expect_s + 75,
        ),
    ]


def rows(workload: Workload) -> list[Row]:
    """The variants of our compiled row."""
    base = configurations(workload)[0]
    return [row_of(workload, batch, ours) for batch in workload.batches for ours in variants(base)]
