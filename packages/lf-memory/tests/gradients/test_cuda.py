"""Plans and arenas on a GPU: fake CUDA tensors beside the caching allocator, gradients inside a captured graph."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from lf_memory.gradients import GradientArena, PlanError, predict, verify
from lf_memory.gradients._policy import MODES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = (12, 768, 12, 32000, 512)  # 134 M parameters


@pytest.fixture
def ids():
    return torch.randint(0, 32000, (4, 512), generator=torch.Generator().manual_seed(0)).cuda()


def made(gpt, dtype, **options):
    before = torch.get_default_dtype()
    torch.set_default_dtype(
        dtype
    )  # not .to(dtype) afterwards: torch 2.11 cannot convert a module of fake parameters
    try:
        with torch.device("cuda"):
            return gpt(*SHAPE, **options)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peaks_are_as_predicted_on_fake_tensors(gpt, ids, dtype, mode, tied):
    with FakeTensorMode() as fakes:
        plan = predict(made(gpt, dtype, tied=tied), fakes.from_tensor(ids), mode=mode)
    assert plan.device == "cuda:0"
    found = verify(plan, made(gpt, dtype, tied=tied), ids)
    assert found.within(0.05), f"{found}"
    assert found.ratio("saved_bytes") == pytest.approx(1, abs=0.05), f"{found}"


@pytest.mark.parametrize("mode", MODES)
def test_a_real_run_finds_the_gradients_that_a_dry_run_does(gpt, ids, mode):
    model = made(gpt, torch.bfloat16)
    real, dry = (predict(model, ids, mode=mode, tensors=tensors) for tensors in ("real", "fake"))
    assert real.placements == dry.placements
    assert real.slots == dry.slots
    assert real.gradient_peak_bytes == pytest.approx(dry.gradient_peak_bytes, rel=0.01)
    walked = predict(model(ids), model=model, mode=mode)
    assert walked.gradient_peak_bytes == pytest.approx(dry.gradient_peak_bytes, rel=0.05)


def test_planning_allocates_nothing_on_the_device(gpt, ids):
    model = made(gpt, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    predict(model, ids, mode="bucket")
    # One block of 512 bytes is torch's own: fake tensors make a tensor of one element to wake the device.
    assert torch.cuda.max_memory_allocated() <= before + 512


def test_verify_leaves_no_recording_behind_and_respects_one(gpt, ids):
    model = made(gpt, torch.bfloat16)
    plan = predict(model, ids)
    verify(plan, model, ids)
    assert not torch._C._cuda_isHistoryEnabled()
    torch.cuda.memory._record_memory_history()
    try:
        with pytest.raises(PlanError, match="being recorded"):
            verify(plan, model, ids)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@pytest.fixture
def deterministic():
    """The same bits in every pass: the backward kernels of attention add in any order, plain products do not."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["fused", "bucket"])
def test_gradients_in_an_arena_are_bitwise_those_of_a_plain_pass(gpt, ids, deterministic, mode, dtype):
    model = made(gpt, dtype)
    model(ids).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    equal = {}

    def compare(bucket):
        for name, p in bucket.parameters.items():
            equal[name] = torch.equal(p.grad, expected[name])
        bucket.flat.fill_(torch.nan)

    with GradientArena(predict(model, ids, mode=mode), model, compare) as arena:
        for _ in range(3):
            model(ids).backward()
            arena.flush()
            assert equal.keys() == expected.keys()
            assert all(equal.values()), [name for name, same in equal.items() if not same]
            equal.clear()


def test_an_arena_keeps_its_addresses_within_a_captured_graph(gpt, ids):
    model = made(gpt, torch.bfloat16)
    side = torch.cuda.Stream()
    with GradientArena(predict(model, ids, mode="all-alive"), model) as arena:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(ids).backward()
            arena.flush()
            model.zero_grad()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            model(ids).backward()
        arena.flush()
        arena.flat.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        replayed = {name: p.grad.clone() for name, p in model.named_parameters()}
        assert arena.stats().live_bytes == sum(g.nbytes for g in replayed.values())
    model(ids).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(replayed[name].float(), p.grad.float(), rtol=0.05, atol=1e-3)
