"""A thread's floating-point state: set, verified, given back, and every foreign change found by its bit."""

import ctypes
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lf_hal.errors import FpStateError
from lf_hal.fp_guard import LAYOUTS, FpState, check_fp_state, fp_guard, fp_guarded, fp_state

GCC = shutil.which("gcc")
FE_UPWARD = {"x86_64": 0x800, "aarch64": 0x400000, "loongarch64": 0x200, "riscv64": 3}[platform.machine()]
TINY = np.float32(1e-40)
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="speaks of MXCSR")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Each test begins and ends in the default state, whatever it does between."""
    libm = ctypes.PyDLL("libm.so.6")
    env = ctypes.create_string_buffer(512)
    libm.fegetenv(env)
    yield
    libm.fesetenv(env)


def halved() -> float:
    """A subnormal times one half, in this thread: zero where subnormals are flushed."""
    return float((np.full(4, TINY) * np.float32(0.5))[0])


def test_the_default_state_of_a_thread_is_the_wanted_one() -> None:
    assert fp_state().wrong == ()
    check_fp_state("test")
    with fp_guard() as before:
        assert before == fp_state()
    assert halved() > 0


@x86
def test_torch_flushing_denormals_is_detected_and_named_by_its_bits() -> None:
    with pytest.raises(FpStateError) as caught, fp_guard("layer 3"):
        assert torch.set_flush_denormal(True)
    text = str(caught.value)
    assert "layer 3" in text
    assert "MXCSR.FTZ (bit 15) is 1" in text
    assert "MXCSR.DAZ (bit 6) is 1" in text
    assert len(caught.value.bits) == 2
    assert fp_state().wrong == ()


def test_a_state_set_before_is_changed_within_and_given_back() -> None:
    torch.set_flush_denormal(True)
    assert halved() == 0
    with fp_guard() as before:
        assert before.wrong
        assert halved() > 0
    assert halved() == 0
    assert fp_state() == before
    with pytest.raises(FpStateError, match="set_flush_denormal"):
        check_fp_state("test")


def test_a_rounding_direction_is_changed_within_and_its_change_is_detected() -> None:
    libm = ctypes.PyDLL("libm.so.6")
    libm.fesetround(FE_UPWARD)
    assert "rounding direction" in fp_state().wrong[0]
    with fp_guard():
        assert libm.fegetround() == 0
        assert np.float32(1) + np.float32(2**-25) == 1
    assert libm.fegetround() == FE_UPWARD
    libm.fesetround(0)
    with pytest.raises(FpStateError, match="rounding direction"), fp_guard():
        libm.fesetround(FE_UPWARD)
    assert libm.fegetround() == 0


@pytest.mark.skipif(GCC is None or platform.machine() != "x86_64", reason="needs gcc for x86-64")
def test_a_library_built_with_fast_math_is_found_when_it_is_loaded(tmp_path: Path) -> None:
    """gcc before 13 links code that sets FTZ and DAZ into every shared library made with -ffast-math."""
    (tmp_path / "fast.c").write_text("float twice(float x) { return 2 * x; }\n")
    library = tmp_path / "libfast.so"
    build = [str(GCC), "-shared", "-fPIC", "-ffast-math", "-o", library, tmp_path / "fast.c"]
    subprocess.run(build, check=True)
    code = "import ctypes, sys; from lf_hal.fp_guard import fp_state; ctypes.CDLL(sys.argv[1]); print(fp_state().wrong)"
    done = subprocess.run([sys.executable, "-c", code, library], capture_output=True, text=True, check=True)
    if "FTZ" not in done.stdout:
        pytest.skip("this gcc leaves the state alone")
    with pytest.raises(FpStateError, match="FTZ"), fp_guard():
        ctypes.CDLL(str(library))


def test_each_thread_has_its_own_state_and_guard() -> None:
    inside: list[FpState] = []

    @fp_guarded
    def work() -> None:
        inside.append(fp_state())

    def spoil_and_work() -> None:
        torch.set_flush_denormal(True)
        work()
        inside.append(fp_state())

    with fp_guard():
        thread = threading.Thread(target=spoil_and_work)
        thread.start()
        thread.join()
    assert inside[0].wrong == ()
    assert inside[1].wrong


def test_a_worker_that_spoils_its_state_is_named() -> None:
    @fp_guarded
    def worker() -> None:
        torch.set_flush_denormal(True)

    with pytest.raises(FpStateError, match="worker"):
        worker()


def test_an_exception_of_the_body_goes_on_with_a_note_and_the_state_is_given_back() -> None:
    def body() -> None:
        torch.set_flush_denormal(True)
        raise KeyError("x")

    with pytest.raises(KeyError) as caught, fp_guard("kernel"):
        body()
    assert "kernel: meanwhile" in caught.value.__notes__[0]
    assert fp_state().wrong == ()


def test_guards_nest_and_keep_exception_flags() -> None:
    libm = ctypes.PyDLL("libm.so.6")
    libm.feclearexcept(0x3D)
    with fp_guard(), fp_guard():
        np.float32(1) / np.float32(3)
    assert libm.fetestexcept(0x3D) & 0x20 or platform.machine() != "x86_64"  # inexact


def test_a_machine_nobody_knows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    with pytest.raises(FpStateError, match="vax"):
        fp_state()


@pytest.mark.parametrize(
    ("machine", "word", "named"),
    [
        ("x86_64", 0x1F80, ()),
        ("x86_64", 0x9FC0, ("FTZ (bit 15) is 1", "DAZ (bit 6) is 1")),
        ("x86_64", 0x7F80, ("RC (bit 13) is 3",)),
        ("aarch64", 1 << 24 | 2 << 22, ("FZ (bit 24) is 1", "RMode (bit 22) is 2")),
        ("aarch64", 0x1F00, ()),  # trap enables
        ("loongarch64", 0x300, ("RM (bit 8) is 3",)),
        ("loongarch64", 0x1F00_001F, ()),  # cause and enables
        ("riscv64", 0xE1, ("frm (bit 5) is 7",)),
        ("riscv64", 0x1F, ()),  # flags
    ],
)
def test_bits_are_read_as_each_architecture_lays_them_out(
    machine: str, word: int, named: tuple[str, ...]
) -> None:
    first = LAYOUTS[machine][0]
    env = bytes(first.offset) + word.to_bytes(4, "little") + bytes(8)
    wrong = FpState.of(machine, env).wrong
    assert len(wrong) == len(named)
    assert all(part in text for part, text in zip(named, wrong, strict=True))


@pytest.mark.parametrize("machine", LAYOUTS)
def test_a_field_is_put_where_it_is_read_and_nowhere_else(machine: str) -> None:
    env = bytes(range(64))
    for field in LAYOUTS[machine]:
        for value in range(1 << field.width):
            put = field.put(env, value)
            assert field.of(put) == value
            assert field.put(put, field.of(env)) == env
            others = [f for f in LAYOUTS[machine] if f is not field]
            assert [f.of(put) for f in others] == [f.of(env) for f in others]
