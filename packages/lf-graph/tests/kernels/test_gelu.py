"""gelu_tanh: kernels and plain twin equal float64 and drop the same elements, which Philox chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sm90
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, assert_near, same_bits
from kernel_checks import exact, with_gradients
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lf_graph.kernels import KernelUnavailableError, gelu_tanh
from lf_graph.kernels import _gelu_triton as kernels
from lf_graph.kernels._philox import _philox, draw_seed, keep_mask, scale_of
from lf_graph.kernels._tunable import Config

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def seed_of(seed: int, offset: int = 0) -> Tensor:
    return torch.tensor([seed, offset], device=DEVICE)


def ours(implementation: str, p: float = 0.0, seed: Tensor | None = None) -> Callable[..., Tensor]:
    def call(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return gelu_tanh(x, bias, dropout_p=p, seed=seed, implementation=implementation)  # type: ignore[arg-type]

    return call


def by_torch(p: float = 0.0, seed: Tensor | None = None) -> Callable[..., Tensor]:
    """torch's GELU times the mask."""

    def call(x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = F.gelu(x if bias is None else x + bias, approximate="tanh")
        if not p:
            return out
        assert seed is not None
        mask = keep_mask(x.shape[:-1].numel(), x.shape[-1], seed, p).view(x.shape)
        return out * mask * scale_of(p)

    return call


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


@pytest.mark.parametrize("implementation", ["triton", "plain"])
@pytest.mark.parametrize("p", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_equal_float64(
    dtype: torch.dtype, biased: bool, p: float, implementation: str
) -> None:
    seed = seed_of(-(2**62) + 12345, 2**33 + 7)
    given = (leaf(19, 530, dtype=dtype), leaf(530) if biased else None)
    expected = with_gradients(by_torch(p, seed), *exact(*given))
    assert_near(with_gradients(ours(implementation, p, seed), *given), expected)


@given(
    rows=st.integers(0, 20),
    columns=st.one_of(st.integers(0, 40), st.sampled_from([511, 512, 513])),
    dtype=st.sampled_from(DTYPES),
    bias_dtype=st.sampled_from([None, *DTYPES]),
    p=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(-(2**63), 2**63 - 1),
    offset=st.integers(-(2**63), 2**63 - 1),
)
@settings(max_examples=25, deadline=None)
def test_any_shape_equals_float64(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    p: float,
    seed: int,
    offset: int,
) -> None:
    chosen = seed_of(seed, offset)
    given = (
        leaf(rows, columns, dtype=dtype),
        None if bias_dtype is None else leaf(columns, dtype=bias_dtype),
    )
    expected = with_gradients(by_torch(p, chosen), *exact(*given))
    assert_near(with_gradients(ours("triton", p, chosen), *given), expected)


def test_philox_gives_the_numbers_of_random123() -> None:
    """``kat_vectors`` of Random123 1.14, philox4x32 with 7 rounds."""
    zero, ones = torch.tensor(0), torch.tensor(0xFFFFFFFF)
    known = {
        zero: (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
        ones: (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
    }
    for word, expected in known.items():
        assert tuple(int(w) for w in _philox((word,) * 4, (word,) * 2)) == expected


def test_the_mask_keeps_the_right_share_and_neighbours_are_independent() -> None:
    mask = keep_mask(256, 512, seed_of(1), 0.2).double()
    deviation = (0.2 * 0.8 / mask.numel()) ** 0.5
    assert abs(float(mask.mean()) - 0.8) < 5 * deviation
    centred = mask - 0.8
    for a, b in [(centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])]:
        assert abs(float((a * b).mean())) < 5 * 0.16 / a.numel() ** 0.5


@pytest.mark.parametrize("other", [(2, 0), (1, 1), (1, 2**32), (1 + 2**32, 0)])
def test_every_word_of_seed_and_offset_changes_the_mask(other: tuple[int, int]) -> None:
    first, second = keep_mask(64, 64, seed_of(1), 0.5), keep_mask(64, 64, seed_of(*other), 0.5)
    assert 0.4 < float((first == second).double().mean()) < 0.6


@pytest.mark.parametrize("block", [64, 256])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_launch_changes_only_the_rounding_of_the_bias_gradient(
    block: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, fn = (leaf(40, 100), leaf(100)), ours("triton", 0.3, seed_of(5))
    expected = with_gradients(fn, *given)
    config = Config((("BLOCK", block), ("GROUPS", groups)), 2)
    monkeypatch.setattr(kernels, "config_of", lambda *_: config)
    found = with_gradients(fn, *given)
    assert same_bits(found[:2], expected[:2])
    assert_near(found[2:], expected[2:])


def test_without_a_seed_torchs_generator_chooses() -> None:
    x = torch.ones(40, 40, device=DEVICE)
    fn = ours("triton", 0.5)
    torch.manual_seed(3)
    first, second = fn(x), fn(x)
    torch.manual_seed(3)
    assert torch.equal(fn(x), first)
    assert not torch.equal(first, second)


def test_a_checkpoint_drops_the_same_elements_again() -> None:
    x = leaf(24, 40)
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(ours("triton", 0.5)(x).sum(), x)
    torch.manual_seed(0)
    out = checkpoint(ours("triton", 0.5), x, use_reentrant=False)
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, expected)


def test_without_dropout_no_seed_is_drawn() -> None:
    x, before = leaf(3, 3), torch.get_rng_state()
    ours("triton")(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert draw_seed(DEVICE).dtype == torch.int64


def test_columns_side_by_side_in_a_wider_tensor_and_transposed_inputs_give_the_same() -> None:
    wide, bias = leaf(9, 3 * 20), leaf(20)
    middle = wide.detach()[:, 20:40].clone().requires_grad_()
    expected = with_gradients(ours("triton"), middle, bias)
    part = wide.detach()[:, 20:40].requires_grad_()
    assert same_bits(with_gradients(ours("triton"), part, bias), expected)
    transposed = middle.detach().mT.contiguous().mT.requires_grad_()
    assert same_bits(with_gradients(ours("triton"), transposed, bias), expected)


def test_a_seed_that_is_a_column_of_others_is_read_as_such() -> None:
    seed, x = torch.tensor([[7, 1], [9, 2]], device=DEVICE)[:, 1], leaf(20, 9)
    found = with_gradients(ours("triton", 0.5, seed), x)
    assert same_bits(found, with_gradients(ours("triton", 0.5, seed.clone()), x))


def test_rows_of_more_dimensions_are_rows() -> None:
    given, seed = (leaf(2, 3, 5, 7), leaf(7)), seed_of(9)
    expected = with_gradients(by_torch(0.4, seed), *exact(*given))
    assert_near(with_gradients(ours("triton", 0.4, seed), *given), expected)


@pytest.mark.parametrize("implementation", ["triton", "plain"])
def test_rows_without_columns_have_gradients_without_elements(implementation: str) -> None:
    found = with_gradients(ours(implementation), leaf(3, 0), leaf(0))
    assert [t.shape for t in found] == [(3, 0), (3, 0), (0,)]


def test_the_plain_twin_has_exact_gradients() -> None:
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for p in (0.0, 0.3):
        assert torch.autograd.gradcheck(ours("plain", p, torch.tensor([1, 2])), (x, bias))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter's numpy
def test_large_inputs_do_not_overflow() -> None:
    x = torch.tensor([[-1e4, -50.0, 0.0, 50.0, 1e4]], device=DEVICE, requires_grad=True)
    out, grad = with_gradients(ours("triton"), x)
    assert out.tolist() == [[0.0, 0.0, 0.0, 50.0, 1e4]]
    assert grad.isfinite().all()


def test_calls_repeat_bit_for_bit() -> None:
    given, fn = (leaf(37, 60, dtype=torch.bfloat16), leaf(60)), ours("triton", 0.2, seed_of(4))
    first = with_gradients(fn, *given)
    assert all(same_bits(with_gradients(fn, *given), first) for _ in range(5))


def test_autocast_changes_nothing() -> None:
    given, fn = (leaf(9, 20), leaf(20)), ours("triton", 0.2, seed_of(4))
    expected = with_gradients(fn, *given)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert same_bits(with_gradients(fn, *given), expected)


def test_compiled_whole_it_computes_the_same() -> None:
    given, seed = (leaf(9, 24), leaf(24)), seed_of(11)
    for implementation in ("plain", "triton"):
        fn = torch.compile(ours(implementation, 0.3, seed), fullgraph=True, backend="aot_eager")
        assert_near(with_gradients(fn, *given), with_gradients(ours("plain", 0.3, seed), *given))


def test_operators_keep_their_promises_to_torch() -> None:
    x, bias = leaf(9, 6), leaf(6)
    for sample in [(x, bias, seed_of(1), 0.5), (x, None, None, 0.0)]:
        torch.library.opcheck(kernels.forward, sample)
        detached = (t.detach() if isinstance(t, Tensor) else t for t in sample)
        torch.library.opcheck(kernels.backward, (torch.ones_like(x), *detached))


def test_meta_and_fake_tensors_have_the_right_shapes() -> None:
    assert gelu_tanh(torch.empty(2, 3, 8, device="meta"), dropout_p=0.5).shape == (2, 3, 8)
    with FakeTensorMode():
        x = torch.empty(2, 8, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        bias = torch.empty(8, device=DEVICE, requires_grad=True)
        gelu_tanh(x, bias, dropout_p=0.5, implementation="triton").sum().backward()
        assert x.grad is not None
        assert bias.grad is not None
        assert bias.grad.dtype == torch.float32


def test_inputs_that_do_not_fit_are_refused() -> None:
    x = torch.randn(2, 6)
    with pytest.raises(ValueError, match="no dimension"):
        gelu_tanh(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"it must be \[6\]"):
        gelu_tanh(x, torch.ones(5))
    with pytest.raises(TypeError, match="bias is"):
        gelu_tanh(x, torch.ones(6, dtype=torch.int32))
    with pytest.raises(ValueError, match="a probability"):
        gelu_tanh(x, dropout_p=1.5)
    with pytest.raises(TypeError, match="must be int64"):
        gelu_tanh(x, dropout_p=0.5, seed=torch.ones(2))
    with pytest.raises(ValueError, match="must be int64"):
        gelu_tanh(x, dropout_p=0.5, seed=torch.ones(3, dtype=torch.int64))
    with pytest.raises(KernelUnavailableError, match="float64"):
        gelu_tanh(x.double(), implementation="triton")


def test_accesses_are_wide_and_the_generator_runs_once_for_eight_rows_on_an_h200() -> None:
    sizes: dict[str, Any] = dict.fromkeys(("rows", "columns", "stride", "grad_stride", "threshold"), "i32")
    sizes |= {"scale": "fp32", "seed": "*i64", "bias": "*fp32", "partials": "*fp32"}
    constants: dict[str, Any] = {"BIAS": False, "DROPOUT": True, "BLOCK": 512, "GROUPS": 1}
    forward = sm90.ptx("lf_graph.kernels._gelu_triton", "gelu_forward", sizes, constants, {"num_warps": 2})
    # 8 bf16 of each of 8 rows for a thread
    assert (forward.count("ld.global.v4"), forward.count("st.global.v4")) == (8, 8)
    columns_of_a_thread, rounds, products = 8, 7, 2
    assert forward.count("mul.hi.u32") <= columns_of_a_thread * rounds * products
