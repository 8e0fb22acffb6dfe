"""The interpreter's bf16 is that of torch, and operators work in it as compiled ones do."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import DEVICE
from torch import Tensor

from lf_graph.kernels._interpreter import cast, dot, operator


@triton.jit
def _store_as(x, y, n, DTYPE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    lanes = tl.arange(0, BLOCK)
    tl.store(y + lanes, cast(tl.load(x + lanes, mask=lanes < n), DTYPE), mask=lanes < n)


@triton.jit
def _multiply(a, b, c, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    tile = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + tile, dot(tl.load(a + tile), tl.load(b + tile), tl.zeros([N, N], tl.float32)))


DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cast_rounds_as_torch_does(dtype: torch.dtype) -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4028e38, -3.4028e38, 1e-40, 0.0, -0.0])
    x = torch.cat((ties, torch.randn(1000) * 1e3)).to(DEVICE)
    y = torch.empty_like(x, dtype=dtype)
    _store_as[(1,)](x, y, len(x), DTYPE=DTYPES[dtype], BLOCK=1024)
    assert torch.equal(y, x.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cast_keeps_what_is_not_finite(dtype: torch.dtype) -> None:
    payloads = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    x = torch.cat((payloads, -payloads, torch.tensor([float("inf"), -float("inf")]))).to(DEVICE)
    y = torch.empty_like(x, dtype=dtype)
    _store_as[(1,)](x, y, len(x), DTYPE=DTYPES[dtype], BLOCK=8)
    assert y[:6].isnan().all()
    assert torch.equal(y[6:], x[6:].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dot_multiplies_numbers(dtype: torch.dtype) -> None:
    a, b = (torch.randn(16, 16, device=DEVICE).to(dtype) for _ in range(2))
    c = torch.empty(16, 16, device=DEVICE)
    _multiply[(1,)](a, b, c, N=16)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@operator("lf_graph_test::to_half")
def _to_half(x: Tensor) -> Tensor:
    y = torch.empty_like(x, dtype=torch.bfloat16)
    torch.library.wrap_triton(_store_as)[(1,)](x, y, x.numel(), DTYPE=tl.bfloat16, BLOCK=64)
    return y


@_to_half.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.bfloat16)


def test_an_operator_can_be_compiled_whole() -> None:
    x = torch.randn(50, device=DEVICE)
    compiled = torch.compile(lambda t: _to_half(t) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), x.bfloat16() * 2)
    torch.library.opcheck(_to_half, (x,))
