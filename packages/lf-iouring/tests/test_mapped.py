"""Copies from mappings of the files: the same batches, and an error instead of SIGBUS when a file shrinks."""

import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import lf_format as lff
from lf_iouring import DataError, EngineError
from lf_iouring._compiled import lib

pytestmark = pytest.mark.skipif(lib is None, reason="no C module")


@pytest.fixture
def data(tmp_path, write):
    """A fresh file of 3,000 masked records in the page cache, open."""
    path = write(tmp_path / "a.loongbin", 3000, (64, 256), mask=True)
    path.read_bytes()
    with lff.open_dataset(path) as dataset:
        yield dataset


@pytest.mark.parametrize("engine", ["auto", "pread"])
def test_mapped_and_buffered_give_the_same_batches(data, loader_of, digest, engine):
    buffered = loader_of(data, engine=engine, io="buffered", epochs=2)
    mapped = loader_of(data, engine=engine, epochs=2)
    assert mapped.info().engine.io == "mapped"
    assert digest(mapped) == digest(buffered)
    stats = mapped.stats()
    # a thread that comes while another asks what is in memory reads by a system call
    assert (
        11_900 <= stats.mapped_reads <= 12_000 == stats.mapped_reads + stats.cached_reads + stats.pread_reads
    )
    assert buffered.stats().mapped_reads == 0


def test_what_is_not_in_memory_is_read_as_ever(data, loader_of, digest):
    expected = digest(loader_of(data, io="buffered", epochs=2))
    fd = data.readers[0].fileno()
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    loader = loader_of(data, io="mapped", epochs=2)
    assert digest(loader) == expected
    stats = loader.stats()
    if stats.mapped_reads == 12_000:
        pytest.skip("this file system keeps its files in memory")
    assert stats.mapped_reads >= 6000  # the second epoch
    assert stats.mapped_reads + stats.cached_reads + stats.ring_reads + stats.pread_reads == 12_000


def test_where_the_kernel_would_not_tell_it_is_not_asked(data, in_child):
    """mincore says of every page of somebody else's file that it is in memory."""
    path = data.readers[0].path
    fd = data.readers[0].fileno()
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    code = """
        import os, sys
        import limits
        import lf_format as lff
        from lf_iouring import LoongDataLoader

        dataset = lff.open_dataset(sys.argv[1])
        limits.become()
        with LoongDataLoader(dataset, global_batch=20, return_type="numpy", io="mapped", epochs=2) as loader:
            for batch in loader:
                if batch.step == 2:
                    early = loader.stats()
            print(early.cached_reads + early.ring_reads + early.pread_reads, loader.stats().mapped_reads)
    """
    read, mapped = map(int, in_child(textwrap.dedent(code), path).split())
    assert read >= 60  # of the first batches only neighbours of what was read before are copied
    assert mapped > 6000


@pytest.mark.parametrize("engine", ["auto", "pread"])
def test_a_file_cut_under_its_mapping_is_a_data_error(data, loader_of, engine):
    loader = loader_of(data, engine=engine, io="mapped", num_workers=2)
    for _ in range(50):
        next(loader).release()
    os.truncate(data.readers[0].path, 8192)
    with pytest.raises(DataError, match="end of the file"):
        list(loader)


@pytest.mark.parametrize("verify", [True, False])
def test_zeros_behind_a_cut_inside_a_page_are_not_taken_for_data(tmp_path, write, loader_of, verify):
    path = write(tmp_path / "a.loongbin", 3000, (64,))
    with lff.open_dataset(path) as dataset:
        loader = loader_of(dataset, io="mapped", verify=verify, shuffle=False, epochs=1)
        offsets = dataset.readers[0].extents(np.arange(3000)).offset.astype(int)
        record = next(n for n in range(1500, 3000) if 1000 < offsets[n] % 4096 < 3000)
        os.truncate(path, offsets[record] + 1)
        with pytest.raises(DataError) as caught:
            list(loader)
        assert caught.value.record == record


def test_a_flipped_byte_is_found_in_a_mapping(data, loader_of):
    at = int(data.readers[0].extents([1234]).offset[0])
    with open(data.readers[0].path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
    with pytest.raises(DataError, match="record hash") as caught:
        list(loader_of(data, io="mapped", epochs=1))
    assert caught.value.record == 1234


def test_mapped_by_name_needs_the_engines_in_c(data, loader_of):
    with pytest.raises(EngineError, match="io='mapped'"):
        loader_of(data, engine="python", io="mapped")


CHILD = """
    import os, resource, signal, sys
    import numpy as np
    import lf_format as lff
    from lf_iouring import DataError, LoongDataLoader

    path = sys.argv[1]
    dataset = lff.open_dataset(path)
    loader = LoongDataLoader(dataset, global_batch=20, return_type="numpy", io="mapped", prefetch_factor=1)
    next(loader)
    BODY
"""


def run_child(path, body):
    code = textwrap.dedent(CHILD).replace("BODY", body)
    return subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60)


def test_sigbus_of_others_still_ends_the_process(data):
    done = run_child(data.readers[0].path, "os.kill(os.getpid(), signal.SIGBUS); print('alive')")
    assert done.returncode == -signal.SIGBUS
    assert done.stdout == ""


def test_sigbus_of_others_reaches_the_handler_that_was_there(data):
    body = "import faulthandler; os.kill(os.getpid(), signal.SIGBUS)"
    code = "import faulthandler; faulthandler.enable()\n" + textwrap.dedent(CHILD).replace("BODY", body)
    command = [sys.executable, "-c", code, data.readers[0].path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr


def test_with_another_handler_in_force_nothing_is_copied_from_mappings(data):
    body = (
        "before = loader.stats().mapped_reads; signal.signal(signal.SIGBUS, lambda *_: None)\n"
        "[next(loader).release() for _ in range(20)]; low = loader.stats().mapped_reads\n"
        "[next(loader).release() for _ in range(100)]; print(before > 0, loader.stats().mapped_reads == low)"
    )
    done = run_child(data.readers[0].path, body)
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_a_thread_that_blocks_sigbus_copies_nothing_from_mappings(data):
    body = """
    loader.close()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGBUS])
    loader = LoongDataLoader(dataset, global_batch=2, io="mapped", num_workers=1, prefetch_factor=50)
    for _ in range(len(dataset) // 2):
        next(loader).release()
    os.truncate(path, 8192)
    loader.set_step(0)
    for _ in range(20):  # the caller helps with what is read ahead
        try:
            next(loader)
        except DataError as error:
            print(error.path)
    """
    done = run_child(data.readers[0].path, textwrap.dedent(body))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [data.readers[0].path] * 20


def test_without_room_for_a_mapping_files_are_read_and_it_is_said(tmp_path):
    path = tmp_path / "long.loongbin"
    with lff.Writer(
        path, vocab_size=65_536, buckets=(1 << 20,), tokenizer=lff.TokenizerInfo("test", "00")
    ) as writer:
        for number in range(80):  # 160 MB
            writer.append(np.full(1 << 20, number, np.uint16))
    body = """
    loader.close()
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (120 << 20), resource.RLIM_INFINITY))
    options = {"global_batch": 1, "prefetch_factor": 1, "hugepages": "off", "shuffle": False, "return_type": "numpy"}
    try:
        LoongDataLoader(dataset, io="mapped", **options)
    except Exception as error:
        print(type(error).__name__, error)
    loader = LoongDataLoader(dataset, **options)
    print(loader.info().engine.io_reason)
    print([int(next(loader).tokens[0, 0]) for _ in range(3)])
    """
    done = run_child(path, textwrap.dedent(body))
    lines = done.stdout.splitlines()
    assert lines[0].startswith("EngineError io='mapped' cannot be had"), done.stderr
    assert "ENOMEM" in lines[0]
    assert "but no mapping: ENOMEM" in lines[1]
    assert lines[2] == "[0, 1, 2]"
