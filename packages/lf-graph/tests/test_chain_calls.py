"""Chain: inputs, calls, pools, and what is refused."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from chain_cases import Pair, data, linears
from torch import nn

from lf_graph import (
    AddressError,
    Chain,
    ClosedError,
    Eager,
    GraphCaptureError,
    GraphError,
    GraphPool,
    Piece,
    SignatureError,
    StaleReplayError,
)
from lf_graph._elements import Element
from lf_graph._recorder import RecordedGraph

# -- inputs, calls, errors ---------------------------------------------------------------------------------


def test_elements_left_unnamed_follow_each_other() -> None:
    m = linears(2)
    chain = Chain([Piece(m[0]), Eager(torch.relu), Piece(m[1])]).capture(data())
    x = data()
    assert torch.equal(chain(x), m[1](m[0](x).relu()))
    assert [e.name for e in chain.elements] == ["piece0", "eager1", "piece2"]


@pytest.mark.parametrize(
    ("elements", "message"),
    [
        ([], "at least one element"),
        (
            [Piece(torch.relu, ("z",), ("y",))],
            r"piece0 takes \['z'\], which nothing before it gives; there are: x",
        ),
        ([Piece(torch.relu, ("x",), ("x",))], r"piece0 gives \['x'\], which are there already"),
        ([Piece(torch.relu, ("x",), ("z",))], r"nothing gives the outputs \['y'\]; there are: x, z"),
        ([Piece(torch.relu, "x", ("y",))], r"inputs of piece0: .* write \('x',\)"),  # type: ignore[arg-type]
        ([nn.ReLU()], "element 0 is a ReLU: wrap it in Piece, or in Eager"),
    ],
)
def test_a_chain_that_does_not_fit_together_is_refused(elements: list[Element], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Chain(elements, ("x",), ("y",))


def test_inputs_that_are_leaves_get_a_gradient_of_their_own() -> None:
    (m,) = linears(1)
    chain = Chain([Piece(m), Eager(torch.sin)]).capture(data().requires_grad_())
    leaves = [data().requires_grad_() for _ in range(3)]
    for leaf in leaves:
        chain(leaf).sum().backward()
    for leaf in leaves:
        twin = leaf.detach().clone().requires_grad_()
        m(twin).sin().sum().backward()
        assert leaf.grad is not None
        assert twin.grad is not None
        assert torch.equal(leaf.grad, twin.grad)


def test_two_inputs_of_which_one_wants_a_gradient() -> None:
    chain = Chain([Piece(torch.mul, ("a", "b"), ("y",))], ("a", "b"))
    chain.capture(data().requires_grad_(), data())
    a, b = data().requires_grad_(), data()
    chain(a, b).sum().backward()
    assert a.grad is not None
    assert torch.equal(a.grad, b)
    assert b.grad is None


def test_a_wrong_number_of_inputs_is_refused() -> None:
    chain = Chain([Piece(torch.relu)])
    with pytest.raises(GraphError, match=r"chain takes \['input'\], got 2 tensors"):
        chain.capture(data(), data())


def test_a_chain_is_captured_before_it_is_called() -> None:
    with pytest.raises(ClosedError, match="call capture"):
        Chain([Piece(torch.relu)])(data())


def test_other_shapes_and_modes_are_refused() -> None:
    m = linears(2)
    chain = Chain([Piece(m[0]), Eager(m[1])], name="block").capture(data())
    with pytest.raises(SignatureError, match=r"float32\[3, 4\] on cpu -> float32\[2, 4\] on cpu"):
        chain(data()[:2])
    m[1].eval()
    with pytest.raises(SignatureError, match="training of a Linear: True -> False"):
        chain(data())


def test_a_parameter_frozen_after_the_capture_is_refused_until_the_next_one() -> None:
    m = linears(2)
    chain = Chain([Piece(m[0]), Piece(m[1])]).capture(data())
    m[0].weight.requires_grad_(False)
    with pytest.raises(SignatureError, match=r"requires_grad of weight: True -> False; capture again"):
        chain(data())
    chain.capture(data())(data()).sum().backward()
    assert m[0].weight.grad is None
    assert m[0].bias.grad is not None


def test_moved_parameters_are_refused_until_the_next_capture() -> None:
    pair = Pair(lambda m: [Piece(m[0], ("x",), ("y",))], 1).capture()
    pair.ours[0].weight.data = pair.ours[0].weight.data.clone()
    with pytest.raises(AddressError):
        pair.chain(data())
    pair.capture().micro_batches()
    assert pair.chain.stats().captures == 2


def test_a_second_forward_makes_the_first_backward_stale() -> None:
    pair = Pair(lambda m: [Piece(m[0], ("x",), ("a",)), Eager(torch.sin, ("a",), ("y",))], 1).capture()
    early, late = pair.chain(data()), pair.chain(data())
    with pytest.raises(StaleReplayError):
        early.sum().backward()
    late.sum().backward()


def test_chains_with_their_own_pools_interleave() -> None:
    m = linears(2)
    t = copy.deepcopy(m)
    first, second = (Chain([Piece(x)]).capture(data()) for x in m)
    x = data()
    outputs = [first(x), second(x)]
    for out in outputs:
        out.square().sum().backward()
    for a, b in zip(m, t, strict=True):
        b(x).square().sum().backward()
        assert a.weight.grad is not None
        assert b.weight.grad is not None
        assert torch.equal(a.weight.grad, b.weight.grad)


def test_chains_in_one_pool_run_one_after_the_other() -> None:
    pool = GraphPool("cpu")
    a, b = (Chain([Piece(m)], pool=pool).capture(data()) for m in linears(2))
    a(data()).sum().backward()
    stale = b(data())
    a(data())
    with pytest.raises(StaleReplayError):
        stale.sum().backward()


def test_a_piece_that_fails_frees_those_before_it() -> None:
    def recorded() -> int:
        gc.collect()
        return sum(type(o) is RecordedGraph and o.calls is not None for o in gc.get_objects())

    m, before = linears(1), recorded()  # a test that failed keeps its graphs alive
    chain = Chain([Piece(m[0]), Piece(lambda a: a * a.sum().item())])
    for _ in range(3):
        with pytest.raises(GraphCaptureError, match="_local_scalar_dense"):
            chain.capture(data())
    assert recorded() <= before
    assert m[0].weight.grad is None
    with pytest.raises(ClosedError):
        chain(data())


def test_outputs_stay_valid_unless_asked_otherwise() -> None:
    (m,) = linears(1)
    for copied in (True, False):
        chain = Chain([Piece(m)], copy_outputs=copied).capture(data())
        first = chain(data()).detach()
        before = first.clone()
        chain(data())
        assert torch.equal(first, before) is copied


def test_autocast_covers_every_piece() -> None:
    m = linears(2)
    chain = Chain([Piece(m[0]), Piece(m[1])], autocast=lambda: torch.autocast("cpu", torch.bfloat16)).capture(
        data()
    )
    x = data()
    with torch.autocast("cpu", torch.bfloat16):
        expected = m[1](m[0](x))
    assert torch.equal(chain(x), expected)


def test_closing_twice_is_fine_and_counts_remain() -> None:
    pair = Pair(lambda m: [Piece(m[0], ("x",), ("y",))], 1).capture()
    pair.micro_batches(2)
    with pair.chain as chain:
        pass
    chain.close()
    stats = chain.stats()
    assert (stats.graphs, stats.operations, stats.captures, stats.replays, stats.copies) == (0, 0, 1, 4, 2)


def test_every_piece_and_its_backward_is_a_named_range_of_the_profiler() -> None:
    layers = [nn.Linear(4, 4) for _ in range(2)]
    pieces = [Piece(layer, name=name) for layer, name in zip(layers, ("first", "second"), strict=True)]
    chain = Chain(pieces, name="named").capture(torch.randn(2, 4))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        chain(torch.randn(2, 4)).sum().backward()
    names = [e.name for e in seen.events()]
    ranges = ["first", "second", "second.backward", "first.backward"]
    assert sorted((names.index(n), n) for n in ranges) == [(names.index(n), n) for n in ranges]
