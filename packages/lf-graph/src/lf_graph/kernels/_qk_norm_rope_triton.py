"""Norm and rotation of heads as operators ``lf_graph::qk_norm_rope`` and its backward, and their launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lf_graph.kernels._interpreter import operator
from lf_graph.kernels._partials import add_partials
from lf_graph.kernels._qk_norm_rope_kernels import (
    launch_backward,
    launch_forward,
    norm_and_rotate,
    norm_and_rotate_backward,
)
from lf_graph.kernels._rope_triton import outputs_like
from lf_graph.kernels._tunable import Config, Key, Problem, Tunable, config_of, register


def _key(q: Tensor, cos: Tensor) -> Key:
    return int(q.shape[-1]), int(cos.shape[-1]), str(q.dtype).removeprefix("torch.")


def _block(key: Key) -> int:
    """Elements of a row in registers."""
    width, half = int(key[0]), int(key[1])
    return 2 * _power(half) + _power(width - 2 * half)


def _power(n: int) -> int:
    """The next power of two; 0 of 0."""
    return 1 << (n - 1).bit_length() if n else 0


def _default_forward(key: Key) -> Config:
    rows = max(1, 2048 // _power(_block(key)))
    return Config((("ROWS", rows),), num_warps=4, num_stages=1)


def _default_backward(key: Key) -> Config:
    return Config((*_default_forward(key).constants, ("PROGRAMS", 8)), num_warps=4, num_stages=1)


def _tiles(key: Key) -> list[tuple[int, int]]:
    tiles = [(r, w) for r in (1, 2, 4, 8, 16, 32, 64) for w in (1, 2, 4, 8)]
    return [(r, w) for r, w in tiles if 4 <= r * _block(key) // (32 * w) <= 32]


def _forward_candidates(key: Key) -> Sequence[Config]:
    tried = [Config((("ROWS", r),), num_warps=w, num_stages=1) for r, w in _tiles(key)]
    return list(dict.fromkeys([_default_forward(key), *tried]))


def _backward_candidates(key: Key) -> Sequence[Config]:
    tried = [
        Config((("ROWS", r), ("PROGRAMS", p)), num_warps=w, num_stages=1)
        for r, w in _tiles(key)
        for p in (4, 8, 16)
    ]
    return list(dict.fromkeys([_default_backward(key), *tried]))


_ROUNDING = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
_EPS = 1e-6
_Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _inputs(key: Key, device: torch.device) -> tuple[_Inputs, torch.Generator]:
    """q with 16 and k with 8 heads, weights and tables; seeded, so that every process tries the same problem."""
    width, half, dtype = int(key[0]), int(key[1]), getattr(torch, str(key[2]))
    generator = torch.Generator(device).manual_seed(0)
    tokens = max(1, (1 << 24 if device.type == "cuda" else 1 << 11) // width // 24)
    shapes = (1, tokens, 16, width), (1, tokens, 8, width), (width,), (width,)
    q, k, v, w = (torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes)
    angle = torch.randn(tokens, half, generator=generator, device=device)
    return (q, k, v, w, angle.cos(), angle.sin()), generator


def _exact(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of float64 tensors."""
    half = cos.shape[-1]
    x = x * (x.square().mean(-1, keepdim=True) + _EPS).rsqrt() * weight
    a, b, rest = x.tensor_split((half, 2 * half), -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s, rest), -1)


def _forward_problem(key: Key, device: torch.device) -> Problem:
    tensors, _ = _inputs(key, device)
    q, k, v, w, cos, sin = (t.double() for t in tensors)
    return Problem(
        lambda config: launch_forward(config, *tensors, None, _EPS),
        (_exact(q, v, cos, sin), _exact(k, w, cos, sin)),
        (_ROUNDING[str(key[2])],) * 2,
    )


def _backward_problem(key: Key, device: torch.device) -> Problem:
    tensors, generator = _inputs(key, device)
    upstream = [torch.randn(t.shape, generator=generator, device=device).to(t.dtype) for t in tensors[:2]]
    q, k, v, w = leaves = [t.double().requires_grad_() for t in tensors[:4]]
    cos, sin = (t.double() for t in tensors[4:])
    outputs = _exact(q, v, cos, sin), _exact(k, w, cos, sin)
    dq, dk, dv, dw = torch.autograd.grad(outputs, leaves, [g.double() for g in upstream])
    return Problem(
        lambda config: launch_backward(config, upstream[0], upstream[1], *tensors, None, _EPS),
        (dq, dk, torch.stack((dv, dw))),
        (_ROUNDING[str(key[2])],) * 3,
    )


QK_FORWARD = register(
    Tunable(
        "qk_norm_rope_forward", (norm_and_rotate,), _default_forward, _forward_candidates, _forward_problem
    )
)
QK_BACKWARD = register(
    Tunable(
        "qk_norm_rope_backward", (norm_and_rotate_backward, add_partials),
        _default_backward, _backward_candidates, _backward_problem,
    )
)  # fmt: skip


@operator("lf_graph::qk_norm_rope")
def qk_norm_rope_op(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    cos: Tensor, sin: Tensor, positions: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See ``launch_forward``."""
    config = config_of(QK_FORWARD, _key(q, cos))
    return launch_forward(config, q, k, q_weight, k_weight, cos, sin, positions, eps)


@qk_norm_rope_op.register_fake
def _(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    cos: Tensor, sin: Tensor, positions: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return outputs_like(q, k)


@operator("lf_graph::qk_norm_rope_backward")
def qk_norm_rope_backward_op(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    cos: Tensor, sin: Tensor, positions: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See ``launch_backward``."""
    config = config_of(QK_BACKWARD, _key(q, cos))
    return launch_backward(config, dq, dk, q, k, q_weight, k_weight, cos, sin, positions, eps)


@qk_norm_rope_backward_op.register_fake
def _(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    cos: Tensor, sin: Tensor, positions: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return *outputs_like(q, k), q_weight.new_empty(2, q.shape[-1])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.eps = inputs[7]


def _gradients(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dweights = qk_norm_rope_backward_op(dq, dk, *ctx.saved_tensors, ctx.eps)
    return dq, dk, dweights[0], dweights[1], None, None, None, None


qk_norm_rope_op.register_autograd(_gradients, setup_context=_remember)
