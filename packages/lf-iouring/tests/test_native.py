"""The C code alone, under sanitizers, and its wheel."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import xxhash

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "csrc").glob("*.c"))

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """sanitized(main, flags) -> a program of tests/ with all of the C code, compiled under sanitizers.

    The C code is compiled once for each set of flags: four programs share one.
    """
    base = ["cc", "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}", "-pthread"]
    made = {}

    def compiled(folder, *arguments):
        done = subprocess.run([*base, *arguments], cwd=folder, capture_output=True, text=True)
        if done.returncode and "cannot find" in done.stderr:
            pytest.skip("the compiler has no sanitizer libraries")
        assert done.returncode == 0, done.stderr

    def build(main, flags):
        every = [*flags, "-fno-sanitize-recover=all"]
        if tuple(flags) not in made:
            folder = tmp_path_factory.mktemp("objects")
            compiled(folder, *every, "-c", *SOURCES)
            made[tuple(flags)] = sorted(folder.glob("*.o"))
            assert len(made[tuple(flags)]) == len(SOURCES)
        binary = tmp_path_factory.mktemp("program") / "native"
        compiled(binary.parent, *every, "-o", binary, Path(__file__).with_name(main), *made[tuple(flags)])
        return binary

    return build


@needs_compiler
@pytest.mark.parametrize(
    ("main", "flags"),
    [
        ("native_main.c", ["-fsanitize=address,undefined"]),
        ("native_main.c", ["-fsanitize=thread"]),
        ("native_main.c", ["-fsanitize=address", "-DLF_PLAIN_XXH3"]),
        ("write_main.c", ["-fsanitize=address,undefined"]),
        ("pack_main.c", ["-fsanitize=address,undefined"]),
    ],
    ids=["address", "thread", "plain-hash", "writes", "packing"],
)
def test_the_c_code_is_clean_under_sanitizers(tmp_path, sanitized, main, flags):
    binary = sanitized(main, flags)
    done = subprocess.run([binary, tmp_path / "data"], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "ok", done.stdout + done.stderr


@needs_compiler
def test_an_index_that_lies_never_makes_the_reader_touch_foreign_memory_or_pass_wrong_bytes(
    tmp_path, sanitized
):
    binary = sanitized("fuzz_reader.c", ["-fsanitize=address,undefined"])
    for seed in ("1", "2"):
        done = subprocess.run(
            [binary, tmp_path / "data", "20000", seed],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"ASAN_OPTIONS": "allocator_may_return_null=1"},
        )
        assert done.stdout.startswith("ok: "), done.stdout + done.stderr
        right, _, short, wrong_hash, wrong_extent, *_ = map(
            int, re.findall(r"(\d+) (?:right|of)", done.stdout)
        )
        assert min(right, short, wrong_hash, wrong_extent) > 500  # it reached what it is meant to reach


@needs_compiler
@pytest.mark.parametrize("form", ["LF_PLAIN_XXH3", "LF_NO_AVX2"])
def test_every_form_of_the_hash_agrees_with_xxhash(tmp_path, form):
    library = tmp_path / "hash.so"
    source = ROOT / "csrc" / "xxh3.c"
    subprocess.run(
        ["cc", "-std=gnu11", "-O2", "-shared", "-fPIC", f"-D{form}", "-o", library, source], check=True
    )
    function = ctypes.CDLL(str(library)).lf_xxh3_64
    function.restype = ctypes.c_uint64
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64]
    data = os.urandom(5000)
    for length in [*range(200, 300), 1024, 1025, 4096, 5000]:
        assert function(data, length, 77) == xxhash.xxh3_64_intdigest(data[:length], seed=77)


def build(tmp_path, target, **environment):
    """Run hatchling on a copy of the package; returns the file it made and its output."""
    for module in ("hatchling", "cffi", "setuptools"):
        pytest.importorskip(module)
    copy = tmp_path / "package"
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "dist")
    shutil.copytree(ROOT, copy, ignore=ignore, dirs_exist_ok=True)
    (copy / "README.md").touch()
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", tmp_path / "dist"],
        cwd=copy,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)} | environment,
    )
    files = list((tmp_path / "dist").glob("*")) if (tmp_path / "dist").exists() else []
    return files, done


@needs_compiler
def test_the_wheel_is_one_abi3_wheel_with_the_module(tmp_path):
    files, done = build(tmp_path, "wheel")
    assert done.returncode == 0, done.stderr
    (wheel,) = files
    assert "-cp311-abi3-linux_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "lf_iouring/_native.abi3.so" in names
    assert "lf_iouring/py.typed" in names


def test_without_a_compiler_the_wheel_is_pure_and_says_so(tmp_path):
    files, done = build(tmp_path, "wheel", CC="/nonexistent/cc")
    assert done.returncode == 0, done.stderr
    (wheel,) = files
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert "pure Python engine" in done.stdout + done.stderr
    assert "C compiler" in done.stdout + done.stderr


def test_a_required_module_without_a_compiler_is_an_error(tmp_path):
    files, done = build(tmp_path, "wheel", CC="/nonexistent/cc", LOONGFORGE_REQUIRE_NATIVE="1")
    assert done.returncode != 0
    assert not files


def test_the_sdist_carries_sources_and_no_binary(tmp_path):
    files, done = build(tmp_path, "sdist")
    assert done.returncode == 0, done.stderr
    names = subprocess.run(["tar", "tzf", files[0]], capture_output=True, text=True, check=True).stdout
    assert "/csrc/engine.c" in names
    assert "/csrc/lf_native.cdef" in names
    assert "/hatch_build.py" in names
    assert ".so" not in names
