"""Which tensors of an exported graph are the same memory, so that writes in place keep their meaning in SSA.

A write changes its target and everything that shares its memory. What is the very same tensor (an earlier write's
result, a detached one) is renamed to the new value; a view that is read after the write has no form here and is
refused.
"""

from __future__ import annotations

from typing import Any

from lf_hal.lir._lower import RefusedError

Node = Any  # torch.fx.Node

_SAME = ("detach", "detach_", "alias", "lift_fresh", "dropout", "dropout_", "contiguous", "to", "positive")


class Aliases:
    """Memory and identity of each node, in the order of the graph."""

    def __init__(self, nodes: list[Node]) -> None:
        self._place = {n: i for i, n in enumerate(nodes)}
        self._memory: dict[Node, int] = {}
        self._identity: dict[Node, int] = {}
        for n in nodes:
            self._enter(n)

    def _enter(self, n: Node) -> None:
        self._memory[n] = self._identity[n] = self._place[n]
        source = next((a for a in n.all_input_nodes), None)
        if n.op != "call_function" or source is None:
            return
        schema = getattr(n.target, "_schema", None)
        if schema is None:  # getitem, of a list that may be of views
            if getattr(n.target, "__name__", "") == "getitem":
                self._memory[n] = self._memory[source]
            return
        name = schema.name.removeprefix("aten::")
        if any(r.alias_info is not None for r in schema.returns) or name in _SAME:
            self._memory[n] = self._memory[source]
        if writes(n) or (name in _SAME and _alike(n, source)):
            self._identity[n] = self._identity[source]

    def renamed_by(self, write: Node) -> list[Node]:
        """Nodes that mean ``write``'s result from there on.

        Raises:
            RefusedError: a view of the target is read later, or the target is an input or a weight.
        """
        target = write.args[0]
        place, memory = self._place[write], self._memory[target]
        if self._owner(memory).op == "placeholder":
            raise RefusedError("writes in place to an input or a weight; use the form without _")
        same = []
        for n, of in self._memory.items():
            if of != memory or n is write:
                continue
            if self._identity[n] == self._identity[target]:
                same.append(n)
            elif any(self._place[user] > place for user in n.users):
                raise RefusedError(f"writes in place, and {n.name} is a view of the same that is read later")
        return same

    def _owner(self, memory: int) -> Node:
        return next(n for n, place in self._place.items() if place == memory)


def writes(n: Node) -> bool:
    """Whether the operator changes its first argument."""
    schema = getattr(n.target, "_schema", None)
    if schema is None or not schema.arguments:
        return False
    info = schema.arguments[0].alias_info
    return info is not None and bool(info.is_write) and not schema.name.endswith("detach_")


def _alike(n: Node, source: Node) -> bool:
    a, b = n.meta.get("val"), source.meta.get("val")
    return getattr(a, "dtype", None) == getattr(b, "dtype", None) and getattr(a, "shape", 0) == getattr(
        b, "shape", 1
    )
