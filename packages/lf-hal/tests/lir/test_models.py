"""Whole models: traced, run by the reference, and optimised. In one file, as each is traced once a process."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from lir_models import NAMES, case
from torch.utils._pytree import tree_leaves, tree_map
from traced import EPS, array, assert_close, longest_sum, traced

from lf_hal.lir import Graph, parse, to_text, verify
from lf_hal.passes import optimize

C = 1  # of the bound C * K * EPS, relative to the largest element of an output


def kinds(graph: Graph) -> Counter[str]:
    return Counter(op.kind for op in graph.ops)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_within_the_bound_of_torch(name: str) -> None:
    found = traced(name)
    bound = C * longest_sum(found.graph) * EPS
    for exact, single, expected in zip(found.run("float64"), found.run(), found.expected, strict=True):
        assert_close(expected, exact, bound)
        assert_close(single, exact, bound)


@pytest.mark.parametrize("name", ["resnet18", "gpt2", "bert", "yolo_neck", "conv_lstm", "lstm_cell"])
def test_in_float64_a_model_is_torch_in_float64(name: str) -> None:
    """Nothing but the mathematics is left to differ: 1e-12, where float32 gives 1e-7."""
    made = case(name)
    inputs = tree_map(lambda t: t.double() if t.is_floating_point() else t, made.inputs)
    with torch.no_grad():
        outputs = tree_leaves(made.module.double()(*inputs))
    for exact, expected in zip(traced(name).run("float64"), outputs, strict=True):
        assert_close(exact, array(expected), 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_an_optimised_model_is_within_the_bound(name: str) -> None:
    found = traced(name)
    after = optimize(found.graph)
    verify(after)
    bound = 8 * longest_sum(found.graph) * EPS
    for exact, old in zip(found.run("float64", after), found.run("float64"), strict=True):
        assert_close(exact, old, bound)
    for single, exact in zip(found.run("float32", after), found.run("float64"), strict=True):
        assert_close(single, exact, bound)


def test_an_optimised_residual_network_is_convolutions_and_little_else() -> None:
    after = optimize(traced("resnet18").graph)
    assert kinds(after) == {
        "conv2d": 12,
        "conv_add_act": 8,
        "pool2d": 1,
        "reduce": 1,
        "reshape": 1,
        "linear": 1,
    }
    acts = Counter((op.kind, op.attr("act")) for op in after.ops if op.kind.startswith("conv"))
    assert acts == {("conv2d", "relu"): 9, ("conv2d", "none"): 3, ("conv_add_act", "relu"): 8}
    assert Counter(r.kind for r in after.recipes)["scale_rows"] == 20


def test_tables_of_angles_become_constants() -> None:
    before, after = traced("gr00t_n16_lm").graph, optimize(traced("gr00t_n16_lm").graph)
    assert kinds(before)["iota"] == 2
    assert not {"iota", "cast"} & set(kinds(after))
    assert [c.value.type.shape for c in after.constants] == [(12, 16), (12, 16)]


def test_a_residual_network_keeps_its_convolutions_and_norms_whole() -> None:
    found = kinds(traced("resnet18").graph)
    assert found["conv2d"] == found["batch_norm"] == 20
    assert set(found) == {"conv2d", "batch_norm", "unary", "binary", "pool2d", "reduce", "reshape", "linear"}


def test_norms_rotations_and_shared_heads_that_are_written_out_are_recognised() -> None:
    found = kinds(traced("llama").graph)
    assert (found["rms_norm"], found["rope"], found["attention"]) == (5, 4, 2)
    assert not found["broadcast"]  # repeat_interleave
    attention = next(op for op in traced("llama").graph.ops if op.kind == "attention")
    types = traced("llama").graph.types()
    assert [types[n].shape[1] for n in attention.inputs] == [4, 2, 2]


def test_rotation_of_halves_is_recognised() -> None:
    assert kinds(traced("gr00t_n16_lm").graph)["rope"] == 4


def test_tied_weights_are_one_and_buffers_are_weights() -> None:
    names = [w.name for w in traced("llama").graph.weights]
    assert "embed.weight" in names
    assert "head.weight" not in names
    assert "inverse" in names  # although it is in no state dict
    weights = traced("llama").weights
    assert weights["inverse"].shape == (8,)


def test_weights_have_the_names_of_the_state_dict() -> None:
    state = set(traced("resnet18").module.state_dict())
    names = {w.name for w in traced("resnet18").graph.weights}
    assert names < state
    assert all(name.endswith("num_batches_tracked") for name in state - names)


def test_text_of_every_model_comes_back() -> None:
    for name in ("resnet18", "llama", "bert"):
        graph = traced(name).graph
        verify(graph)
        assert parse(to_text(graph)) == graph
