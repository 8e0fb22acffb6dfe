"""Planning of length buckets: which edge, which dimension, which value; no graph is involved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lf_graph import GraphError
from lf_graph._padding import (
    FILL,
    Call,
    argument_names,
    bucket_of,
    checked_edges,
    cut_outputs,
    length_of,
    make_plan,
    positional_names,
)

EDGES = st.lists(st.integers(1, 50), min_size=1, max_size=6, unique=True).map(sorted)


@given(length=st.integers(1, 60), edges=EDGES)
def test_a_bucket_is_the_smallest_edge_that_holds_the_length(length: int, edges: list[int]) -> None:
    fitting = [e for e in edges if e >= length]
    assert bucket_of(length, edges) == (min(fitting) if fitting else None)


@pytest.mark.parametrize("edges", [(), (0, 4), (4, 4), (8, 4), (-1,), (2.5,), (True, 4)])
def test_edges_that_are_no_rising_whole_numbers_are_refused(edges: Any) -> None:
    with pytest.raises(GraphError, match="rising order"):
        checked_edges(edges)


def names_of(fn: Any, *args: Any, **kwargs: Any) -> list[str]:
    return argument_names(pytree.tree_structure((args, kwargs)), positional_names(fn))


def test_leaves_are_called_by_parameter_and_path() -> None:
    def fn(batch: Any, scale: float, *rest: Any, weights: Any) -> None: ...

    found = names_of(fn, {"ids": 1, "more": [2, 3]}, 4, 5, weights=6)
    assert found == ["batch.ids", "batch.more.0", "batch.more.1", "scale", "2", "weights"]


def test_a_modules_parameters_are_those_of_its_forward() -> None:
    class Model(nn.Module):
        def forward(self, ids: Tensor, mask: Tensor) -> None: ...

    assert positional_names(Model()) == ("ids", "mask")


def test_what_has_no_signature_is_called_by_position() -> None:
    assert names_of(max, 1, 2) == ["0", "1"]


def test_one_dimension_pads_every_tensor_but_the_lengths() -> None:
    plan = make_plan(["ids", "mask", "lengths"], 1, {"mask": -7}, "lengths")
    ids, mask, lengths = plan.pads
    assert ids is not None
    assert mask is not None
    assert (ids.dim, ids.value, mask.dim, mask.value, lengths) == (1, 0, 1, -7, None)


def test_arguments_may_be_named_by_position() -> None:
    plan = make_plan(["ids", "scale"], {0: 1}, {0: 5}, None, ("ids", "scale"))
    assert plan.pads[0] is not None
    assert (plan.pads[0].name, plan.pads[0].value, plan.pads[1]) == ("ids", 5, None)


@pytest.mark.parametrize(("dims", "pads"), [({"idz": 1}, 0), ({"ids": 1}, {"idz": 3}), ({}, 0)])
def test_a_name_that_no_tensor_has_is_refused_with_the_names_there_are(dims: Any, pads: Any) -> None:
    with pytest.raises(GraphError, match=r"\['ids', 'mask'\]"):
        make_plan(["ids", "mask"], dims, pads, None)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 3), (2, 4)], r"one common length above 0, got \{'a': 3, 'b': 4\}"),
        ([(2, 3), (2,)], r"b has shape \[2\] and no dimension 1"),
        ([(2, 0), (2, 0)], "above 0"),
    ],
)
def test_padded_tensors_must_agree_on_one_length(shapes: list[tuple[int, ...]], message: str) -> None:
    plan = make_plan(["a", "b"], 1, 0, None)
    with pytest.raises(GraphError, match=message):
        length_of(plan, [torch.zeros(s) for s in shapes])


def call_of(*tensors: Any, dims: Any = -1, pads: Any = 0, lengths: str | None = None) -> Call:
    leaves, structure = pytree.tree_flatten((tensors, {}))
    names = [str(i) for i in range(len(tensors))]
    plan = make_plan(names, dims, pads, lengths)
    return Call(structure, tuple(leaves), plan, length_of(plan, leaves), tensors[0].shape[0])


@given(length=st.integers(1, 6), beyond=st.integers(0, 5), dim=st.integers(-3, 2), value=st.integers(-3, 3))
def test_a_padded_call_has_the_values_and_then_the_pad_value(
    length: int, beyond: int, dim: int, value: int
) -> None:
    shape = [2, 3, 4]
    shape[dim] = length
    x = torch.randn(shape)
    (padded,) = call_of(x, dims=dim, pads=value).sample(length + beyond)
    assert torch.equal(padded.narrow(dim, 0, length), x)
    assert (padded.narrow(dim, length, beyond) == value).all()


def test_writing_a_shorter_call_leaves_nothing_of_a_longer_one() -> None:
    place = torch.empty(1, 8)
    call_of(torch.ones(1, 7), pads=-1).write([place])
    call_of(torch.full((1, 2), 5.0), pads=-1).write([place])
    assert place.tolist() == [[5, 5, -1, -1, -1, -1, -1, -1]]


def test_lengths_are_filled_in_place() -> None:
    places = [torch.empty(2, 8), torch.empty(2, dtype=torch.int64)]
    call_of(torch.ones(2, 3), FILL, dims={"0": 1}).write(places)
    assert places[1].tolist() == [3, 3]


def test_the_signature_of_a_padded_call_is_that_of_its_sample() -> None:
    call = call_of(
        torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, dtype=torch.int32), FILL, dims=1, lengths="2"
    )
    specs = call.signature(16).leaves
    for spec, tensor in zip(specs, call.sample(16), strict=True):
        assert (spec.shape, spec.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert spec.requires_grad == tensor.requires_grad


def test_outputs_are_cut_where_they_are_named() -> None:
    result = {"logits": torch.zeros(2, 8, 5), "pooled": torch.zeros(2, 8), "note": "kept"}
    cut = cut_outputs(result, {"logits": 1}, edge=8, length=3)
    assert (cut["logits"].shape, cut["pooled"].shape, cut["note"]) == ((2, 3, 5), (2, 8), "kept")


def test_a_lone_output_is_cut_by_its_dimension() -> None:
    assert cut_outputs(torch.zeros(2, 8), 1, edge=8, length=3).shape == (2, 3)


@pytest.mark.parametrize(
    ("unpad", "message"), [(1, r"output '1' has shape \[2\]"), ({"2": 1}, "unpad names"), (0, "output '0'")]
)
def test_outputs_that_cannot_be_cut_are_refused(unpad: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        cut_outputs((torch.zeros(2, 8), torch.zeros(2)), unpad, edge=8, length=3)
