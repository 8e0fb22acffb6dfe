"""Products whose weights are stored as bf16, f16 or int8, and what ORDER.md says the answers are."""

from __future__ import annotations

from itertools import product as every
from typing import Any

import numpy as np
import numpy.typing as npt
import order_v1 as order
from kernel_runs import PANEL, STORAGE, Program
from kernel_values import KINDS, F, f32, panels, values


def widen(stored: npt.NDArray[Any]) -> F:
    """What stored weights stand for: uint16 is bf16 by its bits, float16 and int8 are numbers."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(f32)
    return stored.astype(f32)


def residuals(p: Program) -> None:
    """An array of y's layout, added after bias, scale and shift and before the activation."""
    for m, n, k in ((1, 100, 300), (7, 50, 40), (13, 37, 129), (25, 64, 257)):
        w = values("random", n, k, seed=2)
        stored_gemm(p, f"residual-{m}x{n}x{k}", "f32", w, m, "random", act=m % 5, parts="bias add")
    parts = "bias scale add"
    stored_conv(p, "residual-conv", "f32", (2, 5, 6, 9), 20, 3, parts=parts)
    stored_conv(p, "residual-conv-long", "f32", (1, 6, 6, 33), 16, 3, parts="add")
    stored_conv(p, "residual-conv-groups", "f32", (1, 6, 5, 12), 18, 3, groups=3, parts=parts)
    stored_conv(p, "residual-conv-1x1", "f32", (1, 5, 5, 33), 40, 1, parts=parts)
    stored_conv(p, "residual-conv-depthwise", "f32", (1, 7, 6, 37), 37, 3, groups=37, parts=parts)
    stored_conv(p, "residual-conv-i8", "i8", (1, 7, 6, 17), 37, 3, parts=f"weight_scale {parts}")


def stored(storage: str, kind: str, *shape: int, seed: int) -> npt.NDArray[Any]:
    """Weights as they are stored: bits of bf16, float16 or int8."""
    x = values(kind, *shape, seed=seed)
    if storage == "f32":
        return x
    if storage == "bf16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    if storage == "f16":
        return (x * f32(1e33) if kind == "subnormal" else x).astype(np.float16)
    return np.clip(np.nan_to_num(x) * 50, -128, 127).astype(np.int8)


def stored_gemm(
    p: Program,
    name: str,
    storage: str,
    w: npt.NDArray[Any],
    m: int,
    kind: str,
    *,
    act: int = 0,
    parts: str = "",
) -> None:
    """A linear layer with w[N, K] stored narrow; ``parts`` of ``weight_scale``, ``bias`` and ``add``."""
    n, k = w.shape
    a = values(kind, m, k, seed=1)
    unit = values("random", n, seed=6) if "weight_scale" in parts else None
    bias = values("random", n, seed=3) if "bias" in parts else None
    add = values("special", m, n, seed=7) if "add" in parts else None
    number, count = STORAGE.index(storage), panels(n)
    packed = p.put(np.zeros(count * k * PANEL, w.dtype))
    p.call("pack_b_stored", number, packed, p.put(w), 1, k, k, n, 0, count)
    places = [None if v is None else p.put(v) for v in (bias, None, None, unit, add)]
    y, where = p.out(name, (m, n)), p.put(a)
    for rows, columns in every(((0, m // 3), (m // 3, m)), ((0, count // 2), (count // 2, count))):
        has = 1 if parts or act else 0
        p.call(
            "gemm_stored",
            number,
            y,
            n,
            where,
            k,
            packed,
            k,
            n,
            *rows,
            *columns,
            has,
            *places[:3],
            act,
            *places[3:],
        )
    s = order.product(a, widen(w).T)
    s = order.epilogue(s if unit is None else s * unit, bias)
    p.expected[name] = order.epilogue(s if add is None else s + add, act=act)


def stored_conv(
    p: Program,
    name: str,
    storage: str,
    size: tuple[int, int, int, int],
    out_c: int,
    kernel: int,
    *,
    groups: int = 1,
    parts: str = "weight_scale bias scale",
) -> None:
    """size is [B, H, W, C]; same padding, a relu after scale and shift."""
    x = values("special", *size, seed=8)
    w = stored(storage, "random", out_c, size[3] // groups, kernel, kernel, seed=9)
    vectors = [values("random", out_c, seed=10 + i) for i in range(4)]
    names = ("bias", "scale", "scale", "weight_scale")
    given = [v if part in parts.split() else None for part, v in zip(names, vectors, strict=True)]
    pad, number = kernel // 2, STORAGE.index(storage)
    s = order.conv2d(x, widen(w), (1, 1), (pad, pad), (1, 1), groups)
    add = values("special", *s.shape, seed=15) if "add" in parts else None
    s = order.epilogue(s if given[3] is None else s * given[3], *given[:3])
    p.expected[name] = order.epilogue(s if add is None else s + add, act=1)
    shape = [*size, *s.shape[1:], kernel, kernel, 1, 1, pad, pad, 1, 1, groups]
    terms = kernel * kernel * size[3] // groups
    packed = p.put(np.zeros(groups * panels(out_c // groups) * terms * PANEL, w.dtype))
    p.call("pack_conv_stored", number, packed, p.put(w), 0, groups, *shape)
    y, where, rows = p.out(name, s.shape), p.put(x), s.shape[0] * s.shape[1] * s.shape[2]
    places = [None if v is None else p.put(v) for v in (*given, add)]
    for begin, end in ((0, rows // 2), (rows // 2, rows)):
        p.call("conv2d_stored", number, y, where, packed, begin, end, 1, *places[:3], 1, *places[3:], *shape)


def storage(p: Program) -> None:
    """Weights of every storage, each 16-bit pattern and each int8 among them."""
    for kind, dtype in (("bf16", np.uint16), ("f16", np.float16), ("i8", np.int8)):
        patterns = np.arange(256 if kind == "i8" else 65536).astype(np.uint8 if kind == "i8" else np.uint16)
        w = patterns.view(dtype).reshape(-1, 1)
        stored_gemm(p, f"stored-{kind}-every-value", kind, w, 1, "random")
        for m, n, k in ((1, 100, 513), (1, 16, 128), (2, 17, 129), (7, 50, 300), (13, 37, 19), (25, 33, 64)):
            for case in KINDS:
                w = stored(kind, case, n, k, seed=2)
                stored_gemm(p, f"stored-{kind}-{m}x{n}x{k}-{case}", kind, w, m, case)
        for act in range(5):
            w = stored(kind, "random", 35, 260, seed=2)
            for m in (1, 8):
                stored_gemm(
                    p,
                    f"stored-{kind}-act{act}-{m}",
                    kind,
                    w,
                    m,
                    "special",
                    act=act,
                    parts="weight_scale bias",
                )
        stored_conv(p, f"stored-{kind}-conv", kind, (2, 5, 6, 9), 20, 3)
        stored_conv(p, f"stored-{kind}-conv-groups", kind, (1, 6, 5, 12), 18, 3, groups=3)
        stored_conv(p, f"stored-{kind}-conv-1x1", kind, (1, 5, 5, 33), 40, 1, parts="weight_scale")
        stored_conv(p, f"stored-{kind}-conv-depthwise", kind, (1, 7, 6, 37), 37, 3, groups=37)


__all__ = ["residuals", "storage"]
