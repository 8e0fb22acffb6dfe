"""Attention, forward and backward apart: full sequences, padded ones of real lengths, and the same packed.

Every way reads q, k, v as [batch, rows, heads, head_dim] (or its rows packed), as projections leave them in memory.
Padded ways of PyTorch compute padding too and multiply it away in the end: one pass over the output, which ours saves.
FlexAttention's block mask is made beforehand and not timed. Operations are those of the used rows, half of them when
causal, and 2.5 times as many in the backward, as FlashAttention counts them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from kernel_rows import REFERENCE, Call, Group, KernelRow, as_float64, backward, compiled, forward
from lf_graph.kernels import attention, attention_lengths, varlen_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Make = Callable[[torch.device], tuple[Tensor, Tensor, Tensor]]
# Eight lengths that leave 18.7 % of 8 x 2048 rows as padding, the share of the language model's workload.
REAL = (2048, 2048, 2048, 2048, 1740, 1506, 1159, 725)


@dataclass(frozen=True)
class Shape:
    """A layer of one of the models."""

    label: str
    batch: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    lengths: tuple[int, ...] = ()

    @property
    def used(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each sequence."""
        return tuple((n, n) for n in self.lengths) or ((self.rows, self.keys),) * self.batch

    @property
    def flops(self) -> int:
        """Of the two products of the forward."""
        return sum(4 * n * m for n, m in self.used) * self.heads * self.head_dim // (2 if self.causal else 1)

    @property
    def bytes(self) -> int:
        """Of q, k, v and the output, bf16."""
        queries, keys = (sum(x) for x in zip(*self.used, strict=True))
        return 2 * (2 * queries * self.heads + 2 * keys * self.kv_heads) * self.head_dim

    def named(self, layout: str) -> str:
        """Label of a group."""
        kind = "causal" if self.causal else "full"
        heads = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        keys = "" if self.keys == self.rows else f" on {self.keys}"
        return f"{self.label} {layout}: {self.batch}x{self.rows}{keys}, {heads}, {kind} bf16"


SHAPES = (
    Shape("LM", 8, 2048, 2048, 32, 32, 64, True),
    Shape("LM, 18.7 % padding", 8, 2048, 2048, 32, 32, 64, True, REAL),
    Shape("Qwen3 layer", 4, 4096, 4096, 16, 8, 128, True),
    Shape("VLA text", 16, 280, 280, 16, 8, 128, True),
    Shape("VLA vision", 32, 256, 256, 16, 16, 72, False),
    Shape("VLA action", 16, 51, 51, 32, 32, 48, False),
    Shape("VLA action on vision", 16, 51, 128, 32, 32, 48, False),
)
SMALL = (
    Shape("small", 2, 40, 40, 2, 1, 24, True, (40, 17)),
    Shape("small", 2, 9, 40, 2, 2, 16, False),
)


def inputs(shape: Shape, packed: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, which want gradients."""
    sizes = ((shape.rows, shape.heads), (shape.keys, shape.kv_heads), (shape.keys, shape.kv_heads))
    whole = [torch.randn(shape.batch, n, h, shape.head_dim).bfloat16() for n, h in sizes]
    if packed:
        whole = [torch.cat([x[b, : n[i > 0]] for b, n in enumerate(shape.used)]) for i, x in enumerate(whole)]
    q, k, v = (x.to(device).requires_grad_() for x in whole)
    return q, k, v


def offsets(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """cu_seqlens of queries and keys."""
    cumulative = [
        torch.tensor([0, *n]).cumsum(0).to(device, torch.int32) for n in zip(*shape.used, strict=True)
    ]
    return cumulative[0], cumulative[1]


def exact_padded(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sequence by sequence, keeping no scores for the backward, so that float64 fits."""
    found = []
    for b, (n, m) in enumerate(shape.used):
        used = q[b : b + 1, :n], k[b : b + 1, :m], v[b : b + 1, :m]
        plain = functools.partial(attention_lengths, causal=shape.causal, implementation="plain")
        out: Tensor = checkpoint(plain, *used, use_reentrant=False)  # type: ignore[assignment]
        found.append(F.pad(out, (0, 0, 0, 0, 0, shape.rows - n)))
    return torch.cat(found)


def exact_packed(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same on packed rows."""
    found, at_q, at_k = [], 0, 0
    for n, m in shape.used:
        one = q[None, at_q : at_q + n], k[None, at_k : at_k + m], v[None, at_k : at_k + m]
        plain = functools.partial(attention_lengths, causal=shape.causal, implementation="plain")
        found.append(checkpoint(plain, *one, use_reentrant=False)[0])  # type: ignore[index]
        at_q, at_k = at_q + n, at_k + m
    return torch.cat(found)


def our_padded(shape: Shape, device: torch.device) -> Attention:
    """Ours on padded rows."""
    lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device) if shape.lengths else None
    return functools.partial(_our_padded, lengths, shape.causal)


def _our_padded(lengths: Tensor | None, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_lengths(q, k, v, lengths, causal=causal)


def our_packed(shape: Shape, device: torch.device) -> Attention:
    """Ours on packed rows."""
    cu_q, cu_k = offsets(shape, device)
    return lambda q, k, v: varlen_attention(q, k, v, cu_q, cu_k, causal=shape.causal)


def chosen(shape: Shape, device: torch.device, packed: bool) -> Attention:
    """The way that the tuner's table names; measuring it here also tells the tuner which keys there are."""
    if packed:
        cu_q, cu_k = offsets(shape, device)
        return lambda q, k, v: attention(q, k, v, cu_q, cu_k, causal=shape.causal)
    lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device) if shape.lengths else None
    return lambda q, k, v: attention(q, k, v, lengths_q=lengths, causal=shape.causal)


def torch_varlen(shape: Shape, device: torch.device) -> Attention:
    """FlashAttention-2 as torch ships it, on packed rows."""
    from torch.nn.attention.varlen import varlen_attn

    cu_q, cu_k = offsets(shape, device)
    known = inspect.signature(varlen_attn).parameters  # it changes from release to release
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    options = options if shape.causal else {}
    if shape.heads != shape.kv_heads and "enable_gqa" in known:
        options["enable_gqa"] = True
    call: Any = varlen_attn
    return lambda q, k, v: call(q, k, v, cu_q, cu_k, shape.rows, shape.keys, **options)


def sdpa(backend: SDPBackend, shape: Shape, device: torch.device) -> Attention:
    """torch's attention on padded rows."""
    used = _used(shape, device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)),
                is_causal=shape.causal,
                enable_gqa=shape.heads != shape.kv_heads,
            ).transpose(1, 2)
        return out if used is None else out * used

    return call


def _used(shape: Shape, device: torch.device) -> Tensor | None:
    """1 for used rows and 0 for padding, bf16 [batch, rows, 1, 1]."""
    if not shape.lengths:
        return None
    lengths = torch.tensor(shape.lengths, device=device)
    return (torch.arange(shape.rows, device=device) < lengths[:, None])[:, :, None, None].bfloat16()


def flex(shape: Shape, device: torch.device, packed: bool) -> Attention:
    """FlexAttention, compiled, with a block mask that skips what is not used."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    see, batch, rows, keys = _packed_rule(shape, device) if packed else _padded_rule(shape, device)
    mask = None
    if packed or shape.causal or shape.lengths:
        mask = create_block_mask(see, batch, None, rows, keys, device=str(device))
    run = compiled(flex_attention)
    used = None if packed else _used(shape, device)
    gqa = shape.heads != shape.kv_heads

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(-3, -2) for x in ((x[None] for x in (q, k, v)) if packed else (q, k, v)))
        out = run(*heads_first, block_mask=mask, enable_gqa=gqa).transpose(1, 2)
        return out[0] if packed else out if used is None else out * used

    return call


def _padded_rule(shape: Shape, device: torch.device) -> tuple[Any, int | None, int, int]:
    lengths = torch.tensor(shape.lengths, device=device) if shape.lengths else None

    def see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = i >= j if shape.causal else j >= 0
        return seen if lengths is None else seen & (j < lengths[b]) & (i < lengths[b])

    return see, shape.batch if shape.lengths else None, shape.rows, shape.keys


def _packed_rule(shape: Shape, device: torch.device) -> tuple[Any, int | None, int, int]:
    counts = [torch.tensor(n, device=device) for n in zip(*shape.used, strict=True)]
    documents = torch.arange(len(shape.used), device=device)
    of_q, of_k = (documents.repeat_interleave(n) for n in counts)

    def see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = of_q[i] == of_k[j]
        return same & (i >= j) if shape.causal else same

    return see, None, len(of_q), len(of_k)


def rows(small: bool) -> list[KernelRow]:
    """Layers of the models: the language model, its real lengths, and the towers of the VLA."""
    found = []
    for shape in SMALL if small else SHAPES:
        found += _padded_rows(shape)
        if shape.lengths or small:
            found += _packed_rows(shape)
    return found


def _groups(shape: Shape, layout: str) -> list[tuple[Group, Callable[..., Call]]]:
    name = shape.named(layout)
    return [
        (Group("attention fwd", name, shape.bytes, shape.flops, 2e-2), forward),
        (Group("attention bwd", name, 2 * shape.bytes, 5 * shape.flops // 2, 2e-2), backward),
    ]


def _padded_rows(shape: Shape) -> list[KernelRow]:
    make = functools.partial(inputs, shape, False)
    ways: dict[str, Callable[[Shape, torch.device], Attention]] = {
        "sdpa flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
        "flex compiled": functools.partial(flex, packed=False),
    }
    return _rows(shape, "padded" if shape.lengths else "whole", make, exact_padded, our_padded, ways)


def _packed_rows(shape: Shape) -> list[KernelRow]:
    make = functools.partial(inputs, shape, True)
    ways = {"torch varlen_attn": torch_varlen, "flex compiled": functools.partial(flex, packed=True)}
    return _rows(shape, "packed", make, exact_packed, our_packed, ways)


def _rows(
    shape: Shape,
    layout: str,
    make: Make,
    exact: Callable[..., Tensor],
    ours: Callable[[Shape, torch.device], Attention],
    ways: dict[str, Callable[[Shape, torch.device], Attention]],
) -> list[KernelRow]:
    found = []
    for group, measured in _groups(shape, layout):
        reference = functools.partial(exact, shape)

        def of(way: Callable[[Shape, torch.device], Attention], run: Any = measured) -> Callable[..., Call]:
            return lambda d: run(way(shape, d), *make(d))

        found += [
            group.row(REFERENCE, lambda d, run=measured, fn=reference: run(fn, *as_float64(make(d)))),
            group.row("lf-graph", of(ours), ours=True),
            group.row(
                "lf-graph, by table", of(functools.partial(chosen, packed=layout == "packed")), ours=True
            ),
            *(group.row(name, of(way), cuda_only=True) for name, way in ways.items()),
        ]
    return found
