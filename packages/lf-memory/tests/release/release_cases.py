"""A model, batches, and the ordinary training loop that released steps are compared with."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from lf_memory.gradients import release


class Net(nn.Module):
    """Linear layers, norms, a tied weight, an embedding, a frozen and an unused parameter; dropout on request."""

    def __init__(self, width=32, dropout=0.0, batch_norm=False):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(width))

    def forward(self, ids):
        x = self.embed(ids) + self.frozen
        x = x + self.dropout(self.second(F.gelu(self.first(x))))
        logits = self.norm(x) @ self.embed.weight.t()
        return F.cross_entropy(logits, ids.roll(1))


def net(seed=0, dtype=torch.float32, **options):
    torch.manual_seed(seed)
    return Net(**options).to(dtype)


def batches(count, size=24, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 50, (size,), generator=generator) for _ in range(count)]


def groups(model):
    """Two param groups: matrices, and the rest at another learning rate without weight decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices}, {"params": rest, "lr": 3e-3, "weight_decay": 0.0}]


def train(model, optimizer, data, accumulation=1, clip=None, schedule=None):
    """The ordinary loop; returns the losses."""
    losses = []
    for i in range(0, len(data), accumulation):
        optimizer.zero_grad()
        for ids in data[i : i + accumulation]:
            loss = model(ids) / accumulation
            loss.backward()
            losses.append(loss.detach())
        if clip is not None:
            # in the order of the optimizer, as release: a norm's last bit depends on it
            params = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return losses


def train_released(model, optimizer, data, mode, schedule=None, **options):
    """The same loop with `release`; returns the losses and the handle, which is closed."""
    losses, accumulation = [], options.get("accumulation", 1)
    with release(model, optimizer, mode, **options) as handle:
        for i in range(0, len(data), accumulation):
            if mode == "two_pass":
                losses.append(handle.step(closure(model, data[i])).detach())
            else:
                for ids in data[i : i + accumulation]:
                    loss = model(ids) / accumulation
                    loss.backward()
                    losses.append(loss.detach())
                handle.step()
            if schedule is not None:
                schedule.step()
    return losses, handle


def closure(model, ids):
    def run():
        loss = model(ids)
        loss.backward()
        return loss

    return run


def assert_same(ours, theirs):
    """Parameters and buffers have the same bits."""
    theirs = theirs.state_dict()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs[name]), f"{name}: {(value - theirs[name]).abs().max()}"


def assert_close(ours, theirs, atol):
    theirs = theirs.state_dict()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_state(ours, theirs):
    """The optimizers would save the same."""
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in ours["state"].items():
        assert state.keys() == theirs["state"][index].keys()
        for key, value in state.items():
            other = theirs["state"][index][key]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
