"""The text form of a graph: one statement a line, and a parser that gives back the same graph.

    graph "net"
    input %x: f32[2,3]
    weight %w: f32[5,3]
    const %one: f32[1] = [1.0]
    recipe %s: f32[5] = batch_norm_scale(%gamma, %var) {eps = 1e-05}
    %y: f32[2,5] = linear(%x, %w)
    %z: f32[2,5] = unary(%y) {fn = "relu"} @mlu290
    output %z

``#`` begins a comment. A float has a point, an exponent, or is ``inf``; strings are JSON's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from lf_hal.lir._lexer import Line, lines_of, quoted
from lf_hal.lir.errors import LirSyntaxError
from lf_hal.lir.graph import Attr, Attrs, Constant, Graph, Number, Op, Recipe, TensorType, Value

__all__ = ["parse", "to_text"]

T = TypeVar("T")


def to_text(graph: Graph) -> str:
    """``graph`` as text; :func:`parse` gives it back."""
    lines = [f"graph {quoted(graph.name)}"]
    lines += [f"input {_value(v)}" for v in graph.inputs]
    lines += [f"weight {_value(v)}" for v in graph.weights]
    lines += [f"const {_value(c.value)} = [{', '.join(map(_attr, c.data))}]" for c in graph.constants]
    lines += [f"recipe {_applied(r)}" for r in graph.recipes]
    lines += [_applied(o) + (f" @{o.hardware_affinity}" if o.hardware_affinity else "") for o in graph.ops]
    if graph.outputs:
        lines.append(f"output {', '.join(f'%{name}' for name in graph.outputs)}")
    return "\n".join(lines) + "\n"


def _value(v: Value) -> str:
    return f"%{v.name}: {v.type}"


def _applied(op: Op | Recipe) -> str:
    attrs = ", ".join(f"{name} = {_attr(value)}" for name, value in op.attrs)
    inputs = ", ".join(f"%{name}" for name in op.inputs)
    return f"{_value(op.output)} = {op.kind}({inputs})" + (f" {{{attrs}}}" if attrs else "")


def _attr(value: Attr) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return repr(value)


@dataclass
class _Parts:
    inputs: list[Value] = field(default_factory=list)
    weights: list[Value] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    recipes: list[Recipe] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


def parse(text: str) -> Graph:
    """The graph that ``text`` says; whether it is a sound one is for :func:`~lf_hal.lir.verify` to say.

    Raises:
        LirSyntaxError: it is no graph; the error has line and column.
    """
    lines = lines_of(text)
    if not lines:
        raise LirSyntaxError(1, 1, 'the text is empty; it begins with: graph "name"')
    first, parts = lines[0], _Parts()
    first.word("graph")
    name = first.string()
    first.end()
    for line in lines[1:]:
        if parts.outputs:
            line.fail("a statement after output, which is the last one")
        _STATEMENTS.get(line.peek(), _op)(line, parts)
        line.end()
    return Graph(
        name,
        tuple(parts.inputs),
        tuple(parts.weights),
        tuple(parts.constants),
        tuple(parts.ops),
        tuple(parts.outputs),
        tuple(parts.recipes),
    )


def _input(line: Line, parts: _Parts) -> None:
    line.word("input")
    parts.inputs.append(_read_value(line))


def _weight(line: Line, parts: _Parts) -> None:
    line.word("weight")
    parts.weights.append(_read_value(line))


def _const(line: Line, parts: _Parts) -> None:
    line.word("const")
    value = _read_value(line)
    line.sign("=")
    parts.constants.append(Constant(value, tuple(_list(line, "[", "]", _number))))


def _recipe(line: Line, parts: _Parts) -> None:
    line.word("recipe")
    output, kind, inputs, attrs = _read_applied(line)
    parts.recipes.append(Recipe(kind, inputs, output, attrs))


def _output(line: Line, parts: _Parts) -> None:
    line.word("output")
    parts.outputs.append(line.reference())
    while line.peek() == ",":
        line.sign(",")
        parts.outputs.append(line.reference())


def _op(line: Line, parts: _Parts) -> None:
    output, kind, inputs, attrs = _read_applied(line)
    affinity = None
    if line.peek() == "@":
        line.sign("@")
        affinity = line.name()
    parts.ops.append(Op(kind, inputs, output, attrs, affinity))


_STATEMENTS: dict[str, Callable[[Line, _Parts], None]] = {
    "input": _input,
    "weight": _weight,
    "const": _const,
    "recipe": _recipe,
    "output": _output,
}


def _read_value(line: Line) -> Value:
    name = line.reference()
    line.sign(":")
    dtype = line.name()
    return Value(name, TensorType(dtype, tuple(_list(line, "[", "]", _size))))


def _read_applied(line: Line) -> tuple[Value, str, tuple[str, ...], Attrs]:
    output = _read_value(line)
    line.sign("=")
    kind = line.name()
    inputs = tuple(_list(line, "(", ")", Line.reference))
    attrs = tuple(_list(line, "{", "}", _named)) if line.peek() == "{" else ()
    return output, kind, inputs, attrs


def _list(line: Line, opening: str, closing: str, item: Callable[[Line], T]) -> list[T]:
    line.sign(opening)
    found: list[T] = []
    while line.peek() != closing:
        if found:
            line.sign(",")
        found.append(item(line))
    line.sign(closing)
    return found


def _named(line: Line) -> tuple[str, Attr]:
    name = line.name()
    line.sign("=")
    if line.peek() == "[":
        return name, tuple(_list(line, "[", "]", Line.integer))
    return name, line.string() if line.is_string() else _number(line)


def _number(line: Line) -> Number:
    return line.number()


def _size(line: Line) -> int:
    size = line.integer()
    if size < 0:
        line.fail("a size is negative")
    return size
