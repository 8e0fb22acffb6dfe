"""The norms as operators ``lf_graph::norm`` and ``lf_graph::norm_backward``, and what the tuner knows of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lf_graph.kernels._interpreter import operator
from lf_graph.kernels._norm_kernels import (
    Norm,
    Wanted,
    backward_outputs,
    norm_backward,
    norm_forward,
    norm_outputs,
    norm_rows,
    norm_rows_backward,
)
from lf_graph.kernels._partials import add_partials
from lf_graph.kernels._tunable import Config, Key, Problem, Tunable, config_of, register

_ROUNDING = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
_ELEMENTS = 1 << 24  # of a problem: 32 MiB in bf16, well past the caches' share of one launch


def norm_key(x: Tensor, residual: bool, norm: Norm) -> Key:
    """Width, dtype, centred, with a residual, affine, one row of weights per sample."""
    affine = norm.weight is not None
    return (
        int(x.shape[-1]),
        str(x.dtype).removeprefix("torch."),
        norm.centred,
        residual,
        affine,
        norm.per_sample,
    )


def _block(key: Key) -> int:
    return 1 << max(0, int(key[0]) - 1).bit_length()


def _default_forward(key: Key) -> Config:
    """About 2048 elements a program, 16 a thread: two 16-byte loads of bf16 in flight."""
    rows = max(1, 2048 // _block(key))
    return Config((("ROWS", rows),), num_warps=_warps(rows * _block(key)), num_stages=1)


def _default_backward(key: Key) -> Config:
    rows = max(1, 2048 // _block(key))
    constants = (("ROWS", rows), ("PROGRAMS", 4 if _block(key) <= 4096 else 2))
    return Config(constants, num_warps=_warps(rows * _block(key)), num_stages=1)


def _warps(elements: int) -> int:
    return max(1, min(32, elements // 512))


def _tiles(key: Key) -> list[tuple[int, int]]:
    """(rows, warps) of tiles of up to 8192 elements (or one row), 8 to 32 elements a thread."""
    block = _block(key)
    tiles = [(r, w) for r in (1, 2, 4, 8, 16, 32, 64) for w in (1, 2, 4, 8, 16, 32)]
    fits = [(r, w) for r, w in tiles if r == 1 or r * block <= 8192]
    return [(r, w) for r, w in fits if 8 <= r * block / (32 * w) <= 32]


def _forward_candidates(key: Key) -> Sequence[Config]:
    tried = [Config((("ROWS", r),), num_warps=w, num_stages=1) for r, w in _tiles(key)]
    return list(dict.fromkeys([_default_forward(key), *tried]))


def _backward_candidates(key: Key) -> Sequence[Config]:
    """With two stages the rows of the next tile travel while this one is computed."""
    tried = [
        Config((("ROWS", r), ("PROGRAMS", p)), num_warps=w, num_stages=stages)
        for r, w in _tiles(key)
        for stages in (1, 2)
        for p in (2, 4, 8)
    ]
    return list(dict.fromkeys([_default_backward(key), *tried]))


def _inputs(key: Key, device: torch.device) -> tuple[Tensor, Tensor | None, Norm]:
    """Random x [8, tokens, D], residual and weights; seeded, so that every process tries the same problem."""
    width, dtype, centred, residual, affine, per_sample = key
    generator = torch.Generator(device).manual_seed(0)
    tokens = max(1, (_ELEMENTS if device.type == "cuda" else 1 << 9) // int(width) // 8)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(getattr(torch, str(dtype)))

    x, r = draw(8, tokens, int(width)), draw(8, tokens, int(width))
    weights = [draw(*((8,) if per_sample else ()), int(width)) if affine else None for _ in range(2)]
    norm = Norm(weights[0], weights[1] if centred else None, 1e-6, bool(centred))
    return x, r if residual else None, norm


def _reference(x: Tensor, residual: Tensor | None, norm: Norm) -> tuple[list[Tensor], Tensor, Tensor]:
    """Leaves x, weight, bias (float64; present ones), and h and y of them."""
    h = (x if residual is None else (x + residual)).double().requires_grad_()
    leaves = [h, *(w.double().requires_grad_() for w in (norm.weight, norm.bias) if w is not None)]
    centred = h - h.mean(-1, keepdim=True) if norm.centred else h
    y = centred * (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    affine = [w[:, None] if norm.per_sample else w for w in leaves[1:]]
    if affine:
        y = y * (affine[0] + 1 if norm.per_sample else affine[0])
    return leaves, h, y + affine[1] if len(affine) > 1 else y


def _forward_problem(key: Key, device: torch.device) -> Problem:
    x, residual, norm = _inputs(key, device)
    _, h, y = _reference(x, residual, norm)
    outputs = (y.detach(),) if residual is None else (y.detach(), h.detach())

    def run(config: Config) -> tuple[Tensor, ...]:
        return norm_forward(config, x, residual, norm, x.dtype)[: len(outputs)]

    return Problem(run, outputs, (_ROUNDING[str(key[1])],) * len(outputs))


def _backward_problem(key: Key, device: torch.device) -> Problem:
    x, residual, norm = _inputs(key, device)
    leaves, h, y = _reference(x, residual, norm)
    dy, dh = (torch.randn_like(x) for _ in range(2))
    outputs = (y, h) if residual is not None else (y,)
    grads = torch.autograd.grad(outputs, leaves, [g.double() for g in (dy, dh)[: len(outputs)]])
    wanted = Wanted(norm.weight is not None, norm.bias is not None, x.dtype, None)
    statistics = norm_forward(_default_forward(key), x, residual, norm, x.dtype)[2]
    seen, dsummed = (x, None) if residual is None else (x + residual, dh)

    def run(config: Config) -> tuple[Tensor, ...]:
        dx, _, sums = norm_backward(config, dy, dsummed, seen, norm, statistics, wanted)
        return dx, *(s if norm.per_sample else s[0] for s in sums)

    return Problem(run, tuple(grads), (_ROUNDING[str(key[1])],) * len(grads))


NORM_FORWARD = register(
    Tunable("norm_forward", (norm_rows,), _default_forward, _forward_candidates, _forward_problem)
)
NORM_BACKWARD = register(
    Tunable(
        "norm_backward",
        (norm_rows_backward, add_partials),
        _default_backward,
        _backward_candidates,
        _backward_problem,
    )
)


@operator("lf_graph::norm")
def norm_op(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``norm_forward``."""
    norm = Norm(weight, bias, eps, centred)
    config = config_of(NORM_FORWARD, norm_key(x, residual is not None, norm))
    return norm_forward(config, x, residual, norm, dtype)


@norm_op.register_fake
def _(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    return norm_outputs(x, residual, centred, dtype)


@operator("lf_graph::norm_backward")
def norm_backward_op(
    dy: Tensor,
    dsummed: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    weight_wanted: bool,
    bias_wanted: bool,
    dtype: torch.dtype,
    branch: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``norm_backward``."""
    norm = Norm(weight, bias, 0.0, statistics.shape[0] == 2)
    config = config_of(NORM_BACKWARD, norm_key(x, dsummed is not None, norm))
    wanted = Wanted(weight_wanted, bias_wanted, dtype, branch)
    return norm_backward(config, dy, dsummed, x, norm, statistics, wanted)


@norm_backward_op.register_fake
def _(
    dy: Tensor,
    dsummed: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    weight_wanted: bool,
    bias_wanted: bool,
    dtype: torch.dtype,
    branch: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    samples = Norm(weight, bias, 0.0, True).samples
    return backward_outputs(x, samples, Wanted(weight_wanted, bias_wanted, dtype, branch))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, bias, *_ = inputs
    _, summed, statistics = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if residual is None else summed, weight, bias, statistics)
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype


def _gradients(ctx: Any, dy: Tensor | None, dsummed: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    x, weight, bias, statistics = ctx.saved_tensors
    if ctx.dtypes[1] is None:
        dsummed = None  # the sum without a residual is empty
    if dy is None:
        return *_branches(ctx, dsummed, None), None, None, None, None, None
    narrow = next((d for d in ctx.dtypes if d not in (None, x.dtype)), None)
    _, _, weight_wanted, bias_wanted, *_ = ctx.needs_input_grad
    affine = weight if weight is not None else bias
    dx, branch, sums = norm_backward_op(
        dy, dsummed, x, weight, bias, statistics, weight_wanted, bias_wanted,
        x.dtype if affine is None else affine.dtype, narrow,
    )  # fmt: skip
    dweight = sums[0].view(weight.shape) if weight_wanted else None
    dbias = sums[-1].view(bias.shape) if bias_wanted else None
    return *_branches(ctx, dx, branch), dweight, dbias, None, None, None


def _branches(ctx: Any, dx: Tensor | None, branch: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and of the residual, each in its dtype; the same tensor where the dtypes are."""

    def of(dtype: torch.dtype | None) -> Tensor | None:
        if dx is None or dtype is None:
            return None
        if branch is not None and dtype == branch.dtype != dx.dtype:
            return branch
        return dx.to(dtype)

    return of(ctx.dtypes[0]), of(ctx.dtypes[1])


norm_op.register_autograd(_gradients, setup_context=_remember)
