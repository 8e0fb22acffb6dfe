"""Plans beside DistributedDataParallel on a Gloo rank."""

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lf_memory.gradients import PlanError, predict
from lf_memory.gradients._measure import measure

IDS = torch.arange(64).view(2, 32) * 7 % 512


@pytest.fixture
def gloo():
    """A process group of this process alone: real buckets, hooks and reductions."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def third_step(model):
    """Bytes of a step after those in which the reducer makes its buckets, and makes them again."""
    for _ in range(2):
        model(IDS).backward()
        model.zero_grad()
    return measure(lambda: model(IDS), lambda loss: loss.backward(), torch.device("cpu"))


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_that_are_views_of_buckets_are_given_up_at_once(gpt, gloo, tied):
    """The buckets exist before the pass; what the pass makes is copied into them."""
    model = gpt(tied=tied)
    plan = predict(model, IDS, mode="fused")
    found = third_step(DistributedDataParallel(model, gradient_as_bucket_view=True))
    assert found.gradient_peak_bytes == pytest.approx(plan.gradient_peak_bytes, rel=0.02)
    assert found.backward_peak_bytes == pytest.approx(plan.backward_peak_bytes, rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_beside_buckets_are_all_alive(gpt, gloo, tied):
    model = gpt(tied=tied)
    plan = predict(model, IDS, mode="all-alive")
    found = third_step(DistributedDataParallel(model))
    assert found.gradient_peak_bytes == pytest.approx(plan.gradient_peak_bytes, rel=0.02)
    assert found.backward_peak_bytes == pytest.approx(plan.backward_peak_bytes, rel=0.02)


def test_a_sharded_model_is_refused(gpt, gloo):
    model = gpt()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(PlanError, match="DTensor: plan the model before it is sharded"):
        predict(model, IDS)


def test_a_wrapped_model_is_refused_and_left_usable(gpt, gloo):
    wrapped = DistributedDataParallel(gpt())
    with pytest.raises(PlanError, match=r"plan its \.module, with mode"):
        predict(wrapped, IDS)
    for _ in range(2):
        wrapped(IDS).backward()
        wrapped.zero_grad()
    predict(wrapped.module, IDS)  # the reducer does not notice
    wrapped(IDS).backward()
    assert wrapped.module.head.weight.grad is not None
