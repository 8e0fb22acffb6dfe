"""Artefacts: what a run accepts, what is refused by name, and that no changed file is ever executed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import lf_hal
from lf_hal import artifact as artifact_module
from lf_hal import build
from lf_hal.errors import (
    ArtifactError,
    CompilerMissingError,
    HalError,
    InputError,
    RunFailedError,
    UnknownTargetError,
    UnsupportedOpError,
    WeightsError,
    WrongMachineError,
    WrongTargetError,
)
from lf_hal.lir import Graph, TensorType, Value, make_op
from lf_hal.targets import TARGETS, missing_features

X = Value("ids", TensorType("i64", (3,)))
TABLE = Value("table.weight", TensorType("f32", (5, 4)))
W = Value("head.weight", TensorType("f32", (2, 4)))
FOUND = make_op("embedding", "found", [TABLE, X])
OUT = make_op("linear", "out", [FOUND.output, W])
GRAPH = Graph("toy", (X,), (TABLE, W), (), (FOUND, OUT), ("out", "found"))
WEIGHTS = {
    "table.weight": np.arange(20, dtype=np.float32).reshape(5, 4),
    "head.weight": np.array([[1, 0, 0, 0], [0.5, 0.5, 0.5, 0.5]], np.float32),
}
IDS = np.array([4, 0, 2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "toy"
    lf_hal.compile(GRAPH, WEIGHTS, folder=path)
    return path


def check(artifact: lf_hal.Artifact) -> None:
    with artifact:
        found = artifact.run({"ids": IDS})
    assert list(found) == ["out", "found"]
    rows = WEIGHTS["table.weight"][IDS]
    assert np.array_equal(found["found"], rows)
    assert np.array_equal(found["out"], np.stack([rows[:, 0], rows.sum(1) / 2], 1))


def test_threads_of_python_wait_for_each_other(folder: Path) -> None:
    wide = np.arange(4000, dtype=np.float32).reshape(1000, 4)
    rows = Value("rows", TensorType("f32", (1000, 4)))
    out = make_op("linear", "out", [rows, W])
    graph = Graph("wide", (rows,), (W,), (), (out,), ("out",))

    with lf_hal.compile(graph, WEIGHTS, threads=2) as artifact, ThreadPoolExecutor(4) as pool:
        inputs = [wide + i for i in range(200)]
        found = [r["out"] for r in pool.map(lambda x: artifact.run([x]), inputs)]

    assert all(np.array_equal(y[:, 0], x[:, 0]) for x, y in zip(inputs, found, strict=True))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_opens_the_model_anew(folder: Path) -> None:
    with lf_hal.load(folder) as artifact:
        artifact.run({"ids": IDS}, threads=2)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                check(
                    artifact
                )  # runs with threads of its own, and closes: the parent's are not there to wait for
                status = 0
            finally:
                os._exit(status)
        assert _status_of(child) == 0
        check(artifact)


def _status_of(child: int) -> int:
    """The exit status of a child, which is killed if it does not end."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def test_compiled_saved_and_loaded_it_computes_the_same(folder: Path, tmp_path: Path) -> None:
    check(lf_hal.compile(GRAPH, WEIGHTS))
    check(lf_hal.load(folder))
    check(lf_hal.load(folder).save(tmp_path / "copy"))
    assert sorted(p.name for p in (tmp_path / "copy").iterdir()) == sorted(p.name for p in folder.iterdir())


def test_the_manifest_says_what_was_made(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["target"] == lf_hal.resolve_target("native").name
    assert manifest["order"] == 1
    assert "-ffp-contract=off" in manifest["compiler"]["flags"]
    assert manifest["inputs"] == [{"name": "ids", "dtype": "i64", "shape": [3]}]
    assert set(manifest["files"]) == {"graph.c", "model.so"}


def _sealed(folder: Path, copy: Path, changes: dict[str, object]) -> Path:
    """A copy of an artefact whose manifest says something else, with a hash of itself that is right."""
    shutil.copytree(folder, copy)
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, value in changes.items():
        manifest.pop(name) if value is None else manifest.update({name: value})
    manifest["sha256"] = artifact_module._seal(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


@pytest.mark.parametrize("name", ["files", "weights_head", "steps", "threads", "inputs", "outputs", "target"])
@pytest.mark.parametrize("value", [None, 0, "x", [1], {"a": 1}, {"../model.so": "0"}], ids=str)
def test_a_manifest_of_other_fields_is_a_typed_error(
    folder: Path, tmp_path: Path, name: str, value: object
) -> None:
    with pytest.raises(HalError):
        lf_hal.load(_sealed(folder, tmp_path / "made", {name: value}))


def test_a_library_that_the_manifest_does_not_name_is_not_run(folder: Path, tmp_path: Path) -> None:
    files = json.loads((folder / "manifest.json").read_text())["files"]
    other = {"model": files["model.so"], "graph.c": files["graph.c"]}
    made = _sealed(folder, tmp_path / "made", {"files": other})
    shutil.copy2(made / "model.so", made / "model")
    (made / "model.so").write_bytes(b"somebody else's")

    with pytest.raises(RunFailedError, match="made/model -t"):
        lf_hal.load(made).run({"ids": IDS})


@pytest.mark.parametrize("name", ["manifest.json", "graph.c", "model.so", "weights.lfw"])
def test_a_flipped_byte_anywhere_is_an_error_before_anything_runs(
    folder: Path, tmp_path: Path, name: str
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    good = (copy / name).read_bytes()
    for place in {0, len(good) // 3, len(good) // 2, len(good) - 2}:
        bad = bytearray(good)
        bad[place] ^= 4
        (copy / name).write_bytes(bad)
        with pytest.raises(ArtifactError) as caught:
            lf_hal.load(copy).run([IDS])
        assert caught.value.path == copy / name


@pytest.mark.parametrize("name", ["manifest.json", "graph.c", "model.so", "weights.lfw"])
def test_an_absent_file_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / name).unlink()
    with pytest.raises(ArtifactError, match="not there") as caught:
        lf_hal.load(copy)
    assert caught.value.path == copy / name


def test_whole_weights_of_another_model_are_found_out(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    other = lf_hal.compile(GRAPH, {n: w + 1 for n, w in WEIGHTS.items()})
    shutil.copy(other.folder / "weights.lfw", copy / "weights.lfw")
    with pytest.raises(ArtifactError, match="exchanged"):
        lf_hal.load(copy)


def test_inputs_are_checked_and_never_converted(folder: Path) -> None:
    with lf_hal.load(folder) as artifact:
        for wrong in (IDS.astype(np.int32), IDS[:2], IDS.reshape(1, 3)):
            with pytest.raises(InputError, match=r"i64\[3\]"):
                artifact.run([wrong])
        with pytest.raises(InputError, match="nothing"):
            artifact.run({})
        with pytest.raises(InputError, match="'idz'"):
            artifact.run({"ids": IDS, "idz": IDS})
        with pytest.raises(InputError, match="1 arrays"):
            artifact.run([])
        with pytest.raises(ValueError, match="threads=0"):
            artifact.run([IDS], threads=0)
        assert artifact.run([np.arange(12)[::4] % 5])["out"].shape == (3, 2)  # strided


def test_an_index_outside_its_table_names_the_step_and_the_place(folder: Path) -> None:
    with lf_hal.load(folder) as artifact:
        for bad in (np.array([1, 5, 0]), np.array([1, -1, 9])):
            with pytest.raises(RunFailedError, match="embedding found, index number 1"):
                artifact.run([bad])
        artifact.run([IDS])


def test_weights_are_checked_by_name(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"'head\.weight'.*nothing"):
        lf_hal.compile(GRAPH, {"table.weight": WEIGHTS["table.weight"]})
    with pytest.raises(WeightsError, match="float64"):
        lf_hal.compile(GRAPH, {n: w.astype(np.float64) for n, w in WEIGHTS.items()})


def test_refusals_come_before_any_compiler_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    monkeypatch.setattr(build, "run_compiler", lambda command: pytest.fail("a compiler ran"))
    with pytest.raises(UnknownTargetError):
        lf_hal.compile(GRAPH, WEIGHTS, "pdp11")
    with pytest.raises(WrongTargetError):
        lf_hal.compile(GRAPH, WEIGHTS, "x86-64-avx2", switches=["--enable-loongarch-optimization"])
    monkeypatch.setattr(build, "_zig", lambda: None)
    with pytest.raises(CompilerMissingError):
        lf_hal.compile(GRAPH, WEIGHTS, "loongarch64-lasx")
    with pytest.raises(ArtifactError, match="not empty"):
        lf_hal.compile(GRAPH, WEIGHTS, folder=folder)


def test_what_has_no_c_form_is_named() -> None:
    x = Value("x", TensorType("bf16", (4,)))
    op = make_op("softmax", "y", [x])
    with pytest.raises(UnsupportedOpError, match="bf16") as caught:
        lf_hal.compile(Graph("g", (x,), (), (), (op,), ("y",)), {})
    assert (caught.value.op, caught.value.kind) == ("y", "softmax")


def test_code_for_another_processor_is_not_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = [t for t in TARGETS.values() if t.machine == "x86_64" and missing_features(t)]
    artifact = lf_hal.load(folder)
    monkeypatch.setattr("lf_hal.artifact.missing_features", lambda target: ("avx9",))
    with pytest.raises(WrongMachineError, match="avx9"):
        artifact.run([IDS])
    assert all(t.name != artifact.target.name for t in lacking)


def test_a_graph_may_return_its_inputs_weights_and_views() -> None:
    x = Value("x", TensorType("f32", (2, 3)))
    w = Value("w", TensorType("f32", (2,)))
    turned = make_op("permute", "turned", [x], {"perm": (1, 0)})
    half = make_op("slice", "half", [turned.output], {"axis": 0, "start": 1, "end": 3})
    graph = Graph("views", (x,), (w,), (), (turned, half), ("x", "w", "turned", "half", "half"))
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    with lf_hal.compile(graph, {"w": a[:, 0]}) as artifact:
        found = artifact.run([a])
    assert list(found) == ["x", "w", "turned", "half"]  # each once
    for name, expected in (("x", a), ("w", a[:, 0]), ("turned", a.T), ("half", a.T[1:])):
        assert np.array_equal(found[name], expected)


@pytest.fixture(scope="module")
def program(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same graph as a static program, as other machines get it, here by gcc."""
    native = lf_hal.resolve_target("native")
    runtime = Path(build.__file__).parent / "codegen" / "c"
    sources = [
        *sorted(build.CSRC.glob("*.c")),
        runtime / "lf_runtime.c",
        runtime / "lf_main.c",
        folder / "graph.c",
    ]
    compiler = build.find_compiler(native)
    objects = build.build_objects(compiler, native, sources, [build.CSRC, runtime])
    out = tmp_path_factory.mktemp("program") / "model"
    build.link(compiler, native, objects, out, shared=False)
    return out


def execute(program: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=False)


def test_a_program_reads_and_writes_raw_arrays(program: Path, folder: Path, tmp_path: Path) -> None:
    IDS.tofile(tmp_path / "ids")
    done = execute(
        program, "-t", 2, "-r", 3, folder / "weights.lfw", *(tmp_path / n for n in ("ids", "out", "found"))
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) > 0
    with lf_hal.load(folder) as artifact:
        for name, array in artifact.run([IDS]).items():
            assert (tmp_path / name).read_bytes() == array.tobytes()


def test_a_program_refuses_what_is_not_its_own(program: Path, folder: Path, tmp_path: Path) -> None:
    IDS.tofile(tmp_path / "ids")
    places = [tmp_path / n for n in ("ids", "out", "found")]
    weights, bad = folder / "weights.lfw", tmp_path / "bad.lfw"
    assert execute(program, weights).returncode == 2
    assert execute(program, tmp_path / "none", *places).returncode == 3
    good = weights.read_bytes()
    for place in (0, 9, 40, 50, 100, 4000, len(good) - 1):
        bad.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        done = execute(program, bad, *places)
        assert (done.returncode, str(bad) in done.stderr) == (3, True)
    bad.write_bytes(good[:-64])
    assert execute(program, bad, *places).returncode == 3
    np.array([1, 7, 2]).tofile(tmp_path / "ids")
    done = execute(program, weights, *places)
    assert done.returncode == 4
    assert "index 1 is outside its table" in done.stderr
    IDS[:2].tofile(tmp_path / "ids")
    assert execute(program, weights, *places).returncode == 3
    assert not (tmp_path / "out").exists()
