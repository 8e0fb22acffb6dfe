"""Released steps on a GPU: results, memory, and no wait for the device within a step."""

import contextlib

import pytest
import torch
from release_cases import assert_close, assert_same, batches, closure, groups, net, train, train_released
from release_rank_cases import fsdp, fsdp_local_clip
from release_rank_pool import Ranks
from torch import nn
from torch.optim import SGD, AdamW

from lf_memory.gradients import release

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OPTIMIZERS = {
    "foreach": lambda ps: AdamW(ps, lr=1e-2, foreach=True),
    "fused": lambda ps: AdamW(ps, lr=1e-2, fused=True),
    "capturable": lambda ps: AdamW(ps, lr=1e-2, capturable=True),
    "sgd": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
}
ON_DEVICE = [
    lambda ps: AdamW(ps, lr=1e-2, fused=True),
    lambda ps: AdamW(ps, lr=1e-2, capturable=True),
    lambda ps: SGD(ps, lr=0.1, momentum=0.9),
]
MODES = [
    ("fused", {}, None),
    ("fused", {"chunk_bytes": 1}, None),
    ("fused", {"accumulation": 3, "accumulate": "buffer"}, None),
    ("exact", {"clip": 0.5}, 0.5),
    ("two_pass", {"clip": 0.5}, 0.5),
]


def pair(**options):
    return [net(**options).cuda() for _ in range(2)]


def data(count):
    return [ids.cuda() for ids in batches(count)]


@contextlib.contextmanager
def no_waiting():
    """Any wait of the host for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(("mode", "options", "clip"), MODES)
@pytest.mark.usefixtures("repeatable")
def test_parameters_are_those_of_the_ordinary_loop(make, mode, options, clip):
    theirs, ours = pair()
    train(theirs, make(groups(theirs)), data(12), options.get("accumulation", 1), clip)
    train_released(ours, make(groups(ours)), data(12), mode, **options)
    if clip is None:
        assert_same(ours, theirs)
    else:
        assert_close(ours, theirs, atol=1e-5)  # Adam divides by what a last bit of the norm has changed


@pytest.fixture
def repeatable():
    """Kernels without atomics: the embedding's backward would differ from run to run."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("repeatable")
def test_two_passes_see_the_same_dropout_on_the_device():
    theirs, ours = pair(dropout=0.3)
    torch.manual_seed(5)
    expected = train(theirs, SGD(theirs.parameters(), lr=0.1), data(4), clip=0.5)
    torch.manual_seed(5)
    losses, handle = train_released(ours, SGD(ours.parameters(), lr=0.1), data(4), "two_pass", clip=0.5)
    torch.testing.assert_close(losses, expected)
    assert handle.drift < 1e-6


@pytest.mark.parametrize(("mode", "options"), [
    ("fused", {}), ("local_clip", {"clip": 1.0}), ("exact", {"clip": 1.0}), ("exact", {"keep": torch.bfloat16}),
])  # fmt: skip
@pytest.mark.parametrize("make", ON_DEVICE)
def test_nothing_waits_for_the_device_in_backward_and_step(mode, options, make):
    model, ids = net().cuda(), data(1)[0]
    handle = release(model, make(model.parameters()), mode, **options)
    for _ in range(3):
        loss = model(ids)
        with no_waiting():
            loss.backward()
            handle.step()


@pytest.mark.parametrize("mode", ["exact", "fused"])
@pytest.mark.parametrize("make", ON_DEVICE)
def test_the_gate_waits_in_the_first_step_only_and_leaves_out_a_bad_one(mode, make):
    model, ids = net().cuda(), data(1)[0]
    handle = release(model, make(model.parameters()), mode, gate=True)
    model(ids).backward()
    handle.step()
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(ids) * float("nan")
    with no_waiting():
        loss.backward()
        handle.step()
    assert handle.skipped == (1 if mode == "exact" else 7)
    assert all(map(torch.equal, model.parameters(), before))


def test_two_passes_with_a_gate_do_not_wait_either():
    model, ids = net().cuda(), data(1)[0]
    handle = release(model, AdamW(model.parameters(), fused=True), "two_pass", clip=1.0, gate=True)
    handle.step(closure(model, ids))
    with no_waiting():
        handle.step(closure(model, ids))


def test_a_gate_with_steps_counted_on_the_host_is_refused():
    model = net().cuda()
    with pytest.raises(ValueError, match="capturable=True"):
        release(model, AdamW(model.parameters()), "exact", gate=True)


@pytest.mark.parametrize(("mode", "options", "copies"), [
    ("fused", {}, 2), ("fused", {"accumulate": "state"}, 4), ("local_clip", {"clip": 1.0}, 2),
    ("exact", {"clip": 1.0, "chunk_bytes": 1 << 24}, 24 + 4),
    ("exact", {"keep": torch.bfloat16, "chunk_bytes": 1}, 12 + 4),
])  # fmt: skip
def test_memory_of_backward_and_step(mode, options, copies):
    """24 layers of 16 MiB: what is allocated at the peak above parameters and optimizer state, in layers."""
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(24))).cuda()
    x, layer = torch.randn(8, 2048, device="cuda"), 2048 * 2048 * 4
    handle = release(model, AdamW(model.parameters(), fused=True), mode, **options)
    for _ in range(2):
        model(x).square().mean().backward()
        handle.step()
    loss = model(x).square().mean()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    loss.backward()
    handle.step()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert peak <= copies * layer
    assert handle.stats().peak_bytes <= handle.stats().planned_bytes


@pytest.fixture(scope="module")
def ranks():
    made = Ranks(min(2, torch.cuda.device_count()), "nccl")
    yield made
    made.close()


@pytest.mark.parametrize(("mode", "options", "clip"), [
    ("fused", {}, None), ("exact", {"clip": 0.5}, 0.5), ("two_pass", {"clip": 0.5}, 0.5),
])  # fmt: skip
def test_fully_sharded_parameters_over_nccl(ranks, mode, options, clip):
    for _ in range(3):
        for off, over_plan, live, _ in ranks.call(fsdp, mode=mode, options=options, clip=clip, device="cuda"):
            assert off <= 1e-5
            assert over_plan == live == 0


def test_local_clip_of_shards_over_nccl(ranks):
    assert max(ranks.call(fsdp_local_clip, device="cuda")) <= 1e-5
