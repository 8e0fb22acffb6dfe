"""The toolchain: what is missing is said, what fails is shown, what was made is kept."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from lf_hal import build
from lf_hal.build import build_objects, emulator_command, find_compiler, link
from lf_hal.errors import CompilerFailedError, CompilerMissingError, EmulatorMissingError
from lf_hal.targets import TARGETS, Target, resolve_target

NATIVE = resolve_target("native")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LF_HAL_CACHE", str(tmp_path / "cache"))


def _source(folder: Path, text: str, name: str = "part.c") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_missing_gcc_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerMissingError, match="apt-get install gcc") as caught:
        find_compiler(NATIVE)
    assert (caught.value.compiler, caught.value.target) == ("gcc", NATIVE.name)


def test_a_missing_zig_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_zig", lambda: None)
    with pytest.raises(CompilerMissingError, match=r"pip install 'lf-hal\[zig\]'"):
        find_compiler(TARGETS["loongarch64-lasx"])


def test_gcc_of_this_machine_is_not_taken_for_another() -> None:
    other = next(t for t in TARGETS.values() if t.machine != NATIVE.machine)
    with pytest.raises(CompilerMissingError, match=other.machine):
        find_compiler(other, "gcc")


def test_a_missing_emulator_is_named_with_what_to_install() -> None:
    target = Target("toy", "toy", "toy-linux-musl", emulator=("qemu-of-no-machine",))
    with pytest.raises(EmulatorMissingError, match="qemu-user"):
        emulator_command(target)


def test_what_the_compiler_said_is_in_the_error(tmp_path: Path) -> None:
    source = _source(tmp_path, "int f(void) { return undeclared_thing; }\n")
    with pytest.raises(CompilerFailedError, match="undeclared_thing") as caught:
        build_objects(find_compiler(NATIVE), NATIVE, [source])
    assert caught.value.returncode != 0
    assert "undeclared_thing" in caught.value.output
    assert str(source) in caught.value.command


def test_a_library_is_built_and_works(tmp_path: Path) -> None:
    compiler = find_compiler(NATIVE)
    objects = build_objects(compiler, NATIVE, [_source(tmp_path, "int twice(int x) { return 2 * x; }\n")])
    link(compiler, NATIVE, objects, tmp_path / "lib.so", shared=True)
    assert ctypes.CDLL(str(tmp_path / "lib.so")).twice(21) == 42


def test_an_unresolved_name_fails_at_link_time(tmp_path: Path) -> None:
    compiler = find_compiler(NATIVE)
    text = "int absent(int); int f(void) { return absent(1); }\n"
    objects = build_objects(compiler, NATIVE, [_source(tmp_path, text)])
    with pytest.raises(CompilerFailedError, match="absent"):
        link(compiler, NATIVE, objects, tmp_path / "lib.so", shared=True)


def test_an_object_is_made_once_and_anew_when_source_header_or_flags_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    real = build.run_compiler
    monkeypatch.setattr(build, "run_compiler", lambda command: (runs.append(command), real(command)))
    compiler = find_compiler(NATIVE)
    include = tmp_path / "include"
    include.mkdir()
    header = _source(include, "#define N 1\n", "n.h")
    source = _source(tmp_path, '#include "n.h"\nint f(void) { return N; }\n')

    first = build_objects(compiler, NATIVE, [source], [include])
    assert build_objects(compiler, NATIVE, [source], [include]) == first
    assert len(runs) == 1

    header.write_text("#define N 2\n")
    second = build_objects(compiler, NATIVE, [source], [include])
    source.write_text(source.read_text() + "\n")
    third = build_objects(compiler, NATIVE, [source], [include])
    other = TARGETS["x86-64-sse2"] if NATIVE.machine == "x86_64" else NATIVE
    build_objects(compiler, other, [source], [include])
    assert len({*first, *second, *third}) == 3
    assert len(runs) == (4 if other is not NATIVE else 3)


def test_a_static_program_needs_no_library(tmp_path: Path) -> None:
    compiler = find_compiler(NATIVE)
    text = '#include <stdio.h>\nint main(void) { puts("hello"); return 0; }\n'
    objects = build_objects(compiler, NATIVE, [_source(tmp_path, text)])
    link(compiler, NATIVE, objects, tmp_path / "program", shared=False)
    assert (
        subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True).stdout == "hello\n"
    )
