"""parameter_uses: which parameters a forward pass reads only through a cast."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lf_graph._uses import parameter_uses

BF16 = torch.bfloat16


class Mixed(nn.Module):
    """An embedding, norms, linear layers, batch norm and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.rms = nn.RMSNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)
        self.batch = nn.BatchNorm1d(8)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.rms(self.norm(self.embed(tokens)))
        x = self.down(F.silu(self.up(x)))
        return self.batch(x.flatten(0, 1).float())


def under_autocast(fn):
    def run(*args):
        with torch.autocast("cpu", BF16):
            return fn(*args)

    return run


def tokens() -> Tensor:
    return torch.arange(6).view(2, 3)


def cast_only(uses) -> set[str]:
    return {name for name, use in uses.items() if use.only_cast_to is BF16}


def test_autocast_casts_weights_of_linear_layers_and_nothing_else():
    uses = parameter_uses(under_autocast(Mixed()), tokens())
    assert cast_only(uses) == {"up.weight", "up.bias", "down.weight"}
    assert uses["up.weight"].ops == ("aten._to_copy",)


def test_names_are_those_of_named_parameters_and_an_unread_parameter_has_no_use():
    model = Mixed()
    uses = parameter_uses(model, tokens())
    assert list(uses) == [name for name, _ in model.named_parameters()]
    assert uses["spare"].ops == ()
    assert uses["spare"].only_cast_to is None


def test_without_autocast_no_parameter_is_cast():
    uses = parameter_uses(Mixed(), tokens())
    assert cast_only(uses) == set()
    assert uses["down.weight"].ops == ("aten.mm",)
    assert uses["embed.weight"].ops == ("aten.embedding",)


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w.bfloat16(),
        lambda w: w.to(BF16),
        lambda w: w.t().bfloat16(),
        lambda w: w.transpose(0, 1).view(4, 4).to(dtype=BF16),
        lambda w: w.reshape(2, 8)[1].bfloat16(),
        lambda w: w.detach().bfloat16(),
        lambda w: w.bfloat16() + w[:2].bfloat16().sum(),
    ],
)
def test_explicit_casts_also_behind_views_are_only_casts(read):
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(4, 4))
    assert parameter_uses(lambda: read(model.w))["w"].only_cast_to is BF16


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w.bfloat16().sum() + w.sum(),
        lambda w: w.bfloat16().sum() + w.t()[0].exp().sum(),
        lambda w: w.bfloat16().sum() + w.half().sum(),
        lambda w: w.t().contiguous().bfloat16(),
        lambda w: w.to(torch.float32, copy=True),
        lambda w: w.to("meta", BF16),
        lambda w: torch.stack([w.bfloat16(), w]),
    ],
)
def test_any_other_reader_excludes_a_parameter(read):
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(4, 4))
    use = parameter_uses(lambda: read(model.w))["w"]
    assert use.only_cast_to is None
    assert use.ops


def test_the_dtype_of_the_cast_is_told():
    model = nn.Linear(4, 4, bias=False)
    with torch.autocast("cpu", torch.float16):
        assert parameter_uses(model, torch.randn(2, 4))["weight"].only_cast_to is torch.float16


def test_a_weight_used_twice_under_autocast_is_cast_twice_because_the_cache_is_off():
    model = nn.Linear(4, 4, bias=False)
    x = torch.randn(2, 4)
    with torch.autocast("cpu", BF16):
        model(x)  # fills the cache of the caller's autocast
        use = parameter_uses(lambda: model(model(x)))["weight"]
        assert torch.is_autocast_cache_enabled()
    assert use.ops == ("aten._to_copy", "aten._to_copy")
    assert use.only_cast_to is BF16


def test_a_tied_parameter_has_the_use_of_both_places_under_both_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    uses = parameter_uses(under_autocast(Tied()), tokens())
    assert uses["embed.weight"].ops == uses["head.weight"].ops == ("aten.embedding", "aten._to_copy")
    assert cast_only(uses) == set()


def test_frozen_parameters_and_no_grad_regions_are_seen():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = nn.Linear(4, 4).requires_grad_(False)
            self.side = nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                y = self.side(self.tower(x))
            return self.tower(x) + y

    uses = parameter_uses(under_autocast(Frozen()), torch.randn(2, 4))
    assert cast_only(uses) == {"tower.weight", "tower.bias", "side.weight", "side.bias"}
    assert uses["tower.weight"].ops == ("aten._to_copy",) * 2


def test_parameters_that_are_views_of_one_flat_buffer_are_told_apart():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            flat = torch.randn(32)
            self.a = nn.Parameter(flat[:16].view(4, 4))
            self.b = nn.Parameter(flat[16:].view(4, 4))

        def forward(self, x):
            return F.linear(x, self.a.bfloat16()) * self.b.sum()

    uses = parameter_uses(Flat(), torch.randn(2, 4).bfloat16())
    assert uses["a"].ops == ("aten._to_copy",)
    assert uses["b"].ops == ("aten.sum",)


def test_a_write_in_forward_is_a_use_and_is_undone():
    model = nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()

    def renormalise(x):
        with torch.no_grad():
            model.weight.mul_(2)
        return F.linear(x, model.weight.bfloat16())

    use = parameter_uses(renormalise, torch.randn(2, 4).bfloat16())["weight"]
    assert use.ops[0] == "aten.mul_"
    assert use.only_cast_to is None
    assert torch.equal(model.weight, before)


def test_casts_inside_a_checkpointed_region_are_seen():
    model = nn.Linear(4, 4)
    uses = parameter_uses(
        under_autocast(lambda x: checkpoint(model, x, use_reentrant=False)), torch.randn(2, 4)
    )
    assert cast_only(uses) == {"weight", "bias"}


def test_nothing_of_the_module_changes():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)).train()
    model[0].weight.grad = torch.ones(8, 8)
    grad = model[0].weight.grad
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def noisy(x):
        model.eval()
        model[2].train()
        random.random()
        np.random.rand()
        return model[2](model[0](x) + torch.randn(8))

    x = torch.randn(4, 8)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    parameter_uses(noisy, x)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training
    assert model[1].training
    assert model[0].weight.grad is grad
    assert torch.equal(grad, torch.ones(8, 8))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


def test_everything_is_put_back_after_an_error_too():
    model = nn.BatchNorm1d(4)

    def fails(x):
        model(x)
        raise KeyError("user")

    with pytest.raises(KeyError, match="user"):
        parameter_uses(fails, torch.randn(3, 4))
    assert model.num_batches_tracked.item() == 0
    assert torch.equal(model.running_mean, torch.zeros(4))


def test_two_models_behind_one_function_are_named_by_their_variables():
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    uses = parameter_uses(lambda x: second(first(x)), torch.randn(1, 2))
    assert sorted(uses) == ["first.weight", "second.weight"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_of_either_device_type_is_accepted(device):
    model = nn.Linear(4, 4)
    with torch.autocast(device, BF16, enabled=device == "cpu" or torch.cuda.is_available()):
        uses = parameter_uses(model, torch.randn(2, 4))
    assert cast_only(uses) == ({"weight", "bias"} if device == "cpu" else set())


KERNEL = """
import torch, triton, triton.language as tl
from torch import nn
from lf_graph._uses import parameter_uses

@triton.jit
def double(x, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(x + at, tl.load(x + at) * 2)

model = nn.Linear(4, 4, bias=False)
before = model.weight.detach().clone()

def fn(x):
    double[(1,)](model.weight, 16)
    return x.bfloat16() @ model.weight.bfloat16().t()

use = parameter_uses(fn, torch.randn(2, 4))["weight"]
assert use.ops == ("triton.double", "aten._to_copy"), use
assert use.only_cast_to is None
assert torch.equal(model.weight, before)
print("seen and undone")
"""


def test_a_triton_kernel_is_a_reader_and_what_it_writes_is_undone(tmp_path):
    pytest.importorskip("triton")
    script = tmp_path / "kernel.py"
    script.write_text(textwrap.dedent(KERNEL))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "seen and undone", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_same_parameters_are_cast():
    model = Mixed().cuda()
    with torch.autocast("cuda", BF16):
        uses = parameter_uses(model, tokens().cuda())
    assert cast_only(uses) == {"up.weight", "up.bias", "down.weight"}
