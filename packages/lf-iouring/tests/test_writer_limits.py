"""WriteEngine where the system refuses: seccomp, RLIMIT_MEMLOCK, full file systems, RLIMIT_FSIZE, kill -9.

Each case runs in a process of its own (see limits.py).
"""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile

import pytest

NATIVE = importlib.util.find_spec("lf_iouring._native") is not None
ENGINES = ["io_uring", "pwrite", "python"] if NATIVE else ["python"]


def test_kill_9_in_mid_write_leaves_no_final_name(tmp_path):
    """The recipe of the module: another name, then rename."""
    code = """
import os, sys
import numpy as np
import lf_iouring
os.chdir(sys.argv[1])
data = np.ones(8 << 20, np.uint8)
with lf_iouring.WriteEngine() as engine:
    with engine.create("step-1.tmp") as file:
        file.write(data)
    os.replace("step-1.tmp", "step-1")
    lf_iouring.sync_folder(".")
    with engine.create("step-2.tmp") as file:
        print("writing", flush=True)
        while True:
            file.write(data, 0)
"""
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "writing"
    process.kill()
    assert process.wait(timeout=30) == -signal.SIGKILL
    process.stdout.close()
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2.tmp"]
    assert (tmp_path / "step-1").read_bytes() == b"\1" * (8 << 20)


CHILD = """
import errno, mmap, os, sys
import numpy as np, xxhash
import lf_iouring, limits
folder = sys.argv[1]
slab = np.frombuffer(mmap.mmap(-1, 4 << 20), np.uint8)
slab[:] = np.random.default_rng(0).integers(0, 256, slab.size, dtype=np.uint8)

def check(name, **arguments):
    with lf_iouring.WriteEngine([slab], **arguments) as engine:
        with engine.create(f"{folder}/{name}") as file:
            digest = file.write(slab, xxh3=True).xxh3
            file.write(slab[77:])
    data = open(f"{folder}/{name}", "rb").read()
    assert data == slab.tobytes() + slab[77:].tobytes() and digest == xxhash.xxh3_64_intdigest(slab)
    print(engine.info().name, engine.info().registered_bytes, engine.info().reason, file.info().io, sep="|")
"""


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")
needs_native = pytest.mark.skipif(not NATIVE, reason="no C module")


@needs_native
@pytest.mark.parametrize(("name", "code"), [("EPERM", 1), ("ENOSYS", 38)])
def test_denied_io_uring_writes_by_pwrite_and_says_why(tmp_path, in_child, name, code):
    text = in_child(CHILD + f"limits.deny(425, {code})\ncheck('file')", tmp_path)
    assert text.startswith(f"pwrite|0|io_uring: {name} ")
    assert "425-427" in text or "hides it" in text
    text = in_child(
        CHILD + "limits.deny(425, 1)\ntry: check('x', engine='io_uring')\nexcept Exception as e: print(e)",
        tmp_path,
    )
    assert "engine='io_uring' cannot be had: io_uring: EPERM" in text


@needs_native
@needs_root
@pytest.mark.parametrize("kib", [0, 64, 8192])
def test_a_low_memlock_limit_degrades_step_by_step(in_child, kib):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own lie behind a folder that is root's alone
        os.chmod(folder, 0o777)
        text = in_child(
            CHILD + f"limits.limit('MEMLOCK', {kib} << 10)\nlimits.become()\ncheck('file')", folder
        )
    name, registered, reason, _ = text.split("|")
    if kib == 0 and name != "io_uring":
        assert name == "pwrite"
        assert "RLIMIT_MEMLOCK" in reason
    if kib == 8192 and name == "io_uring":
        assert registered == str(4 << 20)  # the slab; the buffer for bytes that are not aligned is too much
    if kib == 64 and name == "io_uring":
        assert registered == "0"
        assert "not registered (ENOMEM" in reason


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_file_system_is_an_error_and_writing_goes_on_after_space_is_made(tmp_path, in_child, kind):
    code = """
folder = sys.argv[1] + "/mounted"
os.mkdir(folder)
if sys.argv[2] == "tmpfs":
    arguments = ["-t", "tmpfs", "-o", "size=2m", "none", folder]
else:
    image = sys.argv[1] + "/image"
    with open(image, "wb") as file:
        file.truncate(6 << 20)
    if os.system(f"mkfs.ext4 -q -N 16 {image} 2>/dev/null"):
        sys.exit(print("skip"))
    arguments = ["-o", "loop", image, folder]
if not limits.mount(*arguments):
    sys.exit(print("skip"))
used = limits.descriptors()
with lf_iouring.WriteEngine([slab]) as engine:
    inside = limits.descriptors()
    for reserve in (0, 64 << 20):
        try:
            with engine.create(folder + "/file.tmp", reserve=reserve) as file:
                for _ in range(16):
                    file.write(slab)
                os.rename(folder + "/file.tmp", folder + "/file")
        except lf_iouring.WriteError as error:
            assert error.errno == errno.ENOSPC, error
            assert error.operation == ("reserve" if reserve else "write"), error
        assert limits.descriptors() == inside
        os.unlink(folder + "/file.tmp")
        assert os.listdir(folder) in ([], ["lost+found"])
    with engine.create(folder + "/file") as file:
        file.write(slab[:1_000_001])
        io = file.info().io
    assert open(folder + "/file", "rb").read() == slab[:1_000_001].tobytes()
assert limits.descriptors() == used
print(io)
"""
    printed = in_child(CHILD + code, tmp_path, kind)
    if printed == "skip":
        pytest.skip("cannot mount here")
    assert printed == ("buffered" if kind == "tmpfs" or not NATIVE else "direct")


@pytest.mark.parametrize("limit", [1 << 20, (1 << 20) + 4096, (1 << 20) + 100])
@pytest.mark.parametrize("engine_name", ENGINES)
def test_a_file_size_limit_is_an_error_with_the_fix(tmp_path, in_child, limit, engine_name):
    code = f"""
limits.limit("FSIZE", {limit})
with lf_iouring.WriteEngine([slab], engine="{engine_name}") as engine:
    try:
        with engine.create(folder + "/file") as file:
            file.write(slab)
    except lf_iouring.WriteError as error:
        assert error.errno == errno.EFBIG, error
        assert {limit} - (1 << 20) <= error.offset <= {limit}, error
        print(error)
    with engine.create(folder + "/file") as file:
        file.write(slab[:{limit}])
assert open(folder + "/file", "rb").read() == slab[:{limit}].tobytes()
"""
    assert "ulimit -f" in in_child(CHILD + code, tmp_path)
