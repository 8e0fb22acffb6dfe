"""Modules that tests of use() exchange, and ones that only look like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lf_graph.kernels import use


class Rows(nn.Module):
    """A norm that is not torch's: RMSNorm, rounded before the weight as in transformers."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * h.to(x.dtype)


class TypedRows(Rows):
    """The same in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x.float())).to(x.dtype)


class Offset(Rows):
    """Gemma's: the weight is what is added to 1."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.variance_epsilon) * (1 + self.weight)


class OtherEpsilon(Rows):
    """It does not use the epsilon it has."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 3e-5)


class Noisy(Rows):
    """Another function while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class Detached(Rows):
    """The values of a norm, and another gradient."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return x * scale.detach() * self.weight


class Channels(nn.LayerNorm):
    """A subclass of torch's that normalises over channels: [B, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Broken(Rows):
    """It cannot be run."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not here")


class Gated(nn.Module):
    """down(act(gate) * up), its parts named as one likes."""

    def __init__(
        self,
        width: int = 16,
        inner: int = 24,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        act: nn.Module | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.names = names
        for name, (i, o) in zip(names, ((width, inner), (width, inner), (inner, width)), strict=True):
            self.register_module(name, nn.Linear(i, o, bias=bias))
        self.act_fn = act or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        out: Tensor = down(self.act_fn(gate(x)) * up(x))
        return out


class Packed(nn.Module):
    """gate and up in one projection."""

    def __init__(self, up_first: bool = False) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(16, 48), nn.Linear(24, 16)
        self.act, self.up_first = nn.SiLU(), up_first

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        if self.up_first:
            gate, up = up, gate
        out: Tensor = self.down(self.act(gate) * up)
        return out


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class OwnGELU(nn.Module):
    """By tanh, written out."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


class Block(nn.Module):
    """Before-norm attention-free block with everything that can be exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.RMSNorm(16, eps=1e-5), nn.LayerNorm(16), Rows(16)
        self.gated, self.packed = Gated(bias=True), Packed()
        self.mlp = nn.Sequential(nn.Linear(16, 24), nn.GELU(approximate="tanh"), nn.Linear(24, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gated(self.first(x))
        x = x + self.packed(self.second(x))
        out: Tensor = x + self.mlp(self.third(x))
        return out


EXCHANGED = {
    "first": "rms_norm", "second": "layer_norm", "third": "rms_norm", "gated": "swiglu", "packed": "swiglu",
    "mlp.1": "gelu_tanh",
}  # fmt: skip
NOT_QUITE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "weight beside one": (lambda: Offset(16), "not what it computes"),
    "another epsilon": (lambda: OtherEpsilon(16), "not what it computes"),
    "dropout": (lambda: Noisy(16), "not what it computes"),
    "another gradient": (lambda: Detached(16), "not what it computes"),
    "over channels": (lambda: Channels(16), "not what it computes"),
    "groups": (lambda: nn.GroupNorm(4, 16), "not what it computes"),
    "cannot be run": (lambda: Broken(16), "not what it computes"),
    "over two dimensions": (lambda: nn.LayerNorm((4, 16)), "over 2 dimensions"),
    "too wide": (lambda: nn.RMSNorm(40000), "do not fit"),
    "gated by GELU": (lambda: Gated(act=nn.GELU()), "not what it computes"),
    "up before gate": (lambda: Packed(up_first=True), "not what it computes"),
    "GELU of erf": (nn.GELU, "not the GELU by tanh"),
    "quick GELU": (QuickGELU, "not the GELU by tanh"),
}  # fmt: skip


def block(seed: int = 0) -> nn.Module:
    """A block with random weights in every place, so that nothing is one or zero."""
    torch.manual_seed(seed)
    made = Block()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return made


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, gradient of x and of all parameters."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = model(x)
    out.float().square().mean().backward()
    found: list[Any] = [out.detach(), x.grad, *[p.grad for p in model.parameters()]]
    return [t.clone() for t in found]


def gradients_on_a_rank(rank: int, inside: bool) -> list[Tensor]:
    """Of a block exchanged before DistributedDataParallel wraps it, or after; run by each rank."""
    model: Any = block()
    if inside:
        use(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    if not inside:
        use(wrapped)
    torch.manual_seed(rank)
    wrapped(torch.randn(4, 16)).square().mean().backward()
    return [p.grad for p in model.parameters()]
