"""Cutting a graph: some of its ops as a graph of their own, with the same names."""

from __future__ import annotations

from collections.abc import Sequence

from lf_hal.lir.graph import Graph

__all__ = ["cut", "reads_of"]


def reads_of(graph: Graph, ops: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names that these ops (by results) read from outside of them, and those of theirs that are read outside."""
    own = set(ops)
    read: dict[str, None] = {}
    outside = set(graph.outputs)
    for op in graph.ops:
        if op.output.name in own:
            read.update(dict.fromkeys(n for n in op.inputs if n not in own))
        else:
            outside.update(op.inputs)
    return tuple(read), tuple(o.output.name for o in graph.ops if o.output.name in own & outside)


def cut(graph: Graph, ops: Sequence[str]) -> Graph:
    """The ops whose results these are, in the graph's order, as a graph.

    Values that other ops make and inputs of the whole are its inputs. Weights, constants and what recipes derive are
    its weights, so it has neither constants nor recipes. Its outputs are what is read outside, or the last result.
    """
    read, makes = reads_of(graph, ops)
    values = {v.name: v for v in graph.values()}
    flowing = {*(v.name for v in graph.inputs), *(o.output.name for o in graph.ops)}
    own = set(ops)
    chosen = tuple(o for o in graph.ops if o.output.name in own)
    return Graph(
        f"{graph.name}.{ops[0]}",
        tuple(values[n] for n in read if n in flowing),
        tuple(values[n] for n in read if n not in flowing),
        (),
        chosen,
        makes or (chosen[-1].output.name,),
    )
