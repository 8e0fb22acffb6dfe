"""`lf-hal compile`: from an exported program to an artefact, and refusals as one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import lf_hal
from lf_hal.cli import main
from lf_hal.lir import Graph, TensorType, Value, make_op, to_text


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 4)).eval()
    example = torch.randn(3, 6)
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    torch.export.save(torch.export.export(module, (example,)), path)
    return path, module, example


def test_an_exported_program_is_compiled(
    exported: tuple[Path, nn.Module, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, module, example = exported
    assert main(["compile", str(path), "--out", str(tmp_path / "made"), "--threads", "2"]) == 0
    assert lf_hal.resolve_target("native").name in capsys.readouterr().out
    with lf_hal.load(tmp_path / "made") as made:
        (found,) = made.run([example.numpy()]).values()
    with torch.no_grad():
        np.testing.assert_allclose(found, module(example).numpy(), rtol=0, atol=1e-6)


def test_weights_are_stored_narrow_and_their_error_is_said(
    exported: tuple[Path, nn.Module, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", str(exported[0]), "--out", str(tmp_path / "made"), "--weights-dtype", "i8"]) == 0
    assert "2 weights stored as i8, relative error" in capsys.readouterr().out
    storage = lf_hal.load(tmp_path / "made").manifest["storage"]
    assert storage["dtype"] == "i8"
    assert 1e-3 < storage["relative_error"] < 1e-2


def test_a_graph_as_text_is_compiled(tmp_path: Path) -> None:
    x = Value("x", TensorType("f32", (4,)))
    op = make_op("unary", "y", [x], {"fn": "relu"})
    (tmp_path / "g.lir").write_text(to_text(Graph("g", (x,), (), (), (op,), ("y",))))
    assert main(["compile", str(tmp_path / "g.lir")]) == 0
    with lf_hal.load(tmp_path / f"g.{lf_hal.resolve_target('native').name}") as made:
        assert made.run([np.array([-1, 0, 2, -0.0], np.float32)])["y"].tolist() == [0, 0, 2, 0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "pdp11"], "loongarch64-lasx"),
        (
            ["--target", "x86-64-sse2", "--enable-loongarch-optimization"],
            "--enable-loongarch-optimization has no",
        ),
        (["--target", "loongarch64-scalar", "--enable-loongarch-optimization"], "loongarch64-lasx"),
        (["--threads", "0"], "at least 1"),
    ],
)
def test_refusals_are_one_line_and_make_nothing(
    exported: tuple[Path, nn.Module, torch.Tensor],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    out = tmp_path / "made"
    assert main(["compile", str(exported[0]), "--out", str(out), *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("lf-hal: ")
    assert said in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_what_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.onnx").write_bytes(b"x")
    (tmp_path / "broken.pt2").write_bytes(b"x")
    for name in ("model.onnx", "broken.pt2", "absent.pt2"):
        assert main(["compile", str(tmp_path / name)]) == 1
        assert name in capsys.readouterr().err
