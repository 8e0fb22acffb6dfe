"""Compiled models of two targets, and torch, held to each other by check_consistency."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import nn

import lf_hal
from lf_hal import Run, check_consistency
from lf_hal.fp_guard import fp_state
from lf_hal.lir import Graph, reference
from lf_hal.targets import TARGETS, missing_features

X86 = [
    name for name, target in TARGETS.items() if target.machine == "x86_64" and not missing_features(target)
]
TERMS = 300
Weights = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def case() -> tuple[Graph, nn.Module, Weights, dict[str, np.ndarray]]:
    torch.manual_seed(5)
    module = nn.Linear(TERMS, 8).eval()
    example = torch.randn(3, TERMS)
    graph = lf_hal.trace(module, (example,))
    weights = {name: np.asarray(value) for name, value in lf_hal.weights_of(module, graph).items()}
    return graph, module, weights, {graph.inputs[0].name: example.numpy()}


def by_torch(graph: Graph, module: nn.Module) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
    def run(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with torch.no_grad():
            return {graph.outputs[0]: module(torch.from_numpy(inputs[graph.inputs[0].name])).numpy()}

    return run


def exact(graph: Graph, weights: Weights) -> Run:
    return Run("float64", lambda inputs: reference.run(graph, inputs, weights, "float64"))


@pytest.mark.skipif(len(X86) < 2, reason="one instruction set here")
def test_two_instruction_sets_have_the_same_bits(
    case: tuple[Graph, nn.Module, Weights, dict[str, np.ndarray]],
) -> None:
    graph, _, weights, inputs = case
    with lf_hal.compile(graph, weights, X86[0]) as one, lf_hal.compile(graph, weights, X86[-1]) as other:
        found = check_consistency(Run.of(one), Run.of(other), inputs)
        assert found.ok, found
        assert found.compared == (graph.outputs[0],)


def test_torch_has_other_bits_and_lies_in_the_bound(
    case: tuple[Graph, nn.Module, Weights, dict[str, np.ndarray]],
) -> None:
    graph, module, weights, inputs = case
    (x,) = inputs.values()
    sizes = {graph.outputs[0]: np.abs(x) @ np.abs(weights["weight"]).T + np.abs(weights["bias"])}
    theirs = Run("cpu:0", by_torch(graph, module), lf_hal.precision_settings("cpu:0"))
    with lf_hal.compile(graph, weights) as ours:
        found = check_consistency(
            Run.of(ours),
            theirs,
            inputs,
            "bound",
            reference=exact(graph, weights),
            k=TERMS,
            c=1.0,
            magnitude=sizes,
        )
        assert found.ok, found
        assert all(0 < b.worst < 1 for b in found.bounds)
        broken = nn.Linear(TERMS, 8)
        broken.load_state_dict({"weight": module.weight * 1.001, "bias": module.bias})
        other = Run("cpu:0", by_torch(graph, broken))
        found = check_consistency(
            Run.of(ours),
            other,
            inputs,
            "bound",
            reference=exact(graph, weights),
            k=TERMS,
            c=1.0,
            magnitude=sizes,
        )
        assert [b.device for b in found.bounds if b.worst > 1] == ["cpu:0"]


def test_a_thread_that_flushes_subnormals_changes_no_bit_of_a_compiled_model(
    case: tuple[Graph, nn.Module, Weights, dict[str, np.ndarray]],
) -> None:
    graph, _, weights, inputs = case
    tiny = {name: x * np.float32(1e-42) for name, x in inputs.items()}
    small = {name: w * np.float32(1e-42) if name == "bias" else w for name, w in weights.items()}
    with lf_hal.compile(graph, small) as made:
        (before,) = made.run(tiny).values()
        torch.set_flush_denormal(True)
        try:
            (after,) = made.run(tiny).values()
            wrong = fp_state().wrong
        finally:
            torch.set_flush_denormal(False)
    assert before.any()
    assert (after.view(np.uint32) == before.view(np.uint32)).all()
    assert wrong  # and the caller's own state is its own


@pytest.mark.cross
@pytest.mark.parametrize("target", ["aarch64-neon", "riscv64", "loongarch64-scalar", "loongarch64-lasx"])
def test_another_machine_has_the_same_bits(
    case: tuple[Graph, nn.Module, Weights, dict[str, np.ndarray]], target: str
) -> None:
    graph, _, weights, inputs = case
    with lf_hal.compile(graph, weights) as here, lf_hal.compile(graph, weights, target) as there:
        found = check_consistency(Run.of(here), Run.of(there), inputs)
        assert found.ok, found
        assert found.devices[1] == target
