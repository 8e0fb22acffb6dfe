"""Weights read past the page cache: the same bytes, the same checks, and a reason where the system refuses."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lf_hal
from lf_hal import direct
from lf_hal.errors import ArtifactError, HalError
from lf_hal.lir import Graph, TensorType, Value, make_op
from lf_hal.weights import open_weights, write_weights

X, W = Value("x", TensorType("f32", (2, 64))), Value("w", TensorType("f32", (96, 64)))
OUT = make_op("linear", "out", [X, W])
GRAPH = Graph("toy", (X,), (W,), (), (OUT,), ("out",))
RNG = np.random.default_rng(0)
WEIGHTS = {"w": RNG.standard_normal((96, 64)).astype(np.float32)}
INPUT = RNG.standard_normal((2, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "toy"
    lf_hal.compile(GRAPH, WEIGHTS, folder=path)
    return path


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system without direct reads."""
    real = os.open

    def opened(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.parametrize("size", [1, 64, 4095, 4096, 4097, 100_000, (8 << 20) + 12345])
def test_all_bytes_come_into_aligned_memory(size: int, tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    raw = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    path.write_bytes(raw.tobytes())
    found, report = direct.read_file(path)
    assert np.array_equal(found, raw)
    assert found.ctypes.data % 4096 == 0
    assert report.nbytes == size
    assert (report.used, report.direct_bytes) == ("direct", size) or report.reason


def test_a_model_is_the_same_and_says_how_its_weights_were_read(folder: Path) -> None:
    with lf_hal.load(folder) as mapped, lf_hal.load(folder, io_strategy="direct") as read:
        assert read.weights_io is None
        assert mapped.run([INPUT])["out"].tobytes() == read.run([INPUT])["out"].tobytes()
        assert mapped.weights_io is not None
        assert mapped.weights_io.used == "mmap"
        assert read.weights_io is not None
        assert read.weights_io.asked == "direct"
        assert (read.weights_io.used == "direct") == (read.weights_io.reason == "")


@pytest.mark.usefixtures("refusing")
def test_a_refusal_is_reported_and_the_model_runs(folder: Path) -> None:
    with lf_hal.load(folder, io_strategy="direct") as made:
        np.testing.assert_allclose(made.run([INPUT])["out"], INPUT @ WEIGHTS["w"].T, rtol=0, atol=1e-4)
        assert made.weights_io == direct.ReadReport(
            "direct",
            "buffered",
            "opening with O_DIRECT: Invalid argument",
            (folder / "weights.lfw").stat().st_size,
        )


def test_a_refusal_in_the_middle_goes_on_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, raw = tmp_path / "bytes", os.urandom((8 << 20) + 777)
    path.write_bytes(raw)
    real, calls = os.preadv, []

    def read(file: int, parts: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, parts, offset)

    monkeypatch.setattr(os, "preadv", read)
    found, report = direct.read_file(path)
    assert found.tobytes() == raw
    if report.direct_bytes:  # else the file system of the tests refuses at once
        assert report.direct_bytes == 8 << 20
        assert report.reason == f"a direct read at byte {8 << 20}: Invalid argument"


def test_a_failing_disk_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bytes").write_bytes(bytes(5000))

    def read(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(OSError, match="Input/output error"):
        direct.read_file(tmp_path / "bytes")


@pytest.mark.parametrize("refused", [False, True])
def test_every_changed_part_is_found_as_it_is_when_mapped(
    refused: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if refused:
        request.getfixturevalue("refusing")
    path = tmp_path / "weights.lfw"
    write_weights(path, {"w": ("f32", WEIGHTS["w"]), "ids": ("i64", np.arange(9))})
    good = path.read_bytes()
    for place in (3, 20, 50, 70, 4096, 5000, len(good) - 1):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(ArtifactError) as caught:
            open_weights(path, io_strategy="direct")
        with pytest.raises(ArtifactError) as mapped:
            open_weights(path)
        assert str(caught.value) == str(mapped.value)
    for cut in (0, 10, 64, 4096, len(good) - 1):
        path.write_bytes(good[:cut])
        with pytest.raises(ArtifactError):
            open_weights(path, io_strategy="direct")
    with pytest.raises(ArtifactError, match="not there"):
        open_weights(tmp_path / "none.lfw", io_strategy="direct")


def test_other_strategies_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"io_strategy='odirect'.*mmap, direct"):
        lf_hal.load(folder, io_strategy="odirect")


@pytest.mark.cross
def test_a_program_maps_its_weights_itself(tmp_path: Path) -> None:
    lf_hal.compile(GRAPH, WEIGHTS, compiler="zig", folder=tmp_path / "program")
    with pytest.raises(HalError, match="maps its weights itself"):
        lf_hal.load(tmp_path / "program", io_strategy="direct")
