"""Recurrent layers, unrolled: one cell a step, layer and direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lf_hal.lir._lower import Call, Lowered, lower
from lf_hal.lir.graph import Value


def _cell(c: Call, x: Value, state: Sequence[Value], weights: Sequence[Value]) -> list[Value]:
    both = c.emit("lstm_cell", x, *state, *weights)
    return [c.reshape(c.slice(both, 0, i, i + 1), state[0].type.shape) for i in (0, 1)]


@lower("lstm_cell.default")
def _lstm_cell(c: Call) -> Lowered:
    weights = [c.value("w_ih"), c.value("w_hh"), *c.optional("b_ih", "b_hh")]
    return _cell(c, c.value("input"), c.args["hx"], weights)


MOST_STEPS = 1024


def _gru(c: Call, x: Value, h: Value, weights: Sequence[Value]) -> Value:
    """Gates in torch's order (reset, update, new); the reset gate acts on the product, not on h."""
    w_ih, w_hh, *bias = weights
    width = h.type.shape[1]
    given, kept = (
        c.emit("linear", t, w, *bias[i : i + 1]) for i, (t, w) in enumerate(((x, w_ih), (h, w_hh)))
    )
    (r, z, n), (hr, hz, hn) = (
        [c.slice(t, 1, i * width, (i + 1) * width) for i in range(3)] for t in (given, kept)
    )
    reset, update = (
        c.emit("unary", c.emit("binary", a, b, fn="add"), fn="sigmoid") for a, b in ((r, hr), (z, hz))
    )
    held = c.emit("binary", reset, hn, fn="mul")
    new = c.emit("unary", c.emit("binary", n, held, fn="add"), fn="tanh")
    change = c.emit("binary", h, new, fn="sub")
    return c.emit("binary", c.emit("binary", update, change, fn="mul"), new, fn="add")


@lower("gru_cell.default")
def _gru_cell(c: Call) -> Value:
    weights = [c.value("w_ih"), c.value("w_hh"), *c.optional("b_ih", "b_hh")]
    return _gru(c, c.value("input"), c.value("hx"), weights)


@lower("lstm.input")
def _lstm(c: Call) -> Lowered:
    return _layers(c, c.args["hx"], lambda x, state, w: _cell(c, x, state, w))


@lower("gru.input")
def _gru_layers(c: Call) -> Lowered:
    return _layers(c, [c.value("hx")], lambda x, state, w: [_gru(c, x, state[0], w)])


Step = Callable[[Value, Sequence[Value], Sequence[Value]], list[Value]]


def _layers(c: Call, initial: Sequence[Value], step: Step) -> list[Value]:
    """Outputs of the last layer, then the last state of every layer and direction."""
    x, params = c.value("input"), c.args["params"]
    c.need(not c.args["train"] or c.args["dropout"] == 0, "dropout in training: call .eval() first")
    c.need(len(x.type.shape) == 3, "an input without a batch")
    time_axis = 1 if c.args["batch_first"] else 0
    steps, directions = x.type.shape[time_axis], 2 if c.args["bidirectional"] else 1
    c.need(0 < steps <= MOST_STEPS, f"{steps} steps; 1 to {MOST_STEPS} are unrolled")
    rows = [_row(c, x, time_axis, t) for t in range(steps)]
    each = 4 if c.args["has_biases"] else 2
    c.need(len(params) == each * directions * c.args["num_layers"], "projections")
    ends: list[Sequence[Value]] = []
    for layer in range(c.args["num_layers"]):
        found = []
        for direction in range(directions):
            i = layer * directions + direction
            state: Sequence[Value] = [_row(c, s, 0, i) for s in initial]
            seen = []
            for row in rows[::-1] if direction else rows:
                state = step(row, state, params[i * each : (i + 1) * each])
                seen.append(state[0])
            found.append(seen[::-1] if direction else seen)
            ends.append(state)
        rows = [p[0] if directions == 1 else c.emit("concat", *p, axis=1) for p in zip(*found, strict=True)]
    return [
        _stacked(c, rows, time_axis),
        *(_stacked(c, [e[i] for e in ends], 0) for i in range(len(initial))),
    ]


def _row(c: Call, x: Value, axis: int, index: int) -> Value:
    shape = x.type.shape
    return c.reshape(c.slice(x, axis, index, index + 1), shape[:axis] + shape[axis + 1 :])


def _stacked(c: Call, rows: Sequence[Value], axis: int) -> Value:
    shape = rows[0].type.shape
    parts = [c.reshape(r, (*shape[:axis], 1, *shape[axis:])) for r in rows]
    return parts[0] if len(parts) == 1 else c.emit("concat", *parts, axis=axis)
