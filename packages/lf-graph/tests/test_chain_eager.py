"""Chain: eager elements between pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chain_cases import WIDTH, Pair, data
from torch import Tensor, nn

from lf_graph import (
    Chain,
    Eager,
    GraphError,
    Piece,
    SignatureError,
)
from lf_graph._elements import Element

# -- eager elements ----------------------------------------------------------------------------------------


def test_an_eager_element_may_read_values_back() -> None:
    seen: list[float] = []

    def clip(a: Tensor) -> Tensor:
        norm = a.norm().item()
        seen.append(norm)
        return a / norm if norm > 1 else a

    def build(m: list[nn.Linear]) -> list[Element]:
        return [Piece(m[0], ("x",), ("a",)), Eager(clip, ("a",), ("b",)), Piece(m[1], ("b",), ("y",))]

    pair = Pair(build, 2).capture()
    seen.clear()
    pair.micro_batches()
    assert len(set(seen)) == 3  # each call's own values


def test_an_eager_bias_keeps_its_gradient_over_replays() -> None:
    """A1 at the seam: autograd would keep the tensor that the graph's backward handed out."""
    bias = torch.zeros(3, WIDTH, requires_grad=True)
    twin = bias.detach().clone().requires_grad_()
    pair = Pair(
        lambda m: [
            Piece(m[0], ("x",), ("a",)),
            Eager(lambda a: a + bias, ("a",), ("b",)),
            Piece(m[1], ("b",), ("y",)),
        ],
        2,
    ).capture()
    bias.grad = None
    for _ in range(3):
        x = data()
        pair.chain(x).square().sum().backward()
        hidden = pair.theirs[0](x) + twin
        pair.theirs[1](hidden).square().sum().backward()
        assert bias.grad is not None
        assert twin.grad is not None
        assert torch.equal(bias.grad, twin.grad)


def test_an_edge_skips_over_an_eager_element() -> None:
    def build(m: list[nn.Linear]) -> list[Element]:
        return [
            Piece(m[0], ("x",), ("a",)),
            Eager(lambda a: a.relu() + a.sum().item() * 0, ("a",), ("b",)),
            Piece(lambda a, b: m[1](a) * b, ("a", "b"), ("y",), owners=(m[1],)),
        ]

    Pair(build, 2).capture().micro_batches()


def test_eager_elements_at_both_ends_and_in_a_row() -> None:
    def build(m: list[nn.Linear]) -> list[Element]:
        return [
            Eager(torch.tanh, ("x",), ("a",)),
            Eager(torch.sin, ("a",), ("b",)),
            Piece(m[0], ("b",), ("c",)),
            Eager(torch.cos, ("c",), ("y",)),
        ]

    Pair(build, 1).capture().micro_batches()


def test_an_eager_element_with_integer_outputs_routes_a_graph() -> None:
    def route(a: Tensor) -> tuple[Tensor, Tensor]:
        return a, torch.tensor(sorted(range(3), key=lambda i: a[i].sum().item()))

    def build(m: list[nn.Linear]) -> list[Element]:
        return [
            Piece(m[0], ("x",), ("a",)),
            Eager(route, ("a",), ("b", "order")),
            Piece(lambda b, order: m[1](b.index_select(0, order)), ("b", "order"), ("y",), owners=(m[1],)),
        ]

    Pair(build, 2).capture().micro_batches()


def test_an_eager_element_may_take_a_value_twice_and_give_one_that_nobody_reads() -> None:
    def build(m: list[nn.Linear]) -> list[Element]:
        return [
            Piece(m[0], ("x",), ("a",)),
            Eager(lambda a, b: (a * b, a.sum()), ("a", "a"), ("c", "unread")),
            Piece(m[1], ("c",), ("y",)),
        ]

    Pair(build, 2).capture().micro_batches()


def test_an_input_is_copied_once_also_when_eager_code_keeps_a_view_of_it() -> None:
    def build(m: list[nn.Linear]) -> list[Element]:
        return [
            Piece(lambda x: x.view_as(x), ("x",), ("a",)),
            Eager(lambda a: m[0](a) * a, ("a",), ("b",)),
            Piece(lambda x, b: x + m[1](b), ("x", "b"), ("y",), owners=(m[1],)),
        ]

    pair = Pair(build, 2).capture()
    pair.micro_batches(1)
    assert pair.chain.stats().copies == 2  # x, and what the eager element gave


def test_an_eager_element_must_return_what_it_named() -> None:
    chain = Chain([Eager(lambda x: (x, x), ("x",), ("y",), name="splitter")], ("x",), ("y",))
    with pytest.raises(GraphError, match=r"splitter returned 2 values, named \['y'\]"):
        chain.capture(data())


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: (x, x), r"doubler returned 2 values, named \['y'\]"),
        (lambda x: {"y": x}, r"doubler returned \['dict'\]: a piece gives one tensor"),
    ],
)
def test_a_piece_must_return_what_it_named(fn: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Chain([Piece(fn, ("x",), ("y",), name="doubler")], ("x",), ("y",)).capture(data())


@pytest.mark.parametrize(
    ("later", "difference"),
    [
        (lambda x: x[:1], r"float32\[3, 4\] on cpu -> float32\[1, 4\] on cpu"),  # a copy would broadcast it
        (lambda x: x.double(), r"float32\[3, 4\] on cpu -> float64\[3, 4\] on cpu"),  # and round this
    ],
)
def test_an_eager_element_that_gives_another_shape_or_dtype_later_is_refused(
    later: Any, difference: str
) -> None:
    does = [torch.relu]
    chain = Chain([Piece(torch.sin), Eager(lambda x: does[0](x), (), ("kept",)), Piece(torch.cos)])
    chain.capture(data())
    chain(data())
    does[0] = later
    with pytest.raises(SignatureError, match=f"chain: kept .*{difference}; let the eager element"):
        chain(data())
