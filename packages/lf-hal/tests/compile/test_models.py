"""Whole models: the same bits for every instruction set and any number of threads, and near to float64.

The models are those of the tracer's tests (ResNets, Llama, GPT-2, BERT, a detector's neck, LSTMs, both models of
lf-meta) and a ResNet-18 of full width. A model is compiled once for this machine; every other target is held to that.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compile_models import resnet18, with_statistics
from lir_models import NAMES
from traced import EPS, Traced, assert_close, longest_sum, of, traced

import lf_hal
from lf_hal.targets import TARGETS, missing_features

Outputs = dict[str, np.ndarray]
WIDE = "resnet18, 64 channels"
QUICK = ("resnet18", "llama", "bert", "yolo_neck", "lstm_cell", WIDE)


def of_model(name: str, *, quick: bool = True) -> Any:
    """The parameter of a model. One process does all with it in nox -s cross: it is traced and compiled once."""
    marks = [pytest.mark.xdist_group(name)] + ([] if quick else [pytest.mark.cross])
    return pytest.param(name, marks=marks, id=name.split(",")[0] + " wide" * (name == WIDE))


MODELS = [of_model(n, quick=n in QUICK) for n in (*NAMES, WIDE)]


def as_cross(parameter: Any) -> Any:
    return pytest.param(*parameter.values, marks=[*parameter.marks, pytest.mark.cross], id=parameter.id)


NATIVE = lf_hal.resolve_target("native")
OTHERS_HERE = [
    n for n, t in TARGETS.items() if t.machine == NATIVE.machine and t != NATIVE and not missing_features(t)
]
ELSEWHERE = [n for n, t in TARGETS.items() if t.machine != NATIVE.machine]


@cache
def model(name: str) -> Traced:
    if name != WIDE:
        return traced(name)
    torch.manual_seed(1)
    return of(with_statistics(resnet18(classes=10)), (torch.randn(1, 3, 64, 64),))


@cache
def made(name: str) -> lf_hal.Artifact:
    return lf_hal.compile(model(name).graph, model(name).weights)


@cache
def here(name: str) -> Outputs:
    return made(name).run(model(name).inputs)


def assert_same_bits(found: Outputs, expected: Outputs) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_as_near_to_float64_as_torch(name: str) -> None:
    case, found = model(name), here(name)
    bound = longest_sum(case.graph) * EPS
    for exact, theirs, ours in zip(case.run("float64"), case.expected, found.values(), strict=True):
        assert_close(ours, exact, bound)
        scale = np.abs(exact).max()
        assert np.abs(ours - exact).max() <= 8 * max(np.abs(theirs - exact).max(), EPS * scale)


@pytest.mark.parametrize("name", MODELS)
def test_neither_threads_nor_repetition_change_a_bit(name: str) -> None:
    for threads in (2, 3, 2, 1):
        assert_same_bits(made(name).run(model(name).inputs, threads=threads), here(name))


@pytest.mark.parametrize("target", OTHERS_HERE)
@pytest.mark.parametrize("name", [p if p.values[0] in ("llama", WIDE) else as_cross(p) for p in MODELS])
def test_instruction_sets_of_this_machine_agree(name: str, target: str) -> None:
    case = model(name)
    with lf_hal.compile(case.graph, case.weights, target) as other:
        for threads in (1, 2):
            assert_same_bits(other.run(case.inputs, threads=threads), here(name))


@pytest.mark.cross
@pytest.mark.parametrize("target", ELSEWHERE)
@pytest.mark.parametrize("name", MODELS)
def test_other_machines_agree(name: str, target: str) -> None:
    case = model(name)
    with lf_hal.compile(case.graph, case.weights, target) as other:
        for threads in (1, 2):
            assert_same_bits(other.run(case.inputs, threads=threads), here(name))


@pytest.mark.parametrize("name", ["resnet18", "llama"])
def test_a_saved_artefact_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    with made(name).save(tmp_path / "model") as loaded:
        assert_same_bits(loaded.run(model(name).inputs), here(name))


@pytest.mark.parametrize("name", ["resnet18", "yolo_neck"])
def test_images_are_turned_only_at_the_edges(name: str) -> None:
    """No step between convolutions copies: the copies are of inputs, outputs, and what is joined or reduced."""
    case = model(name)
    steps = made(name).manifest["steps"]
    joined = sum(len(op.inputs) for op in case.graph.ops if op.kind == "concat")
    text = (made(name).folder / "graph.c").read_text()
    copies = text.count("lf_copy_f32(")
    assert len(steps) > 20
    assert copies <= len(case.graph.inputs) + len(case.graph.outputs) + joined + 1


def test_a_checkpoint_has_the_bits_of_the_module_it_was_saved_from(tmp_path: Path) -> None:
    lf_ckpt = pytest.importorskip("lf_ckpt")
    with lf_ckpt.open(tmp_path / "store") as store:
        store.save(0, *lf_ckpt.collect(model("llama").module)).wait()
        lf_ckpt.export_file(store, 0, tmp_path / "step.lfckpt")
    saved = lf_hal.read_weights(tmp_path / "step.lfckpt", prefix="model.")
    buffers = dict(
        model("llama").module.named_buffers()
    )  # one of them is not persistent, so no checkpoint has it
    with lf_hal.compile(model("llama").graph, {**buffers, **saved}) as loaded:
        assert_same_bits(loaded.run(model("llama").inputs), here("llama"))


@pytest.mark.cross
@pytest.mark.parametrize("name", [of_model("llama"), of_model(WIDE)])
def test_gcc_and_clang_agree(name: str) -> None:
    case = model(name)
    with lf_hal.compile(case.graph, case.weights, compiler="zig") as program:
        assert_same_bits(program.run(case.inputs, threads=2), here(name))
