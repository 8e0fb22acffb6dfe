"""gelu_tanh on a GPU: sizes of a model, repeated bits, and dropout that every replay of a graph draws anew."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import assert_near, same_bits
from kernel_checks import exact, with_gradients
from torch import Tensor

import lf_graph
from lf_graph.kernels import gelu_tanh
from lf_graph.kernels._philox import keep_mask

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()


def call(x: Tensor, bias: Tensor | None = None, seed: Tensor | None = None, p: float = 0.0) -> Tensor:
    return gelu_tanh(x, bias, dropout_p=p, seed=seed, implementation="triton")


def plain(x: Tensor, bias: Tensor | None = None, seed: Tensor | None = None, p: float = 0.0) -> Tensor:
    return gelu_tanh(x, bias, dropout_p=p, seed=seed, implementation="plain")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(816, 6144), (4097, 1536), (3, 1), (2, 51, 6145)])
def test_values_and_gradients_equal_float64(shape: tuple[int, ...], p: float, dtype: torch.dtype) -> None:
    seed = torch.tensor([-5, 2**40], device="cuda")
    for bias in (None, leaf(shape[-1])):
        given = (leaf(*shape, dtype=dtype), bias, seed, p)
        assert_near(with_gradients(call, *given), with_gradients(plain, *exact(*given)))


def test_thirty_calls_give_the_same_bits() -> None:
    given = (leaf(816, 6144, dtype=torch.bfloat16), leaf(6144), torch.tensor([1, 2], device="cuda"), 0.2)
    first = with_gradients(call, *given)
    assert all(same_bits(with_gradients(call, *given), first) for _ in range(30))


def test_the_kernel_drops_what_the_twin_drops() -> None:
    seed = torch.tensor([123456789, 10**12], device="cuda")
    kept = call(torch.ones(1001, 777, device="cuda"), None, seed, 0.3) != 0
    assert torch.equal(kept, keep_mask(1001, 777, seed, 0.3))


def test_every_replay_drops_others_and_its_backward_the_same() -> None:
    def dropped(x: Tensor) -> Tensor:
        return call(x, None, None, 0.5)

    x = torch.ones(64, 512, device="cuda", requires_grad=True)
    captured = lf_graph.capture(dropped, x)
    masks = []
    for _ in range(3):
        out = captured(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
        masks.append(out != 0)
        assert torch.equal(grad != 0, masks[-1])
        assert 0.48 < float(masks[-1].double().mean()) < 0.52
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_the_seed_of_torch_fixes_what_replays_drop() -> None:
    x = torch.ones(64, 512, device="cuda", requires_grad=True)
    captured = lf_graph.capture(lambda t: call(t, None, None, 0.5), x)
    torch.cuda.manual_seed(9)
    first = [captured(x).detach().clone() for _ in range(2)]
    torch.cuda.manual_seed(9)
    assert same_bits([captured(x).detach().clone() for _ in range(2)], first)


def test_compiled_whole_it_computes_the_same() -> None:
    seed = torch.tensor([7, 8], device="cuda")
    given = (leaf(816, 1536, dtype=torch.bfloat16), leaf(1536), seed, 0.2)
    compiled = torch.compile(call, fullgraph=True)
    assert_near(with_gradients(compiled, *given), with_gradients(plain, *exact(*given)))
