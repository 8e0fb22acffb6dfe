"""Trained by torch here, saved by lf-ckpt, run on an emulated LoongArch: the same logits and the same text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lir_models import Llama
from torch.nn import functional as F
from traced import EPS, longest_sum

import lf_hal
from lf_hal.consistency import Run, check_consistency
from lf_hal.lir import reference

TEXT = "the loong drinks from the river, and the river runs to the sea. " * 3
WINDOW, STEPS, NEW = 32, 150, 24
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hello_loongarch.py"


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Llama()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    tokens = torch.tensor(list(TEXT.encode()))
    for step in range(STEPS):
        starts = torch.randint(
            0, len(tokens) - WINDOW - 1, (4,), generator=torch.Generator().manual_seed(step)
        )
        rows = torch.stack([tokens[s : s + WINDOW + 1] for s in starts])
        optimizer.zero_grad()
        F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
    return net.eval(), optimizer


def written_on(artifact: lf_hal.Artifact, prompt: str) -> str:
    """What greedy decoding in a window of fixed length adds to the prompt."""
    ids = list(prompt.encode())
    for _ in range(NEW):
        window = (ids + [0] * WINDOW)[:WINDOW] if len(ids) < WINDOW else ids[-WINDOW:]
        (logits,) = artifact.run([np.array([window])]).values()
        ids.append(int(logits[0, min(len(ids), WINDOW) - 1].argmax()))
    return bytes(ids).decode()


@pytest.mark.cross
def test_a_checkpoint_of_torch_gives_the_same_logits_and_text_on_loongarch(tmp_path: Path) -> None:
    lf_ckpt = pytest.importorskip("lf_ckpt")
    net, optimizer = trained()
    with lf_ckpt.open(tmp_path / "run") as store:
        store.save(STEPS, *lf_ckpt.collect(net, optimizer)).wait()
        lf_ckpt.export_file(store, STEPS, tmp_path / "trained.lfckpt")
    ids = torch.tensor([list(TEXT.encode())[:WINDOW]])
    graph = lf_hal.trace(net, (ids,))
    saved = lf_hal.read_weights(tmp_path / "trained.lfckpt", prefix="model.")
    weights = {**lf_hal.weights_of(net, graph), **saved}  # rotary frequencies are no part of a state dict

    here = lf_hal.compile(graph, weights)
    there = lf_hal.compile(graph, weights, target="loongarch64-lasx")
    inputs = {graph.inputs[0].name: ids.numpy()}

    assert check_consistency(Run.of(here), Run.of(there), inputs).ok
    text = written_on(here, TEXT[:12])
    assert text == TEXT[: 12 + NEW]  # it has learned its sentence
    assert written_on(there, TEXT[:12]) == text

    (exact,) = reference.run(graph, inputs, weights, "float64").values()
    (logits,) = here.run(inputs).values()
    bound = longest_sum(graph) * EPS * np.abs(exact).max()
    assert np.abs(logits - exact).max() <= bound
    assert np.abs(net(ids).detach().numpy() - exact).max() <= bound


@pytest.mark.cross
def test_the_example_of_the_readme_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--out", tmp_path / "made"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "loongarch64-lasx (emulated): 0 differing bits" in done.stdout
