"""Passes over compiled graphs, tried on our rows: less traffic and fuller multiprocessors where no gradient is wanted.

- A tanh-GELU inside the product before it, by the epilogue of cuBLASLt: nobody needs what enters the GELU. In the
  vision tower of the VLA class 141 MB of traffic less a block at batch 16, about 35 us at 4 TB/s.
- Products of one input as one: q, k and v of that tower are 320 tiles of 128 x 256 each, which 132 multiprocessors take
  in 3 waves of 2.4; together they are 896 in 7 waves. The weights are put side by side at every step, 16 MB.

Not measured yet.
"""

from __future__ import annotations

import hashlib
import operator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass


def _this_file() -> bytes:
    return hashlib.sha256(Path(__file__).read_bytes()).digest()


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``gelu(linear(x, weight, bias), approximate="tanh")``, [..., out]; one product where no gradient is wanted."""
    if torch.is_grad_enabled():
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        rows = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return rows.unflatten(0, x.shape[:-1])


class GeluInProduct(CustomGraphPass):
    """Puts :func:`linear_gelu` in the place of a linear layer with a bias whose only reader is a tanh-GELU."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite; leaves everything else as it is."""
        for node in list(graph.nodes):
            linear = product_before(node)
            if linear is None:
                continue
            with graph.inserting_before(node):
                fused = graph.call_function(linear_gelu, linear.args)
            fused.meta.update(node.meta)
            node.replace_all_uses_with(fused)
            graph.erase_node(node)
            graph.erase_node(linear)

    def uuid(self) -> Any:
        """For the compiler's cache."""
        return _this_file()


def product_before(node: fx.Node) -> fx.Node | None:
    """The linear layer whose result only this tanh-GELU reads; None for any other node."""
    if node.target is not F.gelu or node.kwargs.get("approximate") != "tanh":
        return None
    (linear,) = node.args
    if not isinstance(linear, fx.Node) or linear.target is not F.linear or len(linear.users) > 1:
        return None
    return linear if len(linear.args) == 3 and isinstance(linear.args[2], fx.Node) else None


def linears(x: Tensor, *weights_and_biases: Tensor) -> tuple[Tensor, ...]:
    """``linear(x, w, b)`` for each weight, the biases behind all weights; one product without gradients."""
    half = len(weights_and_biases) // 2
    biased = weights_and_biases[half].dim() == 1
    weights = weights_and_biases[:half] if biased else weights_and_biases
    biases = weights_and_biases[half:] if biased else ()
    if torch.is_grad_enabled():
        pairs = zip(weights, biases or [None] * len(weights), strict=True)
        return tuple(F.linear(x, w, b) for w, b in pairs)
    together = F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
    return together.split([len(w) for w in weights], dim=-1)


class OneProductForOneInput(CustomGraphPass):
    """Puts :func:`linears` in the place of linear layers that read the same input, where that pays.

    Args:
        widest: most outputs together, as a multiple of the inputs; wider products fill the device by themselves.
    """

    def __init__(self, widest: int = 4) -> None:
        self.widest = widest

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite; leaves everything else as it is."""
        for nodes in products_by_input(graph):
            if self._pays(nodes):
                merge_products(graph, nodes)

    def _pays(self, nodes: list[fx.Node]) -> bool:
        shapes = [n.args[1].meta["example_value"].shape for n in nodes]
        return len(nodes) > 1 and sum(s[0] for s in shapes) <= self.widest * shapes[0][1]

    def uuid(self) -> Any:
        """For the compiler's cache."""
        return _this_file() + bytes([self.widest])


def products_by_input(graph: fx.Graph) -> list[list[fx.Node]]:
    """Linear layers with given weights, grouped by input and by whether they have a bias, in order."""
    groups: dict[tuple[fx.Node, int], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is F.linear and not node.kwargs and _are_given(node.args[1:]):
            groups.setdefault((node.args[0], len([a for a in node.args if a is not None])), []).append(node)
    return list(groups.values())


def _are_given(arguments: tuple[Any, ...]) -> bool:
    found = [a for a in arguments if a is not None]
    return all(isinstance(a, fx.Node) and a.op == "placeholder" for a in found)


def merge_products(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """One call at the place of the first."""
    first = nodes[0]
    weights = [n.args[1] for n in nodes]
    biases = [n.args[2] for n in nodes if len(n.args) > 2 and n.args[2] is not None]
    with graph.inserting_before(first):
        call = graph.call_function(linears, (first.args[0], *weights, *biases))
        parts = [graph.call_function(operator.getitem, (call, i)) for i in range(len(nodes))]
    for node, part in zip(nodes, parts, strict=True):
        part.meta.update(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
