"""Lifetimes read from a graph alone: per node input, and per buffer with inferred aliases and sums."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch.autograd.graph import Node

from ._plan import Lifetime, Slots
from ._policy import Policy, last_steps
from ._walk import Graph, is_leaf, slot_bytes

# The gradient these nodes send is a view of the one they get; Sum's is an expanded one, Cat's a slice.
VIEWS = frozenset(
    f"{name}Backward{at}"
    for name in (
        *("Alias", "Cat", "Permute", "ReshapeAlias", "Squeeze", "Sum", "T"),
        *("Transpose", "UnsafeView", "Unsqueeze", "View"),
    )
    for at in range(3)
)
SUMS = frozenset({"AddBackward0", "AddBackward1"})  # send the very gradient they get, unless they broadcast


def completions(graph: Graph, policy: Policy) -> list[tuple[Node, int, int, int]]:
    """(AccumulateGrad node, bytes, step that completes the gradient, last step it lives), in the engine's order."""
    found = [(node, at) for at, node in enumerate(graph.order) if is_leaf(node)]
    sizes = [slot_bytes(node, 0) for node, _ in found]
    ends = last_steps(policy, [at for _, at in found], sizes, len(graph.order) - 1)
    return [(node, size, at, end) for (node, at), size, end in zip(found, sizes, ends, strict=True)]


def count_slots(graph: Graph, policy: Policy) -> tuple[Slots, ...]:
    """Lifetimes of the inputs of all nodes: from the first node that contributes to the node that reads."""
    position = {node: at for at, node in enumerate(graph.order)}
    ends = {node: end for node, _, _, end in completions(graph, policy)}
    first: dict[tuple[Node, int], int] = {}
    for node in graph.order:
        for edge in graph.edges[node]:
            first.setdefault(edge, position[node])
    counts = Counter(
        ("parameter" if to in ends else "activation", ends.get(to, position[to]) - start)
        for (to, _), start in first.items()
    )
    return tuple(Slots(kind, steps, count) for (kind, steps), count in sorted(counts.items()))  # type: ignore[arg-type]


@dataclass
class _Guess:
    """A buffer while its aliases are collected."""

    name: str
    nbytes: int
    start: int
    end: int
    parameter: bool = False
    holders: int = 0  # node inputs that refer to it at this moment
    viewed: bool = False  # a view and what it views both refer to it, so nobody may add to it in place


@dataclass
class _Inference:
    """Executes a graph in thought, keeping the books of engine.cpp and input_buffer.cpp."""

    graph: Graph
    ends: dict[Node, int]  # last step of the gradient that an AccumulateGrad node gets
    incoming: dict[tuple[Node, int], _Guess] = field(default_factory=dict)
    found: list[_Guess] = field(default_factory=list)

    def run(self) -> list[_Guess]:
        for at, node in enumerate(self.graph.order):
            given = self._read(node, at)
            for to, slot in self.graph.edges[node]:
                self._arrive(at, (to, slot), self._made_by(node, given, at, slot_bytes(to, slot)))
        return self.found

    def _read(self, node: Node, at: int) -> _Guess | None:
        """The first gradient `node` gets; all that it gets live until now at least."""
        gradients = [self.incoming.pop((node, slot), None) for slot in range(len(node._input_metadata))]
        for gradient in filter(None, gradients):
            gradient.holders -= 1
            gradient.end = max(gradient.end, self.ends.get(node, at))
            if node in self.ends:
                gradient.parameter, gradient.name = True, self.graph.label(node)
        return gradients[0] if gradients else None

    def _made_by(self, node: Node, given: _Guess | None, at: int, nbytes: int) -> _Guess:
        """What `node` sends: what it got if it only passes that on, else a new buffer."""
        if given is not None and node.name() in VIEWS:
            given.viewed = True
            return given
        if given is not None and node.name() in SUMS and nbytes == given.nbytes:
            return given
        return self._new(self.graph.label(node), nbytes, at)

    def _arrive(self, at: int, to: tuple[Node, int], gradient: _Guess) -> None:
        """Add to what is there: in place if nothing else refers to it, else into a third buffer."""
        before = self.incoming.pop(to, None)
        gradient.end = max(gradient.end, at)
        if before is not None:
            before.end = max(before.end, at)
            before.holders -= 1
            if before.holders == 0 and not before.viewed:
                gradient = before
            else:
                gradient = self._new(f"sum for {self.graph.label(to[0])}", slot_bytes(*to), at)
        gradient.holders += 1
        self.incoming[to] = gradient

    def _new(self, name: str, nbytes: int, at: int) -> _Guess:
        self.found.append(_Guess(name, nbytes, at, at))
        return self.found[-1]


def infer(graph: Graph, policy: Policy) -> tuple[Lifetime, ...]:
    """One lifetime per buffer, with moments equal to steps."""
    # what is added to a gradient of an earlier micro-batch is given up at once
    arriving = replace(policy, mode="fused", accumulation=1) if policy.accumulation > 1 else policy
    found = _Inference(graph, {node: end for node, _, _, end in completions(graph, arriving)}).run()
    lifetimes = [
        Lifetime(
            g.name, "parameter" if g.parameter else "activation", g.nbytes, g.start, g.end, g.start, g.end + 1
        )
        for g in found
    ]
    return tuple(lifetimes + list(_kept(graph, policy)))


def _kept(graph: Graph, policy: Policy) -> Iterator[Lifetime]:
    """Gradients kept from earlier micro-batches; those of this one are added to them and gone."""
    if policy.accumulation > 1:
        last = len(graph.order) - 1
        for node, nbytes, _, _ in completions(graph, policy):
            yield Lifetime(graph.label(node), "parameter", nbytes, 0, last, 0, last + 1)
