"""Chain: pieces in a row give what eager code gives, also where they share weights; on the recorder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from chain_cases import WIDTH, Pair, data, linears, run_eagerly
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lf_graph import (
    Chain,
    Eager,
    Piece,
)
from lf_graph._elements import Element

# -- pieces ------------------------------------------------------------------------------------------------


def test_pieces_in_a_row_accumulate_like_eager() -> None:
    pair = Pair(lambda m: [Piece(m[0], ("x",), ("a",)), Piece(m[1], ("a",), ("y",))], 2).capture()
    pair.micro_batches()
    assert pair.chain.stats().graphs == 4


def test_an_edge_used_by_several_pieces_gets_the_sum_of_their_gradients() -> None:
    def build(m: list[nn.Linear]) -> list[Element]:
        return [
            Piece(m[0], ("x",), ("a",)),
            Piece(m[1], ("a",), ("b",)),
            Piece(m[2], ("a",), ("c",)),
            Piece(lambda a, b, c: a * b + c, ("a", "b", "c"), ("y",)),
        ]

    Pair(build, 3).capture().micro_batches()


def test_an_addition_that_hands_one_gradient_to_two_edges_keeps_them_apart() -> None:
    def build(m: list[nn.Linear]) -> list[Element]:
        return [
            Piece(m[0], ("x",), ("a",)),
            Piece(m[1], ("a",), ("b",)),
            Piece(lambda a, b: a + b, ("a", "b"), ("c",)),
            Piece(lambda a, c: a * c, ("a", "c"), ("y",)),
        ]

    Pair(build, 2).capture().micro_batches()


def test_an_output_that_later_pieces_use_too_gets_both_gradients() -> None:
    m = linears(2)
    t = copy.deepcopy(m)
    elements = [Piece(m[0], ("x",), ("a",)), Piece(m[1], ("a",), ("y",))]
    chain = Chain(elements, ("x",), ("a", "y")).capture(data())
    for _ in range(2):
        x = data()
        a, y = chain(x)
        (a.sin().sum() + y.cos().sum()).backward()
        b = t[0](x)
        (b.sin().sum() + t[1](b).cos().sum()).backward()
        for p, q in zip(m[0].parameters(), t[0].parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def test_a_piece_with_several_outputs_may_leave_some_unused() -> None:
    def split(a: Tensor) -> tuple[Tensor, Tensor]:
        return a * 2, a * 3

    def build(m: list[nn.Linear]) -> list[Element]:
        return [
            Piece(m[0], ("x",), ("a",)),
            Piece(split, ("a",), ("b", "unused")),
            Piece(m[1], ("b",), ("y",)),
        ]

    Pair(build, 2).capture().micro_batches()


def test_a_frozen_piece_has_no_backward_graph() -> None:
    def build(m: list[nn.Linear]) -> list[Element]:
        m[0].requires_grad_(False)
        return [Piece(m[0], ("x",), ("a",)), Piece(m[1], ("a",), ("y",))]

    pair = Pair(build, 2).capture()
    pair.micro_batches()
    assert pair.chain.stats().graphs == 3


def test_a_frozen_piece_in_the_middle_passes_gradients_on() -> None:
    def build(m: list[nn.Linear]) -> list[Element]:
        m[1].requires_grad_(False)
        return [Piece(m[0], ("x",), ("a",)), Piece(m[1], ("a",), ("b",)), Piece(m[2], ("b",), ("y",))]

    pair = Pair(build, 3).capture()
    pair.micro_batches()
    assert pair.ours[0].weight.grad is not None


def dropout(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_dropout_in_several_pieces_equals_the_eager_sequence_by_seed(checkpoint: bool) -> None:
    def build(m: list[nn.Linear]) -> list[Element]:
        return [
            Piece(lambda x: dropout(m[0](x)), ("x",), ("a",), checkpoint=checkpoint, owners=(m[0],)),
            Piece(m[1], ("a",), ("b",), checkpoint=checkpoint),
            Piece(lambda x: dropout(m[2](x)).tanh(), ("b",), ("y",), checkpoint=checkpoint, owners=(m[2],)),
        ]

    Pair(build, 3).capture().micro_batches()


def test_the_generator_stands_where_eager_code_would_leave_it() -> None:
    pair = Pair(
        lambda m: [Piece(lambda x: dropout(m[0](x)), ("x",), ("y",), checkpoint=True, owners=(m[0],))], 1
    )
    pair.capture()
    positions = []
    for run in (pair.chain, pair.eager):
        torch.manual_seed(3)
        run(torch.ones(3, WIDTH)).sum().backward()
        positions.append(torch.get_rng_state())
    assert torch.equal(*positions)


# -- weights in several places -----------------------------------------------------------------------------


def test_weights_tied_across_two_pieces_get_both_gradients() -> None:
    pair = Pair(lambda m: [Piece(m[0], ("x",), ("a",)), Piece(m[0], ("a",), ("y",))], 1).capture()
    x = data()
    for run in (pair.chain, pair.eager):
        run(x).square().sum().backward()
    for p, q in zip(pair.ours[0].parameters(), pair.theirs[0].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert len(pair.chain.parameters) == 2


def test_weights_tied_between_a_piece_and_eager_code_get_both_gradients() -> None:
    def build(m: list[nn.Linear]) -> list[Element]:
        return [Piece(m[0], ("x",), ("a",)), Eager(m[0], ("a",), ("b",)), Piece(m[1], ("b",), ("y",))]

    pair = Pair(build, 2).capture()
    for _ in range(3):
        x = data()
        for run in (pair.chain, pair.eager):
            run(x).square().sum().backward()
        for p, q in zip(pair.ours[0].parameters(), pair.theirs[0].parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def test_weights_shared_by_two_chains_add_into_one_gradient() -> None:
    (m,) = linears(1)
    (t,) = copy.deepcopy([m])
    chains = [Chain([Piece(m)], ("x",)).capture(data()) for _ in range(2)]
    for chain in (*chains, *chains):
        x = data()
        for run in (chain, t):
            run(x).sum().backward()
        assert m.weight.grad is not None
        assert t.weight.grad is not None
        assert torch.equal(m.weight.grad, t.weight.grad)


# -- any chain ---------------------------------------------------------------------------------------------

# name -> number of inputs, whether it uses the module, the function
KINDS: dict[str, tuple[int, bool, Callable[..., Any]]] = {
    "linear": (1, True, lambda m, a: m(a)),
    "tanh": (1, False, lambda m, a: a.tanh()),
    "dropout": (1, True, lambda m, a: dropout(m(a))),
    "add": (2, False, lambda m, a, b: a + b),
    "mul": (2, True, lambda m, a, b: m(a) * b),
    "same": (1, False, lambda m, a: a.view_as(a)),
}


@st.composite
def plans(draw: Any) -> list[tuple[str, tuple[int, ...], bool, bool]]:
    """(kind, which earlier values, eager?, checkpoint?) for each element of a random graph."""
    plan = []
    for i in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(sorted(KINDS)))
        places = tuple(draw(st.integers(0, i)) for _ in range(KINDS[kind][0]))
        plan.append((kind, places, draw(st.booleans()) and draw(st.booleans()), draw(st.booleans())))
    return plan


def elements_of(
    plan: list[tuple[str, tuple[int, ...], bool, bool]], modules: Sequence[nn.Module]
) -> list[Element]:
    elements: list[Element] = []
    for i, (kind, places, is_eager, checkpoint) in enumerate(plan):
        _, uses_module, fn = KINDS[kind]
        names, gives, module = tuple(f"v{p}" for p in places), (f"v{i + 1}",), modules[i]

        def call(*tensors: Tensor, fn: Any = fn, module: Any = module) -> Any:
            return fn(module, *tensors)

        if is_eager:
            elements.append(Eager(call, names, gives))
        else:
            elements.append(Piece(call, names, gives, checkpoint=checkpoint, owners=(module,) * uses_module))
    return elements


@given(plan=plans(), wants=st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_small_chain_equals_eager(plan: Any, wants: bool) -> None:
    """Values to the bit; gradients too, where no value has more than two uses (else the order of sums may differ)."""
    ours = linears(len(plan))
    theirs = copy.deepcopy(ours)
    out = (f"v{len(plan)}",)
    uses = [p for _, places, _, _ in plan for p in places]
    exact = all(uses.count(p) <= 2 for p in uses)
    chain = Chain(elements_of(plan, ours), ("v0",), out).capture(data().requires_grad_(wants))
    reference = elements_of(plan, theirs)
    for seed in range(2):
        x, y = (torch.linspace(-1, 1, 12).view(3, 4).add(seed).requires_grad_(wants) for _ in range(2))
        torch.manual_seed(seed)
        found = chain(x)
        torch.manual_seed(seed)
        (expected,) = run_eagerly(reference, ("v0",), out, y)
        assert torch.equal(found, expected)
        assert found.requires_grad == expected.requires_grad
        if not found.requires_grad:
            continue
        found.square().sum().backward()
        expected.square().sum().backward()
        pairs = [(x.grad, y.grad)]
        pairs += [(p.grad, q.grad) for a, b in zip(ours, theirs, strict=True) for p, q in _parameters(a, b)]
        for a, b in pairs:
            assert a is not None or b is None
            if a is not None:
                b = (
                    torch.zeros_like(a) if b is None else b
                )  # what the output does not reach gets zeros, not None
                torch.testing.assert_close(a, b, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5)
    chain.close()


def _parameters(a: nn.Module, b: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return list(zip(a.parameters(), b.parameters(), strict=True))
