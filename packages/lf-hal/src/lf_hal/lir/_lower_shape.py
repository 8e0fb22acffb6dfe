"""Operators that move, join, pick or make elements."""

from __future__ import annotations

from math import prod

from lf_hal.lir._lower import Call, Rule, lower
from lf_hal.lir.graph import INTEGERS, Value


@lower(
    "clone.default", "contiguous.default", "detach.default", "detach_.default", "alias.default",
    "lift_fresh_copy.default", "lift_fresh.default", "positive.default",
)  # fmt: skip
def _same(c: Call) -> Value:
    return c.value()


@lower("dropout.default", "dropout_.default", "feature_dropout.default", "alpha_dropout.default")
def _dropout(c: Call) -> Value:
    c.need(not c.get("train", False) or c.get("p") == 0, "dropout in training: call .eval() first")
    return c.args["input"] if "input" in c.args else c.value()


@lower(
    "to.dtype", "to.dtype_layout", "to.device", "to.other", "_to_copy.default", "type_as.default", "float.default"
)  # fmt: skip
def _to(c: Call) -> Value:
    device = c.get("device")
    c.need(device is None or str(device) == "cpu", f"a copy to {device}")
    return c.cast(c.value(), c.dtype)


@lower(
    "view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "unflatten.int",
    "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "view_as.default",
)  # fmt: skip
def _reshape(c: Call) -> Value:
    return c.reshape(c.value(), c.shape)


@lower("transpose.int", "t.default", "swapaxes.default", "numpy_T.default")
def _transpose(c: Call) -> Value:
    x = c.value()
    rank = len(x.type.shape)
    perm = list(range(rank))
    if "dim0" in c.args or "axis0" in c.args:
        a, b = (c.axis(x, c.args[f"dim{i}"] if "dim0" in c.args else c.args[f"axis{i}"]) for i in (0, 1))
        perm[a], perm[b] = b, a
    else:
        perm.reverse()
    return c.permute(x, perm)


@lower("mT.default", "adjoint.default")
def _matrix_transpose(c: Call) -> Value:
    *lead, rows, columns = range(len(c.value().type.shape))
    return c.permute(c.value(), [*lead, columns, rows])


@lower("permute.default")
def _permute(c: Call) -> Value:
    x = c.value()
    return c.permute(x, [c.axis(x, d) for d in c.args["dims"]])


@lower("movedim.int", "movedim.intlist")
def _movedim(c: Call) -> Value:
    x = c.value()
    source, target = (
        [c.axis(x, d) for d in ([g] if isinstance(g, int) else g)]
        for g in (c.args["source"], c.args["destination"])
    )
    rest = iter(i for i in range(len(x.type.shape)) if i not in source)
    goes = dict(zip(target, source, strict=True))
    return c.permute(x, [goes[i] if i in goes else next(rest) for i in range(len(x.type.shape))])


@lower("expand.default", "expand_as.default", "broadcast_to.default")
def _expand(c: Call) -> Value:
    return c.broadcast(c.value(), c.shape)


@lower("repeat.default")
def _repeat(c: Call) -> Value:
    x, times = c.value(), c.args["repeats"]
    shape = (1,) * (len(times) - len(x.type.shape)) + x.type.shape
    apart = [n for size in shape for n in (1, size)]
    wide = [n for t, size in zip(times, shape, strict=True) for n in (t, size)]
    return c.reshape(c.broadcast(c.reshape(x, apart), wide), c.shape)


@lower("repeat_interleave.self_int")
def _repeat_interleave(c: Call) -> Value:
    x, times = c.value(), c.args["repeats"]
    c.need(c.get("dim") is not None, "without dim")
    axis, shape = c.axis(x, c.args["dim"]), x.type.shape
    x = c.reshape(x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    return c.reshape(c.broadcast(x, (*shape[: axis + 1], times, *shape[axis + 1 :])), c.shape)


@lower("pixel_shuffle.default")
def _pixel_shuffle(c: Call) -> Value:
    x, n = c.value(), c.args["upscale_factor"]
    *lead, channels, height, width = x.type.shape
    x = c.reshape(x, (*lead, channels // n**2, n, n, height, width))
    k = len(lead)
    return c.reshape(c.permute(x, [*range(k + 1), k + 3, k + 1, k + 4, k + 2]), c.shape)


@lower("pixel_unshuffle.default")
def _pixel_unshuffle(c: Call) -> Value:
    x, n = c.value(), c.args["downscale_factor"]
    *lead, channels, height, width = x.type.shape
    x = c.reshape(x, (*lead, channels, height // n, n, width // n, n))
    k = len(lead)
    return c.reshape(c.permute(x, [*range(k + 1), k + 2, k + 4, k + 1, k + 3]), c.shape)


@lower("cat.default", "concat.default")
def _cat(c: Call) -> Value:
    parts = [
        p for p in c.args["tensors"] if p.type.shape != (0,)
    ]  # torch skips these, whatever the others' rank
    c.need(bool(parts), "of nothing")
    parts = [c.cast(p, c.dtype) for p in parts]
    return parts[0] if len(parts) == 1 else c.emit("concat", *parts, axis=c.axis(parts[0], c.args["dim"]))


@lower("stack.default")
def _stack(c: Call) -> Value:
    parts = c.args["tensors"]
    axis = c.axis(parts[0], c.args["dim"], 1)
    shape = parts[0].type.shape
    parts = [c.reshape(c.cast(p, c.dtype), (*shape[:axis], 1, *shape[axis:])) for p in parts]
    return parts[0] if len(parts) == 1 else c.emit("concat", *parts, axis=axis)


def _cut(c: Call, x: Value, axis: int, sizes: list[int]) -> list[Value]:
    start, parts = 0, []
    for size in sizes:
        parts.append(c.slice(x, axis, start, start + size))
        start += size
    return parts


@lower("chunk.default", "split.Tensor", "split.sizes", "split_with_sizes.default", "tensor_split.sections")
def _split(c: Call) -> list[Value]:
    x = c.value()
    axis = c.axis(x, c.args["dim"])
    sizes = [int(part.shape[axis]) for part in c.out]  # type: ignore[attr-defined]
    return _cut(c, x, axis, sizes)


@lower("unbind.int")
def _unbind(c: Call) -> list[Value]:
    x = c.value()
    axis = c.axis(x, c.args["dim"])
    shape = x.type.shape
    return [c.reshape(p, shape[:axis] + shape[axis + 1 :]) for p in _cut(c, x, axis, [1] * shape[axis])]


@lower("select.int")
def _select(c: Call) -> Value:
    x = c.value()
    axis, index = c.axis(x, c.args["dim"]), c.args["index"]
    c.need(isinstance(index, int), "an index that is a tensor")
    index += x.type.shape[axis] if index < 0 else 0
    return c.reshape(c.slice(x, axis, index, index + 1), c.shape)


@lower("slice.Tensor", "narrow.default")
def _slice(c: Call) -> Value:
    x = c.value()
    axis, start, step = c.axis(x, c.args["dim"]), c.get("start", 0), c.get("step", 1)
    size = x.type.shape[axis]
    end = start + c.args["length"] if "length" in c.args else c.get("end", size)
    start, end = (min(max(i + size if i < 0 else i, 0), size) for i in (start, end))
    return c.slice(x, axis, start, max(start, end), step)


@lower("pad.default", "constant_pad_nd.default")
def _pad(c: Call) -> Value:
    c.need(c.get("mode", "constant") == "constant", f"mode {c.get('mode')}")
    x, pad = c.value(), list(c.args["pad"])
    for i in range(0, len(pad), 2):
        axis = len(x.type.shape) - 1 - i // 2
        size = x.type.shape[axis]
        before, after = pad[i : i + 2]
        x = c.slice(x, axis, max(-before, 0), size + min(after, 0))
        shape = x.type.shape
        edges = [
            c.fill(x.type.dtype, (*shape[:axis], max(n, 0), *shape[axis + 1 :]), c.get("value", 0))
            for n in (before, after)
        ]
        parts = [p for p in (edges[0], x, edges[1]) if p.type.shape[axis]]
        x = parts[0] if len(parts) == 1 else c.emit("concat", *parts, axis=axis)
    return x


def _counted(c: Call, index: Value, rows: int) -> Value:
    """``index`` with negative entries counted from the end, as torch's indexing has it."""
    c.need(index.type.dtype in INTEGERS[1:], f"an index of {index.type.dtype}")
    negative = c.emit("compare", index, fn="lt", scalar=0)
    return c.emit("where", negative, c.emit("binary", index, fn="add", scalar=rows), index)


@lower("index.Tensor")
def _index(c: Call) -> Value:
    """x[i, j, ...] by integer tensors on neighbouring axes: rows of x with those axes as one, in front."""
    x, indices = c.value(), c.args["indices"]
    axes = [i for i, index in enumerate(indices) if index is not None]
    c.need(
        bool(axes) and axes == list(range(axes[0], axes[-1] + 1)), "indices on axes that are no neighbours"
    )
    first, sizes = axes[0], x.type.shape[axes[0] : axes[-1] + 1]
    rest = [i for i in range(len(x.type.shape)) if i not in axes]
    row = _counted(c, indices[first], sizes[0])
    for axis, size in zip(axes[1:], sizes[1:], strict=True):
        row = c.emit("binary", row, fn="mul", scalar=size)
        row = c.emit("binary", row, _counted(c, indices[axis], size), fn="add")
    x = c.permute(x, [*axes, *rest])
    table = c.reshape(x, (prod(sizes), *x.type.shape[len(axes) :]))
    found = c.emit("embedding", table, row)
    lead = len(row.type.shape)
    return c.permute(
        found, [*range(lead, lead + first), *range(lead), *range(lead + first, len(found.type.shape))]
    )


@lower("index_select.default")
def _index_select(c: Call) -> Value:
    c.need(c.axis(c.value(), c.args["dim"]) == 0, "on another axis than the first")
    return c.emit("embedding", c.value(), c.value("index"))


@lower("embedding.default")
def _embedding(c: Call) -> Value:
    return c.emit("embedding", c.value("weight"), c.value("indices"))


@lower("gather.default")
def _gather(c: Call) -> Value:
    return c.emit("gather", c.value(), c.value("index"), axis=c.axis(c.value(), c.args["dim"]))


@lower("scatter.src")
def _scatter(c: Call) -> Value:
    x, index, source = c.value(), c.value("index"), c.value("src")
    for axis, size in enumerate(index.type.shape):
        source = c.slice(source, axis, 0, size)
    return c.emit("scatter", x, index, source, axis=c.axis(x, c.args["dim"]))


@lower("arange.default", "arange.start", "arange.start_step")
def _arange(c: Call) -> Value:
    start, step, (length,) = c.get("start", 0), c.get("step", 1), c.shape
    whole = isinstance(start, int) and isinstance(step, int)
    kept = c.dtype if c.dtype in ("f32", "i32", "i64") else "f32"
    c.need(whole or kept == "f32", f"fractions in an arange of {c.dtype}")
    return c.cast(c.emit("iota", dtype=kept, length=length, start=start, step=step), c.dtype)


def _filled(number: int) -> Rule:
    return lambda c: c.fill(c.dtype, c.shape, number)


lower("zeros.default", "zeros_like.default", "new_zeros.default")(_filled(0))
lower("ones.default", "ones_like.default", "new_ones.default")(_filled(1))


@lower("full.default", "full_like.default", "new_full.default", "scalar_tensor.default")
def _full(c: Call) -> Value:
    given = c.args["fill_value"] if "fill_value" in c.args else c.args["s"]
    return c.fill(c.dtype, c.shape, given)


def _triangle(fn: str) -> Rule:
    def rule(c: Call) -> Value:
        x = c.value()
        rows, columns = x.type.shape[-2:]
        row = c.emit("iota", dtype="i64", length=rows, start=c.get("diagonal", 0))
        column = c.emit("iota", dtype="i64", length=columns)
        kept = c.emit("compare", c.reshape(row, (rows, 1)), column, fn=fn)
        return c.emit("where", kept, x, c.fill(x.type.dtype, (), 0))

    return rule


lower("tril.default")(_triangle("ge"))
lower("triu.default")(_triangle("le"))
