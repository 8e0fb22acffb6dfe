"""Calls of the operators at the sizes of our models, on tensors that hold nothing.

Numbers of rows are odd where they can be: an odd number tells the compiler the least. They are small, for launches
depend on widths, strides and dtypes, not on how many rows there are; but where a configuration is chosen by rows, it is
that of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lf_graph._adamw import FusedAdamW
from lf_graph._flat import FlatParameters
from lf_graph.kernels import (
    add_layer_norm,
    add_rms_norm,
    attention_lengths,
    gated_residual,
    gelu_tanh,
    grouped_experts,
    grouped_gemm,
    layer_norm,
    layer_norm_modulate,
    linear_cross_entropy,
    qk_norm_rope,
    rms_norm,
    rope,
    swiglu,
    varlen_attention,
)

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """One call, forward and backward.

    Attributes:
        op: the operator's name.
        shape: a label of sizes.
        call: launches what the operator launches.
        products: whether its kernels are bound by matrix products, else by memory.
        quick: whether the test compiles it too: the hardest sizes of every kernel.
        tails: whether whole blocks are followed by a last one that goes element by element, in instructions of its own.
    """

    op: str
    shape: str
    call: Callable[[], None]
    products: bool = False
    quick: bool = False
    tails: bool = False

    @property
    def label(self) -> str:
        """What ``--match`` is compared with."""
        return f"{self.op} | {self.shape}"


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A leaf of unknown values."""
    return torch.empty(shape, dtype=dtype).requires_grad_(dtype.is_floating_point)


def both(fn: Callable[..., Any], *inputs: Any, **options: Any) -> None:
    """Forward, and the gradients of all inputs that want one."""
    outputs = fn(*inputs, **options, implementation="triton")
    found = [t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if t.requires_grad]
    wanted = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    torch.autograd.grad(found, wanted, [torch.empty_like(t) for t in found])


def _attention() -> list[Case]:
    """(label, rows of a sequence, heads, key-value heads, head size, causal, quick)."""
    sizes = (
        ("language model", 2048, 32, 32, 64, True, False),
        ("Qwen3", 4096, 16, 8, 128, True, True),
        ("VLA text", 280, 16, 8, 128, True, False),
        ("VLA vision", 256, 16, 16, 72, False, True),
        ("VLA action", 51, 32, 32, 48, False, False),
        ("full", 4096, 16, 16, 128, False, False),
    )

    def padded(rows: int, heads: int, kv: int, dim: int, causal: bool) -> None:
        q, k, v = empty(1, rows, heads, dim), empty(1, rows, kv, dim), empty(1, rows, kv, dim)
        both(attention_lengths, q, k, v, causal=causal)

    def packed(rows: int, heads: int, kv: int, dim: int, causal: bool) -> None:
        q, k, v = empty(2 * rows, heads, dim), empty(2 * rows, kv, dim), empty(2 * rows, kv, dim)
        cu = torch.tensor([0, rows, 2 * rows], dtype=torch.int32)
        both(varlen_attention, q, k, v, cu, causal=causal)

    found = []
    for label, *size, quick in sizes:
        rows, heads, kv, dim, causal = size
        shape = f"{label}: {rows} rows, {heads}/{kv}x{dim}, {'causal' if causal else 'full'}"
        for op, fn in (("attention_lengths", padded), ("varlen_attention", packed)):
            chosen = quick and (op == "varlen_attention") == (dim == 128)
            found.append(Case(op, shape, lambda f=fn, s=size: f(*s), products=True, quick=chosen))
    return found


def _norms() -> list[Case]:
    ops: dict[str, tuple[str, Callable[..., Any], tuple[int, ...]]] = {
        "rms_norm": ("xw", rms_norm, (128, 2048)),
        "add_rms_norm": ("xrw", add_rms_norm, (2048,)),
        "layer_norm": ("xwb", layer_norm, (1152, 4608)),
        "add_layer_norm": ("xrwb", add_layer_norm, (1152,)),
        "layer_norm_modulate": ("xsc", layer_norm_modulate, (1152, 1536)),
        "gated_residual": ("xrs", gated_residual, (1152, 1536)),
    }

    def call(letters: str, fn: Callable[..., Any], width: int) -> None:
        shapes = {"x": (3, 51, width), "r": (3, 51, width), "w": (width,), "b": (width,)}
        shapes |= {"s": (3, width), "c": (3, width)}
        both(fn, *(empty(*shapes[n]) for n in letters), **({} if fn is gated_residual else {"eps": EPS}))

    return [
        Case(op, f"3x51x{width}", lambda a=letters, f=fn, w=width: call(a, f, w), quick=width == widths[-1])
        for op, (letters, fn, widths) in ops.items()
        for width in widths
    ]


def _rope() -> list[Case]:
    def call(heads: int, kv: int, width: int, normed: bool) -> None:
        fused = torch.empty(3, 51, heads + 2 * kv, width, dtype=torch.bfloat16)
        q, k = fused[:, :, :heads].requires_grad_(), fused[:, :, heads : heads + kv].requires_grad_()
        cos, sin = torch.empty(51, width // 2), torch.empty(51, width // 2)
        if normed:
            both(qk_norm_rope, q, k, empty(width), empty(width), cos, sin)
        else:
            both(rope, q, k, cos, sin)

    sizes = ((32, 32, 64), (16, 8, 128))
    return [
        Case(op, f"3x51x({h}+{kv})x{w}", lambda s=(h, kv, w, normed): call(*s), quick=w == 128)
        for op, normed in (("rope", False), ("qk_norm_rope", True))
        for h, kv, w in sizes
    ]


def _float8() -> list[Case]:
    from lf_graph.kernels._float8_triton import by_row, by_tensor

    def call(op: Callable[..., Any], transposed: bool, dtype: torch.dtype) -> None:
        x = torch.empty(51, 2048, dtype=torch.bfloat16)
        op(torch.empty(2048, 48, dtype=torch.bfloat16).t() if transposed else x, dtype)

    ways = (
        ("float8 by tensor", by_tensor, False),
        ("float8 by row", by_row, False),
        ("float8 by row", by_row, True),
    )
    return [
        Case(
            name,
            f"51x2048{' transposed' if transposed else ''} to {str(dtype).removeprefix('torch.')}",
            lambda o=op, t=transposed, d=dtype: call(o, t, d),
            quick=dtype == torch.float8_e4m3fn,
        )
        for name, op, transposed in ways
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    ]


def _activations() -> list[Case]:
    def weighted(rows: int, columns: int) -> None:
        weight = torch.empty(rows, requires_grad=True)
        both(lambda x, w, **o: swiglu(x, weight=w, **o), empty(rows, 2 * columns), weight)

    def dropped(rows: int, columns: int) -> None:
        seed = torch.zeros(2, dtype=torch.int64)
        both(
            lambda x, b, **o: gelu_tanh(x, b, dropout_p=0.2, seed=seed, **o),
            empty(rows, columns),
            empty(columns),
        )

    return [
        Case("swiglu", "51x5632", lambda: both(swiglu, empty(51, 5632), empty(51, 5632)), quick=True),
        Case("swiglu", "51x1024 of experts", lambda: weighted(51, 1024), quick=True),
        Case(
            "gelu_tanh",
            "51x6144 with bias",
            lambda: both(gelu_tanh, empty(51, 6144), empty(6144)),
            quick=True,
        ),
        Case("gelu_tanh", "51x6144 with bias and dropout", lambda: dropped(51, 6144), quick=True),
    ]


def _grouped() -> list[Case]:
    """32 experts of 2048 x 1024, top-2, of 16384 tokens or of 512: 1024 or 32 rows an expert."""

    def product(rows: int, depth: int, columns: int) -> None:
        offsets = torch.zeros(32, dtype=torch.int32)
        both(grouped_gemm, empty(rows, depth), empty(32, depth, columns), offsets)

    def experts(tokens: int) -> None:
        x, gate_up, down = empty(tokens, 2048), empty(32, 2048, 2048), empty(32, 1024, 2048)
        weight, offsets = torch.empty(2 * tokens, requires_grad=True), torch.zeros(32, dtype=torch.int32)
        rows = torch.zeros(2 * tokens, dtype=torch.int64)
        both(grouped_experts, x, gate_up, down, weight, offsets, rows, rows.view(tokens, 2))

    sizes = ((32767, 2048, 2048), (32767, 1024, 2048), (1023, 2048, 2048))
    found = [
        Case("grouped_gemm", f"{r} rows, 32x{k}x{n}", lambda s=(r, k, n): product(*s), products=True)
        for r, k, n in sizes
    ]
    for tokens, quick in ((16383, True), (511, False)):
        shape = f"{tokens} tokens, 32x2048x1024"
        found.append(Case("grouped_experts", shape, lambda t=tokens: experts(t), products=True, quick=quick))
    return found


def _cross_entropy() -> list[Case]:
    def call(vocab: int, gradients: bool) -> None:
        targets = torch.zeros(5, dtype=torch.int64)
        with torch.set_grad_enabled(gradients):
            hidden, weight = (torch.zeros(n, 8, dtype=torch.bfloat16) for n in (5, vocab))
            linear_cross_entropy(
                hidden.requires_grad_(gradients),
                weight.requires_grad_(gradients),
                targets,
                implementation="triton",
            )

    return [
        Case("linear_cross_entropy", f"vocabulary {v}, {name}", lambda v=v, g=g: call(v, g), quick=v == 50257)
        for v in (50257, 151936)
        for name, g in (("gradients", True), ("loss alone", False))
    ]


def _adamw() -> list[Case]:
    def call(dtype: torch.dtype) -> None:
        p = torch.nn.Parameter(torch.zeros(2048))
        fused = FusedAdamW(FlatParameters(torch.optim.AdamW([p]), [p]), implementation="triton", clip=1.0)
        fused.set_gradients([torch.zeros(2048, dtype=dtype)])

    return [
        Case("adamw", f"{name} gradients", lambda d=dtype: call(d), quick=True, tails=True)
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
    ]


def all_cases() -> list[Case]:
    """Every operator at the sizes of our models."""
    makers = (_attention, _grouped, _norms, _rope, _activations, _float8, _cross_entropy, _adamw)
    return [case for make in makers for case in make()]
