"""Whole models: the same bits for every instruction set and any number of threads, and near to float64."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from compile_models import LanguageModel, resnet18, with_statistics
from torch import nn

import lf_hal
from lf_hal.lir import Graph
from lf_hal.lir.trace import trace, weights_of
from lf_hal.targets import TARGETS, missing_features

X86 = [n for n, t in TARGETS.items() if t.machine == "x86_64" and not missing_features(t)]
OTHERS = ["aarch64-neon", "riscv64", "loongarch64-lasx"]
EPS = 2.0**-24

Example = tuple[nn.Module, torch.Tensor]


def image_model() -> Example:
    torch.manual_seed(1)
    return with_statistics(resnet18(classes=10)), torch.randn(1, 3, 64, 64)


def language_model() -> Example:
    torch.manual_seed(2)
    model = LanguageModel(vocab=97, dim=64, layers=2, heads=4, kv_heads=2, hidden=172, length=32)
    return model.eval(), torch.randint(0, 97, (1, 19))


MODELS = {"resnet18": image_model, "language model": language_model}


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest) -> tuple[Graph, nn.Module, torch.Tensor]:
    module, example = MODELS[request.param]()
    return trace(module, (example,)), module, example


def run(graph: Graph, module: nn.Module, example: torch.Tensor, target: str, threads: int = 1) -> np.ndarray:
    with lf_hal.compile(graph, weights_of(module, graph), target) as made:
        (found,) = made.run([example.numpy()], threads=threads).values()
    return found


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint32)


def test_the_result_is_near_to_float64(case: tuple[Graph, nn.Module, torch.Tensor]) -> None:
    """Within 8 * K * eps of the largest value, K the longest sum of the model; torch's own float32 as a yardstick."""
    graph, module, example = case
    wide = copy.deepcopy(module).double()
    with torch.no_grad():
        exact = wide(example.double() if example.is_floating_point() else example).numpy()
        theirs = module(example).numpy()
    ours = run(graph, module, example, "native")
    longest = max(v.type.elements // v.type.shape[0] for v in graph.weights if len(v.type.shape) > 1)
    error, scale = np.abs(ours - exact).max(), np.abs(exact).max()
    assert error <= 8 * longest * EPS * scale
    assert error <= 8 * max(np.abs(theirs - exact).max(), EPS * scale)


def test_threads_change_no_bit(case: tuple[Graph, nn.Module, torch.Tensor]) -> None:
    graph, module, example = case
    one = run(graph, module, example, "native")
    for threads in (2, 3):
        assert np.array_equal(bits(run(graph, module, example, "native", threads)), bits(one))


def test_repeated_runs_give_the_same_bits(case: tuple[Graph, nn.Module, torch.Tensor]) -> None:
    graph, module, example = case
    with lf_hal.compile(graph, weights_of(module, graph), threads=2) as made:
        first, *others = (next(iter(made.run([example.numpy()]).values())) for _ in range(5))
    assert all(np.array_equal(bits(first), bits(o)) for o in others)


@pytest.mark.skipif(len(X86) < 2, reason="one instruction set here")
def test_instruction_sets_of_this_machine_agree(case: tuple[Graph, nn.Module, torch.Tensor]) -> None:
    graph, module, example = case
    first, *others = (run(graph, module, example, target) for target in X86)
    for other in others:
        assert np.array_equal(bits(other), bits(first))


@pytest.mark.cross
@pytest.mark.parametrize("target", OTHERS)
def test_other_machines_agree(case: tuple[Graph, nn.Module, torch.Tensor], target: str) -> None:
    graph, module, example = case
    here = run(graph, module, example, "native")
    for threads in (1, 2):
        assert np.array_equal(bits(run(graph, module, example, target, threads)), bits(here))


def test_a_saved_artefact_gives_the_same_bits(
    case: tuple[Graph, nn.Module, torch.Tensor], tmp_path: Path
) -> None:
    graph, module, example = case
    with lf_hal.compile(graph, weights_of(module, graph)) as made:
        (before,) = made.run([example.numpy()]).values()
        made.save(tmp_path / "model")
    with lf_hal.load(tmp_path / "model") as loaded:
        (after,) = loaded.run([example.numpy()]).values()
    assert np.array_equal(bits(after), bits(before))
