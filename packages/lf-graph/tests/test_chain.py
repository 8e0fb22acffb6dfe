"""Chain: pieces and eager elements in order behave like the same functions called one after the other."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

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

WIDTH = 4


def linears(count: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def data() -> Tensor:
    return torch.randn(3, WIDTH)


def run_eagerly(
    elements: Sequence[Element], inputs: Sequence[str], outputs: Sequence[str], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """What a chain means: the functions, one after the other."""
    values = dict(zip(inputs, tensors, strict=True))
    for e in elements:
        result = e.fn(*[values[n] for n in e.inputs])
        values |= dict(zip(e.outputs, result if isinstance(result, tuple) else (result,), strict=True))
    return tuple(values[n] for n in outputs)


class Pair:
    """A chain and the same elements with copies of their modules, to run eagerly."""

    def __init__(self, build: Callable[[list[nn.Linear]], list[Element]], count: int, **options: Any) -> None:
        self.ours = linears(count)
        self.theirs = copy.deepcopy(self.ours)
        self.chain = Chain(build(self.ours), ("x",), ("y",), **options)
        self._eager = build(self.theirs)

    def eager(self, x: Tensor) -> Tensor:
        (y,) = run_eagerly(self._eager, ("x",), ("y",), x)
        return y

    def capture(self) -> Pair:
        self.chain.capture(data())
        return self

    def micro_batches(self, count: int = 3) -> None:
        """Outputs and gradients are equal to the bit after each of several micro-batches without zero_grad."""
        for i in range(count):
            x = data()
            found, expected = [], []
            for run, into in ((self.chain, found), (self.eager, expected)):
                torch.manual_seed(i)
                y = run(x)
                y.square().sum().backward()
                into.append(y.detach())
            assert torch.equal(found[0], expected[0])
            self.same_gradients()

    def same_gradients(self) -> None:
        for a, b in zip(self.ours, self.theirs, strict=True):
            for p, q in zip(a.parameters(), b.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                if p.grad is not None and q.grad is not None:
                    assert torch.equal(p.grad, q.grad)


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
