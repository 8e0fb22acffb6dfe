"""The autograd graph behind a loss: its nodes in the order in which the engine runs them."""

import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from ._errors import PlanError

Edge = tuple[Node, int]  # (node, which of its inputs)


@dataclass(frozen=True)
class Graph:
    """Nodes in the engine's order, and where each sends its gradients.

    Attributes:
        order: nodes; none is executed before all that feed it.
        edges: for each node its consumers, one per output that has one.
        names: names of the parameters whose gradients the AccumulateGrad nodes write.
    """

    order: tuple[Node, ...]
    edges: Mapping[Node, Sequence[Edge]]
    names: Mapping[Node, str]

    def label(self, node: Node) -> str:
        """The parameter's name for an AccumulateGrad node, else the name of the node."""
        return self.names.get(node) or node.name().removeprefix("torch::autograd::")

    def fingerprint(self) -> str:
        """Hash of nodes, edges, shapes, types, devices and parameter names; equal for equal backward passes."""
        position = {node: at for at, node in enumerate(self.order)}
        digest = hashlib.sha256()
        for node in self.order:
            to = [(position[consumer], slot) for consumer, slot in self.edges[node]]
            inputs = [(tuple(map(str, m.shape)), str(m.dtype), str(m.device)) for m in node._input_metadata]
            # reshape makes the one node under a dispatch mode and the other without
            label = self.label(node).replace("ReshapeAliasBackward", "ViewBackward")
            digest.update(repr((label, to, inputs)).encode())
        return digest.hexdigest()


def is_leaf(node: Node) -> bool:
    """Whether the node writes the .grad of a leaf tensor."""
    return node.name().endswith("AccumulateGrad")


def leaf_of(node: Node) -> torch.Tensor:
    """The tensor whose .grad an AccumulateGrad node writes."""
    leaf = node.variable  # type: ignore[attr-defined]
    assert isinstance(leaf, torch.Tensor)
    return leaf


def slot_bytes(node: Node, slot: int) -> int:
    """Bytes of one input of a node, which need not exist yet."""
    meta = node._input_metadata[slot]
    return math.prod(map(int, meta.shape)) * int(meta.dtype.itemsize)


def walk(losses: Sequence[torch.Tensor], names: Mapping[int, str]) -> Graph:
    """Read the graph of the losses; nothing is executed or changed.

    Args:
        losses: tensors that require gradients; the backward pass starts at all of them together.
        names: id of a leaf tensor -> its name. Leaves without one are numbered.
    """
    roots = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    if not roots:
        raise PlanError(
            "the loss does not depend on anything that requires a gradient: check requires_grad and no_grad"
        )
    edges, waiting = _edges(roots)
    order = _engine_order(roots, edges, waiting)
    return Graph(tuple(order), edges, _leaf_names(order, names))


def _edges(roots: Iterable[Node]) -> tuple[dict[Node, list[Edge]], Counter[Node]]:
    """Consumers of every node that can be reached, and how many edges lead to each; deep graphs overflow recursion."""
    edges: dict[Node, list[Edge]] = {}
    waiting: Counter[Node] = Counter()
    todo = list(dict.fromkeys(roots))
    known = set(todo)
    while todo:
        node = todo.pop()
        edges[node] = [(to, slot) for to, slot in node.next_functions if to is not None]
        for to, _ in edges[node]:
            waiting[to] += 1
            if to not in known:
                known.add(to)
                todo.append(to)
    return edges, waiting


def _engine_order(
    roots: Iterable[Node], edges: Mapping[Node, Sequence[Edge]], waiting: Counter[Node]
) -> list[Node]:
    """The engine's ready queue: AccumulateGrad nodes at once, then the node made last in the forward pass.

    torch/csrc/autograd/engine.cpp, CompareNodeTaskTime: highest sequence number first; leaves have the highest.
    """
    left, order = Counter(waiting), []
    ready = [(_priority(node), at, node) for at, node in enumerate(dict.fromkeys(roots)) if not left[node]]
    heapq.heapify(ready)
    pushed = len(ready)
    while ready:
        node = heapq.heappop(ready)[2]
        order.append(node)
        for to, _ in edges[node]:
            left[to] -= 1
            if not left[to]:
                heapq.heappush(ready, (_priority(to), pushed, to))
                pushed += 1
    return order


def _priority(node: Node) -> int:
    return -(2**64) if is_leaf(node) else -node._sequence_nr()


def _leaf_names(order: Iterable[Node], names: Mapping[int, str]) -> dict[Node, str]:
    leaves = [node for node in order if is_leaf(node)]
    return {node: names.get(id(leaf_of(node)), f"leaf {at}") for at, node in enumerate(leaves)}
