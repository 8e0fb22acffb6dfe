"""Saved activations in a page-locked pool: the same bits under every overlap, and the device memory given back."""

import pytest
import torch
from torch import nn

from lf_memory import HostPool, TorchRegistrar, VariablePool
from lf_memory.gradients import offload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 1 << 20


@pytest.fixture(scope="module")
def pool():
    with VariablePool(1024 * MIB, pin=TorchRegistrar()) as made:
        yield made
        torch.cuda.synchronize()
        assert made.stats().live == 0


def tower(layers=16, width=1024):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers))
    ).cuda()


def gradients(model, x, block):
    model.zero_grad()
    torch.manual_seed(7)
    with block as session:
        loss = model(x).square().mean()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()], session


@pytest.mark.parametrize("rows", [256, 4096])
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_gradients_have_the_same_bits_thirty_times(pool, rows, ahead):
    model, x = tower(), torch.randn(rows, 1024, device="cuda")
    expected, _ = gradients(model, x, torch.enable_grad())
    for _ in range(30):
        found, session = gradients(model, x, offload(pool, min_bytes=MIB // 2, ahead=ahead))
        assert all(map(torch.equal, found, expected))
    stats = session.stats()
    assert stats.stored >= 32
    assert (stats.ahead > stats.stored // 2) == (ahead > 0)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pool_of_slots_page_locked_or_not(pinned):
    model, x = tower(4), torch.randn(2048, 1024, device="cuda")
    expected, _ = gradients(model, x, torch.enable_grad())
    with HostPool(8 * MIB, 6, pin=TorchRegistrar() if pinned else None) as slots:
        for _ in range(5):
            found, session = gradients(model, x, offload(slots))
            assert all(map(torch.equal, found, expected))
        assert session.stats().stored == 6
        assert session.stats().kept["pool"] > 0
        torch.cuda.synchronize()


def test_device_memory_falls_by_what_is_stored(pool):
    model, x = tower(), torch.randn(8192, 1024, device="cuda")

    def peak(block):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        _, session = gradients(model, x, block)
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before, session

    gradients(model, x, torch.enable_grad())
    plain, _ = peak(torch.enable_grad())
    ours, session = peak(offload(pool))
    stored = session.stats().stored_bytes
    assert plain - ours > 0.6 * stored


def test_work_on_another_stream_is_waited_for(pool):
    model, x = tower(8), torch.randn(2048, 1024, device="cuda")
    expected, _ = gradients(model, x, torch.enable_grad())
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(10):
            found, _ = gradients(model, x, offload(pool))
            assert all(map(torch.equal, found, expected))
    torch.cuda.synchronize()


def test_a_capture_is_refused_and_leaves_nothing_behind(pool):
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="offload within a CUDA graph capture"),
        torch.cuda.graph(graph),
        offload(pool),
    ):
        (x * 2.0).exp()
    torch.cuda.synchronize()
    x.exp().sum().backward()


def test_half_types_and_views_keep_their_bits(pool):
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        x = torch.randn(1024, 1024, device="cuda", dtype=dtype, requires_grad=True)
        y = x.t() * 2
        y.exp().sum().backward()
        expected, x.grad = x.grad, None
        with offload(pool):
            loss = (x.t() * 2).exp().sum()
        loss.backward()
        assert torch.equal(x.grad, expected)
        x.grad = None
