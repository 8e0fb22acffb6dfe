"""WriteEngine and FileWriter: any bytes at any place, exact sizes, clear errors, nothing left open."""

import errno
import gc
import importlib.util
import mmap
import os
import pickle
import signal
import sys
import threading

import numpy as np
import pytest
import xxhash

import lf_iouring
from lf_iouring import EngineError, LoaderError, WriteEngine, WriteError
from lf_memory import HostPool

NATIVE = importlib.util.find_spec("lf_iouring._native") is not None
ENGINES = ["io_uring", "pwrite", "python"] if NATIVE else ["python"]
CHUNK = 64 << 10


@pytest.fixture(scope="module")
def slab():
    """3 MiB + 1 page of random bytes that begin on a page."""
    array = np.frombuffer(mmap.mmap(-1, (3 << 20) + 4096), np.uint8)
    array[:] = np.random.default_rng(0).integers(0, 256, array.size, dtype=np.uint8)
    return array


@pytest.fixture(params=ENGINES)
def engine(request, slab):
    """Each engine, with the slab registered and small chunks, so that many are in flight."""
    try:
        made = WriteEngine([slab], engine=request.param, depth=4, chunk=CHUNK)
    except EngineError as error:
        pytest.skip(str(error))
    with made:
        yield made


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def write_and_flush(file, data, times=1):
    while times:
        file.write(data, 0)
        file.flush()
        times -= 1


@pytest.mark.parametrize("size", [0, 1, 511, 4095, 4096, 4097, CHUNK, 5 * CHUNK + 17, (3 << 20) - 1, 3 << 20])
@pytest.mark.parametrize("shift", [0, 1, 512], ids=lambda n: f"memory+{n}")
def test_any_size_from_any_address_arrives_and_hashes(tmp_path, engine, slab, size, shift):
    data = slab[shift : shift + size]
    with engine.create(tmp_path / "file") as file:
        extent = file.write(data, xxh3=True)
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    assert extent == (0, size, xxhash.xxh3_64_intdigest(data))


@pytest.mark.parametrize("reserve", [0, 8 << 20])
def test_pieces_appended_one_after_the_other_make_one_stream(tmp_path, engine, slab, reserve):
    sizes = [3, 4093, 100_000, 0, 8192, 1, 300_001, 65_536]
    expected, at = b"", 0
    with engine.create(tmp_path / "file", reserve=reserve) as file:
        for size in sizes:
            assert file.end == len(expected) == file.write(slab[at : at + size]).offset
            expected += slab[at : at + size].tobytes()
            at += size
    assert (tmp_path / "file").read_bytes() == expected
    assert file.info().nbytes == len(expected)


def test_writes_at_odd_offsets_leave_their_neighbours_alone(tmp_path, engine, slab):
    rng = np.random.default_rng(1)
    model = bytearray()
    with engine.create(tmp_path / "file") as file:
        for _ in range(60):
            at, size, start = (int(rng.integers(0, n)) for n in (400_000, 200_000, 1 << 20))
            data = slab[start : start + size]
            file.write(data, at)
            file.flush()  # they overlap
            model += bytes(max(0, at + size - len(model)))
            model[at : at + size] = data.tobytes()
    assert (tmp_path / "file").read_bytes() == model


def test_a_gap_is_zero_and_an_empty_write_makes_no_file_longer(tmp_path, engine, slab):
    with engine.create(tmp_path / "file") as file:
        file.write(b"abc", 10_000)
        file.write(b"", 90_000)
    assert (tmp_path / "file").read_bytes() == bytes(10_000) + b"abc"


@pytest.mark.skipif(not NATIVE, reason="no C module")
def test_aligned_bytes_go_past_the_page_cache_as_they_lie(tmp_path, engine, slab):
    if engine.info().name == "python":
        pytest.skip("writes through the page cache")
    file = engine.create(tmp_path / "file")
    if file.info().io != "direct":
        pytest.skip(file.info().io_reason)
    file.write(slab[: (2 << 20) + 100])
    file.flush()
    assert (file.info().direct_bytes, file.info().bounced_bytes) == (2 << 20, 0)
    file.write(slab[1 : 1 + (1 << 20)], 4 << 20)
    file.flush()
    assert (file.info().direct_bytes, file.info().bounced_bytes) == (3 << 20, 1 << 20)
    file.close()


def test_what_was_reserved_is_given_back_at_close(tmp_path, engine):
    file = engine.create(tmp_path / "file", reserve=1 << 20)
    assert os.stat(file.path).st_size == 1 << 20
    assert file.info().reserve_reason == ""
    file.write(b"x" * 5000)
    file.close()
    assert os.stat(file.path).st_size == 5000
    assert os.stat(file.path).st_blocks * 512 < 1 << 20


def test_two_engines_and_several_files_write_at_once(tmp_path, slab):
    def work(number):
        with WriteEngine([slab], chunk=CHUNK) as own:
            files = [own.create(tmp_path / f"{number}-{i}") for i in range(3)]
            for k in range(20):
                for i, file in enumerate(files):
                    file.write(slab[k * 4096 + i : k * 4096 + i + 90_001])
            for file in files:
                file.close()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        for i in range(3):
            expected = b"".join(slab[k * 4096 + i : k * 4096 + i + 90_001].tobytes() for k in range(20))
            assert (tmp_path / f"{number}-{i}").read_bytes() == expected


def test_threads_share_one_engine(tmp_path, engine, slab):
    def work(number):
        with engine.create(tmp_path / str(number)) as file:
            for k in range(20):
                file.write(slab[k : k + 70_000], xxh3=True)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = b"".join(slab[k : k + 70_000].tobytes() for k in range(20))
    assert all((tmp_path / str(n)).read_bytes() == expected for n in range(4))


def test_memory_may_be_dropped_right_after_a_write(tmp_path, engine):
    with engine.create(tmp_path / "file") as file:
        for k in range(100):
            file.write(np.full(20_000, k, np.uint8))
    assert (tmp_path / "file").read_bytes() == b"".join(bytes([k]) * 20_000 for k in range(100))


def test_a_full_device_is_a_write_error_that_names_it_all(tmp_path, engine, slab):
    file = engine.create(tmp_path / "file")
    gc.collect()  # what other tests left may close its descriptors at any time
    before = open_descriptors()
    full = os.open("/dev/full", os.O_WRONLY)
    for fd in {file._sink.fd, file._sink.direct} - {-1}:
        os.dup2(full, fd)
    os.close(full)
    with pytest.raises(WriteError) as caught:
        write_and_flush(file, slab)
    error = caught.value
    assert (error.errno, error.offset, error.filename) == (errno.ENOSPC, 0, str(tmp_path / "file"))
    assert str(error).startswith(f"{file.path}: write at byte 0 failed: ENOSPC ")
    assert "free space" in str(error)
    assert isinstance(error, OSError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    with pytest.raises(LoaderError, match="incomplete"):
        file.write(b"more")
    file.close()
    assert open_descriptors() < before
    with engine.create(tmp_path / "next") as after:  # the engine goes on
        after.write(slab)
    assert (tmp_path / "next").read_bytes() == slab.tobytes()


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "quota"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EIO, "kernel log"),
        (errno.EROFS, "read-only"),
        (errno.EBADF, "see errno(3) for EBADF"),
    ],
)
def test_every_error_says_what_to_do(code, fix):
    error = WriteError("/data/step-7", "write", code, 4096)
    assert str(error).startswith(f"/data/step-7: write at byte 4096 failed: {errno.errorcode[code]} ")
    assert fix in str(error)
    assert " at byte" not in str(WriteError("/data/step-7", "fdatasync", code))


@pytest.mark.skipif(not NATIVE, reason="no C module")
def test_slots_of_a_host_pool_are_written_from_registered_memory(tmp_path):
    with HostPool(100_000, 8) as pool, WriteEngine([pool.buffer], chunk=CHUNK) as engine:
        if engine.info().registered_bytes == 0:
            pytest.skip(engine.info().reason)
        assert engine.info().registered_bytes == pool.buffer.nbytes
        with engine.create(tmp_path / "file") as file:
            for k in range(8):
                slot = pool.acquire().array[
                    :100_000
                ]  # goes back when it is garbage, not before it is written
                slot[:] = k + 1
                file.write(slot)
            del slot
            file.flush()
            assert file.info().io == "buffered" or file.info().direct_bytes > 0
    expected = b"".join(bytes([k + 1]) * 100_000 for k in range(8))
    assert (tmp_path / "file").read_bytes() == expected


def test_leaving_by_an_exception_closes_and_does_not_hide_it(tmp_path, engine, slab):
    gc.collect()  # what other tests left may close its descriptors at any time
    before = open_descriptors()
    with pytest.raises(ZeroDivisionError), engine.create(tmp_path / "file", reserve=8 << 20) as file:
        file.write(slab[: slab.size // (file.end or 0)])
    assert open_descriptors() == before
    with pytest.raises(LoaderError, match="closed"):
        file.write(b"x")
    file.close()


def test_an_interrupted_write_leaves_a_file_that_says_so(tmp_path, engine, slab):
    gc.collect()  # what other tests left may close its descriptors at any time
    before = open_descriptors()
    file = engine.create(tmp_path / "file")
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            write_and_flush(file, slab, times=-1)
    finally:
        signal.signal(signal.SIGALRM, previous)
    file.close()
    assert open_descriptors() == before
    with engine.create(tmp_path / "file") as again:
        again.write(slab)
    assert (tmp_path / "file").read_bytes() == slab.tobytes()


@pytest.mark.skipif(not NATIVE, reason="no C module")
def test_a_file_system_that_refuses_direct_writes_gets_them_buffered(tmp_path, engine, slab):
    if engine.info().name == "python":
        pytest.skip("has no direct writes")
    file = engine.create(tmp_path / "file")
    if file.info().io != "direct":
        pytest.skip(file.info().io_reason)
    refusing = os.open("/proc/self/oom_score_adj", os.O_WRONLY)  # EINVAL for what is no number
    os.dup2(refusing, file._sink.direct)
    os.close(refusing)
    file.write(slab[100:], xxh3=True)
    file.flush()
    info = file.info()
    file.write(slab)
    file.close()
    assert (info.io, info.direct_bytes) == ("buffered", 0)
    assert "EINVAL" in info.io_reason
    assert (tmp_path / "file").read_bytes() == slab[100:].tobytes() + slab.tobytes()


def test_a_forked_child_makes_its_own(tmp_path, engine, slab, in_fork):
    file = engine.create(tmp_path / "parent")
    file.write(slab)

    def child():
        with pytest.raises(EngineError, match="fork"):
            file.write(b"x")
        file.abort()
        engine.close()
        with WriteEngine() as own, own.create(tmp_path / "child") as mine:
            mine.write(slab)

    assert in_fork(child) == 0
    file.close()
    for name in ("parent", "child"):
        assert (tmp_path / name).read_bytes() == slab.tobytes()


def test_a_child_forked_while_a_thread_writes_lets_go_without_waiting_for_it(tmp_path, engine, in_fork):
    file = engine.create(tmp_path / "file")
    held, done = threading.Event(), threading.Event()

    def write():
        with engine._turn:
            held.set()
            done.wait()

    thread = threading.Thread(target=write)
    thread.start()
    held.wait()

    def child():
        signal.alarm(20)
        file.abort()
        engine.close()

    assert in_fork(child) == 0
    done.set()
    thread.join()
    file.close()


def test_an_engine_and_a_file_that_nobody_closed_leave_no_descriptor(tmp_path, slab):
    gc.collect()  # what other tests left may close its descriptors at any time
    before = open_descriptors()
    engine = WriteEngine([slab])
    engine.create(tmp_path / "file").write(slab)
    del engine
    assert open_descriptors() == before


def test_a_file_that_is_forgotten_in_mid_write_does_not_write_into_the_next(tmp_path, engine, slab):
    """The next file gets the same descriptor numbers."""
    for k in range(10):
        engine.create(tmp_path / "forgotten").write(slab)
        with engine.create(tmp_path / f"{k}") as file:
            file.write(slab[k:])
    assert (tmp_path / "forgotten").read_bytes() == slab.tobytes()
    assert all((tmp_path / f"{k}").read_bytes() == slab[k:].tobytes() for k in range(10))


def test_wrong_arguments_say_what_fits(tmp_path, engine, slab):
    with pytest.raises(EngineError, match="choose one of"):
        WriteEngine(engine="fast")
    with pytest.raises(LoaderError, match=r"1\.\.256"):
        WriteEngine(depth=0)
    with pytest.raises(LoaderError, match="64 KiB"):
        WriteEngine(chunk=5000)
    with pytest.raises(EngineError, match="choose one of"):
        engine.create(tmp_path / "file", io="mapped")
    with pytest.raises(WriteError, match=r"open failed: ENOENT.*make it first"):
        engine.create(tmp_path / "none" / "file")
    with engine.create(tmp_path / "file") as file:
        with pytest.raises(LoaderError, match="contiguous"):
            file.write(slab[:100:2])
        with pytest.raises(LoaderError, match="negative"):
            file.write(b"x", -1)
        file.write(b"still fine")
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.create(tmp_path / "file")


def test_closing_the_engine_first_is_an_error_at_close_and_leaks_nothing(tmp_path, slab):
    gc.collect()  # what other tests left may close its descriptors at any time
    before = open_descriptors()
    engine = WriteEngine()
    file = engine.create(tmp_path / "file")
    file.write(slab)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        file.close()
    file.close()
    assert open_descriptors() == before


def test_without_the_c_module_python_writes_and_says_so(tmp_path, slab, monkeypatch):
    monkeypatch.setitem(sys.modules, "lf_iouring._native_writer", None)
    with WriteEngine() as engine, engine.create(tmp_path / "file") as file:
        assert file.write(slab, xxh3=True).xxh3 == xxhash.xxh3_64_intdigest(slab)
    assert engine.info().name == "python"
    assert "not built" in engine.info().reason
    with pytest.raises(EngineError, match="C compiler"):
        WriteEngine(engine="io_uring")


def test_sync_makes_a_file_durable_while_open(tmp_path, engine, slab):
    file = engine.create(tmp_path / "file", durable=False)
    file.write(slab)
    file.sync()
    assert (tmp_path / "file").read_bytes() == slab.tobytes()
    file.close()
    lf_iouring.sync_folder(tmp_path)
    with pytest.raises(WriteError, match="ENOENT"):
        lf_iouring.sync_folder(tmp_path / "none")
