"""grouped_gemm: kernels and plain twin equal the loop over experts, whatever the load, shape and layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import compiling
import pytest
import sm90
import torch
from grouped_cases import leaf, loop_product, offsets_of, route
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, assert_near, same_bits
from kernel_checks import exact, with_gradients
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lf_graph.kernels import KernelUnavailableError, grouped_gemm
from lf_graph.kernels import _grouped_gemm_launch as kernels
from lf_graph.kernels._tunable import Config

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def ours(implementation: str, **options: Any) -> Callable[..., Tensor]:
    def call(x: Tensor, weights: Tensor, offsets: Tensor, tokens: Tensor | None = None) -> Tensor:
        return grouped_gemm(x, weights, offsets, tokens=tokens, implementation=implementation, **options)  # type: ignore[arg-type]

    return call


def transposed(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For weights stored [E, N, K]."""
    return lambda x, w, *rest: fn(x, w.transpose(1, 2), *rest)


LOADS = {
    "even": (16, 16, 16),
    "uneven": (1, 33, 0, 31, 32),
    "unused rows": (5, 3, 0),
    "no rows at all": (0, 0, 0, 0),
    "all to the last": (0, 0, 40),
    "one expert": (45,),
}


@pytest.mark.parametrize("implementation", ["triton", "plain"])
@pytest.mark.parametrize("load", LOADS)
def test_values_and_gradients_equal_the_loop(load: str, implementation: str) -> None:
    offsets = offsets_of(*LOADS[load])
    given = (leaf(max(int(offsets[-1]), 40) + 9, 40), leaf(len(offsets), 40, 50), offsets)
    assert_near(with_gradients(ours(implementation), *given), with_gradients(loop_product, *exact(*given)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(64, 32, 32), (33, 64, 96)])
def test_every_dtype_and_both_layouts_equal_the_loop(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    rows, depth, columns = sizes
    offsets = offsets_of(rows // 3, 0, rows // 2)
    given = (leaf(rows, depth, dtype=dtype), leaf(3, depth, columns, dtype=dtype), offsets)
    assert_near(with_gradients(ours("triton"), *given), with_gradients(loop_product, *exact(*given)))
    given = (given[0], leaf(3, columns, depth, dtype=dtype), offsets)
    found = with_gradients(transposed(ours("triton")), *given)
    assert_near(found, with_gradients(transposed(loop_product), *exact(*given)))
    assert found[2].stride() == given[1].stride()


@given(
    counts=st.lists(st.sampled_from([0, 1, 2, 15, 31, 32, 33, 40]), min_size=1, max_size=7),
    unused=st.sampled_from([0, 1, 35]),
    depth=st.integers(1, 40),
    columns=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    flipped=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_any_load_and_shape_equal_the_loop(
    counts: list[int], unused: int, depth: int, columns: int, dtype: torch.dtype, flipped: bool
) -> None:
    stored = (columns, depth) if flipped else (depth, columns)
    weights = leaf(len(counts), *stored, dtype=dtype)
    given = (leaf(sum(counts) + unused, depth, dtype=dtype), weights, offsets_of(*counts))
    layout = transposed if flipped else lambda fn: fn
    assert_near(
        with_gradients(layout(ours("triton")), *given), with_gradients(layout(loop_product), *exact(*given))
    )


@pytest.mark.parametrize("implementation", ["triton", "plain"])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_rows_read_where_their_tokens_are_equal_the_loop(top_k: int, implementation: str) -> None:
    r = route(30, 5, top_k, dropped=0.2, idle=1)
    given = (leaf(30, 24), leaf(5, 24, 40), r.offsets, r.tokens)
    expected = with_gradients(loop_product, *exact(*given))
    assert_near(with_gradients(ours(implementation, rows=r.rows), *given), expected)
    narrow = (*given[:3], r.tokens.int())
    assert_near(with_gradients(ours(implementation, rows=r.rows), *narrow), expected)


@pytest.mark.parametrize("implementation", ["triton", "plain"])
def test_nothing_that_belongs_to_no_expert_is_read(implementation: str) -> None:
    r = route(30, 5, 2, dropped=0.4, idle=1)
    used = torch.zeros(30, dtype=torch.bool, device=DEVICE)
    used[r.tokens[: int(r.offsets[-1])]] = True
    x = leaf(30, 24).detach()
    x[~used] = float("nan")
    x.requires_grad_()
    weights = leaf(5, 24, 40).detach()
    weights[4] = float("nan")  # an expert without a row
    weights.requires_grad_()
    out = ours(implementation, rows=r.rows)(x, weights, r.offsets, r.tokens)
    upstream = torch.randn_like(out)
    upstream[int(r.offsets[-1]) :] = float("nan")
    to_x, to_weights = torch.autograd.grad(out, (x, weights), upstream)
    assert out.isfinite().all()
    assert not out[int(r.offsets[-1]) :].any()
    assert to_x.isfinite().all()
    assert not to_x[~used].any()
    assert to_weights.isfinite().all()
    assert not to_weights[4].any()


def test_offsets_beyond_the_rows_stay_within_them() -> None:
    x, weights = leaf(20, 16), leaf(3, 16, 16)
    offsets = torch.tensor([5, 70, 90], dtype=torch.int32, device=DEVICE)
    expected = with_gradients(loop_product, *exact(x, weights, offsets.clamp(max=20)))
    assert_near(with_gradients(ours("triton"), x, weights, offsets), expected)


@pytest.mark.parametrize("sizes", [(0, 8, 8), (5, 0, 8), (5, 8, 0)])
def test_empty_inputs_give_empty_or_zero(sizes: tuple[int, int, int]) -> None:
    rows, depth, columns = sizes
    given = (leaf(rows, depth), leaf(2, depth, columns), offsets_of(rows // 2, 0))
    for implementation in ("triton", "plain"):
        assert_near(
            with_gradients(ours(implementation), *given), with_gradients(loop_product, *exact(*given))
        )


def test_the_order_of_tiles_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (leaf(80, 20), leaf(3, 20, 40), offsets_of(50, 7, 18))
    expected = with_gradients(ours("triton"), *given)

    def grouped_by(height: int, programs: int) -> tuple[Tensor, ...]:
        tile = (("BLOCK_M", 16), ("BLOCK_N", 16), ("BLOCK_K", 16))
        sizes = (*tile, ("GROUP", height), ("PROGRAMS", programs))
        monkeypatch.setattr(kernels, "config_of", lambda *_: Config(sizes, 4, 1))
        return with_gradients(ours("triton"), *given)

    first = grouped_by(1, programs=0)
    assert same_bits(grouped_by(2, programs=1), first)
    assert same_bits(grouped_by(8, programs=1), first)
    assert_near(first, expected)


def test_calls_repeat_bit_for_bit() -> None:
    given = (leaf(40, 24, dtype=torch.bfloat16), leaf(3, 24, 16, dtype=torch.bfloat16), offsets_of(10, 20, 3))
    first = with_gradients(ours("triton"), *given)
    assert all(same_bits(with_gradients(ours("triton"), *given), first) for _ in range(3))


def test_what_is_not_contiguous_gives_the_same() -> None:
    x, weights, offsets = leaf(40, 24), leaf(3, 24, 16), offsets_of(10, 20, 3)
    expected = with_gradients(ours("triton"), x, weights, offsets)
    flipped = x.detach().mT.contiguous().mT.requires_grad_()
    wider = torch.zeros(3, 30, 40, device=DEVICE)
    wider[:, 3:27, 8:24] = weights.detach()
    part = wider[:, 3:27, 8:24].requires_grad_()
    assert same_bits(with_gradients(ours("triton"), flipped, part, offsets), expected)


def test_only_wanted_gradients_are_computed() -> None:
    x, weights, offsets = leaf(40, 24), leaf(3, 24, 16), offsets_of(10, 20, 3)
    expected = with_gradients(ours("triton"), x, weights, offsets)
    frozen = with_gradients(ours("triton"), x, weights.detach(), offsets)
    assert same_bits(frozen, expected[:2])
    r = route(20, 3, 2)
    out = ours("triton")(x[:20].detach(), weights, r.offsets, r.tokens)  # no rows: x wants no gradient
    assert torch.autograd.grad(out.sum(), weights)[0].shape == weights.shape


def test_the_plain_twin_has_exact_gradients() -> None:
    r = route(6, 3, 2, dropped=0.3)
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in [(6, 4), (3, 4, 5)])
    offsets, tokens, rows = r.offsets.cpu(), r.tokens.cpu(), r.rows.cpu()
    assert torch.autograd.gradcheck(lambda x, w: ours("plain", rows=rows)(x, w, offsets, tokens), (x, w))


def test_autocast_runs_in_its_dtype_and_returns_gradients_of_the_parameters() -> None:
    x, weights, offsets = leaf(40, 24), leaf(3, 24, 16), offsets_of(10, 20, 3)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = ours("triton")(x, weights, offsets)
    assert out.dtype == torch.bfloat16
    to_x, to_w = torch.autograd.grad(out.float().sum(), (x, weights))
    assert (to_x.dtype, to_w.dtype) == (torch.float32, torch.float32)
    assert_near([out.detach()], [loop_product(*exact(x, weights, offsets)).detach()], slack=2)


def test_float32_is_multiplied_as_torch_is_told_to_by_any_of_its_settings() -> None:
    """In its own process: once both kinds of settings are mixed, torch refuses to read the older one."""
    assert compiling.call("grouped_cases", "precisions") == ["ieee", "tf32", "ieee", "tf32"]


def test_compiled_whole_it_computes_the_same() -> None:
    r = route(20, 3, 2)
    given = (leaf(20, 24), leaf(3, 24, 16), r.offsets, r.tokens)
    for implementation in ("plain", "triton"):
        fn = ours(implementation, rows=r.rows)
        compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
        assert_near(with_gradients(compiled, *given), with_gradients(fn, *given))


def test_operators_keep_their_promises_to_torch() -> None:
    r = route(12, 3, 2)
    x, w, y = leaf(12, 8).detach(), leaf(3, 8, 6).detach(), leaf(24, 6).detach()
    torch.library.opcheck(kernels.product, (x, w, r.offsets, r.tokens))
    torch.library.opcheck(kernels.product_swiglu, (x, w, y[:, 0].contiguous(), r.offsets, r.tokens))
    for flipped in (False, True):
        torch.library.opcheck(kernels.weight_gradient_as_stored, (x, y, r.offsets, r.tokens, None, flipped))
    torch.library.opcheck(kernels.sum_rows, (y, r.rows))


def test_meta_and_fake_tensors_have_the_right_shapes() -> None:
    meta = torch.empty(5, 8, device="meta"), torch.empty(2, 8, 4, device="meta")
    assert grouped_gemm(*meta, torch.empty(2, dtype=torch.int32, device="meta")).shape == (5, 4)
    with FakeTensorMode():
        x = torch.empty(5, 8, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        w = torch.empty(2, 8, 4, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        out = ours("triton")(x, w, torch.empty(2, dtype=torch.int32, device=DEVICE))
        out.sum().backward()
        assert out.shape == (5, 4)
        assert w.grad is not None


def test_inputs_that_do_not_fit_are_refused() -> None:
    x, w, offsets = torch.randn(6, 4), torch.randn(2, 4, 3), torch.tensor([3, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"must be \[R, K\] and \[E, K, N\]"):
        grouped_gemm(x[:, :3], w, offsets)
    with pytest.raises(TypeError, match=r"weights torch\.float64"):
        grouped_gemm(x, w.double(), offsets)
    with pytest.raises(TypeError, match="int32 end rows"):
        grouped_gemm(x, w, offsets.long())
    with pytest.raises(ValueError, match="offsets for 2 experts"):
        grouped_gemm(x, w, offsets[:1])
    with pytest.raises(ValueError, match="on meta"):
        grouped_gemm(x, w, offsets.to("meta"))
    with pytest.raises(TypeError, match="tokens are"):
        grouped_gemm(x, w, offsets, tokens=torch.ones(4))
    with pytest.raises(ValueError, match="rows are"):
        grouped_gemm(x, w, offsets, tokens=torch.arange(6), rows=torch.zeros(5, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="x wants a gradient"):
        grouped_gemm(x.requires_grad_(), w, offsets, tokens=torch.arange(6))
    with pytest.raises(KernelUnavailableError, match="float64"):
        grouped_gemm(x.double(), w.double(), offsets, implementation="triton")


def test_an_h200_multiplies_by_warp_groups_from_shared_memory_filled_16_bytes_at_once() -> None:
    names = (
        "rows",
        "experts",
        "depth",
        "columns",
        "x_stride",
        "w_expert",
        "w_depth",
        "w_column",
        "grad_stride",
    )
    types = dict.fromkeys((*names, "out_expert", "out_depth", "out_column"), "i32")
    types |= {
        "offsets": "*i32",
        "tokens": "*i64",
        "x_tokens": "*i64",
        "grad_tokens": "*i64",
        "row_weight": "*fp32",
    }
    tile = {"PRECISION": "ieee", "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP": 8}
    flags = {"INDEXED": True, "WHOLE": True, "GROUPS": 64, "w_column": 1}
    module, options = "lf_graph.kernels._grouped_gemm_triton", {"num_warps": 8, "num_stages": 3}
    kernels = [
        ("grouped_product", {**flags, "SWIGLU": False}),
        ("grouped_product", {**flags, "SWIGLU": True}),
        ("grouped_weight_gradient", {"X_INDEXED": True, "GRAD_INDEXED": False, "out_column": 1}),
    ]
    for kernel, constants in kernels:
        ptx = sm90.ptx(module, kernel, types, {**tile, **constants}, options)
        assert "wgmma.mma_async" in ptx
        assert "mma.sync" not in ptx
        assert "st.global.v4" in ptx
        assert "cp.async.cg" in ptx  # the kind that moves 16 bytes
