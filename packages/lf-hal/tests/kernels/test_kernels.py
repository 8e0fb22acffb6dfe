"""The C kernels against the order of operations, bit by bit, as this machine builds and runs them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import kernel_cases as cases
import numpy as np
import order_v1 as order
import pytest
from kernel_runs import PANEL, SOURCES, Program, build_driver

from lf_hal.build import CSRC, find_compiler, run_compiler
from lf_hal.targets import TARGETS, missing_features, resolve_target

f32 = np.float32
NATIVE = resolve_target("native")
HERE = [t for t in TARGETS.values() if t.machine == NATIVE.machine]


@pytest.fixture(scope="module")
def program() -> Program:
    return cases.all_cases()


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(NATIVE, tmp_path_factory.mktemp("native"))


@pytest.mark.parametrize("target", HERE, ids=lambda t: t.name)
def test_every_result_has_the_bits_of_the_order(target, program: Program, tmp_path: Path) -> None:
    if missing := missing_features(target):
        pytest.skip(f"this machine cannot run {target.name}: no {', '.join(missing)}")
    driver = build_driver(target, tmp_path)
    results = program.run([str(driver)])
    assert len(results) > 250
    assert cases.differences(program.expected, results) == {}


def test_a_kernel_writes_nothing_but_its_output(program: Program, native: Path) -> None:
    results = program.run([str(native)])
    quiet = Program(
        program.memory, program.calls, {"everything": cases.Place(0, (program.size,))}, {}, program.size
    )
    before = np.concatenate(program.memory)
    after = quiet.run([str(native)])["everything"].view(np.uint32)
    written = before != after
    allowed = np.zeros(program.size, bool)
    for place in program.outputs.values():
        allowed[place.offset : place.offset + int(np.prod(place.shape))] = True
    padding = before == 0x7FC12345
    assert not (written & padding).any()
    assert results.keys() == program.expected.keys()
    assert allowed[written].mean() > 0.2  # the rest is packed weights and scratch


def _linear(driver: Path, a: np.ndarray, w: np.ndarray, cuts: list[int]) -> np.ndarray:
    (m, k), n = a.shape, w.shape[0]
    p = Program()
    panels = cases.panels(n)
    packed, where = p.put(np.zeros(panels * k * PANEL, f32)), p.put(a)
    p.call("pack_b", packed, p.put(w), 1, k, k, n, 0, panels)
    y = p.out("y", (m, n))
    for begin, end in zip([0, *cuts], [*cuts, m], strict=True):
        p.call("gemm", y, n, where, k, packed, k, n, begin, end, 0, panels, 0)
    return p.run([str(driver)])["y"]


def test_a_row_has_the_same_bits_alone_and_in_any_batch(native: Path) -> None:
    a, w = cases.values("random", 31, 700, seed=60), cases.values("random", 90, 700, seed=61)
    whole = _linear(native, a, w, [])
    for cuts in ([1, 2, 3], [13], [7, 30], list(range(1, 31))):
        assert (order.canonical(_linear(native, a, w, cuts)) == order.canonical(whole)).all()
    for row in (0, 5, 30):
        alone = _linear(native, a[row : row + 1], w, [])
        assert (order.canonical(alone[0]) == order.canonical(whole[row])).all()


def test_long_sums_are_no_less_accurate_than_torch(native: Path) -> None:
    torch = pytest.importorskip("torch")
    a, w = cases.values("random", 64, 2048, seed=62), cases.values("random", 96, 2048, seed=63)
    exact = a.astype(np.float64) @ w.T.astype(np.float64)
    ours = np.abs(_linear(native, a, w, []) - exact)
    theirs = np.abs(torch.nn.functional.linear(torch.from_numpy(a), torch.from_numpy(w)).numpy() - exact)
    assert np.sqrt((ours**2).mean()) <= np.sqrt((theirs**2).mean())
    bound = 2048 * 2.0**-24 * (np.abs(a).astype(np.float64) @ np.abs(w.T).astype(np.float64))
    assert (ours <= bound).all()


def test_kernels_compile_without_warnings_and_need_only_memcpy_and_memset(tmp_path: Path) -> None:
    compiler = find_compiler(NATIVE)
    objects = []
    for source in SOURCES:
        objects.append(tmp_path / f"{source.stem}.o")
        strict = ["-Wall", "-Wextra", "-Werror", "-O1", f"-I{CSRC}"]
        run_compiler(
            [*compiler.command, *compiler.flags(NATIVE), *strict, "-c", str(source), "-o", str(objects[-1])]
        )
    together = tmp_path / "together.o"
    run_compiler([*compiler.command, "-nostdlib", "-r", *map(str, objects), "-o", str(together)])
    undefined = {name for name in _undefined(together) if not name.startswith("_GLOBAL_OFFSET_TABLE_")}
    assert undefined <= {"memcpy", "memset"}


def _undefined(path: Path) -> set[str]:
    said = subprocess.run(["nm", "-u", str(path)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in said.splitlines()}
