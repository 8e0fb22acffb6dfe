"""The loader where resources are short or data go away: same batches bit for bit, or one clear error.

Every case runs in a process of its own (see limits.py). Denials by name are in test_denied.py.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from child_env import child_env

CHILD = """
import hashlib, os, shutil, sys, threading, time
import limits
import lf_format, lf_iouring
path = sys.argv[1]

WAYS = {"padded": {}, "packed": {"pack": 512}, "direct": {"io": "direct"}, "deep": {"queue_depth": 4096}}
WAYS["coded"] = {"name": "coded.loongbin"}

def open_loader(name=None, **arguments):
    dataset = lf_format.open_dataset(path if name is None else os.path.join(os.path.dirname(path), name))
    arguments = {"global_batch": 24, "seed": 7, "epochs": 1, "return_type": "numpy", "num_workers": 3} | arguments
    return lf_iouring.LoongDataLoader(dataset, **arguments)

def digest(batches):
    total = hashlib.sha256()
    for batch in batches:
        for array in (batch.tokens, batch.loss_mask, batch.ids, batch.lengths):
            total.update(array.tobytes())
        batch.release()
    return total.hexdigest()

def report():
    for name, arguments in WAYS.items():
        try:
            with open_loader(**arguments) as loader:
                engine = loader.info().engine
                print(name, digest(loader), engine.name, engine.reason, sep="|")
        except lf_iouring.EngineError as error:
            print(name, "refused", "", error, sep="|")
"""


def rows(text):
    """{way: (digest, engine, reason)} of what report() printed."""
    return {fields[0]: fields[1:] for fields in (line.split("|") for line in text.splitlines())}


@pytest.fixture(scope="module")
def public():
    """A folder that other users can reach; pytest's own lie behind one that is root's alone."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def data(public, masked_path, write):
    """The masked data set, readable for all; one of zstd blocks lies beside it."""
    write(public / "coded.loongbin", 400, (64, 256), mask=True, codec="zstd", top=9)
    return shutil.copy(masked_path, public / "data.loongbin")


@pytest.fixture(scope="module")
def free(data, in_child):
    """What report() says where nothing is limited."""
    return rows(in_child(CHILD + "report()", data))


NATIVE = importlib.util.find_spec("lf_iouring._native") is not None
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")

LIMITS = {
    "EPERM": "limits.deny(425, 1)",
    "ENOSYS": "limits.deny(425, 38)",
    "memlock 0": "limits.limit('MEMLOCK', 0); limits.become()",
    "memlock 64 KiB": "limits.limit('MEMLOCK', 64 << 10); limits.become()",
    "memlock 8 MiB": "limits.limit('MEMLOCK', 8 << 20); limits.become()",
    "64 descriptors": "limits.limit('NOFILE', 64)",
    "dev shm of 1 MiB": """
if not limits.mount("-t", "tmpfs", "-o", "size=1m", "none", "/dev/shm"):
    sys.exit(print("skip"))
""",
    "all of them": """
limits.mount("-t", "tmpfs", "-o", "size=1m", "none", "/dev/shm")
limits.limit('NOFILE', 64)
limits.limit('MEMLOCK', 0)
limits.become()
limits.deny(425, 1)
""",
}


@needs_root
@pytest.mark.parametrize("name", LIMITS)
def test_limits_do_not_change_a_batch(data, free, in_child, name):
    text = in_child(CHILD + LIMITS[name] + "\nreport()", data)
    if text == "skip":
        pytest.skip("cannot mount here")
    for way, (digest, engine, reason) in rows(text).items():
        if free[way][0] == "refused":
            assert digest == "refused"  # no direct reads on this file system
            continue
        assert digest == free[way][0], (way, engine, reason)
        if NATIVE and name in ("EPERM", "ENOSYS", "all of them"):
            errno = "ENOSYS" if name == "ENOSYS" else "EPERM"
            assert engine == "pread"
            assert reason.startswith(f"io_uring: {errno} ")


@needs_root
def test_a_read_only_folder_of_someone_else_is_enough(public, data, free, in_child):
    folder = public / "readonly"
    folder.mkdir()
    shutil.copy(public / "coded.loongbin", folder)
    path = shutil.copy(data, folder)
    for name in os.listdir(folder):
        os.chmod(folder / name, 0o444)
    os.chmod(folder, 0o555)
    before = (os.listdir(folder), os.stat(folder).st_mtime_ns)
    code = """
limits.mount("-o", "bind,ro", os.path.dirname(path), os.path.dirname(path))
limits.become()
report()
"""
    found = rows(in_child(CHILD + code, path))
    assert {way: found[way][0] for way in found} == {way: free[way][0] for way in free}
    assert (os.listdir(folder), os.stat(folder).st_mtime_ns) == before


@pytest.mark.parametrize(
    "change", ["os.unlink(copy)", "os.replace(other, copy)"], ids=["unlinked", "replaced"]
)
@pytest.mark.parametrize("way", ["padded", "packed", "direct"])
def test_a_file_that_loses_its_name_is_read_to_the_end(tmp_path, data, free, in_child, change, way):
    """Both the index and the records come from descriptors that are open."""
    if free[way][0] == "refused":
        pytest.skip(free[way][2])
    code = f"""
copy, other = sys.argv[2] + "/data", sys.argv[2] + "/other"
shutil.copy(path, copy)
with open(other, "wb") as file:
    file.write(b"something else")
path = copy
loader = open_loader(**WAYS["{way}"])
first = next(loader)
{change}
print(digest(b for some in ([first], loader) for b in some))
"""
    assert in_child(CHILD + code, data, tmp_path) == free[way][0]


@pytest.mark.parametrize("engine", ["auto", "pread", "python"] if NATIVE else ["python"])
@pytest.mark.parametrize("size", [0, 4096, 30_000])
def test_a_file_cut_short_while_reading_is_one_data_error(tmp_path, data, in_child, engine, size):
    code = f"""
copy = sys.argv[2] + "/data"
shutil.copy(path, copy)
path = copy
loader = open_loader(engine="{engine}", prefetch_factor=1)
next(loader).release()
os.truncate(copy, {size})
for _ in range(2):  # asking again is the same error, not a hang and not the next batch
    step = loader.step
    try:
        for batch in loader:
            batch.release()
            step = loader.step
        print("no error")
    except lf_iouring.DataError as error:
        assert loader.step == step
        assert (error.path, error.offset + 512 > {size}) == (copy, True), error
        print(error.found)
loader.close()
"""
    lines = in_child(CHILD + code, data, tmp_path).splitlines()
    assert len(lines) == 2
    assert all("then the end of the file" in line for line in lines)


def test_two_loaders_in_one_process_do_not_meet(data, free, in_child):
    code = """
results = {}
def work(number, way):
    with open_loader(**WAYS[way]) as loader:
        results[number] = (way, digest(loader))
threads = [threading.Thread(target=work, args=(n, ("padded", "packed")[n % 2])) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for way, value in results.values(): print(way, value, sep="|")
"""
    lines = in_child(CHILD + code, data).splitlines()
    assert sorted(lines) == sorted(f"{way}|{free[way][0]}" for way in ("padded", "packed") * 2)


@needs_root
def test_two_users_load_at_once(data, free):
    """Nothing is shared by a name, so nobody owns what another one needs."""
    code = (
        CHILD
        + """
limits.become(int(sys.argv[2]))
loader = open_loader()
first = next(loader)
print("ready", flush=True)
sys.stdin.readline()
print(digest(b for some in ([first], loader) for b in some))
"""
    )
    processes = [start(code, data, uid) for uid in (65_534, 65_533)]
    assert [process.stdout.readline().strip() for process in processes] == ["ready"] * 2
    for process in processes:
        out, _ = process.communicate("go\n", timeout=60)
        assert (process.returncode, out.strip()) == (0, free["padded"][0])


def start(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_env(),
    )


def test_kill_9_of_a_parent_leaves_its_child_reading_and_nothing_behind(data, free):
    """The child has an engine of its own; the parent's threads and memory go with the parent."""
    code = (
        CHILD
        + """
loader = open_loader()
first = next(loader)
if os.fork():
    print("forked", flush=True)
    while True:
        with open_loader() as busy:
            digest(busy)
sys.stdin.readline()  # until the parent is dead
print(digest(b for some in ([first], loader) for b in some), len(os.listdir("/proc/self/task")), flush=True)
loader.close()
for _ in range(500):  # a joined thread may be listed for a moment
    if len(os.listdir("/proc/self/task")) == 1:
        print("alone", flush=True)
        break
    time.sleep(0.01)
"""
    )
    before = set(os.listdir("/dev/shm"))
    process = start(code, data)
    assert process.stdout.readline().strip() == "forked"
    process.kill()
    assert process.wait(timeout=30) == -signal.SIGKILL
    out, _ = process.communicate("go\n", timeout=60)
    found, after = out.splitlines()
    assert found == f"{free['padded'][0]} 4"  # itself and three threads of its own
    assert after == "alone"
    left = set(os.listdir("/dev/shm")) - before  # others may use it meanwhile
    assert not [name for name in left if "lf" in name.lower() or "loong" in name.lower()]


@pytest.mark.parametrize("way", ["padded", "packed", "direct"])
def test_a_fork_in_mid_iteration_gives_both_the_same_batches(data, free, in_child, way):
    if free[way][0] == "refused":
        pytest.skip(free[way][2])
    code = f"""
loader = open_loader(**WAYS["{way}"])
head = [next(loader) for _ in range(3)]
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    copies = digest(b for some in (head, loader) for b in some)
    os.write(writer, copies.encode())
    os._exit(0)
os.waitpid(child, 0)
print(os.read(reader, 100).decode())
print(digest(b for some in (head, loader) for b in some))
"""
    assert in_child(CHILD + code, data).splitlines() == [free[way][0]] * 2
