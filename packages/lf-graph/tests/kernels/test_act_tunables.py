"""What the activations and grouped products tell the tuner: configurations that compute their problem's reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kernel_cases import DEVICE, distance

from lf_graph.kernels import _gelu_triton, _grouped_gemm_launch, _swiglu_triton
from lf_graph.kernels._tunable import Config, Key, Tunable

SHARED_BYTES = 227 * 1024  # that one program of an H100 or H200 may have

CASES: list[tuple[Tunable, Key]] = [
    (_swiglu_triton.TUNABLE, ("float32", True, 64)),
    (_swiglu_triton.TUNABLE, ("bfloat16", False, 64)),
    (_gelu_triton.TUNABLE, ("float32", True, True, 64, 1024)),
    (_gelu_triton.TUNABLE, ("bfloat16", False, False, 64, 16384)),
    (_grouped_gemm_launch.PRODUCT, ("bfloat16", 16, 32, 48)),
    (_grouped_gemm_launch.SWIGLU, ("float32", 16, 32, 48)),
    (_grouped_gemm_launch.WEIGHT, ("bfloat16", 16, 32, 48)),
]


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes half a minute for the rows of a model."""
    monkeypatch.setattr(_swiglu_triton, "TUNED_ROWS", 17)
    drawn = torch.randn
    monkeypatch.setattr(
        torch, "randn", lambda *sizes, **options: drawn(*(40 if n >= 1024 else n for n in sizes), **options)
    )


@pytest.mark.parametrize(("tunable", "key"), CASES, ids=lambda c: c.name if isinstance(c, Tunable) else "")
def test_the_default_and_candidates_compute_the_reference(tunable: Tunable, key: Key) -> None:
    problem = tunable.problem(key, DEVICE)
    candidates = list(tunable.candidates(key))
    for config in (tunable.default(key), candidates[0], candidates[-1]):
        found = problem.run(config)
        for output, reference, tolerance in zip(found, problem.reference, problem.tolerance, strict=True):
            assert distance(output, reference) <= tolerance, config


@pytest.mark.parametrize(("tunable", "key"), CASES, ids=lambda c: c.name if isinstance(c, Tunable) else "")
def test_candidates_are_distinct(tunable: Tunable, key: Key) -> None:
    candidates = list(tunable.candidates(key))
    assert len(set(candidates)) == len(candidates) >= 4


def operand_bytes(config: Config, key: Key, weights: int) -> int:
    size = 4 if key[0] == "float32" else 2
    tiles = config["BLOCK_M"] + weights * config["BLOCK_N"]
    return tiles * config["BLOCK_K"] * size * config.num_stages


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("height", [16, 64, 1024])
def test_tiles_of_products_fit_shared_memory(
    dtype: str, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    key: Key = (dtype, height, 2048, 2048)
    for tunable, weights in [(_grouped_gemm_launch.PRODUCT, 1), (_grouped_gemm_launch.SWIGLU, 2)]:
        assert all(operand_bytes(c, key, weights) <= SHARED_BYTES for c in tunable.candidates(key))
        for roomy, limit in [(True, SHARED_BYTES), (False, 99 * 1024)]:  # 99 KiB: sm_86 and sm_89
            monkeypatch.setattr(_grouped_gemm_launch, "_roomy", lambda roomy=roomy: roomy)
            monkeypatch.setattr(_grouped_gemm_launch, "INTERPRETED", SimpleNamespace(value=False))
            assert operand_bytes(tunable.default(key), key, weights) <= limit


@pytest.mark.parametrize(
    ("rows", "experts", "height"), [(0, 4, 16), (64, 4, 16), (65, 4, 32), (32768, 32, 1024), (10**6, 1, 1024)]
)
def test_the_height_of_an_expert_is_a_bucket(rows: int, experts: int, height: int) -> None:
    assert _grouped_gemm_launch.height_of(rows, experts) == height


def test_many_rows_take_more_groups_a_program() -> None:
    heights = [_gelu_triton._key(torch.empty(rows, 64), True, False)[4] for rows in (0, 1024, 1025, 10**6)]
    assert heights == [1024, 1024, 4096, 16384]
    groups = [_gelu_triton._default(("bfloat16", True, False, 64, h))["GROUPS"] for h in (1024, 4096, 16384)]
    assert groups == sorted(set(groups))
