"""torch.compile looks into activations and grouped products: launches that write outputs, no copies."""

from __future__ import annotations

import pytest
import traced

LAUNCHES = {  # of the forward and of the backward
    "swiglu": (1, 1),
    "swiglu packed": (1, 1),
    "swiglu weighted": (1, 1),
    "gelu_tanh": (1, 2),
    "grouped_gemm": (1, 2),
    "grouped_experts": (3, 6),
}
LAUNCH = "triton_kernel_wrapper_functional"
COPIES = ("clone", "copy_", "scatter", "contiguous")


@pytest.fixture(scope="module", params=[False, True], ids=["static", "dynamic"])
def calls(request: pytest.FixtureRequest) -> dict[str, list[list[str]]]:
    """Graphs of all operators, traced once with fixed shapes and once with symbols for them."""
    return traced.calls_of(list(LAUNCHES), request.param, "traced_products")


@pytest.mark.parametrize("name", LAUNCHES)
def test_forward_and_backward_are_their_launches(calls: dict[str, list[list[str]]], name: str) -> None:
    assert tuple(graph.count(LAUNCH) for graph in calls[name]) == LAUNCHES[name]


@pytest.mark.parametrize("name", LAUNCHES)
def test_nothing_is_copied(calls: dict[str, list[list[str]]], name: str) -> None:
    copied = [c for graph in calls[name] for c in graph if any(kind in c for kind in COPIES)]
    assert not [c for c in copied if not c.startswith("_to_copy")]  # casts of the test's own inputs


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("swiglu", (1, 2)),
        ("swiglu packed", (1, 1)),
        ("swiglu weighted", (1, 2)),
        ("gelu_tanh", (1, 3)),
        ("grouped_gemm", (1, 2)),
        ("grouped_experts", (4, 7)),
    ],
)
def test_launches_write_their_outputs_only(
    calls: dict[str, list[list[str]]], name: str, written: tuple[int, int]
) -> None:
    assert tuple(graph.count("getitem") for graph in calls[name]) == written
