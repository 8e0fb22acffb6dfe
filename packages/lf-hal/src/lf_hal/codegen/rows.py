"""Lowering of what works on rows and images: softmax, norms, reductions, embedding, rope, pooling."""

from __future__ import annotations

from math import prod

from lf_hal.codegen.lowering import C_TYPES, Lowering, literal
from lf_hal.codegen.view import NHWC, View
from lf_hal.lir.graph import DTYPES, Op

__all__ = ["cumsum", "embedding", "normalise", "pool2d", "reduce", "rope", "upsample"]

_REDUCE = {"sum": "LF_REDUCE_SUM", "mean": "LF_REDUCE_MEAN", "max": "LF_REDUCE_MAX"}


def _grain(width: int) -> int:
    return max(1, 4096 // max(width, 1))


def normalise(low: Lowering, op: Op) -> None:
    """softmax, layer_norm, rms_norm: over the last axis, rows in whatever order they lie."""
    x, *vectors = low.inputs_of(op)
    low.only_f32(x, *vectors)
    source, order = low.rows(x)
    y = low.result(op, order)
    n = x.shape[-1]
    vectors = [low.materialise(v) for v in vectors]
    names = [low.read(v) for v in vectors]
    places = f"{low.at(y)}, {low.read(source)}"
    if op.kind == "softmax":
        call = f"lf_softmax_f32({places}, {n}, begin, end);"
    elif op.kind == "rms_norm":
        call = f"lf_rms_norm_f32({places}, {(names or ['0'])[0]}, {n}, {literal(op.get_float('eps'))}, begin, end);"
    else:
        weight, bias = (*names, "0", "0")[:2]
        call = (
            f"lf_layer_norm_f32({places}, {weight}, {bias}, {n}, {literal(op.get_float('eps'))}, begin, end);"
        )
    low.step(call, prod(x.shape[:-1]), [source, *vectors], y, grain=_grain(n))


def reduce(low: Lowering, op: Op) -> None:
    (x,) = low.inputs_of(op)
    axes, fn = op.get_ints("axes"), op.get_str("fn")
    kept = tuple(a for a in range(len(x.shape)) if a not in axes)
    source = low.materialise(x, (*kept, *axes))
    y = low.result(op)
    n, rows = prod(x.shape[a] for a in axes), prod(x.shape[a] for a in kept)
    if x.dtype == "f32":
        call = f"lf_reduce_f32({_REDUCE[fn]}, {low.at(y)}, {low.read(source)}, {n}, begin, end);"
    else:
        kind = C_TYPES[x.dtype]
        unsigned = "uint8_t" if x.dtype == "bool" else f"u{kind}"
        fold = {
            "sum": f"s = ({kind})(({unsigned})s + ({unsigned})v)",
            "any": "s = s | v",
            "max": "s = v > s ? v : s",
        }
        call = (
            f"for (int64_t r = begin; r < end; r++) {{\n  const {kind} *p = {low.read(source)} + r * {n};\n"
            f"  {kind} s = {'p[0]' if fn == 'max' else '0'};\n"
            f"  for (int64_t j = 0; j < {n}; j++) {{ {kind} v = p[j]; {fold[fn]}; }}\n  {low.at(y)}[r] = s;\n}}"
        )
    low.step(call, rows, [source], y, grain=_grain(n))


def cumsum(low: Lowering, op: Op) -> None:
    """Along one axis, ascending, one addition for each element."""
    (x,) = low.inputs_of(op)
    if x.dtype not in ("f32", "i32", "i64"):
        low.refuse(f"it is not compiled for {x.dtype}")
    axis = op.get_int("axis")
    order = (*(a for a in range(len(x.shape)) if a != axis), axis)
    source = low.materialise(x, order)
    y = low.result(op, order)
    n, kind = x.shape[axis], C_TYPES[x.dtype]
    wide = kind if kind == "float" else f"u{kind}"
    text = (
        f"for (int64_t r = begin; r < end; r++) {{\n  {wide} s = 0;\n"
        f"  for (int64_t j = r * {n}; j < (r + 1) * {n}; j++) {{\n"
        f"    s = s + ({wide}){low.read(source)}[j];\n    {low.at(y)}[j] = ({kind})s;\n  }}\n}}"
    )
    low.step(text, prod(x.shape) // max(n, 1), [source], y, grain=_grain(n))


def embedding(low: Lowering, op: Op) -> None:
    table, index = low.inputs_of(op)
    table, index = low.materialise(table), low.materialise(index)
    if index.dtype == "i32":
        wide = low.temporary("i64", index.shape)
        text = f"for (int64_t i = begin; i < end; i++) {low.at(wide)}[i] = {low.read(index)}[i];"
        low.step(text, prod(index.shape), [index], wide, grain=8192)
        index = wide
    y = low.result(op)
    rows, dim = table.shape[0], prod(table.shape[1:])
    if table.dtype == "f32":
        places = ", ".join((low.at(y), low.read(table), low.read(index)))
        text = (
            f"int64_t bad = lf_embedding_f32({places}, {rows}, {dim}, begin, end);\n"
            "if (bad >= 0) lf_report(x, \x03, bad);"
        )
    else:
        text = (
            f"for (int64_t i = begin; i < end; i++) {{\n  int64_t k = {low.read(index)}[i];\n"
            f"  if (k < 0 || k >= {rows}) {{ lf_report(x, \x03, i); continue; }}\n"
            f"  memcpy({low.at(y)} + i * {dim}, {low.read(table)} + k * {dim}, {dim * DTYPES[table.dtype]});\n}}"
        )
    low.step(text, prod(index.shape), [table, index], y, grain=_grain(dim))


def rope(low: Lowering, op: Op) -> None:
    x, cosine, sine = low.inputs_of(op)
    low.only_f32(x, cosine, sine)
    dim, length = x.shape[-1], x.shape[-2]
    half = dim // 2
    if prod(cosine.shape[:-2]) != 1 or (len(cosine.shape) > 1 and cosine.shape[-2] not in (1, length)):
        low.refuse("its tables differ between the batches or heads")
    tables = [_table(low, t, length) for t in (cosine, sine)]
    heads_inside = (*range(len(x.shape) - 3), len(x.shape) - 2, len(x.shape) - 3, len(x.shape) - 1)
    if len(x.shape) >= 3 and x.is_dense(heads_inside):
        order, inner = heads_inside, x.shape[-3]
    else:
        order, inner = tuple(range(len(x.shape))), 1
        x = low.materialise(x)
    y = low.result(op, order)

    def call(target: View, first: int) -> None:
        c, s = (low.materialise(t.slice(1, first, half, 1)) for t in tables)
        text = (
            f"lf_rope_f32({low.at(target)}, {low.read(x)}, {low.read(c)}, {low.read(s)}, {dim}, {inner}, {length}, 0, "
            "begin, end);"
        )
        low.step(text, prod(x.shape[:-1]), [x, c, s], target, grain=_grain(dim))

    if tables[0].shape[1] == half:
        call(y, 0)
        return
    # Tables of whole rows may differ between their halves: rotate with each, and take the half that it is for.
    call(y, 0)
    second = low.temporary("f32", y.shape, order)
    call(second, half)
    last = len(y.shape) - 1
    low.copy(second.slice(last, half, half, 1), y.slice(last, half, half, 1))


def _table(low: Lowering, table: View, length: int) -> View:
    """A table as [length, width]."""
    width = table.shape[-1]
    if len(table.shape) == 1:
        return table.broadcast((length, width))
    flat = table.reshape((table.shape[-2], width)) or low.materialise(table).reshape((table.shape[-2], width))
    if flat is None:
        low.refuse("its tables have no row view")
    return flat.broadcast((length, width))


def pool2d(low: Lowering, op: Op) -> None:
    (x,) = low.inputs_of(op)
    low.only_f32(x)
    x = low.materialise(x, NHWC)
    y = low.result(op, NHWC)
    batch, channels, in_h, in_w = x.shape
    kernel, stride, padding = (op.get_ints(n) for n in ("kernel", "stride", "padding"))
    config = (
        f"static const lf_pool2d c = {{.batch = {batch}, .in_h = {in_h}, .in_w = {in_w}, .channels = {channels}, "
        f".out_h = {y.shape[2]}, .out_w = {y.shape[3]}, .k_h = {kernel[0]}, .k_w = {kernel[1]}, "
        f".stride_h = {stride[0]}, .stride_w = {stride[1]}, .pad_top = {padding[0]}, .pad_left = {padding[1]}, "
        f".dil_h = 1, .dil_w = 1, .count_pad = {int(bool(op.attr('count_padding')))}}};\n"
    )
    fn = "LF_POOL_MAX" if op.get_str("fn") == "max" else "LF_POOL_AVG"
    call = f"lf_pool2d_f32({fn}, {low.at(y)}, {low.read(x)}, &c, begin, end);"
    low.step(config + call, batch * y.shape[2] * y.shape[3], [x], y, grain=_grain(channels * prod(kernel)))


def upsample(low: Lowering, op: Op) -> None:
    """Nearest pixels, or four pixels weighted in float32 in the order of the code below."""
    (x,) = low.inputs_of(op)
    low.only_f32(x)
    x = low.materialise(x, NHWC)
    y = low.result(op, NHWC)
    batch, channels, in_h, in_w = x.shape
    out_h, out_w = op.get_ints("size")
    if op.get_str("fn") == "nearest":
        pixel = (
            f"const float *p = {low.read(x)} + ((b * {in_h} + i * {in_h} / {out_h}) * {in_w} + j * {in_w} / {out_w}) "
            f"* {channels};\nfor (int64_t c = 0; c < {channels}; c++) q[c] = p[c];"
        )
        tables = ""
    else:
        corners = bool(op.attr("align_corners"))
        tables = _bilinear("i", in_h, out_h, corners) + _bilinear("j", in_w, out_w, corners)
        pixel = (
            f"const float *p = {low.read(x)} + b * {in_h * in_w * channels};\n"
            "const float u = i_weight[i], v = j_weight[j], u0 = 1.0f - u, v0 = 1.0f - v;\n"
            f"const float *p00 = p + (i_low[i] * {in_w} + j_low[j]) * {channels};\n"
            f"const float *p01 = p + (i_low[i] * {in_w} + j_high[j]) * {channels};\n"
            f"const float *p10 = p + (i_high[i] * {in_w} + j_low[j]) * {channels};\n"
            f"const float *p11 = p + (i_high[i] * {in_w} + j_high[j]) * {channels};\n"
            f"for (int64_t c = 0; c < {channels}; c++)\n"
            "  q[c] = u0 * (v0 * p00[c] + v * p01[c]) + u * (v0 * p10[c] + v * p11[c]);"
        )
    text = (
        f"{tables}for (int64_t t = begin; t < end; t++) {{\n"
        f"const int64_t b = t / {out_h * out_w}, i = t / {out_w} % {out_h}, j = t % {out_w};\n"
        f"float *q = {low.at(y)} + t * {channels};\n{pixel}\n}}"
    )
    low.step(text, batch * out_h * out_w, [x], y, grain=_grain(channels))


def _bilinear(name: str, size: int, out: int, corners: bool) -> str:
    low, high, weight = [], [], []
    for i in range(out):
        if corners:
            at = i * (size - 1) / (out - 1) if out > 1 else 0.0
        else:
            at = max((i + 0.5) * size / out - 0.5, 0.0)
        first = min(int(at), size - 1)
        low.append(first)
        high.append(min(first + 1, size - 1))
        weight.append(at - first)
    numbers = (", ".join(map(str, low)), ", ".join(map(str, high)), ", ".join(map(literal, weight)))
    return (
        f"static const int64_t {name}_low[] = {{{numbers[0]}}}, {name}_high[] = {{{numbers[1]}}};\n"
        f"static const float {name}_weight[] = {{{numbers[2]}}};\n"
    )
