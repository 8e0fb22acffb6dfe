"""RMSNorm of heads and their rotation in one pass, on a GPU: numbers, bits, graphs, compilation."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_near, same_bits
from test_qk_norm_rope import in_float64, leaves, results
from test_rope import tables
from torch import Tensor

import lf_graph
from lf_graph.kernels import packed_positions, qk_norm_rope

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "kv", "half", "wide"),
    [
        ((4, 300, 16, 128), 8, 64, True),
        ((8, 512, 32, 64), 32, 32, False),
        ((2, 300, 16, 80), 4, 20, True),
        ((777, 3, 96), 1, 48, False),
    ],
)
@pytest.mark.parametrize("positions", [False, True])
def test_kernels_equal_float64(
    shape: tuple[int, ...], kv: int, half: int, wide: bool, positions: bool, dtype: torch.dtype
) -> None:
    tensors = leaves(shape, kv, dtype, wide)
    angles = tables(1024, half)
    where = torch.randint(1024, shape[:-2], device="cuda") if positions else None
    found = results(tensors, *angles, where, implementation="auto")
    exact = results(in_float64(tensors), *(t.double() for t in angles), where, implementation="plain")
    assert_near(found[:2], exact[:2], 2)
    assert_near(found[2:], exact[2:], 4, floor=1.0)


def test_thirty_runs_give_the_same_bits() -> None:
    def once() -> tuple[Tensor, ...]:
        return results(
            leaves((8, 512, 16, 128), 8, torch.bfloat16), *tables(512, 64), implementation="triton"
        )

    expected = once()
    for _ in range(30):
        assert same_bits(once(), expected)


def test_a_captured_graph_follows_lengths_in_device_memory() -> None:
    tensors = leaves((96, 4, 64), 2, torch.bfloat16)
    angles = tables(96, 32)

    def call(cu_seqlens: Tensor, *t: Tensor) -> tuple[Tensor, Tensor]:
        return qk_norm_rope(*t, *angles, packed_positions(cu_seqlens, 96), implementation="triton")

    starts = torch.tensor([0, 40, 90], device="cuda", dtype=torch.int32)
    with lf_graph.capture(call, starts, *tensors) as captured:
        for first, last in ((40, 90), (1, 96), (90, 90)):
            cu_seqlens = torch.tensor([0, first, last], device="cuda", dtype=torch.int32)
            replayed, eager = captured(cu_seqlens, *tensors), call(cu_seqlens, *tensors)
            upstream = [torch.randn_like(e) for e in eager]
            assert same_bits(replayed, eager)
            assert same_bits(
                torch.autograd.grad(replayed, tensors, upstream),
                torch.autograd.grad(eager, tensors, upstream),
            )


def test_compiled_whole_it_gives_the_same_bits() -> None:
    tensors = leaves((2, 37, 4, 64), 2, torch.bfloat16)
    angles = tables(96, 32)
    torch._dynamo.reset()

    def call(*t: Tensor) -> tuple[Tensor, Tensor]:
        return qk_norm_rope(*t, *angles, implementation="triton")

    outputs, eager = torch.compile(call, fullgraph=True)(*tensors), call(*tensors)
    upstream = [torch.randn_like(e) for e in eager]
    assert same_bits(outputs, eager)
    assert same_bits(
        torch.autograd.grad(outputs, tensors, upstream), torch.autograd.grad(eager, tensors, upstream)
    )
