"""What each op kind is in torch functions, on whatever device its inputs lie. Torch is imported by the first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lf_hal.lir.graph import FLOATS, Op, freeze

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TORCH_KINDS", "apply", "torch_dtype"]

_DTYPES = {
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "i8": "int8",
    "i32": "int32",
    "i64": "int64",
    "bool": "bool",
}


def torch_dtype(dtype: str) -> Any:
    """The torch.dtype of an element type of LIR."""
    import torch

    return getattr(torch, _DTYPES[dtype])


def apply(op: Op, x: Sequence[Tensor], device: Any) -> Tensor:
    """The op's output, of its declared type, on ``device``, where the inputs are."""
    if not x:
        return _made(op).to(device)
    out: Tensor = _KINDS[op.kind](op, x)
    return out.to(torch_dtype(op.output.type.dtype))


def _made(op: Op) -> Tensor:
    """iota and fill, on the CPU; the exact value of each element is rounded once."""
    import torch

    dtype: torch.dtype = torch_dtype(op.get_str("dtype"))
    if op.kind == "fill":
        return torch.full(op.get_ints("shape"), _number(op, "value"), dtype=dtype)
    exact = torch.float64 if op.get_str("dtype") in FLOATS else torch.int64
    steps = torch.arange(op.get_int("length"), dtype=exact)
    return (steps * _number(op, "step") + _number(op, "start")).to(dtype)  # type: ignore[no-any-return]


def _number(op: Op, name: str) -> Any:
    return op.attr(name)


def _activate(act: str, x: Tensor) -> Tensor:
    return x if act == "none" else _unary(act, x)


def _unary(fn: str, x: Tensor) -> Tensor:
    import torch
    import torch.nn.functional as F

    named: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": F.gelu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "not": torch.logical_not,
        "relu": torch.relu,
        "silu": F.silu,
    }
    return named[fn](x) if fn in named else getattr(torch, fn)(x)


_TORCH_BINARY = {"max": "maximum", "min": "minimum", "and": "logical_and", "or": "logical_or"}


def _sides(op: Op, x: Sequence[Tensor]) -> tuple[Any, Any]:
    import torch

    if not op.has("scalar"):
        return x[0], x[1]
    scalar = torch.full((), _number(op, "scalar"), dtype=x[0].dtype, device=x[0].device)
    left = op.has("scalar_left") and op.attr("scalar_left")
    return (scalar, x[0]) if left else (x[0], scalar)


def _binary(op: Op, x: Sequence[Tensor]) -> Tensor:
    import torch

    fn = op.get_str("fn")
    return getattr(torch, _TORCH_BINARY.get(fn, fn))(*_sides(op, x))  # type: ignore[no-any-return]


def _compare(op: Op, x: Sequence[Tensor]) -> Tensor:
    import torch

    return getattr(torch, op.get_str("fn"))(*_sides(op, x))  # type: ignore[no-any-return]


def _linear(op: Op, x: Sequence[Tensor]) -> Tensor:
    import torch.nn.functional as F

    out = F.linear(x[0], x[1].to(x[0].dtype), x[2] if len(x) > 2 else None)
    return _activate(op.get_str("act"), out) if op.has("act") else out


def _conv(op: Op, x: Sequence[Tensor]) -> Tensor:
    import torch.nn.functional as F

    bias = x[2] if len(x) == 3 else None
    stride, padding, dilation = (op.get_ints(name) for name in ("stride", "padding", "dilation"))
    out = F.conv2d(x[0], x[1].to(x[0].dtype), bias, stride, padding, dilation, op.get_int("groups"))
    if len(x) == 4:
        out = _along(x[3]).addcmul(out, _along(x[2]))
    return _activate(op.get_str("act"), out)


def _conv_add(op: Op, x: Sequence[Tensor]) -> Tensor:
    plain = replace(op, attrs=freeze({**dict(op.attrs), "act": "none"}))
    return _activate(op.get_str("act"), _conv(plain, [*x[:2], *x[3:]]) + x[2])


def _linear_i8(op: Op, x: Sequence[Tensor]) -> Tensor:
    out = (x[0] @ x[1].to(x[0].dtype).T) * x[2]
    return _activate(op.get_str("act"), out + x[3] if len(x) > 3 else out)


def _conv_i8(op: Op, x: Sequence[Tensor]) -> Tensor:
    import torch.nn.functional as F

    stride, padding, dilation = (op.get_ints(name) for name in ("stride", "padding", "dilation"))
    out = F.conv2d(x[0], x[1].to(x[0].dtype), None, stride, padding, dilation, op.get_int("groups"))
    out = out * _along(x[2])
    if len(x) == 4:
        out = out + _along(x[3])
    if len(x) == 5:
        out = _along(x[4]).addcmul(out, _along(x[3]))
    return _activate(op.get_str("act"), out)


def _along(vector: Tensor, rank: int = 4) -> Tensor:
    """A value for each channel, in a shape that broadcasts over images."""
    return vector.reshape(-1, *[1] * (rank - 2))


def _affine(op: Op, x: Sequence[Tensor]) -> Tensor:
    scale, shift = (_along(v, x[0].dim()) for v in x[1:])
    return shift.addcmul(x[0], scale)


def _batch_norm(op: Op, x: Sequence[Tensor]) -> Tensor:
    import torch.nn.functional as F

    given, weight, bias, mean, var = x
    return F.batch_norm(given, mean, var, weight, bias, False, 0.0, op.get_float("eps"))


def _attention(op: Op, x: Sequence[Tensor]) -> Tensor:
    import torch
    import torch.nn.functional as F

    q, k, v, *mask = x
    repeat = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeat, 1) for t in (k, v))
    causal, scale = bool(op.attr("causal")), op.get_float("scale")
    out = F.scaled_dot_product_attention(q, k, v, mask[0] if mask else None, 0.0, causal, scale=scale)
    if (
        mask and mask[0].dtype == torch.bool
    ):  # what a row that sees nothing gives differs among torch's kernels
        out = torch.where(mask[0].any(-1, keepdim=True), out, torch.zeros_like(out))
    return out


def _norm(op: Op, x: Sequence[Tensor]) -> Tensor:
    import torch.nn.functional as F

    run: Callable[..., Tensor] = F.layer_norm if op.kind == "layer_norm" else F.rms_norm
    return run(x[0], (x[0].shape[-1],), *x[1:], eps=op.get_float("eps"))


def _pool(op: Op, x: Sequence[Tensor]) -> Tensor:
    import torch.nn.functional as F

    kernel, stride, (ph, pw) = (op.get_ints(n) for n in ("kernel", "stride", "padding"))
    if op.get_str("fn") == "max":
        padded = F.pad(x[0], (pw, pw, ph, ph), value=float("-inf")) if ph or pw else x[0]
        return F.max_pool2d(padded, kernel, stride)
    return F.avg_pool2d(x[0], kernel, stride, (ph, pw), count_include_pad=bool(op.attr("count_padding")))


def _reduce(op: Op, x: Sequence[Tensor]) -> Tensor:
    import torch

    axes, fn = op.get_ints("axes"), op.get_str("fn")
    if not axes:  # torch would take all of them
        return x[0]
    run: Callable[..., Tensor] = torch.amax if fn == "max" else getattr(torch, fn)
    return run(x[0], axes, keepdim=bool(op.attr("keepdim")))


def _slice(op: Op, x: Sequence[Tensor]) -> Tensor:
    cut = slice(op.get_int("start"), op.get_int("end"), op.get_int("step"))
    return x[0][(*(slice(None),) * op.get_int("axis"), cut)]


def _gather(op: Op, x: Sequence[Tensor]) -> Tensor:
    return x[0].gather(op.get_int("axis"), x[1].long())


def _scatter(op: Op, x: Sequence[Tensor]) -> Tensor:
    return x[0].scatter(op.get_int("axis"), x[1].long(), x[2])


def _rope(op: Op, x: Sequence[Tensor]) -> Tensor:
    import torch

    t, cos, sin = x
    half = t.shape[-1] // 2
    if cos.shape[-1] == half:
        cos, sin = (torch.cat((c, c), -1) for c in (cos, sin))
    return t * cos + torch.cat((-t[..., half:], t[..., :half]), -1) * sin


def _upsample(op: Op, x: Sequence[Tensor]) -> Tensor:
    import torch
    import torch.nn.functional as F

    size = op.get_ints("size")
    if op.get_str("fn") == "bilinear":
        align = bool(op.attr("align_corners"))
        return F.interpolate(x[0], size, mode="bilinear", align_corners=align)
    out = x[0]  # torch's own nearest rounds its scale, and may take a neighbour
    for axis, target in zip((2, 3), size, strict=True):
        places = np.arange(target) * out.shape[axis] // target
        out = out.index_select(axis, torch.from_numpy(places).to(out.device))
    return out


def _lstm_cell(op: Op, x: Sequence[Tensor]) -> Tensor:
    import torch
    import torch.nn.functional as F

    given, h, c, w_ih, w_hh, *bias = x
    gates = F.linear(given, w_ih) + F.linear(h, w_hh)
    for b in bias:
        gates = gates + b
    i, f, g, o = gates.chunk(4, 1)
    cell = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.stack((torch.sigmoid(o) * torch.tanh(cell), cell))


def _cast(op: Op, x: Sequence[Tensor]) -> Tensor:
    return x[0] != 0 if op.get_str("dtype") == "bool" else x[0]


def _concat(op: Op, x: Sequence[Tensor]) -> Tensor:
    import torch

    return torch.cat(tuple(x), op.get_int("axis"))


_KINDS: dict[str, Callable[[Op, Sequence[Any]], Any]] = {
    "affine_channel": _affine,
    "attention": _attention,
    "batch_norm": _batch_norm,
    "binary": _binary,
    "broadcast": lambda op, x: x[0].expand(op.get_ints("shape")),
    "cast": _cast,
    "compare": _compare,
    "concat": _concat,
    "conv2d": _conv,
    "conv_add_act": _conv_add,
    "conv_affine_act": _conv,
    "conv_i8": _conv_i8,
    "copy_to": lambda op, x: x[0],
    "cumsum": lambda op, x: x[0].cumsum(op.get_int("axis"), dtype=x[0].dtype),
    "embedding": lambda op, x: x[0][x[1]],
    "gather": _gather,
    "layer_norm": _norm,
    "linear": _linear,
    "linear_act": _linear,
    "linear_i8": _linear_i8,
    "lstm_cell": _lstm_cell,
    "matmul": lambda op, x: x[0] @ x[1],
    "multiply_add": lambda op, x: x[2].addcmul(x[0], x[1]),
    "permute": lambda op, x: x[0].permute(op.get_ints("perm")),
    "pool2d": _pool,
    "reduce": _reduce,
    "reshape": lambda op, x: x[0].reshape(op.get_ints("shape")),
    "rms_norm": _norm,
    "rope": _rope,
    "scatter": _scatter,
    "slice": _slice,
    "softmax": lambda op, x: x[0].softmax(-1),
    "unary": lambda op, x: _unary(op.get_str("fn"), x[0]),
    "upsample": _upsample,
    "where": lambda op, x: x[1].where(x[0], x[2]),
}
TORCH_KINDS = frozenset({*_KINDS, "iota", "fill"})
"""Op kinds that torch devices run: all of them."""
