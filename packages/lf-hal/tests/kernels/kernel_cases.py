"""The calls that every build has to answer with the same bits, and what ORDER.md says the answers are."""

from __future__ import annotations

from itertools import product as every

import numpy as np
import order_v1 as order
from kernel_runs import BINARY, PANEL, REDUCE, UNARY, Place, Program
from kernel_values import KINDS, SPECIAL, F, dense, f32, panels, values
from stored_cases import residuals, storage


def gemm(p: Program, name: str, m: int, n: int, k: int, kind: str, *, act: int = 0, parts: str = "") -> None:
    """A linear layer; ``parts`` of ``bias`` and ``scale``. Rows and panels are cut in two as threads would."""
    a, w = values(kind, m, k, seed=1), values("random", n, k, seed=2)
    if kind == "subnormal":
        a, w = a, w * f32(1e-2)
    bias = values("random", n, seed=3) if "bias" in parts else None
    scale = values("random", n, seed=4) if "scale" in parts else None
    shift = values("random", n, seed=5) if "scale" in parts else None
    packed = p.put(np.zeros(panels(n) * k * PANEL, f32))
    p.call("pack_b", packed, p.put(w), 1, k, k, n, 0, panels(n))
    places = [None if v is None else p.put(v) for v in (bias, scale, shift)]
    y, where = p.out(name, (m, n)), p.put(a)
    for rows, columns in every(
        ((0, m // 3), (m // 3, m)), ((0, panels(n) // 2), (panels(n) // 2, panels(n)))
    ):
        has = 1 if parts or act else 0
        p.call("gemm", y, n, where, k, packed, k, n, *rows, *columns, has, *places, act)
    p.expected[name] = order.epilogue(order.product(a, w.T), bias, scale, shift, act)


def matmul(p: Program, name: str, m: int, n: int, k: int) -> None:
    """The second factor is a matrix as it stands, [K, N]."""
    a, b = values("random", m, k, seed=6), values("random", k, n, seed=7)
    packed = p.put(np.zeros(panels(n) * k * PANEL, f32))
    p.call("pack_b", packed, p.put(b), n, 1, k, n, 0, panels(n))
    p.call("gemm", p.out(name, (m, n)), n, p.put(a), k, packed, k, n, 0, m, 0, panels(n), 0)
    p.expected[name] = order.product(a, b)


def conv(
    p: Program,
    name: str,
    size: tuple[int, int, int, int],
    out_c: int,
    kernel: tuple[int, int],
    *,
    stride: tuple[int, int] = (1, 1),
    pad: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    kind: str = "random",
    act: int = 0,
    parts: str = "",
) -> None:
    """size is [B, H, W, C]."""
    x, w = values(kind, *size, seed=8), values("random", out_c, size[3] // groups, *kernel, seed=9)
    vectors = {v: values("random", out_c, seed=s) for s, v in enumerate(("bias", "scale", "shift"), 10)}
    bias = vectors["bias"] if "bias" in parts else None
    scale, shift = (vectors["scale"], vectors["shift"]) if "scale" in parts else (None, None)
    s = order.conv2d(x, w, stride, pad, dilation, groups)
    p.expected[name] = order.epilogue(s, bias, scale, shift, act)
    batch, out_h, out_w, _ = s.shape
    terms = kernel[0] * kernel[1] * size[3] // groups
    packed = p.put(np.zeros(groups * panels(out_c // groups) * terms * PANEL, f32))
    shape = [batch, *size[1:], out_h, out_w, out_c, *kernel, *stride, *pad, *dilation, groups]
    p.call("pack_conv", packed, p.put(w), 0, groups, *shape)
    y, where, rows = p.out(name, s.shape), p.put(x), batch * out_h * out_w
    places = [None if v is None else p.put(v) for v in (bias, scale, shift)]
    for begin, end in ((0, rows // 2), (rows // 2, rows)):
        has = 1 if parts or act else 0
        p.call("conv2d", y, where, packed, begin, end, has, *places, act, *shape)


def attention(
    p: Program,
    name: str,
    shape: tuple[int, int, int, int, int, int, int],
    *,
    causal: bool = False,
    q_offset: int = 0,
    lengths: list[int] | None = None,
    mask: bool = False,
    kind: str = "random",
) -> None:
    """shape: batch, heads, groups, queries, keys, width of a key, width of a value."""
    b, heads, g, t, s, d, width = shape
    q, k, v = (
        values(kind, b, heads, t, d, seed=20),
        values(kind, b, g, s, d, seed=21),
        values(kind, b, g, s, width, seed=22),
    )
    m = values("random", t, s, seed=23) if mask else None
    scale = float(f32(d**-0.5))
    scratch = panels(s) * d * PANEL + panels(width) * s * PANEL + 24 * panels(s) * PANEL
    qp = p.put(np.ascontiguousarray(q.transpose(0, 2, 1, 3)))  # [B, T, H, D]: strides are used
    strides = [t * heads * d, d, heads * d, g * s * d, s * d, d, g * s * width, s * width, width]
    y = p.out(name, (b, heads, t, width))
    length_place = None if lengths is None else p.put(np.array(lengths, np.int64))
    mask_place = None if m is None else p.put(m)
    for begin, end in ((0, b * g // 2), (b * g // 2, b * g)):
        p.call(
            "attention",
            *(
                y,
                qp,
                p.put(k),
                p.put(v),
                p.put(np.zeros(scratch, f32)),
                begin,
                end,
                b,
                heads,
                g,
                t,
                s,
                d,
                width,
            ),
            *(*strides, heads * t * width, t * width, width, length_place, mask_place, 0, 0, s),
            *(q_offset, scale, int(causal)),
        )
    p.expected[name] = order.attention(q, k, v, f32(scale), causal, q_offset, lengths, m)


def rows(p: Program, n: int, kind: str) -> None:
    """Softmax, norms and reductions of five rows of n."""
    x, w, b = values(kind, 5, n, seed=30), values("random", n, seed=31), values("random", n, seed=32)
    xp, wp, bp = p.put(x), p.put(w), p.put(b)
    tag = f"{n}-{kind}"
    p.call("softmax", p.out(f"softmax-{tag}", x.shape), xp, n, 0, 5)
    p.expected[f"softmax-{tag}"] = order.softmax(x)
    for label, weight, bias in (("wb", w, b), ("w", w, None), ("b", None, b), ("plain", None, None)):
        name = f"layer_norm-{label}-{tag}"
        where = (None if weight is None else wp, None if bias is None else bp)
        p.call("layer_norm", p.out(name, x.shape), xp, *where, n, 1e-5, 0, 5)
        p.expected[name] = order.layer_norm(x, weight, bias, f32(1e-5))
    for label, weight in (("w", w), ("plain", None)):
        name = f"rms_norm-{label}-{tag}"
        p.call("rms_norm", p.out(name, x.shape), xp, None if weight is None else wp, n, 1e-6, 0, 5)
        p.expected[name] = order.rms_norm(x, weight, f32(1e-6))
    for i, op in enumerate(REDUCE):
        name = f"reduce-{op}-{tag}"
        p.call("reduce", i, p.out(name, (5,)), xp, n, 0, 5)
        p.expected[name] = order.reduce(op, x)


def sweep() -> F:
    """Every exponent and sign, the turning points of the functions, and ordinary numbers."""
    words = np.arange(0, 2**32, 2**21 + 12345, dtype=np.uint64).astype(np.uint32)
    edges = np.array([0.625, 0.9375, 3.953125, 89, -104, -103.97, 88.72284, 131072, 1e-40, 1.5e5, 3e38], f32)
    near = np.concatenate([edges, np.nextafter(edges, f32(9e9)), np.nextafter(edges, f32(-9e9)), -edges])
    ordinary = values("random", 700, seed=40) * f32(4)
    return np.concatenate([words.view(f32), near, ordinary, SPECIAL])


def elements(p: Program) -> None:
    x = sweep()
    xp = p.put(x)
    for i, op in enumerate(UNARY):
        y = p.out(f"unary-{op}", x.shape)
        p.call("unary", i, y, xp, 0, 1001)
        p.call("unary", i, y, xp, 1001, x.size)
        p.expected[f"unary-{op}"] = order.UNARY[op](x)
    shape = (3, 5, 19)
    a = values("special", *shape, seed=41)
    for i, op in enumerate(BINARY):
        for label, b, strides in (
            ("same", values("special", *shape, seed=42), dense(shape)),
            ("column", values("random", 5, 1, seed=43), [0, 1, 0]),
            ("last", values("random", 19, seed=44), [0, 0, 1]),
            ("scalar", np.array([2.0], f32), [0, 0, 0]),
        ):
            name = f"binary-{op}-{label}"
            y = p.out(name, shape)
            p.call("binary", i, y, p.put(a), p.put(b), 3, 0, 15, 0, dense(shape), strides, list(shape))
            p.expected[name] = order.BINARY[op](a, np.broadcast_to(b, shape))
    exponents = np.array(
        [0, 1, 2, 3, -1, 0.5, -0.5, 1.7, -2, 5, 4, 1e9, np.nan, np.inf, 2.5, -3, 1.0, -0.0, 9], f32
    )
    y = p.out("binary-pow-exponents", shape)
    p.call(
        "binary",
        BINARY.index("pow"),
        y,
        p.put(a),
        p.put(exponents),
        3,
        0,
        15,
        0,
        dense(shape),
        [0, 0, 1],
        list(shape),
    )
    p.expected["binary-pow-exponents"] = order.BINARY["pow"](a, np.broadcast_to(exponents, shape))


def mixed(p: Program) -> None:
    """multiply_add, copy, rope, embedding and pooling."""
    shape = (2, 7, 21)
    for kind in KINDS:
        a, b, c = values(kind, *shape, seed=50), values(kind, 21, seed=51), values(kind, 7, 1, seed=52)
        y = p.out(f"multiply_add-{kind}", shape)
        p.call(
            "multiply_add",
            y,
            p.put(a),
            p.put(b),
            p.put(c),
            3,
            0,
            14,
            0,
            dense(shape),
            [0, 0, 1],
            [0, 1, 0],
            list(shape),
        )
        p.expected[f"multiply_add-{kind}"] = order.fma(a, b, c)
    x = values("special", 2, 7, 21, seed=53)
    y = p.out("copy-permuted", (21, 2, 7))
    p.call("copy", y, p.put(x), 3, 0, 42, 0, 0, 0, dense((21, 2, 7)), [1, 147, 21], [21, 2, 7])
    p.expected["copy-permuted"] = x.transpose(2, 0, 1)
    for interleaved in (0, 1):
        x, c, s = (
            values("special", 24, 22, seed=54),
            values("random", 4, 11, seed=55),
            values("random", 4, 11, seed=56),
        )
        y = p.out(f"rope-{interleaved}", x.shape)
        p.call("rope", y, p.put(x), p.put(c), p.put(s), 22, 3, 4, interleaved, 0, 24)
        p.expected[f"rope-{interleaved}"] = order.rope(x, c, s, 3, 4, bool(interleaved))
    table, ids = values("special", 9, 13, seed=57), np.array([8, 0, 3, 3, 7], np.int64)
    for name, which, status in (("good", ids, -1.0), ("bad", np.array([1, 2, 9, 0, 0], np.int64), 2.0)):
        y, flag = p.out(f"embedding-{name}", (5, 13)), p.out(f"embedding-status-{name}", (1,))
        p.call("embedding", flag, y, p.put(table), p.put(which), 9, 13, 0, 5)
        good = 5 if status < 0 else 2
        p.expected[f"embedding-{name}"] = np.full((5, 13), 1e30, f32)
        p.expected[f"embedding-{name}"][:good] = table[which[:good]]
        p.expected[f"embedding-status-{name}"] = np.array([status], f32)
    for op, kind, (kernel, stride, pad, count) in every(
        ("max", "avg"), ("random", "special"), ((3, 2, 1, 1), (3, 2, 1, 0), (2, 2, 0, 1), (9, 1, 0, 1))
    ):
        x = values(kind, 2, 9, 9, 19, seed=58)
        name = f"pool-{op}-{kind}-{kernel}-{count}"
        expected = order.pool2d(op, x, kernel, stride, pad, bool(count))
        size = expected.shape[1]
        y = p.out(name, expected.shape)
        dims = [2, 9, 9, 19, size, size, kernel, kernel, stride, stride, pad, pad, 1, 1, count]
        p.call("pool2d", ("max", "avg").index(op), y, p.put(x), 0, 2 * size * size, *dims)
        p.expected[name] = expected


def products(p: Program) -> None:
    for m, n, k in (
        (1, 16, 1),
        (13, 37, 19),
        (6, 16, 256),
        (7, 50, 300),
        (5, 20, 128),
        (2, 17, 129),
        (1, 100, 513),
        (25, 33, 64),
        (3, 130, 257),
    ):
        for kind in KINDS:
            gemm(p, f"linear-{m}x{n}x{k}-{kind}", m, n, k, kind)
    for act in range(5):
        gemm(p, f"linear-act{act}", 5, 35, 40, "random", act=act, parts="bias")
        gemm(p, f"linear-scale-act{act}", 8, 32, 260, "special", act=act, parts="bias scale")
    gemm(p, "linear-nothing", 4, 20, 0, "random")
    gemm(p, "linear-nothing-bias", 4, 20, 0, "random", parts="bias")
    matmul(p, "matmul", 9, 45, 70)
    matmul(p, "matmul-whole-panels", 14, 64, 30)
    for kind in KINDS:
        conv(p, f"conv-3x3-{kind}", (2, 7, 6, 5), 19, (3, 3), pad=(1, 1), kind=kind)
    conv(p, "conv-fused", (1, 8, 8, 35), 32, (3, 3), stride=(2, 2), pad=(1, 1), act=1, parts="scale")
    conv(p, "conv-1x1", (2, 5, 5, 33), 40, (1, 1), parts="bias")
    conv(p, "conv-1x1-stride", (1, 6, 6, 33), 20, (1, 1), stride=(2, 2))
    conv(p, "conv-7x7", (1, 12, 12, 3), 16, (7, 7), stride=(2, 2), pad=(3, 3), act=2)
    conv(p, "conv-dilated", (1, 9, 10, 4), 18, (3, 2), dilation=(2, 3), pad=(2, 1))
    conv(
        p, "conv-groups", (1, 6, 7, 12), 24, (3, 3), pad=(1, 2), groups=3, kind="special", parts="bias scale"
    )
    conv(p, "conv-depthwise", (1, 6, 6, 7), 7, (3, 3), pad=(1, 1), groups=7, stride=(1, 2))
    for kind in KINDS:
        extra = {"stride": (2, 1), "pad": (2, 1), "dilation": (2, 1), "act": 1, "parts": "bias scale"}
        conv(p, f"conv-depthwise-{kind}", (2, 9, 8, 37), 37, (3, 3), groups=37, kind=kind, **extra)
    conv(p, "conv-depthwise-large", (1, 13, 13, 5), 5, (12, 12), groups=5, pad=(1, 1))


def attentions(p: Program) -> None:
    for kind in KINDS:
        attention(p, f"attention-{kind}", (2, 4, 2, 9, 9, 16, 20), causal=True, kind=kind)
    attention(p, "attention-plain", (1, 2, 2, 7, 33, 24, 24))
    attention(p, "attention-decode", (2, 4, 1, 1, 40, 16, 16), causal=True, q_offset=39)
    attention(
        p, "attention-decode-long", (1, 2, 1, 2, 300, 64, 64), causal=True, q_offset=297, kind="special"
    )
    attention(p, "attention-decode-wide", (2, 1, 1, 1, 130, 20, 112), lengths=[0, 129])
    attention(p, "attention-lengths", (3, 2, 1, 5, 20, 8, 8), lengths=[20, 0, 7])
    attention(p, "attention-mask", (1, 2, 2, 30, 30, 12, 17), causal=True, mask=True)
    attention(p, "attention-long", (1, 1, 1, 3, 600, 8, 16), causal=True, q_offset=510)


def all_cases() -> Program:
    """One program with every case."""
    p = Program()
    with np.errstate(all="ignore"):
        products(p)
        attentions(p)
        storage(p)
        residuals(p)
        for n in (1, 7, 16, 33, 200):
            for kind in KINDS:
                rows(p, n, kind)
        elements(p)
        mixed(p)
    return p


def differences(a: dict[str, F], b: dict[str, F]) -> dict[str, int]:
    """Results that differ, with the number of elements, after every NaN is made the same."""
    counts = {name: int((order.canonical(a[name]) != order.canonical(b[name])).sum()) for name in a}
    return {name: n for name, n in counts.items() if n}


__all__ = ["KINDS", "Place", "all_cases", "differences", "sweep", "values"]
