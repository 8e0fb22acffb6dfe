"""Plans foretell the memory of released steps."""

import pytest
import torch

from lf_memory.gradients import predict, release
from lf_memory.gradients._measure import measure

IDS = torch.arange(64).view(2, 32) * 7 % 512
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}
RELEASED = {  # (mode of release, its options, options of the plan)
    "fused": ("fused", {"chunk_bytes": 1}, {"mode": "fused"}),
    "fused, together": ("fused", {"chunk_bytes": 50_000}, {"mode": "bucket", "bucket_bytes": 50_000}),
    "local_clip": ("local_clip", {"clip": 1.0, "chunk_bytes": 1}, {"mode": "fused"}),
    "exact": ("exact", {"clip": 1.0}, {"mode": "all-alive"}),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", RELEASED)
def test_a_released_step_takes_what_its_plan_says(gpt, name, optimizer, tied):
    """Optimizers without temporaries of their own; AdamW with foreach=False needs the largest parameter again."""
    mode, options, planned = RELEASED[name]
    model = gpt(tied=tied)
    plan = predict(model, IDS, **planned)
    handle = release(model, OPTIMIZERS[optimizer](model.parameters()), mode=mode, **options)
    for _ in range(2):  # states and buffers are made
        model(IDS).backward()
        handle.step()
    found = measure(lambda: model(IDS), lambda loss: loss.backward(), torch.device("cpu"))
    handle.step()
    handle.close()
    assert found.gradient_peak_bytes == pytest.approx(plan.gradient_peak_bytes, rel=0.001)
    assert found.backward_peak_bytes == pytest.approx(plan.backward_peak_bytes, rel=0.001)
