"""torch.compile looks into the modules of use(): one graph, with the launches of the kernels in it."""

from __future__ import annotations

import pytest
import use_traced

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # transformers and the compiler
LAUNCH = "triton_kernel_wrapper_functional"
NORMS, LAYERS = 5, 1
CASES = [("same", False), ("autocast", False), ("autocast", True)]
Graphs = dict[tuple[str, bool], list[list[str]]]


@pytest.fixture(scope="module")
def graphs() -> Graphs:
    """The forward and the backward graph, for both kinds of outputs of norms, and for shapes that are symbols."""
    return dict(zip(CASES, use_traced.calls_of(*CASES), strict=True))


@pytest.mark.parametrize("outputs", ["same", "autocast"])
def test_forward_and_backward_are_one_graph_each_with_all_launches(graphs: Graphs, outputs: str) -> None:
    forward, backward = graphs[outputs, False]
    assert forward.count(LAUNCH) >= NORMS + LAYERS
    assert backward.count(LAUNCH) >= NORMS + LAYERS
    assert not [c for c in (*forward, *backward) if "scaled_dot_product" in c or "rsqrt" in c or "silu" in c]


def test_with_dynamic_shapes_there_are_as_many_launches(graphs: Graphs) -> None:
    dynamic, static = graphs["autocast", True], graphs["autocast", False]
    assert [g.count(LAUNCH) for g in dynamic] == [g.count(LAUNCH) for g in static]


def test_norms_that_give_the_dtype_of_autocast_spare_the_casts_of_the_products_behind_them(
    graphs: Graphs,
) -> None:
    casts = {o: [g.count("_to_copy.default") for g in graphs[o, False]] for o in ("same", "autocast")}
    products = 7 * LAYERS  # each casts what it reads: all but those of o_proj and down_proj read a norm
    assert casts["same"][0] - casts["autocast"][0] >= products - 2 * LAYERS
