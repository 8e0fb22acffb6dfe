"""What passes share: taking ops out, putting others in, all on values of the same names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from lf_hal.lir.graph import Constant, Graph, Op, Recipe, Value

__all__ = ["Editor", "agree", "remove_dead"]


def remove_dead(graph: Graph) -> Graph:
    """``graph`` without ops, constants, recipes and weights that no output needs; inputs stay."""
    needed = set(graph.outputs)
    ops: list[Op] = []
    for op in reversed(graph.ops):
        if op.output.name in needed:
            needed.update(op.inputs)
            ops.append(op)
    recipes: list[Recipe] = []
    for recipe in reversed(graph.recipes):
        if recipe.output.name in needed:
            needed.update(recipe.inputs)
            recipes.append(recipe)
    return replace(
        graph,
        weights=tuple(w for w in graph.weights if w.name in needed),
        constants=tuple(c for c in graph.constants if c.value.name in needed),
        recipes=tuple(reversed(recipes)),
        ops=tuple(reversed(ops)),
    )


def agree(a: Op, b: Op) -> bool:
    """Whether two ops may become one: no two different hints on where they should run."""
    return None in (a.hardware_affinity, b.hardware_affinity) or a.hardware_affinity == b.hardware_affinity


class Editor:
    """A graph being rewritten: who makes a value, how often it is read, and ops put in the place of others.

    A pass asks about the graph as it was, and :meth:`done` gives the new one. Ops that nothing needs any more are
    gone from it.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph = remove_dead(graph)  # what a dead op reads is not in use
        self.values = {v.name: v for v in graph.values()}
        self._producers = graph.producers()
        self._uses = graph.uses()
        self._inputs = {v.name for v in graph.inputs}
        self._instead: dict[str, tuple[Op, ...]] = {}
        self._renamed: dict[str, str] = {}
        self._recipes: list[Recipe] = []
        self._constants: list[Constant] = []

    def producer(self, name: str, kind: str | None = None, fn: str | None = None) -> Op | None:
        """The op that makes a value, if it is of this kind and has this ``fn``."""
        op = self._producers.get(name)
        if op is None or (kind is not None and op.kind != kind):
            return None
        return None if fn is not None and op.attr("fn") != fn else op

    def only_use(self, name: str) -> bool:
        """Whether one op, and no output, reads the value."""
        return self._uses.get(name, 0) == 1

    def is_stored(self, name: str) -> bool:
        """Whether the value is a weight, a constant or made of them by a recipe."""
        return name in self.values and name not in self._producers and name not in self._inputs

    def final(self, name: str) -> str:
        """What the value is called after the renamings so far."""
        return _end(self._renamed, name)

    def fresh(self, base: str) -> str:
        """A name that no value has."""
        name, n = base, 0
        while name in self.values:
            n += 1
            name = f"{base}.{n}"
        return name

    def replace(self, op: Op, *new: Op) -> None:
        """Put ``new`` in the place of ``op``; the last of them makes the same value."""
        self._instead[op.output.name] = new
        for added in new:
            self.values.setdefault(added.output.name, added.output)
            self._producers[added.output.name] = added

    def rename(self, op: Op, name: str) -> None:
        """Take ``op`` out, and read the value ``name`` where its output was read."""
        self._renamed[op.output.name] = name

    def add_recipe(self, recipe: Recipe) -> Value:
        self._recipes.append(recipe)
        self.values[recipe.output.name] = recipe.output
        return recipe.output

    def make_constant(self, op: Op, constant: Constant) -> None:
        """Put a constant, which has the name of ``op``'s output, in the place of ``op``."""
        self._instead[op.output.name] = ()
        self._constants.append(constant)

    def done(self) -> Graph:
        ops = [new for op in self.graph.ops for new in self._instead.get(op.output.name, (op,))]
        kept = (o for o in ops if o.output.name not in self._renamed)
        graph = replace(
            self.graph,
            constants=(*self.graph.constants, *self._constants),
            recipes=(*self.graph.recipes, *self._recipes),
            ops=tuple(replace(o, inputs=self._final(o.inputs)) for o in kept),
            outputs=self._final(self.graph.outputs),
        )
        return remove_dead(graph)

    def _final(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(_end(self._renamed, name) for name in names)


def _end(renamed: Mapping[str, str], name: str) -> str:
    while name in renamed:
        name = renamed[name]
    return name
