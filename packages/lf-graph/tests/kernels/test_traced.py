"""torch.compile looks into the operators: it finds launches that write their own outputs only, and copies nothing."""

from __future__ import annotations

import pytest
import traced

OPERATORS = {
    "rms_norm": (1, 2),
    "layer_norm": (1, 2),
    "add_rms_norm": (1, 2),
    "add_layer_norm": (1, 2),
    "layer_norm_modulate": (1, 2),
    "add_layer_norm_modulate": (1, 2),
    "gated_residual": (1, 2),
    "qk_norm_rope": (1, 2),
    "rope": (1, 1),
}
LAUNCH = "triton_kernel_wrapper_functional"


@pytest.fixture(scope="module", params=[False, True], ids=["static", "dynamic"])
def calls(request: pytest.FixtureRequest) -> dict[str, list[list[str]]]:
    """Graphs of all operators, traced once with fixed shapes and once with symbols for them."""
    return traced.calls_of(list(OPERATORS), request.param)


@pytest.mark.parametrize("name", OPERATORS)
def test_forward_and_backward_are_their_launches(calls: dict[str, list[list[str]]], name: str) -> None:
    assert tuple(graph.count(LAUNCH) for graph in calls[name]) == OPERATORS[name]


@pytest.mark.parametrize("name", OPERATORS)
def test_no_input_counts_as_written_and_is_copied(calls: dict[str, list[list[str]]], name: str) -> None:
    assert not [c for graph in calls[name] for c in graph if "clone" in c or "copy" in c]
