"""Programs on emulated processors with fewer vectors: they run where they can, and say so where not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import lf_hal
from lf_hal.lir import Graph, TensorType, Value, make_op

pytestmark = [
    pytest.mark.cross,
    pytest.mark.xdist_group("loongarch64"),
    pytest.mark.skipif(shutil.which("qemu-loongarch64") is None, reason="no qemu-user: use nox -s cross"),
]
X, W = Value("x", TensorType("f32", (3, 300))), Value("w", TensorType("f32", (40, 300)))
Y = make_op("linear", "y", [X, W])
GRAPH = Graph("toy", (X,), (W,), (), (Y,), ("y",))
RNG = np.random.default_rng(0)
WEIGHTS = {"w": RNG.standard_normal((40, 300)).astype(np.float32)}
INPUT = RNG.standard_normal((3, 300)).astype(np.float32)
NOTHING, LSX, LASX = "la464,lsx=off,lasx=off", "la464,lasx=off", "la464"


def ran(folder: Path, processor: str, emulator: str = "qemu-loongarch64") -> tuple[int, str, bytes]:
    """Status, complaint and output of the program in ``folder`` on such a processor."""
    INPUT.tofile(folder / "in.raw")
    files = [str(folder / name) for name in ("model", "weights.lfw", "in.raw", "out.raw")]
    words = [emulator, "-cpu", processor, *files]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    out = folder / "out.raw"
    return done.returncode, done.stderr, out.read_bytes() if out.exists() else b""


@pytest.fixture(scope="module")
def expected() -> bytes:
    with lf_hal.compile(GRAPH, WEIGHTS) as here:
        return here.run([INPUT])["y"].tobytes()


def test_what_is_for_all_runs_without_any_vectors(tmp_path: Path, expected: bytes) -> None:
    """The C library of a program must not need them either."""
    lf_hal.compile(GRAPH, WEIGHTS, "loongarch64", folder=tmp_path / "toy")
    assert ran(tmp_path / "toy", NOTHING) == (0, "", expected)


def test_lsx_runs_without_lasx_and_says_so_without_lsx(tmp_path: Path, expected: bytes) -> None:
    lf_hal.compile(GRAPH, WEIGHTS, "loongarch64-lsx", folder=tmp_path / "toy")
    status, said, found = ran(tmp_path / "toy", NOTHING)
    assert (status, found) == (5, b"")
    assert "no LSX; compile for loongarch64" in said
    assert ran(tmp_path / "toy", LSX) == (0, "", expected)


def test_the_switch_makes_lasx_which_says_so_where_it_is_not(tmp_path: Path, expected: bytes) -> None:
    switches = ["--enable-loongarch-optimization"]
    made = lf_hal.compile(GRAPH, WEIGHTS, "loongarch64", switches=switches, folder=tmp_path / "toy")
    assert made.target.name == "loongarch64-lasx"
    for processor in (NOTHING, LSX):
        status, said, found = ran(tmp_path / "toy", processor)
        assert (status, found) == (5, b"")
        assert "no LASX; compile for loongarch64-lsx" in said
    assert ran(tmp_path / "toy", LASX) == (0, "", expected)


def test_an_x86_program_says_what_its_processor_lacks(tmp_path: Path, expected: bytes) -> None:
    lf_hal.compile(GRAPH, WEIGHTS, "x86-64-avx2", compiler="zig", folder=tmp_path / "toy")
    status, said, found = ran(tmp_path / "toy", "qemu64", "qemu-x86_64")
    assert (status, found) == (5, b"")
    assert "no AVX2; compile for x86-64-sse2" in said
    assert ran(tmp_path / "toy", "max", "qemu-x86_64") == (0, "", expected)
