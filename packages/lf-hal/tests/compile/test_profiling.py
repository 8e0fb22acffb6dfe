"""Profiles: every step is timed, rates follow from known work, counters are read or missing with a reason."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import lf_hal
from lf_hal import _counters, profiling
from lf_hal._counters import COUNTERS, Counters
from lf_hal.cli import main
from lf_hal.errors import HalError, InputError, WrongMachineError
from lf_hal.lir import Graph, TensorType, Value, make_op
from lf_hal.targets import TARGETS

X = Value("x", TensorType("f32", (32, 96)))
W = Value("w", TensorType("f32", (64, 96)))
Y = make_op("linear", "y", [X, W])
Z = make_op("softmax", "z", [Y.output])
GRAPH = Graph("toy", (X,), (W,), (), (Y, Z), ("z",))
RNG = np.random.default_rng(0)
WEIGHTS = {"w": RNG.standard_normal((64, 96)).astype(np.float32)}
INPUT = [RNG.standard_normal((32, 96)).astype(np.float32)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> lf_hal.Artifact:
    return lf_hal.compile(GRAPH, WEIGHTS, folder=tmp_path_factory.mktemp("profiled") / "toy")


def test_steps_have_times_shares_and_the_rates_of_their_work(made: lf_hal.Artifact) -> None:
    found = lf_hal.profile(made, INPUT, runs=5, counters=())
    assert [s.label for s in found.steps] == made.manifest["steps"] == ["linear y", "softmax z"]
    assert all(s.seconds > 0 for s in found.steps)
    assert sum(s.share for s in found.steps) == pytest.approx(1)
    linear, softmax = found.steps
    assert linear.gflops == pytest.approx(2 * 32 * 64 * 96 / linear.seconds / 1e9)
    assert linear.gbytes == pytest.approx(4 * (32 * 96 + 64 * 96 + 32 * 64) / linear.seconds / 1e9)
    assert softmax.gflops is None
    assert softmax.gbytes == pytest.approx(2 * 4 * 32 * 64 / softmax.seconds / 1e9)
    assert found.seconds >= max(s.seconds for s in found.steps)
    assert found.missing == {}


def test_looking_changes_no_result_and_leaves_nothing_open(made: lf_hal.Artifact) -> None:
    (before,) = made.run(INPUT).values()
    files = len(os.listdir("/proc/self/fd"))
    lf_hal.profile(made, INPUT, runs=2, threads=1, counters=tuple(COUNTERS))
    assert len(os.listdir("/proc/self/fd")) == files
    (after,) = made.run(INPUT).values()
    assert after.tobytes() == before.tobytes()


def test_every_counter_has_numbers_or_a_reason_and_hardware_is_never_zero(made: lf_hal.Artifact) -> None:
    found = lf_hal.profile(made, INPUT, runs=3, threads=1, counters=tuple(COUNTERS))
    counted = set(found.steps[0].counters)
    assert counted | found.missing.keys() == set(COUNTERS)
    assert not counted & found.missing.keys()
    assert all(found.missing.values())
    for name in counted:
        if COUNTERS[name][0] == 0:
            assert sum(s.counters[name] for s in found.steps) > 0


def test_a_counter_of_the_kernel_follows_the_work(made: lf_hal.Artifact) -> None:
    with Counters(["task-clock"]) as opened:
        if opened.missing:
            pytest.skip(f"no task-clock here: {opened.missing}")
    found = lf_hal.profile(made, INPUT, runs=5, threads=1, counters=("task-clock",))
    for step in found.steps:  # nanoseconds on the processor, which the clock on the wall passes by no less
        assert 0 < step.counters["task-clock"] < 1e9


@pytest.mark.parametrize(
    ("code", "word"),
    [(13, "forbidden"), (1, "forbidden"), (2, "no such counter"), (38, "sandbox"), (22, "Invalid")],
)
def test_what_the_kernel_refuses_is_said_in_words(code: int, word: str) -> None:
    assert word in _counters._reason(code)


def test_counters_that_took_turns_or_never_moved_have_no_numbers() -> None:
    opened = Counters(())
    opened.names = ["cycles", "instructions", "page-faults"]
    counts = np.zeros((1, 3, 3, 3), np.uint64)  # runs, marks, counters, (value, enabled, running)
    counts[0, :, :, 1] = [[0], [100], [200]]
    counts[0, :, 1:, 2] = [[0], [100], [200]]
    counts[0, :, 0, 0], counts[0, :, 0, 2] = [0, 50, 90], [0, 40, 90]
    values, missing = profiling._differences(counts, opened)
    assert values.keys() == {"page-faults"}
    assert "took turns" in missing["cycles"]
    assert "stayed at 0" in missing["instructions"]


def test_counters_of_one_thread_are_not_passed_off_as_those_of_two(made: lf_hal.Artifact) -> None:
    found = lf_hal.profile(made, INPUT, runs=1, threads=2, counters=("task-clock",))
    assert "threads=1" in found.missing["task-clock"]
    assert found.steps[0].counters == {}


def test_what_cannot_be_profiled_is_a_named_error(
    made: lf_hal.Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="runs=0"):
        lf_hal.profile(made, INPUT, runs=0)
    with pytest.raises(ValueError, match="cache-misses"):
        lf_hal.profile(made, INPUT, counters=("cash-misses",))
    with pytest.raises(InputError, match="x"):
        lf_hal.profile(made, [INPUT[0][:3]])
    manifest = {**made.manifest, "files": {"model": ""}, "target": "loongarch64-lasx"}
    monkeypatch.setattr(made, "manifest", manifest)
    monkeypatch.setattr(made, "target", TARGETS["loongarch64-lasx"])
    with pytest.raises(WrongMachineError, match="compile for native"):
        lf_hal.profile(made, INPUT)


def test_the_command_prints_steps_or_json(
    made: lf_hal.Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", INPUT[0])
    words = ["profile", str(made.folder), "--runs", "2", "--inputs", str(tmp_path / "x.npy")]
    assert main([*words, "--counters", "", "--threads", "1"]) == 0
    text = capsys.readouterr().out
    assert "GFLOP/s" in text
    assert "linear y" in text
    assert main(["profile", str(made.folder), "--runs", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == 1
    assert [s["label"] for s in found["steps"]] == ["linear y", "softmax z"]
    assert main([*words, "--counters", "cash-misses"]) == 1
    assert "cache-misses" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "x.npy")]) == 1
    assert "2 input files" in capsys.readouterr().err


def test_an_artefact_from_before_is_told_to_be_compiled_again(
    made: lf_hal.Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old:
        library = object()
        ffi = None

    monkeypatch.setattr(made, "_open", lambda threads: Old)
    with pytest.raises(HalError, match="compile it again"):
        made._timed(INPUT, 1, [])
