"""torch.compile looks into the modules of use(): one graph, with the launches of the kernels in it."""

from __future__ import annotations

import pytest
import use_traced

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # a process, transformers and the compiler for each graph
LAUNCH = "triton_kernel_wrapper_functional"
NORMS, LAYERS = 5, 1


@pytest.fixture(scope="module")
def graphs() -> dict[str, list[list[str]]]:
    """The forward and the backward graph, for both kinds of outputs of norms."""
    return {outputs: use_traced.calls_of(outputs, False) for outputs in ("same", "autocast")}


@pytest.mark.parametrize("outputs", ["same", "autocast"])
def test_forward_and_backward_are_one_graph_each_with_all_launches(
    graphs: dict[str, list[list[str]]], outputs: str
) -> None:
    forward, backward = graphs[outputs]
    assert forward.count(LAUNCH) >= NORMS + LAYERS
    assert backward.count(LAUNCH) >= NORMS + LAYERS
    assert not [c for c in (*forward, *backward) if "scaled_dot_product" in c or "rsqrt" in c or "silu" in c]


def test_with_dynamic_shapes_there_are_as_many_launches(graphs: dict[str, list[list[str]]]) -> None:
    dynamic = use_traced.calls_of("autocast", True)
    assert [g.count(LAUNCH) for g in dynamic] == [g.count(LAUNCH) for g in graphs["autocast"]]


def test_norms_that_give_the_dtype_of_autocast_spare_the_casts_of_the_products_behind_them(
    graphs: dict[str, list[list[str]]],
) -> None:
    casts = {outputs: [g.count("_to_copy.default") for g in graphs[outputs]] for outputs in graphs}
    products = 7 * LAYERS  # each casts what it reads: all but those of o_proj and down_proj read a norm
    assert casts["same"][0] - casts["autocast"][0] >= products - 2 * LAYERS
