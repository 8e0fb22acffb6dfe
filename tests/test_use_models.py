"""lf_graph.kernels.use() in lf-meta's models: what it exchanges there, and that they train as before."""

import copy

import pytest
import torch

from lf_graph import TrainStep
from lf_graph.kernels import use
from lf_meta.models import build_model
from lf_meta.models.gr00t_vla_batch import random_batch

TOKENS = torch.arange(4 * 16).view(4, 16) * 7 % 1000
LENGTHS = torch.tensor([16, 15, 9, 1])
SMALL = {
    "gr00t_n16_lm": {"layers": 2, "hidden": 32, "heads": 2, "ffn": 48},
    "gr00t_n16_moe": {"layers": 2, "hidden": 32, "heads": 2, "ffn": 16, "experts": 4},
}


def language_model(name):
    torch.manual_seed(0)
    return build_model(name, "tiny", 1000, SMALL[name])


def mean_loss(model, *inputs):
    total, count = model(*inputs)[:2]
    return total / count.clamp(min=1)


def gradients(model, *inputs):
    loss = mean_loss(model, *inputs)
    return [
        loss,
        *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True),
    ]


@pytest.mark.parametrize(("name", "branches"), [("gr00t_n16_lm", 2), ("gr00t_n16_moe", 0)])
def test_language_models_train_as_before(name, branches):
    model = language_model(name)
    keys, expected = list(model.state_dict()), gradients(model, TOKENS, LENGTHS)

    report = use(model, implementation="plain")

    kinds = list(report.exchanged.values())
    assert (kinds.count("rms_norm"), kinds.count("swiglu")) == (5, branches)
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(gradients(model, TOKENS, LENGTHS), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_language_models_train_as_before_in_a_captured_step(name):
    curves = []
    for exchanged in (False, True):
        model = language_model(name)
        if exchanged:
            use(model, implementation="plain")
        with TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3)) as step:
            curves.append([float(step(TOKENS, LENGTHS).loss) for _ in range(4)])
    assert curves[0][-1] < curves[0][0]
    torch.testing.assert_close(torch.tensor(curves[1]), torch.tensor(curves[0]), rtol=1e-4, atol=1e-4)


def test_the_vision_language_action_model_trains_as_before():
    torch.manual_seed(0)
    model = build_model("gr00t_n16_vla", "tiny", None, {}, "mapping")
    batch = random_batch(model.config, 2, 8)
    twin = copy.deepcopy(model)

    report = use(twin, implementation="plain")

    assert {"rms_norm", "layer_norm"} <= set(report.exchanged.values())
    assert list(twin.state_dict()) == list(model.state_dict())
    found = []
    for m in (model, twin):
        torch.manual_seed(1)  # of its noise, time and dropout
        found.append([g for g in gradients(m, batch) if g is not None])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)
