"""Lowering of the products: linear, matmul, attention, conv2d, lstm_cell."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from lf_hal.codegen.lowering import Lowering, literal
from lf_hal.codegen.view import NHWC, View, dense
from lf_hal.lir.graph import Op

__all__ = ["attention", "conv2d", "linear", "lstm_cell", "matmul"]

PANEL = 16
_ACTS = {"none": "LF_ACT_NONE", "relu": "LF_ACT_RELU", "silu": "LF_ACT_SILU", "gelu_tanh": "LF_ACT_GELU_TANH",
         "gelu": "LF_ACT_GELU_ERF"}  # fmt: skip
STORAGE = {"f32": "LF_F32", "bf16": "LF_BF16", "f16": "LF_F16", "i8": "LF_I8"}
_AFTER = {"sigmoid": "LF_SIGMOID", "tanh": "LF_TANH"}
_PANEL_GRAIN = 4
_ROW_GRAIN = 24  # a multiple of the rows of every register tile


def panels(n: int) -> int:
    return -(-n // PANEL)


def _epilogue(
    low: Lowering,
    act: str,
    bias: View | None,
    scale: View | None = None,
    shift: View | None = None,
    weight_scale: View | None = None,
    add: View | None = None,
) -> str:
    parts = {"bias": bias, "scale": scale, "shift": shift, "weight_scale": weight_scale, "add": add}
    fields = "".join(f".{name} = {low.read(view)}, " for name, view in parts.items() if view is not None)
    return f"const lf_epilogue e = {{{fields}.act = {_ACTS.get(act, 'LF_ACT_NONE')}}};\n"


def _vector(low: Lowering, view: View) -> View:
    low.only_f32(view)
    return low.materialise(view)


def _activate(low: Lowering, y: View, act: str) -> None:
    """An activation that the products do not apply themselves, in place."""
    if act in _AFTER:
        at = low.at(y)
        low.step(f"lf_unary_f32({_AFTER[act]}, {at}, {at}, begin, end);", prod(y.shape), [y], y, grain=4096)


def _only_products(low: Lowering, x: View, w: View) -> None:
    low.only_f32(x)
    if w.dtype not in STORAGE:
        low.refuse(f"weights of {w.dtype} are not multiplied; they are stored as {', '.join(STORAGE)}")


def packed_matrix(low: Lowering, b: View) -> tuple[str, View]:
    """Address of the panels of b[K, N], packed when the model is opened if b is a weight, else in a step of its own."""
    k, n = b.shape
    elements = panels(n) * k * PANEL
    source = f"{low.read(b)}, {b.strides[0]}, {b.strides[1]}, {k}, {n}, begin, end);"
    if b.buffer in low.weights:
        key = f"{b.buffer}|{b.offset}|{b.strides[0]}|{b.strides[1]}|{k}x{n}"
        packed = dense(key, b.dtype, (elements,))
        low.pack(packed, f"lf_pack_b_stored({STORAGE[b.dtype]}, {low.at(packed)}, {source}", panels(n), b)
    else:
        packed = low.temporary(b.dtype, (elements,))
        low.step(f"lf_pack_b_stored({STORAGE[b.dtype]}, {low.at(packed)}, {source}", panels(n), [b], packed)
    return low.read(packed), packed


def gemm(
    low: Lowering,
    y: View,
    ys: int,
    a: View,
    a_stride: int,
    m: int,
    b: View,
    act: str,
    bias: View | None,
    weight_scale: View | None = None,
) -> None:
    """y[m, n] = act((a @ b) * weight_scale + bias): threads share panels if there are many, else rows."""
    k, n = b.shape
    at, packed = packed_matrix(low, b)
    count = panels(n)
    by_panel = count >= 16 or count * PANEL >= m
    cut = f"0, {m}, begin, end" if by_panel else f"begin, end, 0, {count}"
    text = (
        f"{_epilogue(low, act, bias, weight_scale=weight_scale)}"
        f"lf_gemm_stored({STORAGE[b.dtype]}, {low.at(y)}, {ys}, {low.read(a)}, {a_stride}, {at}, {k}, {n}, &e, {cut});"
    )
    reads = [v for v in (a, packed, bias, weight_scale) if v is not None]
    grain = _ROW_GRAIN if not by_panel else _PANEL_GRAIN if count >= 4 * _PANEL_GRAIN else 1
    low.step(text, count if by_panel else m, reads, y, grain=grain, flops=2 * m * n * k)
    _activate(low, y, act)


def linear(low: Lowering, op: Op) -> None:
    x, w, *vectors = low.inputs_of(op)
    _only_products(low, x, w)
    a, order = low.rows(x)
    y = low.result(op, order)
    rest = [_vector(low, v) for v in vectors]
    weight_scale = rest.pop(0) if op.kind == "linear_i8" else None
    act = op.get_str("act") if op.has("act") else "none"
    k, n, m = w.shape[1], w.shape[0], prod(x.shape[:-1])
    gemm(low, y, n, a, k, m, w.permute((1, 0)), act, rest[0] if rest else None, weight_scale)


def matmul(low: Lowering, op: Op) -> None:
    a, b = low.inputs_of(op)
    low.only_f32(a, b)
    k, n = b.shape[-2:]
    if prod(b.shape[:-2]) == 1 and len(b.shape) <= len(a.shape):
        rows, order = low.rows(a)
        matrix = b.reshape((k, n)) or low.materialise(b).reshape((k, n))
        if matrix is None:
            low.refuse("its right factor has no matrix view")
        gemm(low, low.result(op, order), n, rows, k, prod(a.shape[:-1]), matrix, "none", None)
        return
    lead, m = op.output.type.shape[:-2], a.shape[-2]
    y = low.result(op)
    a = a.broadcast((*lead, m, k))
    if a.strides[-1] != 1 and k > 1:
        a = low.materialise(a)
    b = b.broadcast((*lead, k, n))
    batch, count = prod(lead), panels(n)
    packed = low.temporary("f32", (batch, count * k * PANEL))
    pick = "".join(_decode("i", lead, {"b": b.strides[:-2]}))
    # runs of panels of one matrix, as a tile is several panels wide
    each = (
        f"for (int64_t t = begin, p, q; t < end; t += q - p) {{\nint64_t i = t / {count};\np = t % {count};\n"
        f"q = end - t < {count} - p ? p + end - t : {count};\n"
    )
    text = (
        f"{each}{pick}lf_pack_b_f32({low.at(packed)} + i * {count * k * PANEL}, {low.read(b)} + b_at, "
        f"{b.strides[-2]}, {b.strides[-1]}, {k}, {n}, p, q); }}"
    )
    low.step(text, batch * count, [b], packed)
    pick = "".join(_decode("i", lead, {"a": a.strides[:-2]}))
    text = (
        f"{each}{pick}lf_gemm_f32({low.at(y)} + i * {m * n}, {n}, {low.read(a)} + a_at, {a.strides[-2]}, "
        f"{low.read(packed)} + i * {count * k * PANEL}, {k}, {n}, 0, 0, {m}, p, q); }}"
    )
    low.step(text, batch * count, [a, packed], y, flops=2 * batch * m * n * k)


def _decode(index: str, shape: Sequence[int], operands: dict[str, Sequence[int]]) -> list[str]:
    """C that turns a flat ``index`` over ``shape`` into an offset ``name_at`` of each operand."""
    lines = [f"int64_t rest = {index}; (void)rest;\n", *(f"int64_t {n}_at = 0;\n" for n in operands)]
    for axis in range(len(shape) - 1, -1, -1):
        adds = " ".join(f"{n}_at += j * {s[axis]};" for n, s in operands.items())
        lines.append(f"{{ int64_t j = rest % {shape[axis]}; rest /= {shape[axis]}; {adds} }}\n")
    return lines


def attention(low: Lowering, op: Op) -> None:
    q, k, v, *rest = low.inputs_of(op)
    low.only_f32(q, k, v)
    q, k, v = (x if x.strides[-1] == 1 or x.shape[-1] == 1 else low.materialise(x) for x in (q, k, v))
    y = low.result(op, (0, 2, 1, 3))  # heads of one position side by side, as they are joined next
    batch, heads, q_len, dim = q.shape
    groups, kv_len, v_dim = k.shape[1], k.shape[2], v.shape[3]
    mask_text, reads = "0", [q, k, v]
    mask_strides: tuple[int, ...] = (0, 0, 0)
    if rest:
        mask = _float_mask(low, rest[0]).broadcast((batch, heads, q_len, kv_len))
        if mask.strides[-1] != 1 and kv_len > 1:
            mask = low.materialise(mask)
        mask_text, mask_strides = low.read(mask), mask.strides[:3]
        reads.append(mask)

    def braces(strides: Sequence[int]) -> str:
        return "{" + ", ".join(map(str, strides[:3])) + "}"

    sizes = (
        f".batch = {batch}, .heads = {heads}, .groups = {groups}, .q_len = {q_len}, .kv_len = {kv_len}, "
        f".qk_dim = {dim}, .v_dim = {v_dim}, .causal = {int(bool(op.attr('causal')))}, "
        f".scale = {literal(op.get_float('scale'))}"
    )
    config = (
        f"const lf_attention c = {{{sizes}, .q_stride = {braces(q.strides)}, .k_stride = {braces(k.strides)}, "
        f".v_stride = {braces(v.strides)}, .y_stride = {braces(y.strides)}, "
        f".mask = {mask_text}, .mask_stride = {braces(mask_strides)}}};\n"
    )
    places = ", ".join((low.at(y), low.read(q), low.read(k), low.read(v)))
    call = f"lf_attention_f32({places}, &c, (float *)scratch, begin, end);"
    need = f"const lf_attention c = {{{sizes}}};\nneed = 4 * lf_attention_scratch_f32(&c);"
    keys = sum(min(i + 1, kv_len) for i in range(q_len)) if op.attr("causal") else q_len * kv_len
    flops = 2 * batch * heads * keys * (dim + v_dim)
    low.step(config + call, batch * groups, reads, y, scratch=need, flops=flops)


def _float_mask(low: Lowering, mask: View) -> View:
    """A mask that is added; of a bool one, -inf where it is false."""
    if mask.dtype == "f32":
        return mask
    if mask.dtype != "bool":
        low.refuse(f"its mask is of {mask.dtype}")
    plain = low.materialise(mask)
    added = low.temporary("f32", mask.shape)
    each = f"{low.at(added)}[i] = {low.read(plain)}[i] ? 0.0f : -__builtin_inff();"
    text = f"for (int64_t i = begin; i < end; i++) {each}"
    low.step(text, prod(mask.shape), [plain], added, grain=8192)
    return added


def conv2d(low: Lowering, op: Op) -> None:
    x, w, *given = low.inputs_of(op)
    _only_products(low, x, w)
    w = low.materialise(w)
    if w.buffer not in low.weights:
        low.refuse("its weights are computed in the graph; they must be weights or constants")
    x = low.materialise(x, NHWC)
    y = low.result(op, NHWC)
    act = op.get_str("act")
    add = low.materialise(given.pop(0), NHWC) if op.kind == "conv_add_act" else None
    vectors = [_vector(low, v) for v in given]
    weight_scale, rest = (vectors[0], vectors[1:]) if op.kind == "conv_i8" else (None, vectors)
    bias, scale, shift = (None, *rest) if len(rest) == 2 else (*rest, None, None, None)[:3]
    epilogue = _epilogue(low, act, bias, scale, shift, weight_scale, add)
    (out_c, group_c, kh, kw), groups = w.shape, op.get_int("groups")
    stride, padding, dilation = op.get_ints("stride"), op.get_ints("padding"), op.get_ints("dilation")
    batch, in_c, in_h, in_w = x.shape
    config = (
        f"static const lf_conv2d c = {{.batch = {batch}, .in_h = {in_h}, .in_w = {in_w}, .in_c = {in_c}, "
        f".out_h = {y.shape[2]}, .out_w = {y.shape[3]}, .out_c = {out_c}, .k_h = {kh}, .k_w = {kw}, "
        f".stride_h = {stride[0]}, .stride_w = {stride[1]}, .pad_top = {padding[0]}, .pad_left = {padding[1]}, "
        f".dil_h = {dilation[0]}, .dil_w = {dilation[1]}, .groups = {groups}}};\n"
    )
    elements = groups * panels(out_c // groups) * kh * kw * group_c * PANEL
    key = f"{w.buffer}|{w.offset}|conv|{'x'.join(map(str, w.shape))}|{groups}"
    packed = dense(key, w.dtype, (elements,))
    storage = STORAGE[w.dtype]
    text = f"{config}lf_pack_conv_stored({storage}, {low.at(packed)}, {low.read(w)}, &c, begin, end);"
    low.pack(packed, text, groups, w)
    rows = batch * y.shape[2] * y.shape[3]
    call = f"lf_conv2d_stored({storage}, {low.at(y)}, {low.read(x)}, {low.read(packed)}, &c, &e, begin, end);"
    flops = 2 * rows * out_c * kh * kw * group_c
    reads = [x, packed, *vectors, *([add] if add is not None else [])]
    low.step(config + epilogue + call, rows, reads, y, grain=_ROW_GRAIN, flops=flops)
    _activate(low, y, act)


def lstm_cell(low: Lowering, op: Op) -> None:
    x, h, c, w_ih, w_hh, *bias = low.inputs_of(op)
    low.only_f32(x, h, c, w_ih, w_hh)
    batch, hidden = h.shape
    gates = []
    for source, w, b in ((x, w_ih, bias[0] if bias else None), (h, w_hh, bias[1] if bias else None)):
        rows = low.materialise(source)
        y = low.temporary("f32", (batch, 4 * hidden))
        bias_view = _vector(low, b) if b is not None else None
        gemm(low, y, 4 * hidden, rows, source.shape[1], batch, w.permute((1, 0)), "none", bias_view)
        gates.append(y)
    old = low.materialise(c)
    y = low.result(op)
    total = batch * hidden
    text = (
        "for (int64_t i = begin; i < end; i++) {\n"
        f"  const int64_t at = i / {hidden} * {4 * hidden} + i % {hidden};\n"
        f"  const float *a = {low.read(gates[0])} + at, *b = {low.read(gates[1])} + at;\n"
        "  float g[4];\n"
        f"  for (int k = 0; k < 4; k++) g[k] = a[k * {hidden}] + b[k * {hidden}];\n"
        "  lf_unary_f32(LF_SIGMOID, g, g, 0, 2);\n"
        "  lf_unary_f32(LF_TANH, g, g, 2, 3);\n"
        "  lf_unary_f32(LF_SIGMOID, g, g, 3, 4);\n"
        f"  float c = g[1] * {low.read(old)}[i] + g[0] * g[2], t;\n"
        "  lf_unary_f32(LF_TANH, &t, &c, 0, 1);\n"
        f"  {low.at(y)}[i] = g[3] * t;\n"
        f"  {low.at(y)}[i + {total}] = c;\n"
        "}"
    )
    low.step(text, total, [*gates, old], y, grain=64)
