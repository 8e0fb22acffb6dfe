"""From a verified graph to a program: steps in order, buffers with their sizes and lives. A pure function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lf_hal.codegen import elements, products, rows
from lf_hal.codegen.arena import Arena, Lifetime, aligned, padded, plan_arena
from lf_hal.codegen.lowering import Lowering, Step
from lf_hal.codegen.view import dense
from lf_hal.errors import UnsupportedOpError
from lf_hal.lir.graph import Graph, Op, Value

__all__ = ["LOWERINGS", "Program", "lower"]

LOWERINGS: Mapping[str, Callable[[Lowering, Op], None]] = {
    "affine_channel": elements.affine_channel,
    "attention": products.attention,
    "binary": elements.binary,
    "broadcast": elements.move,
    "cast": elements.cast,
    "compare": elements.compare,
    "concat": elements.concat,
    "conv2d": products.conv2d,
    "conv_affine_act": products.conv2d,
    "conv_add_act": products.conv2d,
    "conv_i8": products.conv2d,
    "copy_to": elements.alias,
    "cumsum": rows.cumsum,
    "embedding": rows.embedding,
    "fill": elements.fill,
    "gather": elements.gather,
    "iota": elements.iota,
    "layer_norm": rows.normalise,
    "linear": products.linear,
    "linear_act": products.linear,
    "linear_i8": products.linear,
    "lstm_cell": products.lstm_cell,
    "matmul": products.matmul,
    "multiply_add": elements.multiply_add,
    "permute": elements.move,
    "pool2d": rows.pool2d,
    "reduce": rows.reduce,
    "reshape": elements.move,
    "rms_norm": rows.normalise,
    "rope": rows.rope,
    "scatter": elements.scatter,
    "slice": elements.move,
    "softmax": rows.normalise,
    "unary": elements.unary,
    "upsample": rows.upsample,
    "where": elements.where,
}
"""Every op kind with a C form; ``batch_norm`` has none, as the pass that folds it runs first."""


@dataclass(frozen=True)
class Program:
    """``placed`` says where each buffer lies: a C pointer expression of type ``uint8_t *``."""

    graph: Graph
    steps: tuple[Step, ...]
    packing: tuple[Step, ...]
    placed: Mapping[str, str]
    arena: Arena
    packed_bytes: int
    weight_bytes: int


def lower(
    graph: Graph, weight_offsets: Mapping[str, int], weight_bytes: int, *, padding: bool = True
) -> Program:
    """Steps of ``graph``; ``weight_offsets`` says where weights and constants lie in the payload of their file.

    ``padding`` puts a cache line behind buffers whose sizes would make their neighbours alias.

    Raises:
        UnsupportedOpError: an op has no C form, or not for these types.
    """
    low = Lowering(graph)
    placed: dict[str, str] = {}
    for i, value in enumerate(graph.inputs):
        _place(low, value, low.inputs)
        placed[value.name] = f"((uint8_t *)x->in[{i}])"
    stored = (*graph.weights, *(c.value for c in graph.constants), *(r.output for r in graph.recipes))
    for value in stored:
        if value.name in weight_offsets:
            _place(low, value, low.weights)
            placed[value.name] = f"((uint8_t *)x->weights + {weight_offsets[value.name]})"
    for op in graph.ops:
        low.op = op
        if op.kind not in LOWERINGS:
            raise UnsupportedOpError(op.output.name, op.kind, "this kind has no C form")
        if op.output.type.elements == 0:
            raise UnsupportedOpError(op.output.name, op.kind, "its result has no elements")
        LOWERINGS[op.kind](low, op)
    low.op = None
    outputs = _outputs(low, graph)
    placed |= {buffer: f"((uint8_t *)x->out[{i}])" for buffer, i in outputs.items()}
    arena = plan_arena(_lifetimes(low, placed), padding=padding)
    placed |= {buffer: f"(x->arena + {offset})" for buffer, offset in arena.offsets.items()}
    end = 0
    for key, nbytes in low.packed.items():
        placed[key] = f"(x->packed + {end})"
        end += padded(nbytes) if padding else aligned(nbytes)
    steps = tuple(replace(s, text=s.text.replace("\x03", str(i))) for i, s in enumerate(low.steps))
    return Program(graph, steps, tuple(low.packing), placed, arena, end, weight_bytes)


def _place(low: Lowering, value: Value, kind: set[str]) -> None:
    low.views[value.name] = dense(value.name, value.type.dtype, value.type.shape)
    low.sizes[value.name] = 0
    kind.add(value.name)


def _outputs(low: Lowering, graph: Graph) -> dict[str, int]:
    """Buffer -> number of the output that it is; the others are copied in a last step."""
    written = {s.writes for s in low.steps}
    types = graph.types()
    found: dict[str, int] = {}
    for i, name in enumerate(graph.outputs):
        view, whole = low.views[name], range(len(types[name].shape))
        if (
            view.is_dense(whole)
            and view.offset == 0
            and low.sizes.get(view.buffer) == types[name].nbytes
            and view.buffer in written
            and view.buffer not in found
        ):
            found[view.buffer] = i
            continue
        target = dense(low.buffer(f"output {i}", types[name].nbytes), view.dtype, types[name].shape)
        low.copy(view, target)
        found[target.buffer] = i
    return found


def _lifetimes(low: Lowering, placed: Mapping[str, str]) -> list[Lifetime]:
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, step in enumerate(low.steps):
        for buffer in (step.writes, *step.reads):
            if buffer not in placed and buffer not in low.packed:
                first.setdefault(buffer, i)
                last[buffer] = i
    return [Lifetime(b, low.sizes[b], first[b], last[b]) for b in first]
