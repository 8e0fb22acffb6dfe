"""What the tests of MoE share: the plain loop over experts, and watchers of what runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lf_graph import MoE

# what reads device memory back, or makes a shape from it
READ_BACKS = {
    *("_local_scalar_dense", "item", "nonzero", "masked_select", "bincount", "unique_consecutive"),
    *("_unique2", "unique_dim", "repeat_interleave", "equal", "is_nonzero"),
}


def plain_loop(moe: MoE, x: Tensor, keep: Tensor | None = None) -> Tensor:
    """The loop of Mixtral-style reference code, [N, hidden] to [N, hidden]."""
    gate, up = moe.experts.gate_up.chunk(2, dim=-1)
    weights, chosen = F.softmax(moe.router(x), dim=-1).topk(moe.top_k, dim=-1)
    if moe.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(x)
    for e in range(gate.shape[0]):
        token, choice = torch.where(chosen == e)
        y = (F.silu(x[token] @ gate[e]) * (x[token] @ up[e])) @ moe.experts.down[e]
        out = out.index_add(0, token, y * weights[token, choice, None])
    return out if keep is None else out * keep[:, None]


def gradients(moe: MoE, x: Tensor, y: Tensor, seed: int = 1) -> list[Tensor]:
    """Gradients of x and of every parameter for one fixed gradient of y."""
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return list(torch.autograd.grad(y, [x, *moe.parameters()], grad.to(y.dtype)))


def assert_equals_the_loop(moe: MoE, x: Tensor, keep: Tensor | None = None, tolerance: float = 1e-11) -> None:
    x = x.detach().requires_grad_()
    ours, loop = moe(x, keep).y, plain_loop(moe, x, keep)
    torch.testing.assert_close(ours, loop, rtol=tolerance, atol=tolerance)
    for a, b in zip(gradients(moe, x, ours), gradients(moe, x, loop), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def made(hidden: int = 16, ffn: int = 24, experts: int = 8, top_k: int = 2, **options: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(hidden, ffn, experts, top_k, **options)


class NoReadBack(TorchDispatchMode):
    """Refuses what would make the host wait for a device, and records every shape that comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        assert name not in READ_BACKS, f"{func} reads back"
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{func} with a mask"
        out = func(*args, **(kwargs or {}))
        self.shapes += [
            (str(func), tuple(t.shape))
            for t in (out if isinstance(out, tuple) else (out,))
            if isinstance(t, Tensor)
        ]
        return out


@contextmanager
def nan_in_fresh_memory() -> Iterator[None]:
    """torch.empty holds NaN, so that what is used before it is written is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
