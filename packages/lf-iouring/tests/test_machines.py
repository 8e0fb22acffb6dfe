"""The C code as programs, on this machine and on emulated ones: which engine serves, and the same results.

Programs for other machines are linked statically with musl by zig and run by qemu-user, which has no io_uring; they
are marked ``cross``, and ``nox -s cross`` brings what they need.
"""

import errno
import importlib.util
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import xxhash

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "csrc").glob("*.c"))
PROGRAMS = ["served_main.c", "native_main.c", "write_main.c", "pack_main.c"]
ELSEWHERE = ["aarch64", "loongarch64"]
LINK = {"loongarch64": ["-mno-lsx"]}  # a musl that runs on every one
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
SIZE, LONGEST, EXTENTS, SPOILT = 64 * 5000, 5000, 63, 41  # as in served_main.c, whose first row is empty
RING_OR_REASON = {0, errno.EPERM, errno.ENOSYS, errno.ENOMEM}

here = pytest.param("native", marks=pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"))
# what is built for a machine is built by one process
there = [pytest.param(m, marks=[pytest.mark.cross, pytest.mark.xdist_group(m)]) for m in ELSEWHERE]


def tools(machine):
    """(words of the compiler, words that start a program)."""
    if machine == "native":
        return ["cc"], []
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("no zig: use nox -s cross")
    emulator = shutil.which(f"qemu-{machine}")
    if emulator is None:
        pytest.skip(f"no qemu-{machine}: use nox -s cross")
    return [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-musl"], [emulator]


def must(words, folder):
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """program(main, machine) -> words that run a program of tests/ with all of the C code."""

    @cache
    def objects(machine):
        folder = tmp_path_factory.mktemp(machine)
        must([*tools(machine)[0], "-std=gnu11", "-O2", *WARNINGS, "-c", *SOURCES], folder)
        return sorted(folder.glob("*.o"))

    @cache
    def build(main, machine):
        compiler, emulator = tools(machine)
        folder = tmp_path_factory.mktemp(f"{machine}-program")
        source = Path(__file__).with_name(main)
        flags = ["-std=gnu11", "-O2", *WARNINGS, f"-I{ROOT / 'csrc'}"]
        must([*compiler, *flags, "-c", source, "-o", "main.o"], folder)
        # the same words as lf-hal's: zig builds musl once for each machine and -O level that it links for
        static = [] if machine == "native" else ["-static", *LINK.get(machine, [])]
        must([*compiler, "-O2", *static, *objects(machine), "main.o", "-o", "program", "-pthread"], folder)
        return [*emulator, str(folder / "program")]

    return build


def printed(words, *arguments):
    """(status, lines) of a program."""
    done = subprocess.run([*words, *map(str, arguments)], capture_output=True, text=True, timeout=240)
    assert done.stdout, done.stderr
    return done.returncode, done.stdout.splitlines()


def fields(lines, verb):
    """{name: number} of the line that begins with this word."""
    (line,) = [line for line in lines if line.startswith(verb + " ")]
    return {name: int(number) for name, number in re.findall(r"(\w+)=(-?\d+)", line)}


@pytest.mark.parametrize("machine", there)
@pytest.mark.parametrize("main", PROGRAMS[1:])
def test_the_c_tests_pass_on_another_machine(program, main, machine, tmp_path):
    assert printed(program(main, machine), tmp_path / "data") == (0, ["ok"])


@pytest.mark.parametrize("machine", [here, *there])
def test_hashes_are_those_of_xxhash(program, machine, tmp_path):
    data = bytes((i * 2654435761 & 0xFFFFFFFF) >> 13 & 0xFF for i in range(LONGEST))
    status, lines = printed(program("served_main.c", machine), tmp_path / "data")
    assert status == 0
    found = [line.split()[1:] for line in lines if line.startswith("hash ")]
    assert len(found) == 16
    assert found == [[n, f"{xxhash.xxh3_64_intdigest(data[: int(n)], seed=77):016x}"] for n, _ in found]


@pytest.mark.parametrize("machine", there)
def test_pread_serves_where_the_kernel_knows_no_io_uring(program, machine, tmp_path):
    status, lines = printed(program("served_main.c", machine), tmp_path / "data")
    assert (status, lines[-1]) == (0, "ok")
    assert fields(lines, "write") == {"ring": 0, "error": errno.ENOSYS}
    read = fields(lines, "read")
    assert (read["ring"], read["error"], read["by_ring"]) == (0, errno.ENOSYS, 0)
    assert read["by_pread"] + read["cached"] == EXTENTS
    assert read["by_pread"] > 0
    assert (tmp_path / "data").stat().st_size == SIZE


@pytest.mark.parametrize("machine", [here])
def test_one_engine_serves_all_here_and_says_why(program, machine, tmp_path):
    status, lines = printed(program("served_main.c", machine), tmp_path / "data")
    assert (status, lines[-1]) == (0, "ok")
    read = fields(lines, "read")
    assert read["error"] in RING_OR_REASON
    assert (read["ring"] > 0) == (read["error"] == 0)
    assert read["by_ring"] + read["by_pread"] + read["cached"] == EXTENTS
    assert read["by_pread" if read["ring"] else "by_ring"] == 0


@pytest.mark.parametrize("machine", [here, *there])
def test_a_byte_that_changed_is_found(program, machine, tmp_path):
    status, lines = printed(program("served_main.c", machine), tmp_path / "data", "spoil")
    assert (status, lines[-1]) == (1, f"row {SPOILT}: fault 3")  # LF_HASH
