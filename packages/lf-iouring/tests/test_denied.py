"""Systems that refuse: seccomp, RLIMIT_MEMLOCK, few descriptors, kill -9. Each runs in a child process."""

import os
import signal
import subprocess
import sys
import time

import pytest
from limits import NOBODY

# Before its import-time prelude every child opens the data, so that it may drop privileges afterwards.
PRELUDE = """
import ctypes, hashlib, os, resource, struct, sys
import numpy, lf_format, lf_iouring
dataset = lf_format.open_dataset(sys.argv[1])

def deny(number, errno):
    # ld [nr]; jeq #number, ret ERRNO|errno; ret ALLOW
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *i) for i in code))
    header = struct.pack("@HP", len(code), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.create_string_buffer(header), 0, 0) == 0, ctypes.get_errno()

def report(**arguments):
    with lf_iouring.LoongDataLoader(
        dataset, global_batch=24, seed=7, epochs=1, return_type="numpy", **arguments
    ) as loader:
        total = hashlib.sha256()
        for batch in loader:
            total.update(batch.tokens.tobytes() + batch.loss_mask.tobytes() + batch.ids.tobytes())
        engine = loader.info().engine
        print(total.hexdigest(), engine.name, engine.reason, sep="|")
"""


@pytest.fixture
def child(masked_path):
    """child(code) -> fields of the report lines it printed."""

    def run(code):
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + code, masked_path], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return [line.split("|") for line in done.stdout.splitlines()]

    return run


@pytest.mark.parametrize(("name", "code"), [("EPERM", 1), ("ENOSYS", 38)])
def test_denied_io_uring_gives_the_same_batches_by_pread_and_says_why(child, name, code):
    """Case A8."""
    free, denied = child(f"report(engine='pread')\ndeny(425, {code})\nreport()")
    assert denied[0] == free[0]
    assert denied[1] == "pread"
    assert f"io_uring: {name}" in denied[2]


def test_denied_io_uring_by_name_is_an_error_with_the_fix(child):
    ((text,),) = child("""
deny(425, 1)
try:
    report(engine='io_uring')
except lf_iouring.EngineError as error:
    print(error)
""")
    assert "EPERM" in text
    assert "seccomp" in text
    assert "engine='auto'" in text


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="327 is the number on x86-64")
def test_denied_preadv2_still_reads_through_the_ring(child):
    free, denied = child("report(engine='pread')\ndeny(327, 38)\nreport()")
    assert denied[0] == free[0]


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="dropping privileges needs root")


@needs_root
@pytest.mark.parametrize("kib", [0, 64, 8192])
def test_a_low_memlock_limit_degrades_step_by_step(child, kib):
    """Root is exempt from the limit, so the child becomes nobody."""
    free, limited = child(f"""
report(engine='pread')
resource.setrlimit(resource.RLIMIT_MEMLOCK, ({kib} * 1024, {kib} * 1024))
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
report(num_workers=3)
""")
    assert limited[0] == free[0]
    if kib == 0 and limited[1] != "io_uring":
        assert limited[1] == "pread"
        assert "ENOMEM" in limited[2]
        assert "RLIMIT_MEMLOCK" in limited[2]


@needs_root
def test_no_memlock_by_name_is_an_error_with_the_fix(child):
    ((text, *_),) = child(f"""
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    report(engine='io_uring')
except lf_iouring.EngineError as error:
    print(error)
""")
    assert "RLIMIT_MEMLOCK" in text or "io_uring" in text


def test_few_descriptors_degrade_or_raise_a_clear_error(child):
    free, limited = child("""
report(engine='pread')
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, used + 1))
report(num_workers=4)
""")
    assert limited[0] == free[0]
    assert "EMFILE" in limited[2]


def test_no_thread_to_be_had_is_a_clear_error_or_fewer_threads(child):
    if os.getuid() != 0:
        pytest.skip("dropping privileges needs root")
    ((text, *_),) = child(f"""
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    report(engine='pread', num_workers=2)
except lf_iouring.EngineError as error:
    print(error)
""")
    assert "thread" in text


def test_kill_9_leaves_nothing_behind(masked_path, tmp_path):
    """Case A6: an anonymous memfd dies with its process."""
    code = (
        PRELUDE
        + """
loader = lf_iouring.LoongDataLoader(dataset, global_batch=24)
next(loader)
for fd in os.listdir("/proc/self/fd"):
    if os.path.lexists(f"/proc/self/fd/{fd}"):
        print(os.readlink(f"/proc/self/fd/{fd}"), end=" ")
print(flush=True)
while True:
    next(loader)
"""
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, masked_path],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    files = process.stdout.readline().split()
    assert any("lf-memory" in name for name in files)
    assert not any("/dev/shm" in name for name in files)
    time.sleep(0.05)
    process.kill()
    assert process.wait(timeout=10) == -signal.SIGKILL
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []
    assert not [name for name in os.listdir("/dev/shm") if "lf-memory" in name]


def test_a_tiny_dev_shm_does_not_matter(child):
    """Pools are memfds; /dev/shm is not used, so a container's 64 MiB there is no limit."""
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    code = """
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x44000, None):
    print("skip")
elif libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k"):
    print("skip")
else:
    report()
report()
"""
    first, second = child(code)
    if first == ["skip"]:
        pytest.skip("no mount namespaces here")
    assert first == second


def test_ctrl_c_interrupts_a_waiting_loader(masked_path):
    code = (
        PRELUDE
        + """
loader = lf_iouring.LoongDataLoader(dataset, global_batch=24)
try:
    print("ready", flush=True)
    while True:
        next(loader)
except KeyboardInterrupt:
    step = loader.step
    assert next(loader).step == step
    loader.close()
    print("interrupted", flush=True)
"""
    )
    process = subprocess.Popen([sys.executable, "-c", code, masked_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "ready"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert out.strip() == "interrupted"
    assert process.returncode == 0
